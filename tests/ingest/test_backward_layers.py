"""Which layer a backward operator belongs to, by hand."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import Event, launched, mark, op, read_events
from whatif import Phase

NODE = "autograd::engine::evaluate_function: "


def test_the_loss_takes_no_layer_from_the_step_before(tmp_path: Path) -> None:
    """Forward: a layer, then a loss outside of any; backward on a thread of its own: loss, layer, gradient.

    ::

        main      |fc: mm|nll_loss|
        autograd                   |NllLossBackward|MmBackward|AccumulateGrad|
    """
    events: list[Event] = []
    for i in range(3):
        at, corr, seq = 1000 * i, 10 * i + 1, 2 * i
        numbered = {"Fwd thread id": 1}
        events += [
            mark(f"ProfilerStep#{i}", at, 1000), mark("whatif::layer::fc", at + 10, 50),
            op("aten::mm", at + 15, 40, **{"Sequence number": seq}), *launched("sgemm", at + 20, 5, at + 30, 20, corr),
            op("aten::nll_loss", at + 70, 30, **{"Sequence number": seq + 1}),
            *launched("nll", at + 75, 5, at + 85, 10, corr + 1),
            op(NODE + "NllLossBackward0", at + 150, 40, tid=2, **{"Sequence number": seq + 1}, **numbered),
            *launched("nll_bwd", at + 160, 5, at + 170, 10, corr + 2, tid=2),
            op(NODE + "MmBackward0", at + 200, 40, tid=2, **{"Sequence number": seq}, **numbered),
            *launched("sgemm_bwd", at + 210, 5, at + 220, 10, corr + 3, tid=2),
            op(NODE + "torch::autograd::AccumulateGrad", at + 250, 40, tid=2),
            *launched("add", at + 260, 5, at + 270, 10, corr + 4, tid=2),
        ]  # fmt: skip
    graph = read_events(tmp_path, events)
    for name, layer, phase in (("sgemm", "fc", Phase.FORWARD), ("nll", "", Phase.FORWARD),
                               ("nll_bwd", "", Phase.BACKWARD), ("sgemm_bwd", "fc", Phase.BACKWARD),
                               ("add", "fc", Phase.BACKWARD)):  # fmt: skip
        found = graph.select(name=f"^{name}$") & graph.on_gpu
        assert found.sum() == 3
        assert {graph.layers[code] for code in graph.layer[found].tolist()} == {layer}, name
        assert set(graph.phase[found].tolist()) == {phase}, name


def test_what_runs_between_backward_pass_and_update_is_update(tmp_path: Path) -> None:
    """Unscaling with gradients enabled carries the number of the next step's first operator, and builds nothing."""
    events: list[Event] = []
    for i in range(3):
        at, corr = 1000 * i, 10 * i + 1
        events += [
            mark(f"ProfilerStep#{i}", at, 1000), op("aten::mm", at + 15, 40, **{"Sequence number": i}),
            *launched("sgemm", at + 20, 5, at + 30, 20, corr),
            op(NODE + "MmBackward0", at + 200, 40, **{"Sequence number": i, "Fwd thread id": 1}),
            *launched("sgemm_bwd", at + 210, 5, at + 220, 10, corr + 3),
            op("aten::reciprocal", at + 300, 40, **{"Sequence number": i + 1}),
            *launched("reciprocal", at + 310, 5, at + 320, 10, corr + 4),
            mark("Optimizer.step#SGD.step", at + 400, 100), op("aten::add_", at + 410, 40),
            *launched("add", at + 420, 5, at + 430, 10, corr + 5),
        ]  # fmt: skip
    graph = read_events(tmp_path, events)
    for name, phase in (("sgemm", Phase.FORWARD), ("reciprocal", Phase.UPDATE), ("add", Phase.UPDATE)):
        found = graph.select(name=f"^{name}$") & graph.on_gpu & (graph.step < 2)
        assert set(graph.phase[found].tolist()) == {phase}, name
