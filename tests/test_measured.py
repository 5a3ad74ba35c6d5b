"""Operators measured alone: the table in a recording, which tasks it belongs to, and what-ifs that multiply by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import Event, facts_of, mark, op, read_events
from whatif import TaskGraph
from whatif.models.durations.measured import (
    OperatorTimes,
    form_ratio,
    task_batch_ratio,
    with_form,
)

SHAPES: dict[str, Any] = {
    "Input Dims": [[8, 3, 4, 4], [5, 3, 3, 3]],
    "Input type": ["float", "float"],
    "Concrete Inputs": ["", ""],
}


def row(name: str, **times: float) -> dict[str, Any]:
    return {
        "op": name, "dims": SHAPES["Input Dims"], "types": SHAPES["Input type"], "concrete": SHAPES["Concrete Inputs"],
        "ns": times, "spread": {"recorded": 0.02, "bf16": 0.04},
    }  # fmt: skip


CONVOLUTION = row("aten::conv2d", recorded=1000, bf16=250, channels_last=500, bf16_channels_last=125,
                  **{"batch_x0.5": 500, "batch_x2": 4000})  # fmt: skip
NORM = row("aten::batch_norm", recorded=200, eval=100)


def conv_steps(*rows: dict[str, Any], folder: Path) -> TaskGraph:
    """Four CPU steps of 1,000 us: a convolution of 100 us (in it a product of 80), a norm, a backward, an update.

    ::

        us   0    10                    110      120          160   200                300     400    500
        conv2d    |-(mkldnn 20..100)----|
        batch_norm                               |------------|
        backward                                                    |conv_backward-----|
        update                                                                                 |mul_--|
    """
    events: list[Event] = []
    for i in range(4):
        at = 1000 * i
        events += [
            mark(f"ProfilerStep#{i}", at, 1000),
            op("aten::conv2d", at + 10, 100, **SHAPES, **{"Sequence number": i}),
            op("aten::mkldnn_convolution", at + 20, 80),
            op("aten::batch_norm", at + 120, 40, **SHAPES),
            op("autograd::engine::evaluate_function: ConvolutionBackward0", at + 200, 100),
            op("aten::convolution_backward", at + 210, 80),
            mark("Optimizer.step#SGD.step", at + 400, 100),
            op("aten::mul_", at + 410, 80),
        ]
    return read_events(folder, events, whatif={"version": 1, "batch_size": 8, "operator_times": list(rows)})


def time_us(graph: TaskGraph, name: str) -> float:
    return float(graph.duration_ns[graph.select(name=name) & (graph.step == 1)].sum()) / 1e3


def test_every_task_inside_an_outermost_operator_takes_its_ratio(tmp_path: Path) -> None:
    graph = conv_steps(CONVOLUTION, folder=tmp_path)
    ratio, spread = form_ratio(graph, "bf16")
    inside = graph.select(name="conv2d|mkldnn")
    assert np.allclose(ratio[inside], 0.25)
    assert np.allclose(spread[inside], 0.04)
    assert np.isnan(ratio[~inside]).all()


def test_bf16_of_a_channels_last_operator_is_the_ratio_of_those_two(tmp_path: Path) -> None:
    graph = conv_steps(row("aten::conv2d", recorded=1000, bf16=250, channels_last=500, bf16_channels_last=50),
                       folder=tmp_path)  # fmt: skip
    conv = graph.select(name="conv2d|mkldnn")
    moved = with_form(graph, conv, "channels_last")
    assert np.allclose(form_ratio(moved, "bf16")[0][conv], 0.1)
    assert np.isnan(form_ratio(with_form(moved, conv, "bf16"), "eval")[0]).all()


@pytest.mark.parametrize(("factor", "ratio"), [(0.5, 0.5), (1.0, 1.0), (2.0, 4.0), (4.0, 16.0), (0.25, 0.25)])
def test_between_and_beyond_measured_batches_a_power_law(tmp_path: Path, factor: float, ratio: float) -> None:
    graph = conv_steps(CONVOLUTION, folder=tmp_path)
    found = task_batch_ratio(graph, factor)[0][graph.select(name="mkldnn")]
    assert np.allclose(found, ratio)


def test_the_transforms_multiply_by_the_measured_ratio(tmp_path: Path) -> None:
    graph = conv_steps(CONVOLUTION, NORM, folder=tmp_path)
    assert time_us(graph, "conv2d|mkldnn") == 100
    changed = whatif.apply(graph, "channels_last").graph
    assert time_us(changed, "conv2d|mkldnn") == 50
    both = whatif.apply(graph, "channels_last", "amp").graph
    assert time_us(both, "conv2d|mkldnn") == pytest.approx(12.5)
    other_way = whatif.apply(graph, "amp", "channels_last").graph
    assert time_us(other_way, "conv2d|mkldnn") == pytest.approx(12.5)
    assert time_us(whatif.apply(graph, "batch_norm_eval").graph, "batch_norm$") == 20
    larger = whatif.apply(graph, "batch_size:size=16").graph
    assert time_us(larger, "conv2d|mkldnn") == 400
    # Not measured: in proportion, but for the 2 us of the call itself.
    assert time_us(larger, "convolution_backward") == 2 + 78 * 2
    assert time_us(larger, "mul_") == 80
    assert larger.info.batch_size == 16


def test_on_a_cpu_compile_puts_convolutions_into_channels_last(tmp_path: Path) -> None:
    graph = conv_steps(CONVOLUTION, NORM, folder=tmp_path)
    changed = whatif.apply(graph, "compile").graph
    assert time_us(changed, "aten::mkldnn_convolution") == pytest.approx(80 * 500 / 1000)
    for specs in (("channels_last", "compile"), ("compile", "channels_last")):
        assert whatif.apply(graph, *specs).predicted_ms == whatif.apply(graph, "compile").predicted_ms


@pytest.mark.parametrize(
    "table",
    [
        None, 7, "x", [], [None], [{"op": 3}], [{**CONVOLUTION, "ns": None}],
        [{**CONVOLUTION, "ns": {"recorded": "1"}}], [{**CONVOLUTION, "ns": {"recorded": float("nan"), "bf16": 1}}],
        [{**CONVOLUTION, "ns": {"recorded": 1, "bf16": -1}}],
        [{**CONVOLUTION, "ns": {"recorded": 1, "bf16": 1e12, "batch_xhuge": 3}}], [{**CONVOLUTION, "dims": {"a": [1]}}],
        [{**CONVOLUTION, "ns": {"recorded": 0, "bf16": 0, "batch_x0": 1, "batch_x-1": 1, "batch_xnan": 1}}],
    ],
)  # fmt: skip
def test_a_damaged_table_counts_as_not_measured(tmp_path: Path, table: Any) -> None:
    graph = conv_steps(folder=tmp_path)
    info = {"version": 1, "batch_size": 8, "operator_times": table}
    damaged = read_events(tmp_path, _events_of(tmp_path), whatif=info)
    for spec in ("channels_last", "amp", "batch_size:factor=2", "batch_norm_eval"):
        assert whatif.apply(damaged, spec).predicted_ms == whatif.apply(graph, spec).predicted_ms


def _events_of(folder: Path) -> list[Event]:
    import json

    events: list[Event] = json.loads((folder / "trace.json").read_bytes())["traceEvents"]
    return events


def test_ratios_outside_reason_are_not_used() -> None:
    times = OperatorTimes.of(
        facts_of({"operator_times": [row("a", recorded=1, bf16=1e6), row("b", recorded=4, bf16=2)]})
    )
    assert np.isnan(times.ratio("bf16")[0])
    assert times.ratio("bf16")[1] == 0.5


def test_a_time_whose_quartiles_lie_farther_apart_than_itself_is_none() -> None:
    rows = [row("a", recorded=19, bf16=5_800), row("b", recorded=4, bf16=2)]
    rows[0]["spread"], rows[1]["spread"] = {"recorded": 130.0}, {"recorded": 0.9}
    times = OperatorTimes.of(facts_of({"operator_times": rows}))
    assert np.isnan(times.ratio("bf16")[0])
    assert times.ratio("bf16")[1] == 0.5


def test_eval_takes_its_own_ratio_whatever_came_before(tmp_path: Path) -> None:
    norm = row("aten::batch_norm", recorded=200, eval=100, bf16=50, channels_last=180, bf16_channels_last=45)
    graph = conv_steps(CONVOLUTION, norm, folder=tmp_path)
    assert time_us(whatif.apply(graph, "amp", "channels_last").graph, "batch_norm$") == pytest.approx(40 * 45 / 200)
    for specs in (("amp", "batch_norm_eval"), ("batch_norm_eval", "amp")):
        assert time_us(whatif.apply(graph, *specs).graph, "batch_norm$") == pytest.approx(40 * 0.25 * 0.5)
    for spec in ("batch_norm_eval", "channels_last"):
        once, twice = (whatif.apply(graph, *[spec] * n) for n in (1, 2))
        assert (once.predicted_ms, once.low_ms, once.high_ms) == (twice.predicted_ms, twice.low_ms, twice.high_ms)


def test_forms_that_nobody_measures_take_no_room() -> None:
    odd = {f"form{i}": 1.0 for i in range(1000)} | {f"batch_x{i}": 1.0 for i in range(2, 1000)}
    times = OperatorTimes.of(facts_of({"operator_times": [row("a", recorded=1, bf16=0.5, **odd)]}))
    assert len(times.ns) < 20
    assert times.ratio("bf16")[0] == 0.5


@pytest.mark.parametrize(("at_twice_ns", "factor", "ratio"), [(900, 1e4, 0.9), (900, 0.5, 1.0), (1e6, 8, 16_000)])
def test_noise_is_not_carried_beyond_the_measured_batches(at_twice_ns: float, factor: float, ratio: float) -> None:
    """Beyond twice the batch nothing shrinks, and what grew a thousandfold grows with the square."""
    times = OperatorTimes.of(facts_of({"operator_times": [row("a", recorded=1000, batch_x2=at_twice_ns)]}))
    assert times.batch_ratio(factor)[0][0] == pytest.approx(ratio)


def test_a_noisy_measurement_of_another_batch_widens_the_range(tmp_path: Path) -> None:
    ranges = []
    for spread in (0.0, 0.5):
        measured = {**CONVOLUTION, "spread": {"recorded": 0.0, "batch_x2": spread}}
        found = whatif.apply(conv_steps(measured, folder=tmp_path), "batch_size:factor=2")
        ranges.append(found.high_ms - found.low_ms)
        same = whatif.apply(conv_steps(measured, folder=tmp_path), "batch_size:factor=1")
        assert same.predicted_ms == same.baseline_ms
    assert ranges[1] > 1.5 * ranges[0]
