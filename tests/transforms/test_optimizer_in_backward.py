"""The update within the backward pass: by hand, and on recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.helpers import CPU, STREAM, id_of, names, step
from tests.transforms.programs import BACKWARD, GEMM, POINTWISE, UPDATE, Program, changed, said
from whatif import TaskGraph, TaskKind, WhatifError, simulate
from whatif.graph.kernels import KernelFamily
from whatif.graph.memory import LayerMemory, Memory
from whatif.models.kernels.update_in_backward import PIECE_NAME
from whatif.prediction.predict import Baseline

READY = [{"name": "b.weight", "layer": "b", "bytes": 300}, {"name": "a.weight", "layer": "a", "bytes": 100}]


def training_step(
    *, update: str = "upd", between: str = "", again: bool = False, memory: Memory | None = None, **facts: Any
) -> TaskGraph:
    """Two layers, and an update of one kernel a parameter.

    ::

        us      0     20    40    60   70     90
        CPU     |bwd b|bwd a|upd b|gap-|upd a|
        stream        ..|b ------|a ------|u-|...|u-|     100 us a layer, 6 us an update; 2 us after their calls
    """
    build = Program(CPU, STREAM, launch_lag_ns=2_000, metadata={"grad_ready_order": READY, **facts}, memory=memory)
    build.call("bwd b", 100_000, BACKWARD, layer="b", family=GEMM)
    build.call("bwd a", 100_000, BACKWARD, layer="a", family=GEMM)
    if between:
        build.call(between, 3_000, UPDATE, family=KernelFamily.REDUCTION)
    build.call(f"{update} b", 6_000, UPDATE, in_optimizer=True, family=POINTWISE)
    build.gap("gap", 10_000, UPDATE, in_optimizer=True)
    build.call(f"{update} a", 6_000, UPDATE, in_optimizer=True, family=POINTWISE)
    if again:
        build.call("bwd a again", 100_000, BACKWARD, layer="a", family=GEMM)
    return build.graph()


def test_each_parameter_is_updated_behind_its_gradient() -> None:
    """Three quarters of 8 us above the floor are b's; each call takes its half of the gap and of the calls, and 110 us.

    ::

        us      0     20              155   175              310
        CPU     |bwd b|update of b-----|bwd a|update of a-----|
        stream        ..|b ---------|     ..|ub |  ..|a --------|   ..|ua|
                        22        122       157 165  177      277     312
    """
    after = changed("optimizer_in_backward", training_step())
    timeline = simulate(after)
    found = list(zip(names(after), timeline.start_ns.tolist(), after.duration_ns.tolist(), strict=True))
    found.sort(key=lambda row: row[1])
    # 2 x 20 us of calls and 10 us of the gap, for two parameters; calls that launch are part of what the CPU does.
    assert found == [
        ("call bwd b", 0, 20_000), (PIECE_NAME, 20_000, 135_000), ("bwd b", 22_000, 100_000),
        ("call bwd a", 155_000, 20_000), (PIECE_NAME, 157_000, 8_000),
        (PIECE_NAME, 175_000, 135_000), ("bwd a", 177_000, 100_000), (PIECE_NAME, 312_000, 4_000),
    ]  # fmt: skip
    assert set(after.phase[after.select(name="^update")].tolist()) == {UPDATE}
    assert said(after) == "optimizer_in_backward: the update becomes 2 pieces of the backward pass"
    twice = changed("optimizer_in_backward", after)
    assert len(twice) == len(after)
    assert "nothing changes" in said(twice)


def test_a_multi_tensor_update_is_split_by_bytes_with_a_launch_for_each_operation() -> None:
    """One kernel name: one launch a parameter, 10 us where no forward pass shows what a small operator takes."""
    build = Program(CPU, STREAM, metadata={"grad_ready_order": READY})
    build.call("bwd b", 100_000, BACKWARD, layer="b", family=GEMM)
    build.call("bwd a", 100_000, BACKWARD, layer="a", family=GEMM)
    build.call("multi_tensor_apply_kernel<FusedAdamMathFunctor>", 42_000, UPDATE, in_optimizer=True,
               family=KernelFamily.OPTIMIZER)  # fmt: skip
    after = changed("optimizer_in_backward", build.graph())
    pieces = after.select(name="^update")
    assert after.duration_ns[pieces & after.on_gpu].tolist() == [40_000 * 3 / 4 + 2_000, 40_000 / 4 + 2_000]
    assert after.duration_ns[pieces & after.on_cpu].tolist() == [120_000, 120_000]


def test_gradients_no_longer_live_together() -> None:
    memory = Memory(400, 800, 0, (LayerMemory("a", 10, 100), LayerMemory("b", 10, 300)))
    after = changed("optimizer_in_backward", training_step(memory=memory))
    assert after.info.memory is not None
    assert after.info.memory.gradients_leave


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (lambda: training_step(grad_ready_order=[]), "whatif collect"),
        (lambda: step(), "whatif collect"),
        (lambda: training_step(between="LpNormFunctor"), "clips by a norm"),
        (lambda: training_step(between="amp_foreach_non_finite_check_and_unscale"), "scales the loss"),
        (lambda: training_step(again=True), "two optimizers, as in a GAN"),
    ],
)
def test_an_update_that_cannot_be_split_says_why(graph: Any, reason: str) -> None:
    with pytest.raises(WhatifError, match=reason) as error:
        changed("optimizer_in_backward", graph())
    assert "\n" not in str(error.value)


def test_after_a_loss_scaler_the_update_cannot_be_split() -> None:
    scaled = changed("amp:matrix_speedup=3", training_step())
    changed("optimizer_in_backward", scaled)
    build = training_step()
    inserted = build.insert(
        whatif.NewTasks([id_of(build, "bwd a")], "unscale gradients", TaskKind.KERNEL, 3_000, phase=UPDATE)
    )
    with pytest.raises(WhatifError, match="scales the loss"):
        changed("optimizer_in_backward", inserted.graph)


def test_what_needs_all_gradients_is_refused_behind_it() -> None:
    pieces = changed("optimizer_in_backward", training_step())
    with pytest.raises(WhatifError, match="target=bf16"):
        changed("amp", pieces)
    assert len(changed("amp:target=bf16", pieces)) >= len(pieces)
    for exchange in ("distributed", "zero", "fsdp", "p3:workers=2", "parameter_server:workers=2", "pipeline"):
        with pytest.raises(WhatifError, match="leave one of the two out"):
            changed(exchange, pieces)


def test_collectives_and_inference_are_refused() -> None:
    graph = training_step()
    kind = graph.kind.copy()
    kind[id_of(graph, "bwd a")] = TaskKind.COMMUNICATION
    with pytest.raises(WhatifError, match="leave out what exchanges gradients"):
        changed("optimizer_in_backward", graph.replace(kind=kind))
    no_update = graph.remove(graph.select(phase=UPDATE))
    with pytest.raises(WhatifError, match="inference"):
        changed("optimizer_in_backward", no_update)


@pytest.mark.parametrize("name", ["bert-base--baseline", "bert-base--adam_fused", "resnet50--baseline"])
def test_the_update_of_real_steps_moves_as_a_whole(own_traces: Path, name: str) -> None:
    graph = whatif.read(own_traces / "campaign_cpu" / f"{name}.trace.json.gz")
    before = Baseline.of(graph)
    after = whatif.apply(before, "optimizer_in_backward")
    assert not (after.graph.in_optimizer & after.graph.on_cpu).any()
    pieces = after.graph.select(name="^update")
    n_parameters = len(graph.info.recorded.gradients)
    steps = len(np.unique(after.graph.step[pieces]))
    recorded_ns = before.graph.duration_ns[before.graph.in_optimizer & before.graph.on_cpu].sum()
    calls_ns = 110_000 * n_parameters * steps
    moved_ns = after.graph.duration_ns[pieces].sum()
    if "fused" in name:  # what collects the parameters for one call is not repeated for each
        assert calls_ns < moved_ns < recorded_ns + calls_ns
    else:
        assert moved_ns == pytest.approx(recorded_ns + calls_ns, rel=0.1)
    # Between the first and the last backward work of its step.
    backward = after.graph.on_cpu & after.graph.select(phase=BACKWARD)
    for number in np.unique(after.graph.step[pieces]).tolist():
        mine, work = (np.flatnonzero(tasks & (after.graph.step == number)) for tasks in (pieces, backward))
        assert work[0] < mine[0]
    assert after.low_ms <= after.predicted_ms <= after.high_ms
