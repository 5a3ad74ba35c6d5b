"""Several recordings on the command line: files, a folder, and words that are neither."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from whatif.cli.main import USAGE, main


@pytest.fixture
def files(own_traces: Path) -> list[str]:
    return [str(own_traces / "ranks_cpu" / "twice_the_batch" / f"rank{rank}.json.gz") for rank in range(2)]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_info_states_clocks_and_matches(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "info", *files)["ranks"]
    assert found["world_size"] == 2
    assert found["collectives"] == 25
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert [row["unmatched"] for row in found["ranks"]] == [0, 0]
    assert main(["info", *files]) == 0
    text = capsys.readouterr().out
    assert "Ranks (2) of 2, 25 collectives matched" in text
    assert "rank1.json.gz" in text


def test_explain_names_the_straggler(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "explain", *reversed(files))["ranks"]
    assert found["stragglers"][0] == 1
    assert found["ranks"][0]["waiting_ms"] > found["ranks"][1]["waiting_ms"]
    assert {"rank", "trace", "clock_offset_us", "waiting_ms", "transfer_ms", "last_pct", "late_ms", "breakdown"} <= set(
        found["ranks"][0]
    )
    assert main(["explain", *files]) == 0
    text = capsys.readouterr().out
    assert "Ranks (2), ms a step" in text
    assert "rank 1 holds the others up by" in text


def test_a_gpu_is_as_busy_in_the_table_of_ranks_as_in_the_verdict(
    shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(shared_traces / "param-dlrm-8xv100")
    first = report(capsys, "explain", folder)["ranks"]["ranks"][0]
    assert main(["explain", folder]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"the GPU is busy {first['gpu_busy_ms']:.2f} of" in text
    assert f"rank 0 {first['gpu_busy_ms']:.2f} {first['cpu_busy_ms']:.2f} " in text
    assert first["cpu_busy_ms"] >= first["breakdown"]["cpu_only_ms"] + first["breakdown"]["cpu_gpu_ms"]


def test_the_verdict_names_the_rank_of_the_table(shared_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks come late there, a tenth of a millisecond apart: the table once counted only that tenth."""
    found = report(capsys, "explain", str(shared_traces / "param-dlrm-8xv100"))
    rows = found["ranks"]["ranks"]
    worst = max(rows, key=lambda row: row["late_ms"])
    assert f"the other ranks wait for rank {worst['rank']} for {worst['late_ms']:.2f} of" in found["verdict"]
    assert found["ranks"]["sentences"][0].startswith(f"rank {worst['rank']} holds the others up by")
    assert worst["late_ms"] < max(row["waiting_ms"] for row in rows)


def test_the_profilers_cost_is_said_to_be_of_all_ranks(
    files: list[str], capsys: pytest.CaptureFixture[str], shared_traces: Path
) -> None:
    for paths in (files, [str(shared_traces / "param-dlrm-8xv100")]):
        assert main(["info", *paths]) == 0
        assert "ms of CPU time a step on all ranks together" in " ".join(capsys.readouterr().out.split())
    assert main(["info", files[0]]) == 0
    assert "together" not in capsys.readouterr().out


def test_times_of_ranks_are_of_the_whole_span_where_it_is_asked_for(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The values were means of a step next to the breakdown of the span, and shares of the span."""
    step = report(capsys, "explain", *files)["ranks"]["ranks"]
    span = report(capsys, "explain", *files, "--clock", "span")["ranks"]["ranks"]
    for one, whole in zip(step, span, strict=True):
        assert whole["transfer_ms"] == pytest.approx(5 * one["transfer_ms"], rel=0.4)  # of five steps
    assert span[0]["waiting_ms"] > 4 * step[0]["waiting_ms"]
    assert main(["explain", *files, "--clock", "span"]) == 0
    text = capsys.readouterr().out
    assert "Ranks (2), ms a span" in text
    assert f"holds the others up by {span[1]['late_ms']:.2f} ms a span" in text


def test_a_thread_states_its_own_work_whatever_its_rank(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    threads = {row["thread"]: row for row in report(capsys, "explain", *files)["threads"]}
    others = [row for name, row in threads.items() if name.startswith("rank 1: CPU")]
    assert others
    for row in others:
        assert row["cpu_ms"] >= row["critical_ms"] > 0
        assert row["tasks_per_step"] > 0
    assert main(["explain", *files]) == 0
    assert "a thread shows its own" in " ".join(capsys.readouterr().out.split())


def test_what_ifs_of_ranks_that_do_not_state_their_batch_keep_it(
    shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps counted a millionth of their samples, so that these what-ifs lost to all that keep the ranks."""
    found = report(capsys, "advise", str(shared_traces / "param-dlrm-8xv100"))
    entries = {" + ".join(e["what_ifs"]): e for key in ("advice", "no_gain") for e in found[key]}
    assert {e["batch_factor"] for name, e in entries.items() if not name.startswith(("batch_", "gradient_"))} == {1}
    assert entries["batch_size:factor=2"]["batch_factor"] == 2
    assert entries["compile"]["gain_pct"] > 20
    assert "of all ranks together: " in entries["compile"]["reason"]


def test_a_peak_is_not_said_to_be_of_all_ranks_together(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The peak was printed after the work of all ranks, in their sentence; it is that of the fullest rank."""
    found = report(capsys, "advise", str(Path(files[0]).parent))
    reasons = [entry["reason"] for entry in found["no_gain"] if "peak memory" in entry["reason"]]
    assert any("of all ranks together: " in reason for reason in reasons)
    assert all("peak memory of the rank that needs most " in reason for reason in reasons)


def test_recorded_exchanges_are_not_said_to_be_a_what_ifs(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal suggested another order of what-ifs, although only one was given."""
    assert main(["apply", "distributed", *files]) == 1
    assert "record one worker, or set the number of workers (workers=8)" in capsys.readouterr().err
    for traces in (files[:1], files):
        assert main(["apply", "distributed:workers=8", *traces]) == 0


def test_no_output_takes_the_place_of_a_ranks_recording(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in files:
        shutil.copy(file, tmp_path)
    recorded = tmp_path / "rank1.json.gz"
    before = recorded.read_bytes()
    for command in ("report", "export"):
        assert main([command, str(tmp_path), "-o", str(recorded)]) == 1
        assert "expected another file than the trace itself" in capsys.readouterr().err
        assert recorded.read_bytes() == before
    (tmp_path / "older.html").write_text("<title>What-if report: a page beside the recordings is no recording")
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "older.html"), "--quiet"]) == 0


def test_apply_takes_files_or_their_folder(
    files: list[str], shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, "apply", "balance_ranks", *files)
    assert found["predicted_ms"] < 0.75 * found["baseline_ms"]
    assert abs(found["replay_error_pct"]) < 0.5
    assert found["trace"].endswith("and 1 more rank")
    folder = str(shared_traces / "param-dlrm-8xv100")
    both = report(capsys, "apply", "bandwidth", "balance_ranks", folder)
    assert [t["name"] for t in both["transforms"]] == ["bandwidth", "balance_ranks"]
    assert report(capsys, "apply", "bandwidth", folder + "/rank0.json.gz")["steps"] == 1


def test_one_file_is_read_as_ever(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "ranks" not in report(capsys, "info", files[0])
    assert "ranks" not in report(capsys, "explain", files[0])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{0}", "{1}"], "expected NAME and the traces of the ranks"),
        (["amp", "{0}", "scale", "{1}"], "got another file"),
        (["{0}", "amp", "{0}", "{1}"], "expected the traces last"),
    ],
)
def test_words_in_another_order(
    words: list[str], sentence: str, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["apply", *(word.format(*files) for word in words)]) == USAGE
    assert sentence in capsys.readouterr().err


def test_errors_are_one_sentence(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", files[0], files[0]]) == 1
    assert main(["explain", str(tmp_path)]) == 1
    assert main(["info", files[0], str(tmp_path / "none.json")]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("whatif: ") for line in lines)
