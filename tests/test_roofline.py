"""The only roofline: the entries of its table, that all models use it, and that none has another."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import CPU, STREAM, Build, need
from whatif import Phase, TaskGraph, TaskKind
from whatif.from_module.predict_step import predict_step
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.types import DependencyKind
from whatif.hardware import roofline
from whatif.hardware.gpu import MATRIX_DTYPES, gpu_names, load_gpu
from whatif.models.durations.database import _opened
from whatif.models.durations.estimator import moving
from whatif.models.durations.forms import _usual_prices
from whatif.opdb.data_sheet import analytic_s
from whatif.opdb.default import estimator
from whatif.opdb.rows import Operators, operators
from whatif.prediction.transform import load_transform

ROOT = Path(__file__).resolve().parent.parent
A100, MI210 = "NVIDIA A100-SXM4-80GB", "AMD Instinct MI210"
FLOPS = 2 * 4096**3
pytestmark = pytest.mark.usefixtures("no_database")


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Halve one number of the table."""

    def change(table: str, name: str) -> None:
        tables = copy.deepcopy(roofline._architectures())
        entry = tables[table][name]
        tables[table][name] = [value / 2 for value in entry] if isinstance(entry, list) else entry / 2
        monkeypatch.setattr(roofline, "_architectures", lambda: tables)
        # What a process keeps of answers knows the shipped table only.
        _opened.cache_clear()
        _usual_prices.cache_clear()

    yield change
    _opened.cache_clear()
    _usual_prices.cache_clear()


def product(dtype: str) -> Operators:
    return operators("matmul", {"batch": 1, "m": 4096, "n": 4096, "k": 4096}, name="mm", dtype=dtype)


def step(gpu: str, us: float, dtype: str) -> TaskGraph:
    """A forward product of 137 GFLOP."""
    build = Build(CPU, STREAM, gpu=gpu, n_steps=1)
    call = build.task(0, 1_000, "launch", phase=Phase.FORWARD)
    kernel = build.task(
        1, round(us * 1e3), "product", kind=TaskKind.KERNEL, family=KernelFamily.GEMM, dtype=DTYPES.index(dtype),
        flops=FLOPS, size_bytes=3 * 4 * 4096**2, phase=Phase.FORWARD,
    )  # fmt: skip
    build.edge(call, kernel, kind=DependencyKind.LAUNCH)
    return build.graph()


def time_of_product(graph: TaskGraph) -> int:
    return int(graph.duration_ns[graph.family == KernelFamily.GEMM][0])


def predicted_ms(folder: Path) -> float:
    """A forward pass of one linear layer, predicted without a recording."""
    need("torch")
    taken = importlib.import_module("whatif.instrumentation.trace_module.step")
    (folder / "linear.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Linear(4096, 4096, bias=False)\n"
    )
    wanted = taken.Wanted(f"{folder / 'linear.py'}:build", [("", (4096, 4096), "")], dtype="fp16", inference=True)
    predicted = predict_step(taken.take_down_step(wanted), estimator("MI210"), load_gpu("MI210"))
    return predicted.prediction.breakdown.gpu_busy_ms


def answers(folder: Path) -> dict[str, float]:
    """The time of a half-precision product on an MI210 from every model."""
    operator = product("fp16")
    chain = estimator("MI210").estimate(operator)
    faster = load_transform("amp")(step(MI210, 3.3e3, "fp32"))
    moved = load_transform("device:to=MI210")(step(A100, 500, "fp16"))
    return {
        "opdb query": float(chain.t_s[0]), "predict": predicted_ms(folder),
        "amp": time_of_product(faster), "device": time_of_product(moved),
    }  # fmt: skip


def test_one_share_moves_every_answer(halved: Callable[[str, str], None], tmp_path: Path) -> None:
    before = answers(tmp_path)
    halved("amd", "matmul")
    after = answers(tmp_path)
    assert {name: after[name] / before[name] for name in before} == pytest.approx(dict.fromkeys(before, 2.0), rel=0.05)


def test_a_copy_lasts_as_long_whoever_is_asked(halved: Callable[[str, str], None]) -> None:
    """400 MB on an H100 at 0.91 of 3,350 GB/s: 131 us, and a floor if the model has one."""
    add = operators("elementwise", {"elements": 50_000_000, "tensors": 1}, name="neg", dtype="fp32")
    graph = step("NVIDIA H100 80GB HBM3", 100, "fp16")
    by_sheet = analytic_s(load_gpu("H100-SXM-80"), add, launch=False)[0][0] * 1e9 - 2_000
    assert by_sheet == pytest.approx(moving(graph, 400_000_000).duration_ns[0], rel=1e-6)
    assert by_sheet == pytest.approx(400e6 / (0.91 * 3350), rel=1e-6)
    halved("hopper", "memory")
    assert moving(graph, 400_000_000).duration_ns[0] == pytest.approx(2 * by_sheet)


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_has_its_facts(name: str) -> None:
    gpu = load_gpu(name)
    for what in ("matmul", "conv", "conv_backward", "grouped", "attention", "attention_backward", "rnn"):
        for dtype in MATRIX_DTYPES:
            share = roofline.compute_share(gpu, dtype, what)  # type: ignore[arg-type]
            assert 0 < share.low <= share.centre <= share.high < 1
    assert (
        0.4 <= roofline.memory_share(gpu).low < roofline.memory_share(gpu).centre < roofline.memory_share(gpu).high < 1
    )
    assert 1_000 <= roofline.kernel_floor_ns(gpu) <= 4_000
    gap = roofline.graph_gap_ns(gpu)
    assert 100 <= gap.low < gap.centre < gap.high <= 3_000


def test_measured_rates_come_first() -> None:
    assert roofline.sustained_tflops(load_gpu("H100-SXM-80"), "bf16") == pytest.approx(794.5)
    assert roofline.sustained_tflops(load_gpu("H100-SXM-80"), "tf32") == pytest.approx(794.5 / 2, rel=1e-3)
    assert roofline.sustained_tflops(load_gpu("H100-SXM-80"), "fp8") == pytest.approx(1402.6)
    assert roofline.sustained_tflops(load_gpu("T4"), "fp32") == 4.1
    assert roofline.sustained_tflops(load_gpu("V100-SXM2-32"), "bf16") == pytest.approx(0.8 * 15.7)
    # A card that lowers its clocks slows convolutions as well.
    assert roofline.sustained_tflops(load_gpu("T4"), "fp32", "conv") == pytest.approx(4.1 * 0.77 / 0.8)
    assert roofline.kernel_floor_ns(load_gpu("RTX5090")) == 1_100
    assert roofline.kernel_floor_ns(load_gpu("B200-SXM")) == 2_000


@pytest.mark.parametrize(
    ("name", "dtype", "slowest", "fastest"),
    [
        # xFormers' times of its memory-efficient kernels, heads of 64: 24.6 TFLOP/s for 512 and 1,024 tokens, above the
        # A100's fp32 peak; 10.3 to 10.9 in fp32 and 24 to 36 in fp16 on a V100.
        ("A100-SXM-80", "fp32", 19.6, 25.5), ("V100-SXM2-32", "fp32", 10.2, 11.0), ("V100-SXM2-32", "fp16", 24.0, 36.0),
        # A T4 lowers its clocks: less than the share of 8.1 that a V100 reaches.
        ("T4", "fp32", 3.0, 4.1), ("V100-SXM2-32", "bf16", 10.2, 11.0),
        # Three products for each one: a third of the rate in TF32 at most.
        ("RTX3090", "fp32", 4.0, 35.6 / 3), ("H100-SXM-80", "fp32", 25.0, 494.7 / 3),
    ],
)  # fmt: skip
def test_fused_attention_runs_as_xformers_measured_it(name: str, dtype: str, slowest: float, fastest: float) -> None:
    assert slowest < roofline.sustained_tflops(load_gpu(name), dtype, "attention") < fastest


def test_fused_attention_without_units_takes_as_long_in_half_precision() -> None:
    p100 = load_gpu("P100-SXM2-16")
    rates = [roofline.sustained_tflops(p100, dtype, "attention") for dtype in ("fp16", "fp32")]
    assert rates[0] == rates[1]


def test_no_share_of_a_peak_stands_anywhere_else() -> None:
    """A peak is read only where its share is taken, or where the peak itself is meant: the files that are named."""
    meant = {
        "whatif/hardware/gpu.py", "whatif/hardware/roofline.py",
        "whatif/opdb/data_sheet.py",  # the time that no kernel undercuts
        "whatif/opdb/features.py",  # what fitted models see
        "whatif/opdb/blending.py",  # how far two devices are apart
        "whatif/opdb/instruction_queue.py",  # Pei et al.'s model, with parameters of its own
        "whatif/from_module/predict_step.py",  # whether the device has tensor cores
        "whatif/prediction/utilization.py",  # model FLOPs utilisation
        "whatif/questions/efficiency.py",  # shares of the peak are what it shows
        "whatif/models/durations/computing.py",  # the share that the recorded kernels reach
        "whatif/models/durations/half_precision.py",  # the same
        "whatif/models/durations/device_convolutions.py",  # smaller by narrow channels and waves
        "whatif/models/durations/other_device.py",  # Daydream's exponent of a ratio of peaks
        "whatif/models/durations/estimator.py", "whatif/models/exchange/contention.py",  # ends of ranges
    }  # fmt: skip
    reads = re.compile(r"\.(memory_gbyte_s|matrix_tflops|vector_tflops|\w+_tensor_tflops|\w+_sustained_tflops)\b")
    found = {
        str(path.relative_to(ROOT))
        for folder in ("whatif", "transforms")
        for path in (ROOT / folder).rglob("*.py")
        if any(reads.search(line) and "roofline." not in line for line in path.read_text(encoding="utf-8").splitlines())
    }
    assert found - meant == set()
    shares = re.compile(r"^[A-Z_]*(CEILING|MEMORY_SHARE|MATRIX_SHARE|BANDWIDTH_SHARE|SHARE_OF_PEAK)\b", re.MULTILINE)
    assert not [path for path in (ROOT / "whatif").rglob("*.py") if shares.search(path.read_text(encoding="utf-8"))]
    assert len([*(ROOT / "whatif").rglob("roofline.py")]) == 1
