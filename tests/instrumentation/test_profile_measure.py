"""Operators measured for real, on this CPU, each in a process of its own: what is kept, gone on with, and left out."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import need
from tests.instrumentation import warm
from whatif.cli.main import main
from whatif.graph.described import Described
from whatif.opdb.rows import operators
from whatif.opdb.store import Store
from whatif.runtime.errors import WhatifError

torch = need("torch")
need("pyarrow")
profiling = need("whatif.instrumentation.profile_ops.profile")
visits = need("whatif.instrumentation.profile_ops.visits")
process = need("whatif.instrumentation.line_process")
spelling = need("whatif.instrumentation.profile_ops.spelled")
online = need("whatif.instrumentation.profile_ops.online")
machine = need("whatif.instrumentation.profile_ops.machine")
journals = need("whatif.instrumentation.profile_ops.journal")

pytestmark = pytest.mark.slow

WORKER = "whatif.instrumentation.profile_ops.worker"
WAY = machine.Way("cpu", 1, "hot", "chain_difference")


@pytest.fixture(autouse=True)
def _one_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One visit each: a process takes seconds to start."""
    monkeypatch.setattr(visits, "MOST_VISITS", 1)


@pytest.fixture
def in_forks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What measures begins as a fork that has torch imported, which alone takes two seconds."""
    (tmp_path / "warm").mkdir()
    monkeypatch.setattr(sys, "executable", warm.executable(tmp_path / "warm"))


def product(side: int) -> Described:
    return Described("matmul", "mm", "fp32", (("batch", 1), ("m", side), ("n", side), ("k", side)))


def added(elements: int) -> Described:
    return Described("elementwise", "add", "fp32", (("elements", elements), ("tensors", 2)))


def profile(store: Store, *operators: Described, **options: Any) -> Any:
    questions, left_out = profiling.questions_of(operators)
    assert not left_out
    return profiling.profile(store, questions, WAY, **options)


def rows_in(store: Store) -> dict[str, float]:
    """Name and integers of each operator of a database, with its time."""
    found = {}
    for contribution in store.contributions()[0]:
        rows = contribution.read()
        for row in range(len(rows)):
            said = rows.ops.described(row)
            found[" ".join(f"{value}" for value in said.values())] = float(rows.t_s[row])
    return found


def test_measured_rows_are_a_contribution_and_the_same_question_adds_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "db", create=True)
    too_large = product(20_000)
    done = profile(store, product(32), added(100), product(512), too_large, author="somebody", licence="CC0-1.0")
    assert done.measured == 3
    assert dict(done.left_out) == {"needs too much memory": 1}
    times = rows_in(store)
    # 4,096 times the work: no machine's calls are so slow, and none of its products so fast, that this fails.
    large, small = times["matmul mm fwd fp32  1 512 512 512"], times["matmul mm fwd fp32  1 32 32 32"]
    assert 50 < large / small < 4096 * 4
    assert 1e-7 < times["elementwise add fwd fp32  100 2"] < 1e-3
    contributions, wrong = store.contributions()
    assert not wrong
    origin = contributions[0].provenance.origin
    assert origin.device.name.startswith("cpu:")
    assert origin.device.name.endswith(" x1")
    assert (origin.method.name, origin.method.cache, origin.method.includes_launch) == ("chain_difference", "hot", True)
    assert (origin.source.author, origin.source.licence) == ("somebody", "CC0-1.0")
    assert origin.environment.framework_version == str(torch.__version__)
    rows = contributions[0].read()
    assert (rows.repeats >= 5).all()
    assert (rows.t_low_s <= rows.t_s).all()
    assert (rows.t_s <= rows.t_high_s).all()
    assert not list((tmp_path / "db").rglob("*.jsonl"))
    again = profile(store, added(100), product(32))
    assert (again.measured, again.present) == (0, 2)
    assert len(store.contributions()[0]) == len(contributions)


@pytest.mark.usefixtures("in_forks")
def test_what_is_damaged_in_the_database_is_measured_again(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "db", create=True)
    profile(store, added(100))
    store.contributions()[0][0].shard.write_bytes(b"PAR1")
    done = profile(store, added(100))
    assert (done.measured, done.present) == (1, 0)


@pytest.mark.usefixtures("in_forks")
def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """What is in the journal is not measured again: its time, which nothing takes, ends up in the database."""
    store = Store.open(tmp_path / "db", create=True)
    with journals.Journal(store.folder, machine.origin_of(WAY)) as journal:
        journal.keep(added(100), {"ns": [1234567.0]})
        journal.keep(added(300), {"skipped": "refused by torch (RuntimeError)"})
    done = profile(store, added(100), added(200), added(300))
    assert done.measured == 2
    assert dict(done.left_out) == {"refused by torch (RuntimeError)": 1}
    times = rows_in(store)
    assert times["elementwise add fwd fp32  100 2"] == pytest.approx(1234567e-9)
    assert times["elementwise add fwd fp32  200 2"] < 1e-3


@pytest.mark.usefixtures("in_forks")
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    store = Store.open(tmp_path / "db", create=True)
    done = profile(store, added(100), added(200), added(300), progress=interrupt)
    assert done.interrupted
    assert done.measured == 1
    assert dict(done.left_out) == {profiling.NO_TIME: 2}
    assert len(rows_in(store)) == 1
    assert not list((tmp_path / "db").rglob("*.jsonl"))


def test_what_ends_the_process_costs_itself_alone(tmp_path: Path) -> None:
    """The process is killed as soon as the first operator is done: the second one is what it was busy with."""

    def kill(done: int, total: int) -> None:
        if not killed:
            children = subprocess.run(
                ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True
            )
            workers = [line for line in children.stdout.splitlines() if "profile_ops.worker" in line]
            killed.extend(int(line.split()[0]) for line in workers)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    killed: list[int] = []
    store = Store.open(tmp_path / "db", create=True)
    done = profile(store, added(100), added(200), added(300), progress=kill)
    assert len(killed) == 1
    assert done.measured == 2
    assert dict(done.left_out) == {visits.CRASHED: 1}


@pytest.mark.usefixtures("in_forks")
def test_a_process_that_falls_silent_is_ended() -> None:
    """No operator answers within nothing."""
    with process.MeasuringProcess(WORKER, WAY._asdict()) as running:
        running._silence_s = 0.0
        with pytest.raises(process.EndedError):
            running.measure({"call": spelling.spelled(product(512)), "dtype": "fp32"})
        assert running._process.poll() is not None


def test_a_process_that_never_begins_is_one_sentence() -> None:
    with (
        pytest.raises(WhatifError, match="expected a running measuring process, got one that ended") as caught,
        process.MeasuringProcess("whatif.instrumentation.profile_ops.spelled", {}),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_time_that_is_up_measures_nothing_and_says_so(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "db", create=True)
    done = profile(store, added(100), budget_s=0.0)
    assert done.measured == 0
    assert dict(done.left_out) == {profiling.NO_TIME: 1}
    assert not store.contributions()[0]


@pytest.mark.usefixtures("in_forks")
def test_the_smallest_budget_measures_one_operator(tmp_path: Path) -> None:
    """It was used up by the start of the process, and so was that of each later run."""
    store = Store.open(tmp_path / "db", create=True)
    done = profile(store, added(100), added(200), budget_s=0.02)
    assert done.measured == 1
    assert dict(done.left_out) == {profiling.NO_TIME: 1}


@pytest.mark.usefixtures("in_forks")
def test_gradients_formats_and_families_online(tmp_path: Path) -> None:
    """An operator that a database lacks is measured at once, inserted, and not measured a second time."""
    device = next(name for name in online.at_hand() if name.endswith(" x1"))
    sizes = {
        "batch": [2], "in_channels": [4], "out_channels": [8], "in_h": [9], "in_w": [9], "kernel_h": [3],
        "kernel_w": [3], "stride_h": [2], "stride_w": [2], "padding_h": [1], "padding_w": [1], "dilation_h": [1],
        "dilation_w": [1], "groups": [2],
    }  # fmt: skip
    phases = ["fwd", "dgrad", "wgrad", "bwd", "fwd", "update"]
    ops = operators(
        "conv", {name: value * 6 for name, value in sizes.items()}, name="conv2d", phase=phases,
        dtype=["fp32"] * 4 + ["bf16", "fp32"],
    )  # fmt: skip
    found = online.measure(ops, device, database=tmp_path / "db")
    assert dict(found.left_out) == {"phase update of conv2d is not measured alone": 1}
    assert sorted(found.rows.ops.keys.tolist()) == sorted(ops.keys[:5].tolist())
    assert (found.rows.t_s > 0).all()
    seen = Store.open(tmp_path / "db").contributions()[0]
    again = online.measure(ops.take(np.arange(5)), device, database=tmp_path / "db")
    assert len(Store.open(tmp_path / "db").contributions()[0]) == len(seen) == 1
    assert sorted(again.rows.t_s.tolist()) == sorted(found.rows.t_s.tolist())


@pytest.mark.usefixtures("in_forks")
def test_any_operator_of_a_recording_online() -> None:
    """The family "other" says of its inputs what the recording said; strings of another kind are left out."""
    device = next(name for name in online.at_hand() if name.endswith(" x1"))
    layouts = ['[[[64, 32], [], []], ["float", "ScalarList", "Scalar"], ["", "[1]", "False"]]', "[]", "{"]
    ops = operators("other", {}, name=["aten::cumsum", "aten::sum", "aten::sum"], dtype="fp32", layout=layouts)
    cumsum = operators(
        "other", {}, name="aten::cumsum", dtype="fp32",
        layout='[[[64, 32], [], []], ["float", "Scalar", ""], ["", "1", ""]]',
    )  # fmt: skip
    assert len(online.measure(cumsum, device).rows) == 1
    none = online.measure(ops, device)
    assert none.missing
    assert len(none.rows) == 0
    assert sum(none.left_out.values()) == 3


def test_a_device_of_another_machine_is_refused() -> None:
    ops = operators("matmul", {"batch": [1], "m": [2], "n": [2], "k": [2]}, name="mm", dtype="fp32")
    with pytest.raises(WhatifError, match=r"expected a device of this machine \(cpu:.*got 'H100-SXM-80'"):
        online.measure(ops, "H100-SXM-80")


def test_collectives_over_two_processes(tmp_path: Path) -> None:
    need("torch.distributed")
    code = main(
        ["opdb", "profile", "all_reduce,all_gather", "--sizes", "1024", "--db", str(tmp_path / "db"), "--device", "cpu"]
    )
    assert code == 0
    times = rows_in(Store.open(tmp_path / "db"))
    assert set(times) == {
        "collective all_reduce fwd fp32 in_place 1024 2 1",
        "collective all_gather fwd fp32 out_of_place 1024 2 1",
    }
    assert all(1e-6 < seconds < 1 for seconds in times.values())


@pytest.mark.usefixtures("in_forks")
def test_the_command_measures_and_the_database_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    words = ["opdb", "profile", "Add,Matmul", "--shapes", "1", "--dtype", "fp32,tf32", "--device", "cpu", "--json"]
    assert main([*words, "--db", str(tmp_path / "db")]) == 0
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert (said["measured"], said["known"], said["rows_added"], said["interrupted"]) == (2, 0, 2, False)
    assert said["left_out"] == {"tf32 is measured on NVIDIA GPUs alone": 2}
    assert "2 operators not measured: tf32" in printed.err
    (what,) = (c.read() for c in Store.open(tmp_path / "db").contributions()[0] if c.provenance.family == "matmul")
    sizes = ",".join(f"{name}={int(what.ops.integers[name][0])}" for name in "mnk")
    assert (
        main(["opdb", "query", f"mm:{sizes}", "--device", said["device"], "--db", str(tmp_path / "db"), "--json"]) == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["answered_by"] == "exact"
    assert answer["t_s"] == float(what.t_s[0])


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["frobnicate"], 1, "expected operations"),
        ([], 1, "expected operations such as add,mm or all, or a recording with --from, got none"),
        (["add", "--from", "trace.json"], 1, "got both"),
        (["--from", "missing.json"], 1, "missing.json: expected a recording"),
        (["add", "--dtype", "fp12"], 1, "expected number formats"),
        (["add", "--method", "graph_replay"], 1, "expected --device cuda for --method graph_replay, got cpu"),
        (["all_reduce", "--dtype", "tf32"], 1, "tf32, which is never sent"),
        (["all_reduce", "--ranks", "9999"], 2, "expected a whole number from 2 to 4096"),
        (["add", "--shapes", "0"], 2, "expected a whole number from 1"),
        (["add", "--budget-s", "nan"], 2, "expected a number of seconds above 0"),
        (["add", "--within", "-1"], 2, "expected a percentage above 0"),
    ],
)
def test_a_wrong_word_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, sentence: str
) -> None:
    assert main(["opdb", "profile", *words, "--device", "cpu", "--db", str(tmp_path / "db")]) == status
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph_replay_and_events_agree_on_a_gpu(tmp_path: Path) -> None:
    """The GPU is sent ahead in one, and the other replays graphs: a product of 1 ms takes the same in both."""
    questions, _ = profiling.questions_of([product(4096)])
    times = []
    for method in ("chain_difference", "graph_replay"):
        store = Store.open(tmp_path / method, create=True)
        profiling.profile(store, questions, machine.Way("cuda", 1, "hot", method))
        times += rows_in(store).values()
    assert times[0] == pytest.approx(times[1], rel=0.1)


def test_a_softmax_goes_backward_in_its_inputs_format() -> None:
    """The profiler does not write the format, which the operator needs and has no default for."""
    schema = need("whatif.instrumentation.operators.schema")
    calls = need("whatif.instrumentation.operators.calls")
    tensors = [[32, 10], [32, 10], [], []], ["float", "float", "Scalar", ""], ["", "", "1", ""]
    call = schema.resolve(calls.RecordedCall("aten::_log_softmax_backward_data", *tensors))
    assert [argument.name for argument in call.arguments] == ["grad_output", "output", "dim", "input_dtype"]
    replay = need("whatif.instrumentation.operators.replay").make_replay(call, torch.device("cpu"), 1)
    assert replay[0]().dtype == torch.float32
