"""``whatif check``: exit 0, 1 and 2 as CI needs them, one line of result, and never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import launched, mark, write_trace
from whatif.cli.main import main


def slower(folder: Path, name: str, percent: int) -> str:
    """Six steps, the GPU never idle, whose one kernel takes ``percent`` longer than 10 ms."""
    kernel_us = 10_000 + 100 * percent
    events = []
    for step in range(6):
        begin = step * kernel_us
        events.append(mark(f"ProfilerStep#{step}", begin, kernel_us - 1))
        events += launched("gemm", begin + 5, 5, begin + 20, kernel_us - 5, step + 1)
    return str(write_trace(folder / name, events))


@pytest.mark.parametrize(
    ("percent", "allowed", "status"),
    [(0, "3%", 0), (2, "3%", 0), (5, "3%", 1), (5, "3", 1), (5, "6 %", 0), (-5, "0", 0), (1, "0.5%", 1)],
)
def test_the_gate(percent: int, allowed: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline, changed = slower(tmp_path, "main.json", 0), slower(tmp_path, "branch.json", percent)
    assert main(["check", "--baseline", baseline, changed, "--max-regress", allowed]) == status
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("regressed: a step takes 10.00 → " if status else "ok: a step takes 10.00 → ")
    assert f"{percent:+.1f} %" in first
    assert main(["check", changed, "--baseline", baseline, f"--max-regress={allowed}", "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == ("regressed" if status else "ok")
    assert found["change_pct"] == pytest.approx(percent, abs=0.01)
    assert found["verdict"] == first
    assert [row["kernel"] for row in found["grown"]] == (["gemm"] if percent > 0 else [])


def test_three_percent_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = slower(tmp_path, "main.json", 0)
    assert main(["check", "--baseline", baseline, slower(tmp_path, "two.json", 2)]) == 0
    assert main(["check", "--baseline", baseline, slower(tmp_path, "four.json", 4)]) == 1
    assert "(allowed +3 %, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["b.json"], "the following arguments are required: --baseline"),
        (["--baseline", "a.json"], "the following arguments are required: B"),
        (["--baseline", "a.json", "b.json", "--max-regress", "three"], "expected a percentage from 0 to 1000, as 3%"),
        (["--baseline", "a.json", "b.json", "--max-regress", "nan"], "got 'nan'"),
        (["--baseline", "a.json", "b.json", "--max-regress", "-1"], "--max-regress"),
        (["--baseline", "a.json", "b.json", "--max-regress", "inf%"], "got 'inf%'"),
    ],
)
def test_usage(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert sentence in err


def test_other_work_never_passes(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = str(own_traces / "resnet18_cifar_cpu.json.gz")
    for name, what in (
        ("resnet18_cifar_cpu_batch16", "batch size: 32 → 16"),
        ("transformer_cpu", "model: "),
        ("campaign_cpu/resnet50--baseline.trace", "CPU: Intel(R) Xeon(R) Processor → AMD EPYC"),
    ):
        changed = str(own_traces / f"{name}.json.gz")
        assert main(["check", "--baseline", baseline, changed, "--max-regress", "1000"]) == 1
        out = capsys.readouterr().out
        assert out.startswith("not comparable: ")
        assert what in out
        assert out.count("\n") == 1 or "The recordings differ in" in out
        assert main(["check", "--baseline", baseline, changed, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["status"] == "not comparable"


def test_another_batch_is_seen_in_the_flops(shared_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The batches are unknown, and the host-bound spans are equally long: 8 samples, then 64."""
    small, large = (str(shared_traces / "harryjmoss-a100-batch" / f"bs{n}.run0.pt.trace.json.gz") for n in (8, 64))
    assert main(["check", "--baseline", small, large]) == 1
    assert "not comparable: batch size: not recorded → 8 times as large, by its FLOPs" in capsys.readouterr().out
    assert main(["check", "--baseline", small, small]) == 0


def test_a_rank_with_another_batch_is_other_work(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second rank trains 32 samples instead of 16, which was reported as a regression of the same work."""
    even, other = (str(own_traces / "ranks_cpu" / name) for name in ("even", "twice_the_batch"))
    assert main(["check", "--baseline", even, other]) == 1
    assert "not comparable: batch size: 16 → [16, 32]" in capsys.readouterr().out
    assert main(["check", "--baseline", other, other]) == 0


def test_another_number_of_workers_is_other_work(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four workers instead of two were reported as a regression of 51 %."""
    two, four = (str(own_traces / "lab_ranks_cpu" / f"ranks-gpt2-200mbit-{count}") for count in (2, 4))
    assert main(["check", "--baseline", two, four]) == 1
    assert "not comparable: workers: 2 → 4" in capsys.readouterr().out


def test_one_worker_and_one_of_two_are_no_pair(
    own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace of one worker omits their number: two workers were reported as a regression, also after a what-if."""
    alone, header = slower(tmp_path, "one.json", 0), {"distributedInfo": {"rank": 0, "world_size": 2}}
    events = json.loads(Path(slower(tmp_path, "slow.json", 5)).read_bytes())["traceEvents"]
    one_of_two, scaled = str(write_trace(tmp_path / "two.json", events, **header)), str(tmp_path / "scaled.json.gz")
    assert main(["export", alone, "scale:kind=gpu,factor=0.9", "-o", scaled, "--quiet"]) == 0
    for baseline in (alone, scaled):
        assert main(["check", "--baseline", baseline, one_of_two]) == 1
        assert "not comparable: workers: 1 → 2; record" in capsys.readouterr().out
    recording, spread = str(own_traces / "resnet18_cifar_cpu.json.gz"), str(tmp_path / "spread.json.gz")
    assert main(["export", recording, "distributed:workers=2", "-o", spread, "--quiet"]) == 0
    capsys.readouterr()
    assert main(["check", "--baseline", recording, spread, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["status"] == "regressed"


@pytest.mark.parametrize("what_if", ["blueconnect:factors=2x2", "dgc", "contention:core=0.2"])
def test_what_changes_an_exchange_is_compared(
    what_if: str, own_traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both with the recording, whose workers the exchange adds, and with the exchange that it changes."""
    recording = str(own_traces / "lab_pipeline_cpu" / "mlp.trace.json.gz")
    spread, changed = str(tmp_path / "spread.json.gz"), str(tmp_path / "changed.json.gz")
    assert main(["export", recording, "distributed:workers=4", "-o", spread, "--quiet"]) == 0
    assert main(["export", spread, what_if, "-o", changed, "--quiet"]) == 0
    for baseline in (recording, spread):
        capsys.readouterr()
        main(["check", "--baseline", baseline, changed, "--json"])
        assert json.loads(capsys.readouterr().out)["status"] in ("ok", "regressed")


def test_one_rank_and_all_ranks_are_no_pair(shared_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank's recording cannot separate waiting from transfer; one order passed, the other named another batch."""
    every = str(shared_traces / "param-dlrm-8xv100")
    one = f"{every}/rank0.json.gz"
    for baseline, changed, difference in ((every, one, "8 → one alone"), (one, every, "one alone → 8")):
        assert main(["check", "--baseline", baseline, changed]) == 1
        assert f"not comparable: ranks that were read: {difference}; record" in capsys.readouterr().out
    assert main(["compare", one, every]) == 0
    assert "the work or the machines differ: ranks that were read: one alone → 8" in capsys.readouterr().err


def test_a_recording_that_was_cut_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline, whole = slower(tmp_path, "main.json", 0), Path(slower(tmp_path, "branch.json", 0))
    cut = tmp_path / "cut.json"
    cut.write_bytes(whole.read_bytes()[:-2])
    assert main(["check", "--baseline", baseline, str(cut)]) == 0
    assert "B: the file ends early at byte" in capsys.readouterr().err
    assert main(["check", "--baseline", str(cut), baseline]) == 0
    assert "A: the file ends early at byte" in capsys.readouterr().err


def test_a_batch_that_one_side_states_is_doubted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = slower(tmp_path, "main.json", 0)
    content = json.loads(Path(slower(tmp_path, "branch.json", 1)).read_text())
    stated = write_trace(tmp_path / "stated.json", content["traceEvents"], whatif={"batch_size": 16})
    assert main(["check", "--baseline", baseline, str(stated)]) == 0
    assert "only B has its batch size (16): whether it is the same is not known" in capsys.readouterr().err


def test_real_recordings(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp32, bf16 = (str(own_traces / f"resnet18_cifar_cpu{name}.json.gz") for name in ("", "_bf16"))
    assert main(["check", "--baseline", bf16, fp32]) == 1
    assert "autocast: bfloat16 → none" in capsys.readouterr().out
    assert main(["check", "--baseline", fp32, bf16]) == 0
    assert main(["check", "--baseline", fp32, fp32, "--max-regress", "0"]) == 0


def test_a_slower_machine_is_suspected(own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fused Adam saves time; this recording of it was made while the machine ran at half its pace."""
    folder = own_traces / "campaign_cpu"
    names = ("bert-base--baseline", "bert-base--adam_fused")
    baseline, changed = (str(folder / f"{name}.trace.json.gz") for name in names)
    assert main(["check", "--baseline", baseline, changed]) == 1
    assert "the machine may have been slower, and not the program" in capsys.readouterr().err


@pytest.mark.slow
def test_damage_is_reported_and_never_a_traceback(tmp_path: Path) -> None:
    baseline = slower(tmp_path, "main.json", 0)
    whole = Path(slower(tmp_path, "branch.json", 1)).read_bytes()
    for place, content in enumerate((b"", whole[:40], whole[: len(whole) // 2], b"[]", b'{"traceEvents": []}')):
        damaged = tmp_path / f"damaged{place}.json"
        damaged.write_bytes(content)
        for words in (["--baseline", baseline, str(damaged)], ["--baseline", str(damaged), baseline]):
            done = subprocess.run(
                [sys.executable, "-m", "whatif", "check", *words], capture_output=True, text=True, check=False
            )
            assert done.returncode in (0, 1)
            assert "Traceback" not in done.stderr
            assert done.stdout or done.stderr.startswith("whatif: ")
