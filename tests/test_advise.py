"""Advice for steps drawn by hand, for graphs whose memory is known, and for real traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whatif
from tests.advice_by_hand import GIB, MS, advice, drawn, gains, script
from tests.helpers import CPU, STREAM, Build, replace
from tests.test_edit import traced
from whatif import NewTasks, TaskGraph, TaskKind, Transform, WhatifError
from whatif.graph.info import GraphInfo
from whatif.graph.kernels import DTYPES, KernelFamily
from whatif.graph.memory import LayerMemory, Memory
from whatif.models.kernels.batch import with_batch_size
from whatif.models.layers.memory_effects import change_memory, checkpointed, with_batch
from whatif.prediction.predict import Baseline, apply
from whatif.questions.advice.advise import advise
from whatif.questions.advice.candidates import (
    Candidates,
)
from whatif.questions.advice.effort import Effort, EffortSize
from whatif.questions.advice.trial import Refusal, Trial, Trier
from whatif.questions.advice.warm_up import warm_up
from whatif.report.text_advise import print_decision

cpu = script("cpu2", lambda graph: graph.scale(graph.on_cpu, 0.5))

gpu = script("gpu2", lambda graph: graph.scale(graph.on_gpu, 0.5, low=0.25, high=1.0), "medium: buy it")

slower = script("slower", lambda graph: graph.scale(graph.on_gpu, 1.5))


def doubled(graph: TaskGraph) -> TaskGraph:
    graph = change_memory(graph.scale(graph.on_gpu, 1.5), lambda memory: with_batch(memory, 2))
    return with_batch_size(graph, 2)


batch = script("batch", doubled)


def test_the_drawn_step() -> None:
    """A faster CPU alone: a from 2 to 8, b to 12, still 10 ms. A faster GPU: a to 7, b from 8 to 10, 6 ms. Both: 5 ms.

    The range of the faster GPU: kernels of 1.5 and 1 ms, a from 4 and b from 8 to 9, 5 ms; or as they were, 10 ms.
    Of the CPU's 8 ms, 4 are in the span, which begins with the first kernel.
    """
    found = advice(cpu, gpu, slower)
    assert gains(found.gaining) == {"gpu2": 40.0}
    # And what two runs differ by, as squares.
    assert found.gaining[0].range_ms == pytest.approx((5, 10), rel=0.01)
    assert found.gaining[0].gain_range_pct == pytest.approx((0, 50), abs=0.2)
    assert found.gaining[0].reason == "GPU work 10.00 → 5.00 ms"
    assert gains(found.not_gaining) == {"cpu2": 0.0, "slower": -50.0}
    assert found.not_gaining[0].reason == "CPU work 4.00 → 2.00 ms, but the saved work is not on the critical path"
    assert found.not_gaining[1].reason == "GPU work 10.00 → 15.00 ms"
    assert found.not_gaining[0].range_ms is None
    assert gains(found.together) == {"cpu2 + gpu2": 50.0}
    pair = found.together[0]
    assert pair.alone_pct == (0, 40)
    assert pair.reason == "alone cpu2 0 %, gpu2 40 %; together 50 %; GPU work 10.00 → 5.00 ms, CPU work 4.00 → 2.00 ms"
    assert pair.trial.effort == Effort(EffortSize.MEDIUM, "turn it on; buy it.")
    assert found.verdict == (
        "GPU-bound: the GPU is busy 10.00 of 10.00 ms (100 %); a faster CPU would change little.",
        "Do first: gpu2 (buy it).",
        "It gains 40 % (nominal 90 % range 0 to 50 %), 10.00 → 6.00 ms for the whole span; cpu2 + gpu2 together gain "
        "50 %.",
    )


def test_where_nothing_helps_the_verdict_says_so() -> None:
    assert advice(cpu, slower).verdict[1:] == (
        "No optimization helps this run as it is.",
        "None of 2 what-ifs that apply gains 1 %; the most is cpu2 with +0.0 %.",
    )
    assert advice().verdict[2] == "No what-if applies."


def test_little_effort_comes_first_unless_more_gains_twice_as_much() -> None:
    quarter = script("quarter", lambda graph: graph.scale(graph.on_gpu, 0.75))
    a_bit = script("a_bit", lambda graph: graph.scale(graph.on_gpu, 0.9))

    def first(*transforms: Transform) -> str:
        entry = advice(*transforms).first
        assert entry is not None
        return entry.trial.spelled[0]

    assert gains(advice(quarter, a_bit, gpu).gaining) == {"gpu2": 40.0, "quarter": 25.0, "a_bit": 10.0}
    assert first(quarter, gpu) == "quarter"
    assert first(a_bit, gpu) == "gpu2"
    # Its range is reported wherever it stands.
    assert "nominal 90 % range 24 to 26 %" in advice(quarter, gpu, top=1).verdict[2]
    # Another batch asks for another learning rate: it comes first only where nothing else gains.
    assert first(a_bit, batch) == "a_bit"
    assert first(batch) == "batch"


@pytest.mark.parametrize("kind", [TaskKind.DATA_LOADING, TaskKind.COMMUNICATION])
def test_what_the_step_waits_for_comes_first_where_its_remedy_is_known(kind: TaskKind) -> None:
    """Loading, or communication, of 4 ms between a kernel of 2 and one of 6: a third of the span.

    Twice as fast kernels would gain 4 of 12 ms, without the part between 4.
    """
    build = Build(CPU, STREAM)
    _, a = build.launch(0, 2 * MS, "a")
    between = build.task(0 if kind == TaskKind.DATA_LOADING else 1, 4 * MS, "between", kind)
    build.edge(a, between)
    _, b = build.launch(0, 6 * MS, "b")
    build.edge(between, b)
    graph = build.graph()
    span_ns = whatif.simulate(graph).step_times_ns("span")
    assert span_ns == (12 * MS,)
    graph = graph.replace(info=GraphInfo(path="hand.json", measured_step_ns={"span": span_ns}))
    kernels = script("kernels2", lambda graph: graph.scale(graph.select(kind=TaskKind.KERNEL), 0.25))
    without = script("without", lambda graph: graph.scale(graph.select(kind=kind), 0.0), "medium: move it.")
    alone = advise(Baseline.of(graph), Candidates((kernels,)))
    named = "loading" if kind == TaskKind.DATA_LOADING else "communication"
    assert alone.verdict[2].endswith(f"; no what-if that was tried removes the {named}.")
    found = advise(Baseline.of(graph), Candidates((kernels, without)))
    assert "nothing that was tried" not in found.verdict[2]
    assert gains(found.gaining) == {"kernels2": 50.0, "without": pytest.approx(100 / 3)}
    assert found.bound.lower().startswith(named)
    assert found.first is not None
    assert found.first.trial.spelled == ("without",)


def test_a_larger_batch_is_judged_by_its_samples() -> None:
    """Twice the samples: a from 4 to 13, b to 19, 15 ms; for those of a recorded step 7.5."""
    for info in ({}, {"batch_size": 32}):
        found = advice(batch, **info)
        assert gains(found.gaining) == {"batch": 25.0}
        trial = found.gaining[0].trial
        assert (trial.predicted_ms, trial.samples) == (15, 2)
        assert found.gaining[0].reason.startswith("for the samples of the recorded span: GPU work 10.00 → 7.50 ms")
        assert "10.00 → 7.50 ms for the samples of the recorded span" in found.verdict[2]
    assert advice(batch).to_dict()["advice"][0]["batch_factor"] == 2


def waiting(wait_ms: int) -> Baseline:
    """Times in ms; nothing in the recording says what the CPU waits for.

    ::

        ms      0      10    10 + wait
        stream  |a-----|        |b-----|
        CPU     ||     |wait----||
    """
    build = Build(CPU, STREAM)
    _, a = build.launch(0, 10 * MS, "a")
    wait = build.task(0, wait_ms * MS, "wait", TaskKind.WAIT)
    build.edge(a, wait)
    build.launch(0, 10 * MS, "b")
    graph = build.graph()
    span_ns = whatif.simulate(graph).step_times_ns("span")
    assert span_ns == ((20 + wait_ms) * MS,)
    return Baseline.of(graph.replace(info=GraphInfo(path="hand.json", measured_step_ns={"span": span_ns})))


def test_more_samples_do_not_share_what_nothing_explains() -> None:
    """Kernels of 15 ms each for twice the samples: 30 + 80 ms, and 80 more if each recorded batch waits: 95 of 100.

    Were it one wait for both, 55 of 100; the range counts the wait as free to vanish as well: 30 ms, 15 for half.
    """
    found = advise(waiting(80), Candidates((batch,)))
    entry = found.gaining[0]
    assert (entry.trial.predicted_ms, entry.trial.recorded_samples_ms) == (110, 95)
    assert entry.trial.gain_pct == pytest.approx(5)
    assert entry.reason.endswith("the unexplained wait of 80.0 ms counts once per recorded batch")
    assert entry.gain_range_pct is not None
    # What two runs differ by, 2 to 5 % of 95 ms a recorded batch, is all that it may be worse.
    assert 5 - 0.95 * 5 < entry.gain_range_pct[0] < 5 - 0.95 * 2
    assert entry.gain_range_pct[1] > 44.9
    assert found.to_dict()["advice"][0]["recorded_samples_ms"] == 95
    # Where it does not wait there is nothing to say.
    assert "unexplained" not in advise(waiting(0), Candidates((batch,))).gaining[0].reason


def starting(call_ms: int, cpu_kind: TaskKind = TaskKind.RUNTIME) -> Baseline:
    """A call between two kernels of 5 ms, which frees what the first one worked on."""
    build = Build(CPU, STREAM)
    _, a = build.launch(0, 5 * MS, "a")
    build.edge(a, build.task(0, call_ms * MS, "cudaFree", cpu_kind))
    build.launch(0, 5 * MS, "b")
    graph = build.graph()
    span_ns = whatif.simulate(graph).step_times_ns("span")
    return Baseline.of(graph.replace(info=GraphInfo(path="hand.json", measured_step_ns={"span": span_ns})))


def test_a_step_that_looks_like_the_first_one_is_to_be_recorded_again() -> None:
    """A call of 30 ms and kernels of 10; without the call's half 25 of 40 ms."""
    found = advise(starting(30), Candidates((cpu,)))
    assert found.verdict[1] == (
        "Record again, after some steps of warm-up: 30.00 of 40.00 ms (75 %) is one stretch of CPU time in cudaFree, "
        "which looks like a program's start."
    )
    assert found.verdict[2].startswith("As it was recorded, cpu2 gains 38 % (")
    assert found.to_dict()["warm_up"] == found.warm_up
    # Not the kernel's work, a call of a fifth of the step, or an operator's own work on a CPU.
    for baseline in (starting(0), starting(2), starting(30, TaskKind.CPU_OP), drawn(), waiting(80)):
        assert advise(baseline, Candidates((cpu,))).warm_up == ""
    steps = starting(30)
    info = replace(steps.graph.info, measured_step_ns={"mark": (40 * MS,) * 5})
    assert warm_up(replace(steps, clock="mark", graph=steps.graph.replace(info=info))) == ""


def test_what_a_run_does_in_part_already_is_no_advice() -> None:
    """Of 10 ms of products 4 run in fp8."""
    baseline = drawn()
    on_gpu = baseline.graph.on_gpu
    short = on_gpu & (baseline.graph.duration_ns == 4 * MS)
    graph = baseline.graph.replace(
        family=np.where(on_gpu, KernelFamily.GEMM, -1).astype(np.int8),
        dtype=np.where(short, DTYPES.index("fp8"), DTYPES.index("bf16")).astype(np.int8),
    )
    fp8 = replace(gpu, name="fp8")
    found = advise(replace(baseline, graph=graph), Candidates((fp8, cpu)))
    assert not found.gaining
    assert not found.together
    assert [(refused.spelled, refused.why) for refused in found.refused] == [(("fp8",), Refusal.IN_PART)]
    assert found.refused[0].reason.startswith("40 % of the products' time runs in fp8 already")
    assert found.to_dict()["done_in_part"][0]["what_if"] == "fp8"
    assert gains(advice(fp8).gaining) == {"fp8": 40.0}


def fails(graph: TaskGraph) -> TaskGraph:
    raise KeyError("there is no such thing")


def refuses(graph: TaskGraph) -> TaskGraph:
    raise WhatifError("other: expected another recording, got this one.")


def communicates(graph: TaskGraph) -> TaskGraph:
    return graph.insert(NewTasks(np.array([3]), "all-reduce", TaskKind.COMMUNICATION, 1 * MS)).graph


def never_waits(graph: TaskGraph) -> TaskGraph:
    return graph.replace(duration_ns=-graph.duration_ns, low_ns=-graph.duration_ns)


@pytest.mark.parametrize(
    ("function", "why", "reason"),
    [
        (refuses, Refusal.NOT_APPLICABLE, "expected another recording, got this one."),
        (lambda graph: graph.note("it is so: nothing changes"), Refusal.NOT_APPLICABLE, "it is so: nothing changes"),
        (lambda graph: graph, Refusal.NOT_APPLICABLE, "it changes nothing here"),
        (communicates, Refusal.ELSEWHERE, "it adds communication with other workers, which this run does not have"),
        (fails, Refusal.FAILED, "transform 'other' (a function) failed: KeyError: 'there is no such thing'"),
        (never_waits, Refusal.FAILED, "graph: task 1 'a' has a negative duration."),
    ],
)
def test_what_gives_no_trial_is_listed_with_its_reason(function: Any, why: Refusal, reason: str) -> None:
    found = advice(script("other", function), gpu)
    assert gains(found.gaining) == {"gpu2": 40.0}
    assert not found.together
    assert [(refused.spelled, refused.why) for refused in found.refused] == [(("other",), why)]
    assert found.refused[0].reason.startswith(reason)


def test_communication_that_is_there_already_is_no_other_place() -> None:
    baseline = drawn()
    graph = baseline.graph.replace(kind=np.where(baseline.graph.on_gpu, TaskKind.COMMUNICATION, baseline.graph.kind))
    communicating = replace(baseline, graph=graph, timeline=whatif.simulate(graph))
    found = advise(communicating, Candidates((script("more", communicates), gpu)))
    assert not [refused for refused in found.refused if refused.why == Refusal.ELSEWHERE]
    assert found.gaining[0].reason == "communication 10.00 → 5.00 ms"


def test_more_workers_are_another_place_even_where_some_communicate() -> None:
    """It was "Do first: distributed", on eight times the machines, for the exported prediction of a pipeline."""

    def on_eight(graph: TaskGraph) -> TaskGraph:
        return graph.scale(graph.on_cpu, 2).replace(info=replace(graph.info, workers=8))

    baseline, several = drawn(), script("several", on_eight)
    graph = baseline.graph.replace(kind=np.where(baseline.graph.on_gpu, TaskKind.COMMUNICATION, baseline.graph.kind))
    found = advise(replace(baseline, graph=graph, timeline=whatif.simulate(graph)), Candidates((several,)))
    assert [(refused.why, refused.reason) for refused in found.refused] == [
        (Refusal.ELSEWHERE, "it trains on 8 times as many workers")
    ]


def test_saved_work_that_the_step_waits_for_is_not_called_hidden() -> None:
    """Kernels of 1.5 and 1 ms end at 10.5 and 19, calls at 9 and 18: from 9 to 19, as long as on the slower GPU."""
    slow_cpu = script("slow_cpu", lambda graph: graph.scale(graph.on_cpu, 2.25).scale(graph.on_gpu, 0.25))
    found = advice(slow_cpu)
    assert gains(found.not_gaining) == {"slow_cpu": 0.0}
    assert found.not_gaining[0].reason == (
        "GPU work 10.00 → 2.50 ms, CPU work 4.00 → 9.00 ms, but then other work is on the critical path"
    )


def test_what_needs_another_what_if_is_tried_behind_it() -> None:
    def on_short(graph: TaskGraph) -> TaskGraph:
        if not (graph.on_gpu & (graph.duration_ns < 4 * MS)).any():
            raise WhatifError("on_short: expected short kernels, got long ones.")
        return graph.scale(graph.on_gpu, 0.5)

    found = advice(gpu, script("on_short", on_short))
    assert gains(found.together) == {"gpu2 + on_short": 50.0}
    assert found.together[0].alone_pct == (pytest.approx(40), None)
    assert "alone gpu2 40 %, on_short does not apply; together 50 %" in found.together[0].reason


def test_what_cannot_go_together_is_left_out() -> None:
    one, other = (replace(t, schedule=lambda frontier: min(frontier.ready_ns)) for t in (cpu, gpu))
    assert not advice(one, other).together
    # Two forms of one what-if neither, and what needs other software or machines is no beginning.
    assert not advice(cpu, replace(gpu, name="cpu2", options={"to": "gpu"})).together
    assert not advice(cpu, script("gpu2", gpu.function, "large: another machine")).together
    # What gains nothing beside its parts is no combination.
    again = script("again", lambda graph: graph.scale(graph.on_gpu, 1.0))
    assert gains(advice(gpu, again).together) == {}
    # A mode of torch.compile uses CUDA graphs by itself.
    graphs = replace(cpu, name="cuda_graph")
    assert gains(advice(graphs, replace(gpu, name="compile")).together)
    assert not advice(graphs, replace(gpu, name="compile", options={"mode": "reduce-overhead"})).together


def test_a_schedule_of_what_changes_nothing_is_not_simulated() -> None:
    def never(frontier: whatif.Frontier) -> int:
        raise AssertionError

    same = replace(
        script("same", lambda graph: graph.unchanged("same: it is so already; nothing changes")), schedule=never
    )
    found = advice(same, gpu)
    assert [(r.spelled, r.why) for r in found.refused] == [(("same",), Refusal.NOT_APPLICABLE)]
    # A schedule alone is a what-if.
    picks = replace(script("picks", lambda graph: graph), schedule=lambda frontier: min(frontier.ready_ns))
    assert gains(advice(picks).not_gaining) == {"picks": 0.0}


def test_the_best_combination_grows_as_long_as_something_gains() -> None:
    def eighth(part: int) -> Transform:
        return script(f"part{part}", lambda graph: graph.scale(graph.on_gpu, 0.5 + part / 100))

    found = advice(cpu, *(eighth(part) for part in range(4)), batch)
    largest = max(found.together, key=lambda entry: len(entry.trial.transforms))
    assert len(largest.trial.transforms) <= 5  # four, and another batch
    assert largest.trial.samples == 2
    best = found.together[0].trial.gain_pct
    assert all(best >= entry.trial.gain_pct for entry in found.together)
    for entry in found.together:
        alone = [pct for pct in entry.alone_pct if pct is not None]
        assert entry.trial.gain_pct > max(alone)


@given(graph=traced(), factors=st.lists(st.tuples(st.booleans(), st.floats(0.2, 1.5)), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_every_trial_is_what_apply_predicts(graph: TaskGraph, factors: list[tuple[bool, float]]) -> None:
    span_ns = whatif.simulate(graph).step_times_ns("span")
    info = replace(graph.info, path="random", measured_step_ns={"span": span_ns})
    baseline = Baseline.of(graph.replace(info=info))

    def scaling(on_gpu: bool, factor: float) -> Callable[[TaskGraph], TaskGraph]:
        return lambda graph: graph.scale(graph.on_gpu if on_gpu else graph.on_cpu, factor, low=0.1, high=2.0)

    candidates = Candidates(tuple(script(f"s{n}", scaling(*pair)) for n, pair in enumerate(factors)))
    found = advise(baseline, candidates, top=100)  # ranges of all entries
    assert len(found.gaining) + len(found.not_gaining) + len(found.refused) <= len(factors)
    for entry in (*found.gaining, *found.together):
        prediction = apply(baseline, *entry.trial.transforms)
        assert entry.trial.predicted_ms == prediction.predicted_ms
        assert entry.range_ms == (prediction.low_ms, prediction.high_ms)
        assert entry.trial.gain_pct >= 1
    for entry in found.together:
        assert len(entry.trial.names) == len(entry.trial.transforms) > 1
        assert entry.trial.gain_pct >= max(pct or 0 for pct in entry.alone_pct) + 1


# -- memory -----------------------------------------------------------------------------------------------------------


def held(activations: int) -> Memory:
    """Two layers with the given GiB of activations each, and 1 GiB of parameters."""
    layers = tuple(
        LayerMemory(name, activations * GIB, 0, kept_input=GIB // 4, input=GIB // 4) for name in ("one", "two")
    )
    return Memory(parameters=GIB, optimizer_state=0, inputs=0, layers=layers)


def recompute(graph: TaskGraph) -> TaskGraph:
    graph = graph.scale(graph.on_gpu, 1.1)
    return change_memory(graph, lambda memory: memory.with_layers(
        [layer._replace(activations=layer.activations // 4) for layer in memory.layers]))  # fmt: skip


@pytest.mark.parametrize("specs", [("cpu:speedup=2", "distributed:workers=8"),
                                   ("distributed:workers=4", "activation_checkpoint")])  # fmt: skip
def test_a_trial_is_what_apply_predicts_in_whatever_order(own_traces: Path, specs: tuple[str, ...]) -> None:
    """`memory` gave another step than `apply` where one of two what-ifs moves behind the other."""
    baseline = Baseline.of(whatif.read(own_traces / "transformer_cpu.json.gz"))
    trial = Trier(baseline, may_move=True).attempt([whatif.load_transform(spec) for spec in specs])
    assert isinstance(trial, Trial)
    assert trial.predicted_ms == whatif.apply(baseline, *specs).predicted_ms


def test_memory_is_reported_where_the_recording_knows_it() -> None:
    """1 + 2 x 4 GiB in the recording; twice the batch 1 + 2 x 8."""
    found = advice(batch, gpu, memory=held(4), gpu_memory_bytes=40 * GIB)
    assert found.peak_bytes == 9 * GIB
    entry = next(entry for entry in found.gaining if entry.trial.spelled == ("batch",))
    assert entry.trial.peak_bytes == 17 * GIB
    assert "memory" not in entry.reason  # it has a column, and is no reason for a gain
    assert found.to_dict()["advice"][1]["peak_memory_bytes"] == {"baseline": 9 * GIB, "predicted": 17 * GIB}
    unknown = advice(batch)
    assert unknown.peak_bytes is None
    assert unknown.gaining[0].trial.peak_bytes is None
    assert "memory" not in unknown.gaining[0].reason


def test_what_does_not_fit_is_no_advice_until_something_makes_room() -> None:
    """Of 16 GiB; recomputing leaves 1 + 2 x 1, and twice the batch then 1 + 2 x 2 GiB.

    Recomputing and twice the batch: kernels of 6 x 1.1 x 1.5 and 4 x 1.1 x 1.5 ms, 16.5 in all, 8.25 for the samples
    of a recorded step.
    """
    saver = script("recompute", recompute)
    found = advice(batch, saver, memory=held(4), gpu_memory_bytes=16 * GIB)
    assert not found.gaining
    assert gains(found.too_large) == {"batch": 25.0}
    assert found.too_large[0].reason.endswith("peak memory 9.00 → 17.00 GiB, more than the device's 16.0 GiB")
    assert gains(found.not_gaining) == {"recompute": pytest.approx(-10)}
    assert gains(found.together) == {"batch + recompute": pytest.approx(17.5)}
    assert found.together[0].trial.peak_bytes == 5 * GIB


def test_a_step_that_does_not_fit_is_advised_what_makes_it_fit_first() -> None:
    """9 of 8 GiB. Recomputing leaves 3 and costs 10 %; with a faster GPU a goes from 4 to 7.3, b from 8 to 10.2 ms.

    The faster GPU alone does not fit. "No optimization helps" was the answer.
    """
    saver = script("recompute", recompute)
    found = advice(saver, gpu, memory=held(4), gpu_memory_bytes=8 * GIB)
    assert found.making_fit[0].trial.spelled == ("recompute",)
    assert gains(found.together)["gpu2 + recompute"] == pytest.approx(38)
    assert not found.not_gaining
    assert gains(found.too_large) == {"gpu2": 40.0}
    bound, do_first, gain = found.verdict
    assert bound.endswith("It needs 9.00 GiB at its peak, more than the device's 8.00 GiB.")
    assert do_first == "Do first: recompute (turn it on), with which it fits."
    assert gain.startswith("It costs 10 % (nominal 90 % range")
    assert found.to_dict()["makes_fit"][0]["what_ifs"] == ["recompute"]


def test_what_fits_by_its_predicted_peak_alone_is_advised_with_that_doubt(capsys: pytest.CaptureFixture[str]) -> None:
    """Recomputing leaves 3 GiB of 3.1; by the shapes of operators a run may need 1.06 times as much."""
    saver = script("recompute", recompute)
    found = advice(saver, gpu, memory=held(4), gpu_memory_bytes=int(3.1 * GIB))
    assert found.verdict[1] == "Do first: recompute (turn it on), with which it may fit."
    doubt = (
        "recompute: the predicted peak fits; a run may need up to 3.18 GiB for tensors, more than the device's 3.10 GiB"
    )
    assert found.to_dict()["makes_fit"][0]["memory_doubt"] == doubt
    print_decision(found)
    assert f"{doubt}." in " ".join(capsys.readouterr().out.split())
    ample = advice(saver, gpu, memory=held(4), gpu_memory_bytes=8 * GIB)
    assert ample.to_dict()["makes_fit"][0]["memory_doubt"] is None


def test_two_what_ifs_make_fit_what_neither_does_alone() -> None:
    """13 of 5 GiB: 1 of parameters and 12 of activations; each what-if halves those: 7, and both 4."""
    halves = script("halves", lambda graph: change_memory(graph, lambda memory: memory.with_layers(
        [layer._replace(activations=layer.activations // 2) for layer in memory.layers])))  # fmt: skip
    found = advice(script("also_halves", halves.function), halves, memory=held(6), gpu_memory_bytes=5 * GIB)
    pair = next(entry for entry in found.making_fit if len(entry.trial.spelled) == 2)
    assert (pair.trial.spelled, pair.trial.peak_bytes) == (("also_halves", "halves"), 4 * GIB)


def test_beside_sharing_the_what_if_counts_that_frees_what_is_not_shared(own_traces: Path) -> None:
    """Alone, a peak of 144 MB in the update hides that checkpoints free some of the activations.

    "Nothing that was tried makes it fit" was the answer. The fewest devices come first, though more are faster.
    """
    graph = whatif.read(own_traces / "transformer_cpu.json.gz")
    graph = change_memory(graph, lambda memory: replace(with_batch(memory, 4), update_workspace=60_000_000))
    info = replace(graph.info, gpu_memory_bytes=60_000_000)
    specs = ["fused_adam:to=foreach", "activation_checkpoint"]
    found = advise(Baseline.of(graph.replace(info=info)), Candidates(tuple(map(whatif.load_transform, specs))))
    assert [entry.trial.workers for entry in found.making_fit] == [3, 4]
    assert found.first is found.making_fit[0]
    assert found.first.trial.spelled == ("activation_checkpoint", "fsdp:workers=3")
    assert found.first.trial.gain_pct < found.making_fit[1].trial.gain_pct


def test_where_nothing_makes_it_fit_the_verdict_says_so() -> None:
    found = advice(gpu, memory=held(4), gpu_memory_bytes=GIB // 2)
    assert found.first is None
    assert found.verdict[1:] == (
        "Nothing that was tried makes it fit; see whatif memory and whatif plan.",
        "None of 1 what-ifs that apply frees enough memory; gpu2 needs least, 9.00 GiB.",
    )


def test_a_what_if_that_changes_memory_alone_is_tried() -> None:
    lighter = script("lighter", lambda graph: change_memory(graph, lambda memory: checkpointed(memory, ["one"])))
    found = advice(lighter, memory=held(4))
    assert gains(found.not_gaining) == {"lighter": 0.0}
    assert found.not_gaining[0].reason.startswith("peak memory 9.00 → ")
