"""Which what-if describes the change between two recordings: by hand, and on real pairs whose change is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whatif
from tests.compared import AFTER, BEFORE, MS, run
from tests.helpers import facts_of, replace
from whatif import GraphInfo, TaskGraph
from whatif.graph.kernels import KernelFamily
from whatif.graph.recorded import Recorded
from whatif.graph.types import Phase, TaskKind
from whatif.prediction.baseline import Baseline
from whatif.questions.comparison.change_candidates import accumulated_passes, batch_factor
from whatif.questions.comparison.compare import compare
from whatif.questions.comparison.constraints import constraints_between
from whatif.questions.comparison.describe_change import describe_change
from whatif.questions.comparison.two_recordings import TwoRecordings
from whatif.simulation.simulator import simulate


def test_loading_that_moved_away_is_recognised_both_ways() -> None:
    """5 ms of loading and 6 ms of kernels in turns, against the kernels alone with the same waits."""
    before, after = run(BEFORE, loading_ns=5 * MS), run(BEFORE, loading_ns=1, loads_in_processes=True)
    there, back = describe_change(TwoRecordings.of(before, after)), describe_change(TwoRecordings.of(after, before))
    assert there.found is not None
    assert (there.found.spelled, there.found.undone) == ("data_loading", False)
    assert back.found is not None
    assert (back.found.spelled, back.found.undone) == ("data_loading", True)
    assert back.sentence.startswith("data_loading undone describes the change: A's step time is predicted within ")


def test_chance_is_not_a_description() -> None:
    """Half the time for all kernels alike: no what-if does that to these, nor to one kernel more."""
    faster = [(name, ns // 2, layer, family) for name, ns, layer, family in BEFORE]
    found = describe_change(TwoRecordings.of(run(BEFORE), run(faster)))
    assert found.found is None
    assert found.sentence == "the same program: both make the same calls"  # nothing shows a pace
    other = describe_change(TwoRecordings.of(run(BEFORE), run([*faster, ("k", 1 * MS, "r", KernelFamily.SOFTMAX)])))
    assert other.found is None
    assert other.sentence.startswith("no what-if describes the change")


def test_nothing_is_tried_where_there_is_nothing_to_describe() -> None:
    assert describe_change(TwoRecordings.of(run(BEFORE), run(BEFORE))).sentence == (
        "the two are alike: there is no change to describe"
    )
    other = describe_change(TwoRecordings.of(run(BEFORE), run(AFTER, gpu="AMD Y")))
    assert other.sentence == "no what-if was tried: the recordings differ in device"
    adam = describe_change(TwoRecordings.of(run(BEFORE, optimizer="SGD"), run(AFTER, optimizer="Adam")))
    assert adam.sentence == "no what-if was tried: the recordings differ in optimizer"


def test_what_both_hold_is_accounted_for() -> None:
    def constraints(one: dict[str, Any], other: dict[str, Any]) -> tuple[set[str], list[set[str]]]:
        found = constraints_between(GraphInfo(**one), GraphInfo(**other))
        return set(found.ruled_out), [set(group) for group in found.required]

    def precision(autocast: str | None, matmul: str = "ieee") -> dict[str, Any]:
        table = {"autocast": autocast, "parameters": "float32", "matmul": matmul, "conv": "ieee"}
        return {"recorded": facts_of({"precision": table})}

    launched = {"compile", "cuda_graph"}
    assert constraints({}, {}) == (launched, [])  # every recording shows how it was launched
    assert constraints({"batch_size": 8}, {"batch_size": 8}) == (launched | {"batch_size"}, [])
    assert constraints({"batch_size": 8}, {"batch_size": 4}) == (launched, [{"batch_size"}])
    assert constraints({"batch_size": 8}, {}) == (launched, [])
    assert constraints({}, {"execution": ("compiled",)}) == (set(), [launched])
    assert constraints(precision(None), precision(None)) == (launched | {"amp", "tf32"}, [])
    assert constraints(precision(None), precision("bfloat16")) == (launched | {"tf32"}, [{"amp"}])
    assert constraints(precision(None), precision(None, "tf32")) == (launched | {"amp"}, [])
    assert constraints({"recorded": facts_of({"precision": 7})}, precision(None)) == (launched, [])
    optimizer = [{"recorded": facts_of({"optimizer": {"foreach": value, "fused": None}})} for value in (False, True)]
    assert constraints(optimizer[0], optimizer[0]) == (launched | {"fused_adam"}, [])
    assert constraints(optimizer[0], optimizer[1]) == (launched, [])
    both = constraints_between(GraphInfo(batch_size=8), GraphInfo(batch_size=4, execution=("compiled",)))
    assert both.satisfied_by(frozenset(("batch_size", "cuda_graph")))
    assert not both.satisfied_by(frozenset(("batch_size", "amp")))


def test_a_change_that_is_reported_is_not_described_by_another() -> None:
    """Loading went away, which data_loading describes; with another batch recorded beside it, it alone does not."""
    before, after = run(BEFORE, loading_ns=5 * MS), run(BEFORE, loading_ns=1, loads_in_processes=True)
    assert describe_change(TwoRecordings.of(before, after)).found is not None
    batched = (graph.replace(info=replace(graph.info, batch_size=n)) for graph, n in ((before, 8), (after, 12)))
    assert describe_change(TwoRecordings.of(*batched)).found is None


def test_facts_give_the_options() -> None:
    def pair(before: TaskGraph, after: TaskGraph) -> tuple[float | None, int | None]:
        sides = Baseline.of(before), Baseline.of(after)
        return batch_factor(*sides), accumulated_passes(*sides)

    def with_flops(graph: TaskGraph, factor: float) -> TaskGraph:
        return graph.replace(flops=(graph.duration_ns * factor).astype("int64"))

    batched = run(BEFORE, batch_size=8), run(BEFORE, batch_size=12)
    assert pair(*batched) == (1.5, None)
    assert pair(*batched[::-1]) == (pytest.approx(2 / 3), None)
    plain = run(BEFORE)
    assert pair(with_flops(plain, 1000), with_flops(plain, 8000)) == (8, None)
    assert pair(with_flops(plain, 8000), with_flops(plain, 1000)) == (0.125, None)
    assert pair(with_flops(plain, 1000), with_flops(plain, 1350)) == (None, None)  # no batch grows so
    assert pair(plain, run(BEFORE * 4)) == (None, 4)


@pytest.mark.parametrize(
    ("recording", "what_if"),
    [
        ("transformer_cpu.json.gz", "fused_adam"),
        ("transformer_cpu.json.gz", "batch_size:factor=2"),
        ("transformer_cpu.json.gz", "activation_checkpoint"),
        ("resnet18_cifar_cpu.json.gz", "amp:target=bf16"),
    ],
)
def test_a_run_that_is_exactly_what_a_what_if_says_is_recognised(
    own_traces: Path, recording: str, what_if: str
) -> None:
    graph = whatif.read(str(own_traces / recording))
    prediction = whatif.apply(graph, what_if, calibrated=False)
    clock = prediction.baseline.clock
    times_ns = {clock: prediction.timeline.step_times_ns(clock)}
    # What the recorder wrote is of the unchanged run.
    info = replace(prediction.graph.info, measured_step_ns=times_ns, recorded=Recorded())
    changed = prediction.graph.replace(info=info)
    found = describe_change(TwoRecordings.of(graph, changed, calibrated=False))
    assert found.fits[0].transforms[0].name == what_if.partition(":")[0]
    assert found.fits[0].left == pytest.approx(0, abs=1e-6)
    assert found.found is not None


@pytest.mark.parametrize(
    ("before", "after", "what_if", "undone"),
    [
        ("resnet18_cifar_cpu", "resnet18_cifar_cpu_bf16", "amp:target=bf16", False),
        ("resnet18_cifar_cpu_bf16", "resnet18_cifar_cpu", "amp:target=bf16", True),
        ("resnet18_cifar_cpu", "resnet18_cifar_cpu_batch64", "batch_size:factor=2", False),
        ("resnet18_cifar_cpu", "resnet18_cifar_cpu_batch16", "batch_size:factor=0.5", False),
        ("resnet18_cifar_cpu_loader0", "resnet18_cifar_cpu_loader2", "data_loading", False),
        ("transformer_cpu", "transformer_cpu_fused", "fused_adam", False),
        ("transformer_cpu_fused", "transformer_cpu", "fused_adam", True),
        ("transformer_cpu", "transformer_cpu_foreach", None, False),  # 6 % slower; the model of foreach says faster
        ("campaign_cpu/gpt2-small--baseline.trace", "campaign_cpu/gpt2-small--batch_x0.5.trace",
         "batch_size:factor=0.5", False),
        ("campaign_cpu/resnet50--baseline.trace", "campaign_cpu/resnet50--channels_last.trace",
         "channels_last", False),
        ("campaign_cpu/gnmt--baseline.trace", "campaign_cpu/gnmt--accumulate_x4.trace",
         "gradient_accumulation:passes=4", False),
        # The machine ran at another pace: 0.83, 0.79, 0.85, 1.90 and 0.85 times as long for the same work.
        ("campaign_cpu/resnet50--baseline.trace", "campaign_cpu/resnet50--accumulate_x4.trace",
         "gradient_accumulation:passes=4", False),
        ("campaign_cpu/resnet50--baseline.trace", "campaign_cpu/resnet50--bn_eval.trace", "batch_norm_eval", False),
        ("campaign_cpu/bert-base--baseline.trace", "campaign_cpu/bert-base--checkpoint.trace",
         "activation_checkpoint", False),
        ("campaign_cpu/gnmt--adam_foreach.trace", "campaign_cpu/gnmt--adam_fused.trace", "fused_adam", False),
        ("campaign_cpu/vgg19--baseline.trace", "campaign_cpu/vgg19--accumulate_x4.trace",
         "gradient_accumulation:passes=4", False),
        # Nothing was changed between two lots, and between these two something that no what-if stands for.
        ("campaign_cpu/gnmt--baseline.trace", "campaign_cpu_2/gnmt--baseline.trace", None, False),
        ("campaign_cpu/vgg19--baseline.trace", "campaign_cpu/vgg19--offload.trace", None, False),
        ("campaign_cpu/densenet121--baseline.trace", "campaign_cpu/densenet121--adam_foreach.trace", None, False),
        # Two changes at once.
        ("resnet18_cifar_cpu_loader0", "resnet18_cifar_cpu_bf16", "amp:target=bf16 + data_loading", False),
        ("resnet18_cifar_cpu_bf16", "resnet18_cifar_cpu_loader0", "amp:target=bf16 + data_loading", True),
        ("resnet18_cifar_cpu_batch64", "resnet18_cifar_cpu_bf16", "amp:target=bf16 + batch_size:factor=0.5", False),
        ("resnet18_cifar_cpu_loader0", "resnet18_cifar_cpu_batch64", "batch_size:factor=2 + data_loading", False),
        ("campaign_cpu/resnet50--loader_0.trace", "campaign_cpu/resnet50--accumulate_x4.trace",
         "gradient_accumulation:passes=4 + data_loading", False),
    ],
)  # fmt: skip
def test_own_pairs(own_traces: Path, before: str, after: str, what_if: str | None, undone: bool) -> None:
    two = TwoRecordings.of(*(whatif.read(str(own_traces / f"{name}.json.gz")) for name in (before, after)))
    found = describe_change(two).found
    assert (found.spelled if found else None) == what_if
    assert found is None or found.undone == undone


def test_another_pace_alone_is_said(own_traces: Path) -> None:
    files = [own_traces / folder / "resnet50--baseline.trace.json.gz" for folder in ("campaign_cpu_3", "campaign_cpu")]
    two = TwoRecordings.of(*(whatif.read(str(file)) for file in files))
    assert abs(two.change_pct) > 30
    assert two.pace is not None
    assert describe_change(two).sentence == (
        f"the same program; the machine's pace changed: both make the same calls, and a call takes {two.pace:.2f} "
        "times as long in B (median)"
    )


def test_a_pause_between_the_same_calls_is_no_pace(own_traces: Path) -> None:
    """The framework's time before each update grows by 8 ms: a call takes as long as before."""
    graph = whatif.read(str(own_traces / "transformer_cpu.json.gz"))
    gaps = np.flatnonzero((graph.kind == TaskKind.GAP) & (graph.phase == Phase.UPDATE))
    duration_ns = graph.duration_ns.copy()
    duration_ns[gaps[np.unique(graph.step[gaps], return_index=True)[1]]] += 8 * MS
    slower = graph.with_duration(np.ones(len(graph), dtype=np.bool_), duration_ns)
    times_ns = {clock: simulate(slower).step_times_ns(clock) for clock in graph.info.measured_step_ns}
    slower = slower.replace(info=replace(slower.info, measured_step_ns=times_ns))
    two = TwoRecordings.of(graph, slower, calibrated=False)
    assert two.change_pct > 10
    said = describe_change(two).sentence
    assert said == "the same program: both make the same calls, and a call takes 1.00 times as long in B (median)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "recording", ["campaign_cpu/resnet50--bn_eval.trace", "transformer_cpu", "resnet18_cifar_cpu_loader0",
                  "campaign_cpu/gnmt--baseline.trace", "campaign_cpu_4/resnet50--compile.trace"],
)  # fmt: skip
def test_ten_runs_of_one_program_are_the_same_program(own_traces: Path, recording: str) -> None:
    """Each run takes its steps from the recorded ones, by chance, at a pace of its own."""
    graph = whatif.read(str(own_traces / f"{recording}.json.gz"))
    random = np.random.default_rng(7)
    said = []
    for _ in range(10):
        pair = [resampled(graph, random) for _ in range(2)]
        found = describe_change(TwoRecordings.of(*pair))
        said.append(found.sentence.partition(":")[0])
        assert found.found is None
        assert found.fits == ()
    assert "the same program; the machine's pace changed" in said


def resampled(graph: TaskGraph, random: np.random.Generator) -> TaskGraph:
    """The recording with the durations of each step's calls from another step, at another pace."""
    pace = random.lognormal(0, 0.15)
    by_step = [np.flatnonzero(graph.step == step) for step in range(graph.info.n_steps)]
    duration_ns = graph.duration_ns.copy()
    for tasks in by_step:
        source = by_step[random.integers(len(by_step))]
        if len(source) == len(tasks):
            duration_ns[tasks] = graph.duration_ns[source]
    duration_ns = np.rint(duration_ns * random.lognormal(np.log(pace), 0.1, len(graph))).astype(np.int64)
    changed = graph.replace(duration_ns=duration_ns, low_ns=duration_ns, high_ns=duration_ns)
    times_ns = simulate(changed).step_times_ns("mark")
    info = replace(graph.info, measured_step_ns={"mark": times_ns}, untraced_step_ns=None)
    return changed.replace(info=replace(info, recorded=info.recorded.without_untraced_step()))


def test_what_leads_to_other_tasks_is_no_description(own_traces: Path) -> None:
    """Channels-last takes time from the forward pass as checkpointing undone would, but no task."""
    names = ("baseline", "channels_last")
    files = [own_traces / "campaign_cpu" / f"vgg19--{name}.trace.json.gz" for name in names]
    found = describe_change(TwoRecordings.of(*(whatif.read(str(file)) for file in files)))
    assert found.found is not None
    assert found.found.spelled == "channels_last"
    assert not any("activation_checkpoint" in fit.names for fit in found.fits)


def test_the_loader_pair_of_others(shared_traces: Path) -> None:
    folder = shared_traces / "kineto-resnet50-v100"
    files = [folder / f"num_workers_{workers}.2021-06.pt.trace.json.gz" for workers in (0, 4)]
    found = compare(TwoRecordings.of(*(whatif.read(str(file)) for file in files)))
    assert found.description is not None
    assert found.description.found is not None
    assert found.description.found.spelled == "data_loading"
    assert abs(found.description.found.error_pct) < 3
    assert found.two.change_ms == pytest.approx(-28.5, abs=1)
    (loading,) = (part for part in found.phases if part.name == "data")
    assert loading.change(lambda part: part.cpu_ms) == pytest.approx(-43, abs=2)
    # By hand, of the trace's own events: each step launches 1,462 and 1,478 kernels, 106 of them of batch norm.
    counts = {part.name: (part.before.tasks, part.after.tasks) for part in found.kernels if part.before and part.after}
    assert counts["normalization"] == (106, 106)
    launched = [count for name, count in counts.items() if name not in ("copy", "memset")]
    assert (sum(a for a, _ in launched), sum(b for _, b in launched)) == (1462, 1478)


def test_other_pairs_of_others(shared_traces: Path) -> None:
    def described(folder: str, *names: str) -> tuple[TwoRecordings, str]:
        two = TwoRecordings.of(*(whatif.read(str(shared_traces / folder / f"{name}.json.gz")) for name in names))
        return two, describe_change(two).sentence

    two, sentence = described("harryjmoss-a100-batch", "bs8.run1.pt.trace", "bs64.run1.pt.trace")
    assert two.noise_ms is None
    assert sentence.startswith("batch_size:factor=8 describes the change")
    two, sentence = described("harryjmoss-a100-batch", "bs8.run1.pt.trace", "bs8.run2.pt.trace")
    assert sentence == "the two are alike: there is no change to describe"
    bert = "gaunernst_bert-small-uncased__1016001"
    two, sentence = described("tracelens-h100-mi300", f"h100.{bert}", f"mi300.{bert}")
    assert [(item.what, item.blocks) for item in two.differences] == [("device", True)]
    assert sentence == "no what-if was tried: the recordings differ in device"
    two, sentence = described("modded-nanogpt-8xh100", "current.rank0", "hook.rank0")
    assert not sentence.startswith("no what-if was tried")
    assert "describes the change" not in sentence or sentence.startswith("no what-if")
