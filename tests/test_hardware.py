"""Hardware facts: every file loads, the numbers agree with each other, and recordings' names find their device."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whatif.hardware.gpu import (
    Gpu,
    find_gpu,
    gpu_asked_for,
    gpu_names,
    load_gpu,
)
from whatif.runtime.errors import WhatifError

# Names and memory sizes as real recordings spell them (deviceProperties), and the device that they are.
RECORDED = [
    ("Tesla V100-DGXS-32GB", 34084028416, "V100-SXM2-32"),
    ("Tesla V100-SXM2-32GB", 34089730048, "V100-SXM2-32"),
    ("Tesla V100-SXM2-16GB", 16945512448, "V100-SXM2-16"),
    ("NVIDIA H100 80GB HBM3", 84929347584, "H100-SXM-80"),
    ("NVIDIA H100 PCIe", None, "H100-PCIE-80"),
    ("NVIDIA H100", 102085492736, "H100-SXM-96"),
    ("NVIDIA H100", None, "H100-SXM-80"),
    ("NVIDIA H100 NVL", 99857989632, "H100-NVL-94"),
    ("NVIDIA GeForce RTX 3060", 12622168064, "RTX3060"),
    ("NVIDIA GeForce RTX 3080", None, "RTX3080"),
    ("NVIDIA GeForce RTX 4060 Ti", 8585216000, "RTX4060Ti-8"),
    ("NVIDIA GeForce RTX 4060 Ti", 16710107136, "RTX4060Ti-16"),
    ("NVIDIA GeForce RTX 5080", None, "RTX5080"),
    ("NVIDIA A10G", 23834263552, "A10G"),
    ("AMD Instinct MI325X", None, "MI325X"),
    ("NVIDIA H200", 150754820096, "H200-SXM-141"),
    ("NVIDIA A100-SXM4-80GB", 84990623744, "A100-SXM-80"),
    ("NVIDIA A100-PG509-200", 42297524224, "A100-SXM-40"),
    ("NVIDIA A100-PCIE-40GB", 42346610688, "A100-PCIE-40"),
    ("NVIDIA A100 80GB PCIe", 84990623744, "A100-PCIE-80"),
    ("NVIDIA GeForce RTX 2080 Ti", 11554586624, "RTX2080Ti"),
    ("GeForce RTX 2080 Ti", None, "RTX2080Ti"),
    ("NVIDIA RTX A4000", 16782262272, "RTXA4000"),
    ("Quadro GP100", 17069309952, "GP100"),
    ("Tesla T4", 15843721216, "T4"),
    ("AMD Instinct MI300X VF", 205571227648, "MI300X"),
    ("AMD Instinct MI300X", 206141652992, "MI300X"),
    ("AMD Radeon Graphics", 68702699520, "MI250-GCD"),
    ("AMD Instinct MI250", None, "MI250-GCD"),
]

# The data sheets of these three give the fp32 peak at another clock than the boost clock: their notes say so.
OTHER_CLOCK = {"K40", "K80-die", "P4"}


@pytest.mark.parametrize(("recorded", "memory_bytes", "name"), RECORDED)
def test_a_recorded_name_finds_its_device(recorded: str, memory_bytes: int | None, name: str) -> None:
    found = find_gpu(recorded, memory_bytes)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("recorded", "memory_bytes"),
    [("ARTEMIS", None), ("", None), ("AMD Radeon Graphics", None), ("NVIDIA H100 80GB HBM3", 10 * 2**30)],
)
def test_unknown_devices_and_slices_of_one_find_nothing(recorded: str, memory_bytes: int | None) -> None:
    assert find_gpu(recorded, memory_bytes) is None


def test_there_are_at_least_the_devices_of_the_table() -> None:
    assert len(gpu_names()) >= 32
    assert {"K40", "V100-SXM2-32", "H200-SXM-141", "B200-SXM", "MI300X"} <= set(gpu_names())


@pytest.mark.parametrize("name", gpu_names())
def test_the_numbers_of_a_device_agree(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.name == name
    assert gpu.vendor in ("nvidia", "amd")
    if name not in OTHER_CLOCK:
        lanes = gpu.sm_count * gpu.fp32_lanes_per_sm
        assert lanes * 2 * gpu.boost_mhz / 1e6 == pytest.approx(gpu.fp32_tflops, rel=0.02)
    assert gpu.matrix_tflops("fp16") >= gpu.matrix_tflops("fp32") >= gpu.vector_tflops("fp32")
    assert gpu.matrix_tflops("fp8") >= gpu.matrix_tflops("fp16")
    assert 180 <= gpu.memory_gbyte_s <= 8000
    for dtype in ("fp32", "bf16", "fp8"):
        sustained = getattr(gpu, f"{dtype}_sustained_tflops")
        assert sustained is None or 0 < sustained < gpu.matrix_tflops(dtype)
    assert gpu.nvlink_gbyte_s is None or gpu.nvlink_gbyte_s > gpu.pcie_gbyte_s


def test_numbers_of_data_sheets_that_other_tables_get_wrong() -> None:
    assert load_gpu("MI100").nvlink_gbyte_s == 3 * 46  # one direction of 92 GB/s a link
    assert load_gpu("RTX3090Ti").nvlink_gbyte_s == load_gpu("RTX3090").nvlink_gbyte_s
    assert load_gpu("RTXPRO6000-Server").memory_gbyte_s == 1597  # 1792: the Workstation Edition
    assert load_gpu("A10G").power_watt == 300  # 150: the A10


def test_no_two_devices_share_a_name_or_an_alias() -> None:
    spelled = [text for name in gpu_names() for text in (name, *load_gpu(name).aliases)]
    assert len(spelled) == len(set(spelled))


def test_every_number_has_its_source_beside_it() -> None:
    from importlib import resources

    for name in gpu_names():
        for line in (resources.files("whatif.hardware") / "gpus" / f"{name}.toml").read_text().splitlines():
            if " = " in line and not line.split(" = ")[1].startswith(('"', "[")):
                assert "  # " in line, f"{name}: {line}"


def test_missing_formats_fall_back() -> None:
    v100 = load_gpu("V100-SXM2-32")
    assert v100.matrix_tflops("fp16") == 125
    assert v100.matrix_tflops("bf16") == v100.matrix_tflops("tf32") == v100.matrix_tflops("fp32") == 15.7
    assert v100.vector_tflops("fp16") == 15.7
    assert load_gpu("P100-SXM2-16").matrix_tflops("fp16") == 21.2
    assert load_gpu("MI300X").matrix_tflops("fp32") == 163.4
    with pytest.raises(ValueError, match="int4"):
        v100.matrix_tflops("int4")


def test_names_are_forgiving_and_mistakes_are_helped() -> None:
    assert load_gpu("v100 sxm2 32").name == "V100-SXM2-32"
    assert load_gpu("Tesla V100-SXM2-32GB").name == "V100-SXM2-32"
    assert load_gpu("MI250").name == "MI250"
    assert load_gpu("NVIDIA H100").name == "H100-SXM-80"
    assert load_gpu("RTX 3060").name == "RTX3060"
    with pytest.raises(WhatifError, match=r"got 'A100'.*A100-PCIE-40"):
        load_gpu("A100")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("H100", "H100-SXM-80"),
        ("a100", "A100-SXM-80"),
        ("V100", "V100-SXM2-32"),
        ("T4", "T4"),
        ("H100-PCIE-80",) * 2,
        ("H100 NVL", "H100-NVL-94"),
        ("NVIDIA H100 96GB HBM3", "H100-SXM-96"),
        ("H100 96GB", "H100-SXM-96"),
        ("NVIDIA L40S", "L40S"),
        ("A10", "A10"),
        ("RTX 5090", "RTX5090"),
        ("GeForce RTX 4070", "RTX4070"),
        ("RTX 3060", "RTX3060"),
        ("H200", "H200-SXM-141"),
        ("B200", "B200-SXM"),
        ("MI300X", "MI300X"),
    ],
)
def test_a_person_who_leaves_the_board_out_means_the_one_that_trains(asked: str, meant: str) -> None:
    assert gpu_asked_for(asked).name == meant


def test_a_person_is_shown_the_closest_names() -> None:
    with pytest.raises(WhatifError, match="A100-SXM-80"):
        gpu_asked_for("A101-SXM")
    with pytest.raises(WhatifError, match="RTX4090"):
        load_gpu("RTX4091")
    for unlike in ("cpu", "FOO"):
        with pytest.raises(WhatifError, match=f"got '{unlike}': known are A10, .*, V100-SXM2-32$"):
            load_gpu(unlike)


@given(st.text(max_size=40), st.none() | st.integers())
def test_any_text_finds_a_device_or_nothing(name: str, memory_bytes: int | None) -> None:
    found = find_gpu(name, memory_bytes)
    assert found is None or isinstance(found, Gpu)


def test_facts_do_not_import_numpy() -> None:
    script = "import sys, whatif.hardware.gpu as h; h.load_gpu('T4'); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
