"""The five architectures as what-ifs: on recordings of a CPU and a GPU, with a cluster file, with wrong options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import whatif
from tests.helpers import CPU, STREAM, Build, facts_of, replace
from whatif import Phase, TaskGraph, WhatifError
from whatif.graph.memory import LayerMemory, Memory
from whatif.graph.types import ThreadKind
from whatif.models.dts.built_in import BUILT_IN
from whatif.prediction.baseline import Baseline

CLUSTER = """
[[processor]]
name = "tower"
gflop_s = 200
memory_gbyte = 16
[[processor]]
name = "board"
count = 6
gflop_s = 50
power_fluctuation_pct = 20
memory_gbyte = 4
[[link]]
between = ["tower", "board"]
bandwidth = "1Gbps"
latency_us = 100
bandwidth_fluctuation_pct = 10
[[link]]
between = ["board", "board"]
bandwidth = "1Gbps"
latency_us = 100
"""


@pytest.fixture(scope="module")
def recorded(own_traces: Path) -> Baseline:
    return Baseline.of(whatif.read(own_traces / "lab_dts" / "dnn1.trace.json.gz"))


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def on_gpu() -> TaskGraph:
    """Two layers in each of four steps: forward 10 + 20 us, backward 40 + 20 us, update 6 us, launched 1 us each.

    stream  | a 10 | b 20 | b' 40 | a' 20 | update 6 |
    """
    build = Build(CPU, STREAM, n_steps=4, steady=(1, 3), gpu="Tesla V100", batch_size=8,
                  measured_step_ns={"gpu": (96_000,) * 3})  # fmt: skip
    work = ((10, "a", Phase.FORWARD), (20, "b", Phase.FORWARD), (40, "b", Phase.BACKWARD), (20, "a", Phase.BACKWARD),
            (6, "", Phase.UPDATE))  # fmt: skip
    for step in range(4):
        for duration_us, layer, phase in work:
            call = build.task(0, 1000, "cudaLaunchKernel", layer=layer, phase=phase, step=step)
            kernel = build.task(1, duration_us * 1000, layer=layer, phase=phase, step=step)
            build.edge(call, kernel, kind=whatif.DependencyKind.LAUNCH)
    rows = tuple(
        LayerMemory(name, 1000, size, input=flow) for name, size, flow in (("a", 4000, 800), ("b", 6000, 1600))
    )
    layers = [{"name": "a", "gradient_bytes": 4000}, {"name": "b", "gradient_bytes": 6000}]
    graph = build.graph()
    info = replace(graph.info, memory=Memory(10_000, 0, 800, rows), recorded=facts_of({"layers": layers}))
    return graph.replace(info=info)


def test_on_a_gpu_by_hand() -> None:
    """Split behind a at 1 GB/s with 2 us of latency: 1,600 bytes take 3.6 us, a's 4,000 bytes of weights 6 us.

    client  a 10 | 3.6 | server b 20, b' 40 + 0.6 * 6 of the update | 3.6 | client a' 20 + 0.4 * 6
    """
    found = whatif.apply(on_gpu(), "dts:architecture=split,clients=2,cut=a,bandwidth=1GB/s,latency_us=2")
    one_us = 10 + 3.6 + 20 + 43.6 + 3.6 + 22.4
    assert found.baseline.clock == "gpu"
    assert found.predicted_ms == pytest.approx((2 * one_us + 6) / 1e3, abs=1e-4)
    assert found.graph.on_gpu.any()
    assert {t.kind for t in found.graph.threads} == {ThreadKind.STREAM, ThreadKind.CHANNEL}


def test_a_batch_is_one_of_each_client() -> None:
    found = whatif.apply(on_gpu(), "dts:architecture=federated,clients=3,batches=2,bandwidth=1GB/s")
    assert found.to_dict()["samples_per_s"]["predicted"] == pytest.approx(6 * 8e3 / found.predicted_ms)


@pytest.mark.parametrize("name", BUILT_IN)
def test_on_a_recording_of_a_cpu(recorded: Baseline, cluster: Path, name: str) -> None:
    found = whatif.apply(recorded, f"dts:architecture={name},cluster={cluster}")
    found.graph.check()
    assert found.low_ms < found.predicted_ms < found.high_ms
    assert len(set(found.timeline.step_times_ns("mark"))) == 1  # every step is the same round
    assert any(note.startswith(f"dts: {name}, ") and " on tower" in note for note in found.graph.notes)
    alone = whatif.apply(recorded, f"dts:architecture={name},bandwidth=1Gbps")
    faster = whatif.apply(recorded, f"dts:architecture={name},bandwidth=10Gbps")
    assert faster.predicted_ms < alone.predicted_ms
    # What else changed the step goes into the rounds.
    assert whatif.apply(recorded, "cpu:speedup=2", f"dts:architecture={name}").predicted_ms < alone.predicted_ms


def test_more_bandwidth_than_any_and_one_client_is_the_plain_step(recorded: Baseline) -> None:
    for name in ("split,clients=1", "parallel_split,clients=1", "pipeline_learning,workers=2"):
        found = whatif.apply(recorded, f"dts:architecture={name},bandwidth=100000GB/s,latency_us=0")
        assert found.predicted_ms == pytest.approx(found.baseline_ms, rel=0.01)


def test_what_needs_operators_is_refused_behind_it(recorded: Baseline) -> None:
    with pytest.raises(whatif.WhatifError, match="name amp before dts"):
        whatif.load_transform("amp")(whatif.apply(recorded, "dts").graph)
    steps = [whatif.apply(recorded, *specs).predicted_ms for specs in (("dts", "amp"), ("amp", "dts"))]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("name", BUILT_IN)
def test_twice_changes_nothing_more(recorded: Baseline, name: str) -> None:
    spec = f"dts:architecture={name}"
    once, twice = whatif.apply(recorded, spec), whatif.apply(recorded, spec, "dts:architecture=federated")
    assert twice.predicted_ms == once.predicted_ms
    assert any("of several processors already; nothing changes" in note for note in twice.graph.notes)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("federated,clients=0", "expected from 1 to 1,000 clients, got 0"),
        ("federated,batches=0", "expected from 1 to 100,000 batches a client, got 0"),
        ("federated,max_paths=-1", "expected max_paths of 1 or more, or 0 for all, got -1"),
        ("federated,latency_us=-1", "expected latency_us from 0 to 1,000,000, got -1"),
        ("split,cut=conv9", "dts: expected a cut after one of the layers conv1, relu1"),
        ("split,cut=14", "expected a cut with layers on both sides, from 1 to 13, got 14"),
        ("split,cut=2,cut=3", "option 'cut' is given twice"),
        ("parallel_split,cut=2,5", "expected one cut, between client and server, got 2"),
        ("pipeline_learning,workers=1", "expected from 2 to 1,000 workers, or 0 for as few as do, got 1"),
        ("pipeline_learning,workers=99", "expected no more workers than the 14 layers, got 99"),
        ("pipeline_learning,workers=3,cut=2", "expected 2 cuts for 3 workers, got 1"),
        ("federated,cluster=nowhere.toml", "nowhere.toml: expected a cluster file"),
        ("federated,cluster=ethernet-25g", r"expected \[\[processor\]\] and \[\[link\]\] tables, which DTS needs"),
        ("federated,cut=2", r"no option 'cut' for federated, got it; it applies to pipeline_learning, split, parallel"),
        ("split,workers=0", "no option 'workers' for split, got it; it applies to pipeline_learning"),
        ("pipeline_learning,clients=3", "no option 'clients' for pipeline_learning"),
        ("gossip", r"expected one of pipeline_learning, federated, .*, got 'gossip'"),
    ],
)
def test_nonsense_gets_a_sentence(recorded: Baseline, spec: str, sentence: str) -> None:
    with pytest.raises(WhatifError, match=sentence):
        whatif.apply(recorded, f"dts:architecture={spec}")


def test_a_role_that_no_memory_holds(recorded: Baseline, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(re.sub(r"memory_gbyte = \d+", "memory_gbyte = 0.01", CLUSTER))
    message = r"no processor's memory holds the role 'client 1', which needs 0\.\d+ GB; the largest has 0\.01 GB"
    with pytest.raises(WhatifError, match=message):
        whatif.apply(recorded, f"dts:architecture=federated,cluster={path}")


def test_power_needs_the_flops_of_the_recording(cluster: Path) -> None:
    with pytest.raises(WhatifError, match="the recording lacks its FLOPs, so that processor"):
        whatif.apply(on_gpu(), f"dts:architecture=federated,cluster={cluster}")


def test_workers_of_several_already(shared_traces: Path) -> None:
    graph = whatif.read(shared_traces / "hta" / "v100_allreduce_rank1of2.json.gz")
    with pytest.raises(WhatifError, match="expected a recording of one worker"):
        whatif.apply(graph, "dts:architecture=federated")
