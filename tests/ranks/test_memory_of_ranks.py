"""``whatif memory`` and ``whatif advise`` on the recordings of several ranks, as files or as their folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import whatif
from whatif.cli.main import main
from whatif.graph.memory import peak


@pytest.mark.parametrize("command", ["memory", "advise"])
def test_files_of_ranks_are_read_as_their_folder_is(
    command: str, own_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_traces / "ranks_cpu" / "twice_the_batch"
    files = [str(folder / f"rank{rank}.json.gz") for rank in (0, 1)]
    found = []
    for traces in ([str(folder)], files):
        assert main([command, *traces, "batch_size:factor=2", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_the_peak_of_each_rank_is_told(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 has twice the batch."""
    folder = own_traces / "ranks_cpu" / "twice_the_batch"
    alone = [whatif.read(folder / f"rank{rank}.json.gz").info.memory for rank in (0, 1)]
    peaks = [peak(memory).total for memory in alone if memory is not None]
    assert main(["memory", str(folder), "amp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"] == [{"rank": rank, "peak_bytes": peaks[rank]} for rank in (1, 0)]
    assert found["peak_bytes"] == peaks[1] > peaks[0]
    assert main(["memory", str(folder), "amp"]) == 0
    assert "Peak by rank" in capsys.readouterr().out
    assert main(["memory", str(folder), "amp", "--ranks", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == peaks[0]
    assert main(["memory", str(own_traces / "ranks_cpu" / "even"), "amp"]) == 0
    text = capsys.readouterr().out
    assert "Each of the 2 ranks needs as much." in text
    assert "Peak by rank" not in text
