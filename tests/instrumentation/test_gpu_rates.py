"""The calibration of a GPU: what can be seen without one, and the numbers themselves on one."""

from __future__ import annotations

import json

import pytest
import torch
from whatif.instrumentation.gpu_rates import COPY_BYTES, fp32_products, measure_gpu_rates

from whatif import WhatifError


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_there_is_nothing_to_measure() -> None:
    with pytest.raises(WhatifError, match="expected a CUDA device to measure, got none"):
        measure_gpu_rates()


def test_the_precision_of_products_is_left_as_it_was() -> None:
    """Both ways of asking: the older one raises where the newer setting was left changed."""
    matmul = torch.backends.cuda.matmul

    def asked() -> tuple[str, bool, str]:
        return matmul.fp32_precision, matmul.allow_tf32, torch.get_float32_matmul_precision()

    before = asked()
    for precision in ("tf32", "ieee"):
        with fp32_products(precision):
            assert matmul.fp32_precision == precision
    with pytest.raises(ArithmeticError), fp32_products("tf32"):
        raise ArithmeticError
    assert asked() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rates_of_a_gpu_are_in_order() -> None:
    state = torch.cuda.get_rng_state()
    rates = measure_gpu_rates()
    assert json.loads(json.dumps(rates)) == rates
    assert 0 < rates["fp32_tflops"] <= 1.1 * rates["tf32_tflops"]
    assert rates["tf32_tflops"] < 1.1 * min(rates["fp16_tflops"], rates["bf16_tflops"])
    by_bytes = rates["copy_by_bytes_gbyte_s"]
    assert list(by_bytes) == [str(size_bytes) for size_bytes in COPY_BYTES]
    assert by_bytes[str(COPY_BYTES[0])] < by_bytes[str(COPY_BYTES[-1])] == rates["copy_gbyte_s"]
    for direction in ("h2d", "d2h"):
        assert 0.5 * rates[f"{direction}_pageable_gbyte_s"] < rates[f"{direction}_pinned_gbyte_s"]
        assert rates[f"{direction}_pinned_gbyte_s"] < rates["copy_gbyte_s"]
    assert torch.equal(state, torch.cuda.get_rng_state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cupy_states_launches_and_attributes() -> None:
    pytest.importorskip("cupy")
    rates = measure_gpu_rates()
    assert 0 < rates["empty_kernel_us"] <= rates["round_trip_us"]
    assert 0 < rates["launch_us"] < rates["round_trip_us"]
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    assert rates["device"]["multiprocessors"] == device.multi_processor_count
    assert rates["device"]["memory_bytes"] == device.total_memory
