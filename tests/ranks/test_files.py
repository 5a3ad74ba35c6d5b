"""Which file is which rank, and files that do not fit together."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.helpers import Event, call, kernel, mark, need, op, write_trace
from whatif import WhatifError
from whatif.cli.main import main
from whatif.graph.columns import TASK_COLUMNS
from whatif.ingest.ranks.files import RankFacts, find_recordings, place
from whatif.ingest.ranks.read import read_ranks

NOTHING = RankFacts(None, None)


def events(compute_us: float = 20, *, spent_us: float = 70, shift_us: float = 0, **arguments: Any) -> list[Event]:
    """One step of a rank on a GPU: a kernel, an all-reduce of 1,000 floats, a kernel."""
    at = shift_us + 10
    args = {"Collective name": "allreduce", "In msg nelems": 1_000, "dtype": "Float", "Group size": 2, **arguments}
    found = [
        mark("ProfilerStep#7", shift_us, 200), op("aten::mm", shift_us, 9),
        call("cudaLaunchKernel", shift_us + 1, 2, 1), call("cudaLaunchKernel", shift_us + 4, 2, 2),
        call("cudaLaunchKernel", shift_us + 7, 2, 3), kernel("gemm", at, compute_us, 1),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + compute_us, spent_us, 2),
        kernel("elementwise_kernel", at + compute_us + spent_us, 10, 3),
    ]  # fmt: skip
    found[6]["args"] |= args
    return found


def ranks(folder: Path, *lots: list[Event], world_size: int | None = None) -> list[Path]:
    """A file for each rank, with torch's header."""
    size = world_size or len(lots)
    return [
        write_trace(folder / f"run.rank{i}.json", lot, distributedInfo={"rank": i, "world_size": size})
        for i, lot in enumerate(lots)
    ]


def test_two_traces_are_one_graph(tmp_path: Path) -> None:
    files = ranks(tmp_path, events(20, spent_us=70), events(70, spent_us=20, shift_us=5e9))
    found = read_ranks(files)
    assert found.numbers == (0, 1)
    assert found.world_size == 2
    assert found.collectives[0].operation == ("all_reduce",)
    assert found.collectives[0].size_bytes.tolist() == [4_000]
    assert found.collectives[0].step.tolist() == [7]
    assert found.clock_offsets_ns == (0, 5 * 10**12)
    assert found.waits.wait_ns.tolist() == [50_000, 0]
    assert found.waits.transfer_ns.tolist() == [20_000, 20_000]
    assert any("clocks are up to 5,000 s apart" in quirk for quirk in found.graph.info.quirks)
    folder = read_ranks([tmp_path])
    assert folder.numbers == (0, 1)
    assert len(folder.graph) == len(found.graph)


def test_groups_come_from_the_arguments_and_old_traces_from_the_call(tmp_path: Path) -> None:
    group = {"Process Group Name": "3", "Process Group Ranks": "[0, 1]"}
    found = read_ranks(ranks(tmp_path, events(**group), events(**group)))
    assert found.collectives[1].group == ("3 [0, 1]",)
    old = []
    for lot in (events(), events()):
        lot[6]["args"] = {"device": 0, "stream": 7, "correlation": 2}
        lot[6]["name"] = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t"
        lot.append(mark("nccl:all_to_all", 3, 4))
        lot[-1]["args"] = {"Input Dims": [[6, 1024]], "Input type": ["long int"]}
        old.append(lot)
    found = read_ranks(ranks(tmp_path, *old))
    assert found.collectives[0].operation == ("all_to_all",)
    assert found.collectives[0].size_bytes.tolist() == [6 * 1024 * 8]


def test_ranks_by_header_then_by_name() -> None:
    files = ["b.json", "a.json"]
    assert place(files, [RankFacts(1, 2), RankFacts(0, 2)]).ranks == (1, 0)
    assert place(["x_rank3.json", "x_rank2.json"], [NOTHING] * 2).ranks == (3, 2)
    assert place(["worker1.pt.trace.json", "worker0.pt.trace.json"], [NOTHING] * 2).ranks == (1, 0)
    unnamed = place(files, [NOTHING] * 2)
    assert unnamed.ranks == (0, 1)
    assert "do not name their ranks" in unnamed.warnings[0]
    missing = place(["a.json"], [RankFacts(2, 8)])
    assert missing.world_size == 8
    assert missing.warnings == (
        "7 of 8 ranks are missing (0, 1, 3, 4, 5, …): time that the others wait for them counts as transfer",
    )


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    files = ranks(tmp_path, events(), events())
    with pytest.raises(WhatifError, match="got this file twice; name it once"):
        read_ranks([files[0], tmp_path / "." / files[0].name])
    copy = tmp_path / "copy.json"
    copy.write_bytes(files[0].read_bytes())
    with pytest.raises(WhatifError, match=r"expected each rank once, got rank 0 in .*; name one of the two"):
        read_ranks([files[0], copy])
    write_trace(copy, events(), distributedInfo={"rank": 1, "world_size": 4})
    with pytest.raises(WhatifError, match="got recordings of runs with 2 and 4 ranks"):
        read_ranks([files[0], copy])
    write_trace(copy, [op("aten::mm", 0, 50), mark("ProfilerStep#7", 0, 60)], distributedInfo={"rank": 1})
    with pytest.raises(WhatifError, match="got no GPU kernels in it and GPU kernels in"):
        read_ranks([files[0], copy])
    (tmp_path / "empty").mkdir()
    with pytest.raises(WhatifError, match="expected a folder with the recordings of a run's ranks"):
        find_recordings([tmp_path / "empty"])
    with pytest.raises(WhatifError, match=r"nowhere\.json"):
        read_ranks([files[0], tmp_path / "nowhere.json"])


def test_paths_of_ranks_are_one_path_or_a_list(own_traces: Path) -> None:
    folder = own_traces / "ranks_cpu" / "twice_the_batch"
    assert len(read_ranks(str(folder)).numbers) == 2
    given: Any
    for given in (None, [], [3]):
        with pytest.raises(WhatifError, match="read_ranks: expected paths of recordings, or of their folder, got"):
            read_ranks(given)


def test_a_truncated_rank_is_read_as_far_as_it_goes(tmp_path: Path, own_traces: Path) -> None:
    files = [own_traces / "ranks_cpu" / "even" / f"rank{i}.json.gz" for i in range(2)]
    text = gzip.decompress(files[1].read_bytes())
    cut = tmp_path / "even.rank1.json"
    cut.write_bytes(text[: int(len(text) * 0.4)])
    with pytest.raises(WhatifError, match=r"even.rank1.json: the file ends early at byte .* on every rank, got"):
        read_ranks([files[0], cut])
    cut.write_bytes(text[: int(len(text) * 0.9)])
    found = read_ranks([files[0], cut])
    assert found.matched.n_collectives >= 5
    quirks = " ".join([*found.graph.info.quirks, *found.graph.info.ranks[1].quirks])
    assert "are not matched" in quirks


@pytest.mark.parametrize("header", [None, "x", {"rank": -1}, {"rank": True, "world_size": 1.5}, {"rank": 10**9}, []])
def test_an_absurd_header_states_nothing(tmp_path: Path, header: Any) -> None:
    files = [write_trace(tmp_path / f"rank{i}.json", events(), distributedInfo=header) for i in range(2)]
    assert read_ranks(files).numbers == (0, 1)


def test_some_ranks_of_many(tmp_path: Path) -> None:
    ranks(tmp_path, *[events() for _ in range(4)])
    some = read_ranks([tmp_path], only=[3, 1])
    assert some.numbers == (1, 3)
    assert "2 of 4 ranks are missing (0, 2)" in " ".join(some.graph.info.quirks)
    with pytest.raises(WhatifError, match="expected recordings of rank 9, got none"):
        read_ranks([tmp_path], only=[1, 9])
    with pytest.raises(WhatifError, match="expected recordings of rank 8, 9, got none"):
        read_ranks([tmp_path], only=[8, 9])
    # Names without a rank: all files are read, and their headers state it.
    for i, file in enumerate(sorted(tmp_path.iterdir())):
        file.rename(tmp_path / f"{'dcba'[i]}.json")
    assert read_ranks([tmp_path], only=[0, 2]).numbers == (0, 2)


def test_one_rank_of_a_run_is_explained_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(tmp_path, *[events() for _ in range(2)])
    for chosen, of_several in (("0,1", True), ("1", False)):
        assert main(["explain", str(tmp_path), "--ranks", chosen]) == 0
        assert ("With several ranks" in capsys.readouterr().out) == of_several


def test_lines_are_asked_of_the_rank_that_holds_the_others_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ranks(tmp_path, events(20, spent_us=70), events(70, spent_us=20))
    assert main(["explain", "--by", "line", *map(str, files)]) == 1
    assert "got 2 ranks of a run; name the file of rank 1, for which the others wait" in capsys.readouterr().err
    assert main(["explain", "--by", "stack", *map(str, files)]) == 0
    assert "the recording has no call stacks" not in capsys.readouterr().out


def test_processes_and_an_address_give_the_same(tmp_path: Path) -> None:
    fsspec = need("fsspec")
    ranks(tmp_path, events(20, spent_us=70), events(70, spent_us=20))
    here = read_ranks([tmp_path], jobs=1)
    need("joblib")
    there = read_ranks([tmp_path], jobs=2)
    memory = fsspec.filesystem("memory")
    memory.put(f"{tmp_path}/", "/run-of-two/", recursive=True)
    by_address = read_ranks(["memory://run-of-two"])
    for found in (there, by_address):
        assert found.numbers == here.numbers
        assert all((getattr(found.graph, c) == getattr(here.graph, c)).all() for c in TASK_COLUMNS)
    assert by_address.paths == ("memory:///run-of-two/run.rank0.json", "memory:///run-of-two/run.rank1.json")
    one = whatif.read("memory://run-of-two/run.rank0.json")
    assert one.info.path == "memory://run-of-two/run.rank0.json"
    assert len(whatif.read("memory://run-of-two")) == len(here.graph)
    with pytest.raises(WhatifError, match=r"memory://run-of-two/none\.json: expected .* got nothing of that name"):
        whatif.read("memory://run-of-two/none.json")
    memory.pipe("/run-of-two/run.rank1.json", b"{")
    with pytest.raises(WhatifError, match=r"^memory:///run-of-two/run\.rank1\.json: "):
        read_ranks(["memory://run-of-two"])


def test_a_recording_without_collectives_is_no_rank(tmp_path: Path, own_traces: Path) -> None:
    """It was another rank, that waits for none: the mean wait of the others for the slow one was half as long."""
    for file in (own_traces / "ranks_cpu" / "twice_the_batch").iterdir():
        shutil.copy(file, tmp_path)
    shutil.copy(own_traces / "transformer_cpu.json.gz", tmp_path)
    with pytest.raises(WhatifError, match=r"transformer_cpu.json.gz: expected the recording of a rank, .* got none"):
        read_ranks(tmp_path)
