"""The slowest of many GPUs, and what a collective takes from the kernels beside it: two terms of every exchange."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import apply, replace
from tests.transforms.communication_graphs import on_cpu, two_layers
from whatif import TaskGraph, TaskKind, WhatifError, simulate
from whatif.models.exchange import beside_kernels, stragglers
from whatif.models.exchange.beside_kernels import BESIDE
from whatif.models.exchange.stragglers import recorded_spread_pct, slowest_of

LINK = "workers=8,bandwidth=1GB/s,latency_us=0"


def work_ns(graph: TaskGraph, name: str = "^b[12]$") -> np.ndarray:
    return graph.duration_ns[graph.select(name=name) & graph.on_gpu]


@pytest.mark.parametrize("what_if", ["distributed", "zero", "zero:stage=1", "p3", "parameter_server"])
def test_a_step_works_as_long_as_on_the_slowest_gpu(what_if: str) -> None:
    graph = two_layers(2)
    spec = f"{what_if}{',' if ':' in what_if else ':'}{LINK}"
    changed = apply(graph, spec)
    factor = slowest_of(8, stragglers.GPU_SPREAD_PCT).mean
    np.testing.assert_allclose(work_ns(changed), work_ns(graph) * factor, atol=1)
    low_ns = changed.low_ns[changed.select(name="^b[12]$") & changed.on_gpu]
    np.testing.assert_array_equal(low_ns, graph.low_ns[graph.select(name="^b[12]$") & graph.on_gpu])


def test_the_spread_is_that_of_the_option_or_of_the_recording() -> None:
    graph = two_layers(2)
    for spread in (0.0, 10.0):
        factor = slowest_of(8, spread).mean
        np.testing.assert_allclose(
            work_ns(apply(graph, f"distributed:{LINK},spread_pct={spread}")), work_ns(graph) * factor, atol=1
        )
    with pytest.raises(WhatifError, match="expected spread_pct from 0 to 100, got 101"):
        apply(graph, f"distributed:{LINK},spread_pct=101")


def test_jitter_that_is_named_replaces_the_spread_of_an_exchange() -> None:
    graph = two_layers(2)
    plain = apply(graph, f"distributed:{LINK},spread_pct=0")
    expected = apply(plain, "straggler:count=0,jitter_pct=4")
    found = apply(apply(graph, f"distributed:{LINK}"), "straggler:count=0,jitter_pct=4")
    np.testing.assert_allclose(work_ns(found), work_ns(expected), atol=2)
    # Without jitter the spread stays.
    slower = apply(apply(graph, f"distributed:{LINK}"), "straggler:slowdown=2")
    assert work_ns(slower)[0] == work_ns(apply(graph, f"distributed:{LINK}"))[0]


def test_steps_of_other_lengths_raise_the_spread() -> None:
    """Seven steps whose work is 0.94 to 1.06 of the usual: quartiles 0.97 and 1.03, median 1."""
    graph = two_layers(7)
    graph = graph.replace(info=replace(graph.info, steady=(0, 7)))
    assert recorded_spread_pct(graph) == 0.0
    factor = 0.94 + 0.02 * np.arange(7)
    longer = graph.scale(graph.on_gpu, factor[graph.step[graph.on_gpu]])
    steady = slice(*graph.info.steady)
    low, median, high = np.percentile(factor[steady], (25, 50, 75))
    expected = 100 * (high - low) / 1.349 / median
    assert recorded_spread_pct(longer) == pytest.approx(expected, rel=1e-3)
    changed = apply(longer, f"distributed:{LINK}")
    np.testing.assert_allclose(work_ns(changed), work_ns(longer) * slowest_of(8, expected).mean, rtol=1e-3)


def test_more_workers_never_end_sooner() -> None:
    graph = two_layers(2)
    times = [simulate(apply(graph, f"distributed:workers={n},bandwidth=1TB/s")).makespan_ns for n in (2, 3, 8, 64, 999)]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_kernels_lose_time_by_the_bytes_that_are_summed() -> None:
    graph = two_layers(2)
    changed = apply(graph, f"distributed:{LINK}")
    beside = np.flatnonzero(changed.select(name=f"^{BESIDE}$"))
    sums = np.flatnonzero(changed.kind == TaskKind.COMMUNICATION)
    assert len(beside) == len(sums) > 0
    assert sorted(changed.size_bytes[beside]) == sorted(
        (beside_kernels.TRAFFIC * 7 / 8 * changed.size_bytes[sums]).astype(np.int64)
    )
    assert (changed.low_ns[beside] == 0).all()
    # A slower link moves the same bytes; a sum behind the pass has no kernels beside it.
    slower = apply(graph, f"distributed:{LINK.replace('1GB/s', '1MB/s')}")
    assert sorted(slower.duration_ns[slower.select(name=BESIDE)]) == sorted(changed.duration_ns[beside])
    assert not apply(graph, f"distributed:{LINK},overlap=false").select(name=BESIDE).any()


def test_what_is_compressed_costs_less_and_contention_simulates_it() -> None:
    graph = two_layers(2)
    plain, half, none = (
        int(changed.duration_ns[changed.select(name=BESIDE)].sum())
        for changed in (
            apply(graph, f"distributed:{LINK}", *more) for more in ([], ["dgc:sparsity_pct=99"], ["contention"])
        )
    )
    assert 0 < half < plain
    assert none == 0


def test_a_scatter_costs_half_of_a_sum_and_a_gather_behind_the_update_nothing() -> None:
    graph = two_layers(2)
    summed, scattered = (
        int(changed.size_bytes[changed.select(name=BESIDE)].sum())
        for changed in (apply(graph, f"{name}:{LINK}") for name in ("distributed", "zero"))
    )
    assert scattered == pytest.approx(summed / 2, abs=10)


def test_a_cpu_has_neither() -> None:
    graph = on_cpu(2)
    changed = apply(graph, f"distributed:{LINK}")
    assert not changed.select(name=BESIDE).any()
    assert recorded_spread_pct(graph) is None
