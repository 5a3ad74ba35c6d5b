"""Waiting for peers, separated from transfer in one rank's recording: by hand, and against all ranks of a real run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import whatif
from tests.helpers import CPU, STREAM, Build, launched, mark, write_trace
from whatif import DependencyKind, TaskKind
from whatif.cli.main import main
from whatif.graph.kernels import KernelFamily
from whatif.ingest.ranks.read import read_ranks
from whatif.models.exchange.stragglers import waiting_for_peers

MIB = 1 << 20
# Of a collective's kernel time; or what two stamps of whole microseconds can miss.
TOLERANCE, STAMPS_NS = 0.15, 2_000


def test_the_shortest_of_equal_calls_waited_for_nobody() -> None:
    """Three all-reduces of 1 MiB: 2, 5 and 3 ms; one of 2 MiB: 9 ms."""
    build = Build(CPU, STREAM)
    for duration_ms, size in ((2, MIB), (5, MIB), (3, MIB), (9, 2 * MIB)):
        call = build.task(0, 1_000, "launch")
        kernel = build.task(
            1, duration_ms * 1_000_000, "ncclDevKernel_AllReduce_Sum", TaskKind.COMMUNICATION,
            size_bytes=size, family=KernelFamily.COMMUNICATION,
        )  # fmt: skip
        build.edge(call, kernel, kind=DependencyKind.LAUNCH)
    graph = build.graph()
    waits = waiting_for_peers(graph)[graph.kind == TaskKind.COMMUNICATION]
    assert (waits / 1e6).tolist() == [0, 3, 1, 0]
    faster = whatif.load_transform("bandwidth:factor=2")(graph)
    assert (faster.duration_ns[graph.kind == TaskKind.COMMUNICATION] / 1e6).tolist() == [1, 4, 2, 4.5]


def test_one_rank_against_all(shared_traces: Path) -> None:
    """DLRM on eight V100s: 64 collectives whose waiting is known from all ranks together."""
    folder = shared_traces / "param-dlrm-8xv100"
    together = read_ranks([str(folder)]).graph
    missed, total = [], []
    for rank in range(8):
        alone = whatif.read(folder / f"rank{rank}.json.gz")
        mine = np.flatnonzero(alone.kind == TaskKind.COMMUNICATION)
        of_rank = np.array([thread.rank == rank for thread in together.threads])[together.thread]
        theirs = np.flatnonzero((together.kind == TaskKind.COMMUNICATION) & of_rank & together.on_gpu.mask)
        spent_ns = alone.duration_ns[mine]
        exact_ns, found_ns = spent_ns - together.duration_ns[theirs], waiting_for_peers(alone)[mine]
        missed += (np.abs(found_ns - exact_ns) - np.maximum(TOLERANCE * spent_ns, STAMPS_NS)).tolist()
        total.append(abs(float(found_ns.sum() - exact_ns.sum())) / float(spent_ns.sum()))
    assert len(missed) == 64
    assert max(missed) <= 0
    assert max(total) < 0.02


def test_a_run_that_waits_for_peers(shared_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ResNet under DDP on MI300X: all-reduces at 0.8 to 2 GB/s on links that carry 300."""
    trace = str(shared_traces / "tracelens-h100-mi300" / "mi300.resnet_act_checkpoint_ddp_train.json.gz")
    assert main(["explain", trace, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("waits for peers: ")
    assert {row["kind"] for row in found["collectives"]} >= {"all_reduce", "broadcast"}
    reduced = [row for row in found["collectives"] if row["kind"] == "all_reduce"]
    assert all(0 <= row["exposed_ms"] <= row["ms"] + 1e-6 for row in found["collectives"])
    # All-reduces run beside the backward pass.
    assert 0 < sum(row["exposed_ms"] for row in reduced) < sum(row["ms"] for row in reduced)
    assert all(row["waits_ms"] > 0.9 * row["ms"] for row in reduced)
    assert all(row["bus_gbyte_s"] == pytest.approx(1.75 * row["algorithm_gbyte_s"]) for row in reduced)
    graph = whatif.read(trace)
    faster = whatif.load_transform("bandwidth:factor=2")(graph)
    tasks = np.flatnonzero((graph.kind == TaskKind.COMMUNICATION) & (graph.size_bytes > MIB))
    saved = 1 - faster.duration_ns[tasks].sum() / graph.duration_ns[tasks].sum()
    assert 0 < saved < 0.05


def test_several_ranks_name_the_one_that_is_waited_for(shared_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What each collective waits is known there, as a part of its kernel's time."""
    assert main(["explain", str(shared_traces / "param-dlrm-8xv100"), "--as-recorded", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"].startswith("waits for peers: in collectives the other ranks wait for rank 7 for ")
    assert 0 < sum(row["waits_ms"] for row in found["collectives"]) < sum(row["ms"] for row in found["collectives"])
    for row in found["collectives"]:
        assert row["ms"] - row["waits_ms"] < 0.1 * row["count"]
        assert -1e-6 <= row["exposed_ms"] <= row["ms"] + 1e-6


def test_rows_by_process_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All-reduces of 1 MiB among all eight ranks and among two of them: two rows, each with its own bus bandwidth."""
    events = [mark("ProfilerStep#0", 0, 9000)]
    for place, (name, ranks) in enumerate((("0", "[0, 1, 2, 3, 4, 5, 6, 7]"), ("tp", "[0, 1]"))):
        kernel = launched(
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 10 + place * 200, 5, 500 + place * 400, 100, place
        )
        kernel[1]["args"] |= {
            "Collective name": "allreduce", "In msg nelems": MIB // 2, "Out msg nelems": MIB // 2, "dtype": "BFloat16",
            "Group size": len(json.loads(ranks)), "Process Group Name": name, "Process Group Ranks": ranks,
        }  # fmt: skip
        events += kernel
    header = {"deviceProperties": [{"name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85_000_000_000}]}
    trace = str(write_trace(tmp_path / "groups.json", events, **header))
    assert main(["explain", trace, "--json", "--as-recorded"]) == 0
    rows = {row["group"]: row for row in json.loads(capsys.readouterr().out)["collectives"]}
    assert rows.keys() == {"0 (8)", "tp (2)"}
    for group, factor in (("0 (8)", 1.75), ("tp (2)", 1.0)):
        assert rows[group]["algorithm_gbyte_s"] == pytest.approx(MIB / 100_000)
        assert rows[group]["bus_gbyte_s"] == pytest.approx(factor * MIB / 100_000)
    # Two ranks pass fewer steps around their ring than eight.
    assert rows["tp (2)"]["expected_ms"] < rows["0 (8)"]["expected_ms"]
    saved = str(tmp_path / "saved.json.gz")
    assert main(["export", trace, "-o", saved]) == 0
    assert whatif.read(saved).info.groups == whatif.read(trace).info.groups
