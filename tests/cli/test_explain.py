"""Explanations of steps drawn by hand: the critical path, and the verdict."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import CPU, STREAM, Build
from whatif.graph.kernels import KernelFamily
from whatif.graph.types import Phase, TaskKind
from whatif.prediction.predict import Baseline
from whatif.questions.explain import LAG, critical_path_times, explain
from whatif.report.text_explain import print_explanation
from whatif.simulation.simulator import simulate

MS = 1_000_000


def baseline(build: Build) -> Baseline:
    graph = build.graph()
    span_ns = simulate(graph).step_times_ns("span")
    build.info = type(build.info)(
        path="hand.json", launch_lag_ns=build.info.launch_lag_ns, measured_step_ns={"span": span_ns}
    )
    return Baseline.of(build.graph())


def host_bound() -> Build:
    """Times in ms; the span begins with the first kernel, at 3.

    CPU    |launch a 2|  |loading 4  |launch b 6      |
    stream              |a 1|                          . |b 3|
           0     2   3    4    6                     12 13   16
    """
    build = Build(CPU, STREAM, launch_lag_ns=1 * MS)
    build.launch(2 * MS, 1 * MS, "a")
    build.task(0, 4 * MS, "batch", TaskKind.DATA_LOADING, phase=Phase.DATA)
    build.launch(6 * MS, 3 * MS, "b")
    return build


def test_the_critical_path_is_divided_without_rest() -> None:
    timeline = simulate(host_bound().graph())
    held_ns, lag_ns = critical_path_times(timeline, 0, 16 * MS)
    assert (held_ns // MS).tolist() == [2, 0, 4, 6, 3]
    assert lag_ns == 1 * MS
    held_ns, lag_ns = critical_path_times(timeline, 3 * MS, 13 * MS)
    assert (held_ns // MS).tolist() == [0, 0, 3, 6, 0]
    assert lag_ns == 1 * MS


def test_explanation_of_the_drawn_step() -> None:
    found = explain(baseline(host_bound()))
    assert found.baseline_ms == 13
    assert found.critical_path_ms == {"runtime": 6, "kernel": 3, "data_loading": 3, LAG: 1}
    assert [(part.name, part.gpu_ms, part.cpu_ms) for part in found.phases] == [("unknown", 4, 6), ("data", 0, 3)]
    assert found.breakdown.gpu_busy_ms == 4
    assert found.verdict == (
        "host-bound: the GPU is busy 4.00 of 13.00 ms (31 %), and CPU work is 46 % of the critical path; faster "
        "kernels would change little, fewer or cheaper launches would; the span also waits for its data for 3.00 of "
        "13.00 ms (23 %)."
    )
    assert [(part.name, part.critical_ms) for part in found.operations] == [("b", 3), ("a", 0)]
    assert found.layers == ()


def one(kind: TaskKind, length_ms: int) -> Build:
    """A kernel of 1 ms at the begin and one at the end of the span, and between them something else on the CPU."""
    build = Build(CPU, STREAM)
    build.launch(0, 1 * MS, "first")
    build.task(0, length_ms * MS, "between", kind)
    build.launch(0, 1 * MS, "last")
    return build


@pytest.mark.parametrize(
    ("kind", "begins"),
    [
        (TaskKind.DATA_LOADING, "loading-bound: the span waits for its data for 9.00 of 10.00 ms (90 %)"),
        (TaskKind.WAIT, "waiting: the span is idle for 9.00 of 10.00 ms (90 %)"),
        (TaskKind.GAP, "host-bound: "),
    ],
)
def test_verdicts(kind: TaskKind, begins: str) -> None:
    # The span begins with the first kernel, so 9 of 10 ms are between.
    build = one(kind, 9)
    assert explain(baseline(build)).verdict.startswith(begins)


def test_communication_bound() -> None:
    build = Build(CPU, STREAM)
    build.launch(0, 6 * MS, "gemm")
    call = build.task(0, 0, "launch all-reduce")
    kernel = build.task(1, 4 * MS, "all-reduce", TaskKind.COMMUNICATION)
    build.edge(call, kernel)
    found = explain(baseline(build))
    assert found.verdict.startswith(
        "communication-bound: the span waits for communication, or for other ranks in it, for"
    )
    assert "4.00 of 10.00 ms (40 %)" in found.verdict


def test_gpu_bound() -> None:
    build = Build(CPU, STREAM)
    for _ in range(3):
        build.launch(MS // 10, 4 * MS, "gemm", cpu=0)
    assert explain(baseline(build)).verdict.startswith("GPU-bound: the GPU is busy 12.00 of 12.00 ms (100 %)")


def test_a_gpu_bound_step_names_the_kernels_that_take_most() -> None:
    """12 of 16 ms are convolutions; kernels of no known family, or many kinds of equal weight, are not named."""
    convolution, gemm = int(KernelFamily.CONVOLUTION), int(KernelFamily.GEMM)
    build = Build(CPU, STREAM)
    for family, length_ms in ((convolution, 12), (gemm, 4)):
        call = build.task(0, MS // 10, "launch")
        build.edge(call, build.task(1, length_ms * MS, "kernel", family=family))
    assert ", 75 % of its work in convolution kernels; a faster CPU" in explain(baseline(build)).verdict
    build = Build(CPU, STREAM)
    for family in range(5):
        call = build.task(0, MS // 10, "launch")
        build.edge(call, build.task(1, 4 * MS, "kernel", family=family))
    assert "of its work" not in explain(baseline(build)).verdict


def test_bound_by_both() -> None:
    """A synchronisation after each kernel: the CPU and the GPU take turns."""
    build = Build(CPU, STREAM)
    for _ in range(4):
        build.launch(2 * MS, 2 * MS, "gemm")
        build.sync()
    found = explain(baseline(build))
    assert found.verdict == (
        "bound by both: the GPU is busy 8.00 of 14.00 ms (57 %), CPU work is 43 % of the critical path and GPU work "
        "57 %; faster kernels and cheaper launches both help in part."
    )


def test_a_graph_without_time_is_explained_too() -> None:
    build = Build(CPU)
    build.task(0, 0, "nothing", TaskKind.CPU_OP)
    assert explain(baseline(build)).verdict.startswith("no step to explain")


@pytest.mark.parametrize("seed", range(20))
def test_critical_path_adds_up_on_random_graphs(seed: int) -> None:
    random = np.random.default_rng(seed)
    build = Build(CPU, STREAM, launch_lag_ns=int(random.integers(0, 50)))
    for _ in range(40):
        build.launch(int(random.integers(0, 100)), int(random.integers(0, 100)), "k")
        if random.random() < 0.2:
            build.sync(5, lag_ns=int(random.integers(0, 20)))
    timeline = simulate(build.graph())
    held_ns, lag_ns = critical_path_times(timeline, 0, timeline.makespan_ns)
    assert held_ns.sum() + lag_ns == timeline.makespan_ns
    assert held_ns.min() >= 0


def test_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_explanation(explain(baseline(host_bound())))
    assert capsys.readouterr().out == GOLDEN


GOLDEN = """\
host-bound: the GPU is busy 4.00 of 13.00 ms (31 %), and CPU work is 46 % of the critical path;
faster kernels would change little, fewer or cheaper launches would; the span also waits for its
data for 3.00 of 13.00 ms (23 %).
slack: the GPU is idle for 9.00 of 13.00 ms, so without faster GPU work the span can become at most
69 % shorter; the main CPU thread is idle for 4.00 ms
hand.json: the whole span takes 13.00 ms (first to last task of the device)

Where the time goes
                            ms
  CPU only                8.00   61.5 %   ████████████
  GPU only                3.00   23.1 %   █████
  CPU and GPU together    1.00    7.7 %   ██
  exposed communication   0.00    0.0 %
  neither                 1.00    7.7 %   ██

Critical path: what the whole span waits for
                               ms
  CUDA / HIP calls           6.00   46.2 %   █████████
  kernels                    3.00   23.1 %   █████
  data loading               3.00   23.1 %   █████
  launch and hand-over lag   1.00    7.7 %   ██

Phases
                 GPU ms   CPU ms   critical ms
  unknown          4.00     6.00          9.00
  data             0.00     3.00          3.00

Execution threads
                 GPU ms   CPU ms   critical ms
  CPU              0.00     9.00          9.00
  stream 7         4.00     0.00          3.00

Layers
  none in this trace: record with `whatif collect` to get them

Kernels and copies
                 count   GPU ms   critical ms
  b                  1     3.00          3.00
  a                  1     1.00          0.00
"""
