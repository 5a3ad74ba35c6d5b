"""Properties of tensor, pipeline and data parallelism of any degrees."""

from __future__ import annotations

from functools import cache
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transforms.test_parallel import gpt2, sent
from whatif.prediction.predict import Prediction, apply

AXES = ("tensor", "pipeline", "data")
ORDERS = tuple(permutations(AXES))

degrees = st.fixed_dictionaries({
    "tensor": st.sampled_from([1, 2, 4]), "pipeline": st.integers(1, 3), "data": st.integers(1, 9),
    "micro_batches": st.sampled_from([2, 3, 6]), "name": st.sampled_from(["distributed:", "zero:stage=1,"]),
    "rates": st.fixed_dictionaries(dict.fromkeys(AXES, st.sampled_from([40, 400, 4_000, 40_000]))),
})  # fmt: skip


@cache
def step(*specs: str) -> Prediction:
    return apply(gpt2(), *specs)


def spelled(case: dict[str, object], rates: dict[str, int]) -> dict[str, str]:
    """The what-if of each axis."""
    micro = f"stages={case['pipeline']},micro_batches={case['micro_batches']}"
    return {
        "tensor": f"tensor_parallel:workers={case['tensor']},bandwidth={rates['tensor']}Mbps",
        "pipeline": f"pipeline:{micro},bandwidth={rates['pipeline']}Mbps",
        "data": f"{case['name']}workers={case['data']},bandwidth={rates['data']}Mbps",
    }


@settings(max_examples=12, deadline=None)
@given(degrees, st.sampled_from(ORDERS), st.sampled_from(AXES))
def test_orders_degrees_of_one_and_links(case: dict, order: tuple[str, ...], axis: str) -> None:  # type: ignore[type-arg]
    """Another order: the same step; without an axis of one: the same; half of one link: no shorter."""
    specs = spelled(case, case["rates"])
    found = step(*specs.values())
    assert step(*(specs[name] for name in order)).predicted_ms == found.predicted_ms
    kept = [specs[name] for name in AXES if case[name] > 1]
    assert (step(*kept).predicted_ms if kept else gpt2().step_ns / 1e6) == pytest.approx(found.predicted_ms, abs=1e-9)
    slower = spelled(case, {**case["rates"], axis: case["rates"][axis] // 2})
    assert step(*slower.values()).predicted_ms >= found.predicted_ms - 1e-6


@pytest.mark.parametrize("micro_batches", [2, 6])
def test_a_faster_link_never_lengthens_a_step_of_micro_batches(micro_batches: int) -> None:
    """gloo's messages cost the CPU time behind any link: at 4000 Mbps they used to count for more than at 2000."""
    stages = f"pipeline:stages=2,micro_batches={micro_batches}"
    rates = (40, 200, 1_000, 2_000, 4_000, 40_000)
    found = [step(f"tensor_parallel:workers=2,bandwidth={rate}Mbps", stages).predicted_ms for rate in rates]
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 3


def test_no_bandwidth_shortens_the_work_of_a_cpu() -> None:
    """gloo's threads take 118 ms of a step behind any network; `bandwidth` used to make 75 of them."""
    for name in ("fsdp:workers=4", "tensor_parallel:workers=2", "distributed:workers=2,compress=fp16"):
        fast, slow = step(f"{name},bandwidth=10Tbps"), step(f"{name},bandwidth=1Tbps", "bandwidth:factor=10")
        assert slow.predicted_ms == pytest.approx(fast.predicted_ms, rel=1e-6)


@pytest.mark.parametrize("name", ["dgc", "blueconnect"])
@pytest.mark.parametrize(("now", "then"), [(10, 100), (40, 400), (100, 10)])
def test_exchanges_in_place_of_all_reduces_follow_their_links(name: str, now: int, then: int) -> None:
    """They are no all-reduces of gloo; `bandwidth` used to hold them to the work of those."""
    later = step(f"distributed:workers=8,bandwidth={now}Mbps", name, f"bandwidth:factor={then / now}")
    at_once = step(f"distributed:workers=8,bandwidth={then}Mbps", name)
    assert later.predicted_ms == pytest.approx(at_once.predicted_ms, rel=0.01)


@pytest.mark.parametrize("micro_batches", [2, 6])
@pytest.mark.parametrize(("now", "then"), [(10, 100), (40, 400), (100, 10), (40, 4), (1_000, 100)])
def test_sums_of_a_stage_follow_their_links(micro_batches: int, now: int, then: int) -> None:
    """The CPU work of the sums in a pass was recorded as latency, so that none fully followed its link."""
    stages = f"pipeline:stages=2,micro_batches={micro_batches}"
    later = step(f"tensor_parallel:workers=2,bandwidth={now}Mbps", stages, f"bandwidth:factor={then / now}")
    at_once = step(f"tensor_parallel:workers=2,bandwidth={then}Mbps", stages)
    assert later.predicted_ms == pytest.approx(at_once.predicted_ms, rel=0.01)


@pytest.mark.parametrize("name", ["fsdp:workers=4", "zero:workers=4", "tensor_parallel:workers=2"])
@pytest.mark.parametrize(("now", "then"), [(100_000, 40), (4_000, 40), (40, 4_000), (4_000, 2_000)])
def test_another_bandwidth_later_is_that_bandwidth_at_once(name: str, now: int, then: int) -> None:
    """Of what a CPU bounds the network's own time is known; a slower link used to lengthen the CPU's part."""
    later, at_once = (
        step(f"{name},bandwidth={now}Mbps", f"bandwidth:factor={then / now}"),
        step(f"{name},bandwidth={then}Mbps"),
    )
    for bound in ("predicted_ms", "low_ms", "high_ms"):
        assert getattr(later, bound) == pytest.approx(getattr(at_once, bound), rel=1e-4)
    back = step(f"{name},bandwidth={now}Mbps", f"bandwidth:factor={then / now}", f"bandwidth:factor={now / then}")
    assert back.predicted_ms == pytest.approx(step(f"{name},bandwidth={now}Mbps").predicted_ms, rel=1e-4)


@pytest.mark.parametrize("name", ["dgc", "blueconnect"])
def test_a_faster_link_never_lengthens_a_sum_in_stages_or_of_lists(name: str) -> None:
    """What the CPU takes beyond a quick network counted as the network's latency, of which there was more each time."""
    rates = (40, 400, 4_000, 40_000, 400_000)
    found = [step(f"distributed:workers=8,bandwidth={rate}Mbps", name).predicted_ms for rate in rates]
    assert found == sorted(found, reverse=True)


@settings(max_examples=8, deadline=None)
@given(degrees)
def test_bytes_do_not_depend_on_the_other_axes(case: dict) -> None:  # type: ignore[type-arg]
    """Sums of activations are those of the cut model alone; the stages exchange its gradients, each of them once."""
    specs = spelled(case, case["rates"])
    found, cut = step(*specs.values()).graph, step(specs["tensor"]).graph
    assert sent(found, "sum of activations") == pytest.approx(sent(cut, "sum of activations"), abs=1_000)
    if case["data"] > 1 and case["name"] == "distributed":
        gradients = sum(row.size_bytes or 0 for row in cut.info.recorded.gradients)
        assert sent(found, "all-reduce") == pytest.approx(gradients, rel=0.02)
