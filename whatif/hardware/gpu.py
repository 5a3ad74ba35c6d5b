"""Hardware facts: one TOML file per GPU in `whatif/hardware/gpus`, with a source for each number.

Peaks are dense TFLOP/s (1e12 operations a second, a multiply-add counts two), bandwidths GB/s (1e9 bytes) in one
direction.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources

from msgspec import Struct

from whatif.runtime.errors import WhatifError, close_names

# Formats that `Gpu.matrix_tflops` knows.
MATRIX_DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
# A device without units for a dtype runs its matrix products in this one.
_SLOWER_DTYPE = {"fp8": "fp16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32"}

# Resident warps of a multiprocessor if not 64: CUDA C++ Programming Guide, technical specifications.
_WARPS_PER_SM = {"7.5": 32, "8.6": 48, "8.7": 48, "8.9": 48, "12.0": 48}

# Load and store units of a multiprocessor if not 32: half as many in GP100's halved multiprocessors and, since Turing,
# in chips not made for data centres (NVIDIA's architecture whitepapers, the drawing of a multiprocessor).
_LOAD_STORE_UNITS = dict.fromkeys(("6.0", "7.5", "8.6", "8.7", "8.9", "12.0"), 16)

# Shared memory of a multiprocessor, 1,024 bytes: CUDA C++ Programming Guide, technical specifications.
_SHARED_KIBYTE = {
    "3.5": 48, "3.7": 112, "5.0": 64, "5.2": 96, "6.0": 64, "6.1": 96, "7.0": 96, "7.5": 64, "8.0": 164, "8.6": 100,
    "8.7": 164, "8.9": 100, "9.0": 228, "10.0": 228, "10.3": 228, "12.0": 100,
}  # fmt: skip

# The driver and ECC take up to an eighth of the data sheet's memory (T4, L4: 8 %); no device reports more than it has.
_MEMORY_REPORTED = (0.87, 1.02)


class Gpu(Struct, frozen=True):
    """One GPU as a rank sees it: dense peaks in TFLOP/s, bandwidths in GB/s one way; None without such a unit."""

    name: str
    vendor: str
    arch: str
    sm_count: int
    fp32_lanes_per_sm: int
    boost_mhz: float
    fp64_tflops: float
    fp32_tflops: float
    memory_gibyte: float
    memory_gbyte_s: float
    l2_mbyte: float
    power_watt: float
    pcie_gbyte_s: float
    nvlink_gbyte_s: float | None = None  # all links together; Infinity Fabric on AMD devices
    nvlink_bridged: bool = False  # a bridge joins two boards; else all of a machine are joined
    dies: int = 1  # if the numbers are totals of several dies, each a separate device to a rank
    compute_capability: str = ""
    fp64_tensor_tflops: float | None = None
    fp32_tensor_tflops: float | None = None
    tf32_tensor_tflops: float | None = None
    fp16_tensor_tflops: float | None = None
    fp16_vector_tflops: float | None = None
    bf16_tensor_tflops: float | None = None
    fp8_tensor_tflops: float | None = None
    fp32_sustained_tflops: float | None = None
    bf16_sustained_tflops: float | None = None
    fp8_sustained_tflops: float | None = None
    cluster: str = ""  # preset of the machines that usually contain it; "": a node on PCI Express
    aliases: tuple[str, ...] = ()
    aliases_with_memory: tuple[str, ...] = ()
    note: str = ""

    @property
    def memory_bytes(self) -> int:
        """Device memory in bytes by the data sheet: a device reports 1 to 8 % less."""
        return int(self.memory_gibyte * 2**30)

    @property
    def warps_per_sm(self) -> int:
        """Resident warps of a multiprocessor (CUDA C++ Programming Guide, table of compute capabilities)."""
        return _WARPS_PER_SM.get(self.compute_capability, 64)

    @property
    def note_on_dies(self) -> str | None:
        """A sentence on the dies of a device whose numbers are totals of several dies; None for all others."""
        return f"{self.name} has {self.dies} dies, one for each rank" if self.dies > 1 else None

    @property
    def clock_hz(self) -> float:
        """The clock of the data sheet's fp32 peak."""
        return self.fp32_tflops * 1e12 / (2 * self.sm_count * self.fp32_lanes_per_sm)

    @property
    def tf32_by_default(self) -> bool:
        """Whether PyTorch computes fp32 convolutions in TF32 by default, as on NVIDIA's tensor cores.

        On AMD's matrix cores it does so only on request (pytorch/pytorch pull request 190711).
        """
        return self.tf32_tensor_tflops is not None and self.vendor == "nvidia"

    @property
    def load_store_units(self) -> int:
        """Load and store units of a multiprocessor, each of which moves four bytes a cycle."""
        return _LOAD_STORE_UNITS.get(self.compute_capability, 32)

    @property
    def shared_bytes_per_sm(self) -> int | None:
        """Shared memory of a multiprocessor, bytes; None if NVIDIA's guide does not list the device."""
        kibyte = _SHARED_KIBYTE.get(self.compute_capability)
        return None if kibyte is None else kibyte * 1024

    def matrix_tflops(self, dtype: str) -> float:
        """Return the peak rate of matrix products with `dtype` operands and fp32 accumulation, in TFLOP/s.

        A dtype without units has the rate of the one that it falls back to: "bf16" on Volta is the fp32
        rate. Raises ValueError for anything but `MATRIX_DTYPES`.
        """
        rates = self._matrix_rates
        if dtype not in rates:
            raise ValueError(f"expected one of {', '.join(rates)}, got {dtype!r}")
        rate = rates[self.matrix_dtype(dtype)]
        assert rate is not None
        return rate

    def matrix_dtype(self, dtype: str) -> str:
        """Return the dtype at whose rate matrix products with `dtype` operands run: one with units on this device."""
        rates = self._matrix_rates
        while rates.get(dtype, 0.0) is None:
            dtype = _SLOWER_DTYPE[dtype]
        return dtype

    @property
    def _matrix_rates(self) -> dict[str, float | None]:
        return {
            "fp64": self.fp64_tensor_tflops or self.fp64_tflops,
            "fp32": self.fp32_tensor_tflops or self.fp32_tflops,
            "tf32": self.tf32_tensor_tflops,
            "fp16": self.fp16_tensor_tflops or self.fp16_vector_tflops,
            "bf16": self.bf16_tensor_tflops,
            "fp8": self.fp8_tensor_tflops,
        }

    def vector_tflops(self, dtype: str) -> float:
        """Return the peak rate of ordinary arithmetic on `dtype` operands, in TFLOP/s.

        PyTorch computes elementwise kernels on narrower formats in fp32 (ATen's opmath type), so all but "fp64" have
        the fp32 rate. Raises ValueError for a dtype that `matrix_tflops` does not know.
        """
        self.matrix_tflops(dtype)
        return self.fp64_tflops if dtype == "fp64" else self.fp32_tflops


def gpu_names() -> tuple[str, ...]:
    """Return the names of all GPUs whose facts ship with the package, sorted."""
    return tuple(sorted(_gpus()))


@lru_cache(maxsize=256)
def load_gpu(name: str) -> Gpu:
    """Return the facts of the GPU called `name`: a file's name or an alias, ignoring case and punctuation.

    Raises WhatifError with the closest names when there is none.
    """
    squeezed_name = _squeeze(name)
    by_name = {_squeeze(known): known for known in gpu_names()}
    if squeezed_name in by_name:
        return _gpus()[by_name[squeezed_name]]
    for gpu in _gpus().values():
        if squeezed_name in map(_squeeze, gpu.aliases):
            return gpu
    prefixed = [known for squeezed, known in by_name.items() if squeezed_name and squeezed.startswith(squeezed_name)]
    close = [by_name[match] for match in close_names(squeezed_name, by_name, 4)]
    closest = list(dict.fromkeys(prefixed + close))[:4]
    are = "is" if len(closest) == 1 else "are"
    hint = f"the closest {are} {', '.join(closest)}" if closest else f"known are {', '.join(gpu_names())}"
    raise WhatifError(f"expected the name of a known GPU, got {name!r}: {hint}")


def gpu_asked_for(name: str) -> Gpu:
    """Return the GPU for a user's name: as ``load_gpu``, but "V100" is its SXM board, the usual one for training.

    If there are several such boards ("A100") it is the one with the most memory.
    """
    boards = [known for known in gpu_names() if known.lower().startswith(f"{name.strip().lower()}-sxm")]
    exact = any(_squeeze(name) in map(_squeeze, (known, *gpu.aliases)) for known, gpu in _gpus().items())
    return load_gpu(name if exact or not boards else max(boards, key=lambda board: _gpus()[board].memory_gibyte))


@lru_cache(maxsize=64)
def find_gpu(recorded_name: str, memory_bytes: int | None = None) -> Gpu | None:
    """Return the GPU that a recording calls `recorded_name` ("Tesla V100-SXM2-32GB"), or None.

    `memory_bytes` is the recorded size (totalGlobalMem). It distinguishes devices with the same name; a device whose
    memory differs (a slice of a GPU, another board) does not match.
    """
    squeezed_name = _squeeze(recorded_name)
    if not squeezed_name:
        return None
    # Names in recordings take precedence over ours: a recording's MI250 is one of its two dies.
    for gpu in sorted(_gpus().values(), key=lambda gpu: squeezed_name not in map(_squeeze, gpu.aliases)):
        named = squeezed_name in (_squeeze(gpu.name), *map(_squeeze, gpu.aliases))
        shared = memory_bytes is not None and squeezed_name in map(_squeeze, gpu.aliases_with_memory)
        if (named or shared) and (memory_bytes is None or _memory_fits(gpu, memory_bytes)):
            return gpu
    return None


def _memory_fits(gpu: Gpu, memory_bytes: int) -> bool:
    low, high = _MEMORY_REPORTED
    return low <= memory_bytes / gpu.memory_bytes <= high


def _squeeze(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in ("nvidia", "amd", "tesla", "geforce", "quadro", "instinct"))


@lru_cache(maxsize=1)
def _gpus() -> dict[str, Gpu]:
    import tomllib

    gpus = {}
    known = {*Gpu.__struct_fields__}
    for entry in sorted((resources.files("whatif.hardware") / "gpus").iterdir(), key=lambda entry: entry.name):
        if not entry.name.endswith(".toml"):
            continue
        facts = tomllib.loads(entry.read_text(encoding="utf-8"))
        if unknown := facts.keys() - known:
            raise WhatifError(f"expected only the fields of a GPU in {entry.name}, got {', '.join(sorted(unknown))}")
        facts |= {key: tuple(facts[key]) for key in ("aliases", "aliases_with_memory") if key in facts}
        gpus[facts["name"]] = Gpu(**facts)
    return gpus
