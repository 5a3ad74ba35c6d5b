"""`whatif collect` disturbs nothing: scripts end as they do without it, with the same output and checkpoints."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import whatif
from tests.helpers import extra_data, need
from tests.instrumentation import warm

torch = need("torch")

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "everyday"
QUICK = ["--steps", "3", "--untraced-steps", "2"]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2"]
COLLECT = ["-m", "whatif", "collect", *QUICK]
Ended = subprocess.CompletedProcess[str]
Starts = Callable[[Sequence[str], Path, dict[str, str]], Ended]


def run(folder: Path, *words: str, python: Starts = warm.python) -> Ended:
    """Run `python WORDS` in a fresh folder that holds the scripts."""
    shutil.copytree(SCRIPTS, folder)
    return python(words, folder, {**os.environ, "OMP_NUM_THREADS": "1"})


def with_warm_ranks(words: Sequence[str], cwd: Path, env: dict[str, str]) -> Ended:
    """A launcher starts its ranks as forks."""
    return warm.python(words, cwd, {**env, "PYTHON_EXEC": warm.executable(cwd)})


def new_python(words: Sequence[str], cwd: Path, env: dict[str, str]) -> Ended:
    """Where warm processes would not do: as a user starts one."""
    return subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def checkpoints(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.pt"))}


# A script and a module are run as a user does, which an error's traceback shows as well.
@pytest.mark.parametrize(
    ("words", "options", "python"),
    [
        (["train.py"], [], warm.python),
        (["train.py", "--steps", "37", "-o", "mine.pt", "--status", "7"], [], warm.python),
        (["train.py", "--fail-at", "20"], [], new_python),
        (["gan.py"], [], warm.python),
        (["lstm.py"], [], warm.python),
        (["forks.py"], [], warm.python),
        (["infer.py"], ["--inference"], warm.python),
        (["-m", "pkg.train", "-m", "--stop"], [], new_python),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else given.__name__,
)
def test_a_script_ends_as_it_does_alone(tmp_path: Path, words: list[str], options: list[str], python: Starts) -> None:
    alone = run(tmp_path / "alone", *words, python=python)
    recorded = run(tmp_path / "recorded", *COLLECT, *options, "-o", "run.json.gz", *words, python=python)
    place = str(tmp_path / "alone"), str(tmp_path / "recorded")
    assert recorded.stdout == alone.stdout.replace(*place), recorded.stderr
    assert recorded.returncode == alone.returncode
    assert checkpoints(tmp_path / "recorded") == checkpoints(tmp_path / "alone")
    assert checkpoints(tmp_path / "alone")
    # What Python prints of an error is printed, and nothing else of ours around it.
    assert alone.stderr.replace(*place) in recorded.stderr
    assert "run.json.gz: recorded; next: whatif explain run.json.gz" in recorded.stderr
    graph = whatif.read(tmp_path / "recorded" / "run.json.gz")
    assert whatif.apply(graph, "scale:factor=0.5").predicted_ms > 0


# Scripts as others wrote them, with the packages that they need.
OTHERS = {
    "ab.py": [], "compiled.py": [], "crash.py": [], "fin.py": [], "gan.py": [], "hf_bert.py": ["transformers"],
    "infer.py": [], "lit.py": ["lightning"], "lstm.py": [], "plain_amp.py": [], "plain_amp.py --amp --workers 0": [],
    "rec.py": [], "run.py --steps 60": [], "short.py": [], "-m pkg.train --steps 7": [], "-m pkg.train --steps 60": [],
}  # fmt: skip
# Less work behind the 16 steps that a recording takes: what a script says, and what it says here.
LESS = {
    "ab.py": [("range(4)", "range(1)")], "compiled.py": [("range(100)", "range(24)")],
    "gan.py": [("range(120)", "range(24)")], "hf_bert.py": [("n=800", "n=192")], "lit.py": [("2048", "384")],
    "lstm.py": [("range(240)", "range(80)"), ("(16,33)", "(4,33)")], "plain_amp.py": [("return 3200", "return 768")],
}  # fmt: skip
# What a script measures of its own time.
TIMES = re.compile(
    r"(?<=fp32 )\S+|(?<=amp )\S+|(?<=median ms )\S+|(?<=median step )\S+"
    r"|\S*(runtime|per_second)\S* \S+|\S+it/s|\d:\d\d:\d\d|━+(?= \d+/\d+)"  # the bar fills the line
)


def saved(folder: Path) -> dict[str, list[torch.Tensor]]:
    """The tensors of every checkpoint in a folder; files that hold times or paths as well are not equal bytes."""
    found = {}
    for path in sorted((folder / "out").rglob("*")):
        if path.suffix in (".pt", ".ckpt", ".bin"):
            found[str(path.relative_to(folder))] = list(tensors_in(torch.load(path, weights_only=False)))
        elif path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found[str(path.relative_to(folder))] = list(load_file(path).values())
    return found


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict | list | tuple):
        for inner in content.values() if isinstance(content, dict) else content:
            yield from tensors_in(inner)


@pytest.mark.parametrize("words", OTHERS)
def test_the_scripts_of_others_end_as_they_do_alone(words: str, tmp_path: Path) -> None:
    scripts = extra_data("repro") / "everyday"
    for package in OTHERS[words]:
        need(package)
    alone, recorded = tmp_path / "alone", tmp_path / "recorded"
    for folder in (alone, recorded):
        shutil.copytree(scripts, folder)
        (folder / "out").mkdir(exist_ok=True)
        for long, short in LESS.get(script := words.split()[0], ()):
            text = (folder / script).read_text(encoding="utf-8")
            assert long in text
            (folder / script).write_text(text.replace(long, short), encoding="utf-8")
    # Python runs this file as it starts; most of the scripts set no seed.
    (tmp_path / "seed" / "sitecustomize.py").parent.mkdir()
    (tmp_path / "seed" / "sitecustomize.py").write_text("import torch\n\ntorch.manual_seed(0)\n", encoding="utf-8")
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONPATH": str(tmp_path / "seed"), "N": "60",  # steps of fin.py: of 500, all but 16 are after the recording
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # each worker would import torch
    }  # fmt: skip
    options = ["--inference"] if words == "infer.py" else []
    ends = [
        warm.python(words.split(), alone, environment),
        warm.python([*COLLECT, *options, "-o", "run.json.gz", *words.split()], recorded, environment),
    ]
    assert TIMES.sub("", ends[1].stdout) == TIMES.sub("", ends[0].stdout), ends[1].stderr
    before, after = saved(alone), saved(recorded)
    assert after.keys() == before.keys()
    for name, tensors in before.items():
        assert len(tensors) == len(after[name])
        assert all(map(torch.equal, tensors, after[name])), name
    if words in ("crash.py", "-m pkg.train --steps 7"):  # they end before a recording is whole
        assert not (recorded / "run.json.gz").exists()
        assert ends[1].returncode == (ends[0].returncode or 1)
        return
    assert ends[1].returncode == ends[0].returncode, ends[1].stderr
    graph = whatif.read(recorded / "run.json.gz")
    assert whatif.apply(graph, "scale:factor=0.5").predicted_ms > 0


def test_stop_ends_the_script_and_says_so_first_and_last(tmp_path: Path) -> None:
    found = run(tmp_path / "run", *COLLECT, "--stop", "train.py", "--steps", "100")
    assert found.returncode == 0
    said = [line for line in found.stderr.splitlines() if line.startswith("whatif: ")]
    assert "--stop then ends the script early" in said[0]
    assert "stopped train.py after 16 steps: it did not run to its end" in said[-1]
    assert "saved after 15" in found.stdout


def test_a_script_that_closes_its_streams_ends_as_it_does_alone(tmp_path: Path) -> None:
    """Each flush failed: the child ended with 1, and a traceback of ours stood in place of the script's end."""
    alone = run(tmp_path / "alone", "closes.py")
    recorded = run(tmp_path / "recorded", *COLLECT, "closes.py")
    assert (recorded.returncode, recorded.stdout) == (alone.returncode, alone.stdout), recorded.stderr
    assert alone.stdout == "child ended with 3\ntrained\n"
    assert "Traceback" not in recorded.stderr
    assert whatif.read(tmp_path / "recorded" / "closes.json.gz").info.path


@pytest.mark.parametrize(("options", "words"), [([], []), (["--inference"], ["uncalled"])], ids=["train", "infer"])
def test_a_model_that_is_copied_and_saved_at_each_step(tmp_path: Path, options: list[str], words: list[str]) -> None:
    alone = run(tmp_path / "alone", "copies.py", *words)
    recorded = run(tmp_path / "recorded", *COLLECT, *options, "copies.py", *words)
    assert (recorded.returncode, recorded.stdout) == (0, alone.stdout), recorded.stderr
    assert whatif.read(tmp_path / "recorded" / "copies.json.gz").info.path


@pytest.mark.parametrize(
    "words",
    [["--steps", "300", "lstm.py"], ["--stop", "train.py"], ["--steps", "300", *TORCHRUN, "alone.py"], ["infer.py"]],
    ids=["ends early", "stop", "ranks", "error"],
)
def test_quiet_prints_errors_only(tmp_path: Path, words: list[str]) -> None:
    command = ["-m", "whatif", "--quiet", "collect", "--untraced-steps", "2"]
    found = run(tmp_path / "run", *command, *words, python=with_warm_ranks)
    written = bool(list((tmp_path / "run").glob("*.json.gz")))
    assert (found.returncode, written) == ((1, False) if words == ["infer.py"] else (0, True))
    assert re.findall(r"whatif.*?: [^:]*: ", found.stderr) == (
        ["whatif: no recording of infer.py: "] if not written else []
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 7), (signal.SIGINT, -signal.SIGINT)])
def test_signals_are_the_scripts_own(tmp_path: Path, number: int, status: int) -> None:
    shutil.copytree(SCRIPTS, tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, *COLLECT, "signals.py"],
        cwd=tmp_path / "run",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(6000):
        if (tmp_path / "run" / "ready").exists() or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert ("handler" in out) == (number == signal.SIGTERM)
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    assert (tmp_path / "run" / "signals.json.gz").exists()


# SIGHUP has a handler that exits with 7; the others do what Python and the system do with them.
@pytest.mark.parametrize("options", [[], ["--stop"], ["--steps", "900"]], ids=["whole", "stop", "at its end"])
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", -15), ("SIGINT", -2), ("SIGHUP", 7)])
def test_a_signal_waits_until_the_file_is_written(tmp_path: Path, name: str, status: int, options: list[str]) -> None:
    found = run(tmp_path / "run", *COLLECT, *options, "interrupted.py", name, "1")
    assert found.returncode == status, found.stderr
    assert f"{name}: passed on to the script once interrupted.json.gz is written" in found.stderr
    assert whatif.read(tmp_path / "run" / "interrupted.json.gz").info.path
    assert ("trained to the end" in found.stdout) == ("900" in options)


@pytest.mark.parametrize("part", ["outside", "forward", "backward"])
def test_a_signal_without_a_handler_leaves_the_recorded_steps_and_its_own_status(tmp_path: Path, part: str) -> None:
    number = signal.SIGHUP if part == "forward" else signal.SIGTERM
    found = run(tmp_path / "run", *COLLECT, "--steps", "5", "terminated.py", number.name, part)
    assert found.returncode == -number, found.stderr
    assert "no signal ended this" not in found.stdout
    assert f"terminated.json.gz: written; {number.name} ends the script." in found.stderr
    assert whatif.read(tmp_path / "run" / "terminated.json.gz").info.n_steps == (4 if part == "outside" else 3)


@pytest.mark.parametrize("second", ["SIGTERM", "SIGHUP"])
def test_a_second_signal_without_a_handler_ends_the_script_at_once(tmp_path: Path, second: str) -> None:
    found = run(tmp_path / "run", *COLLECT, "--steps", "5", "terminated.py", "SIGTERM", "outside", second)
    assert found.returncode == -signal.Signals[second], found.stderr
    assert "passed on" not in found.stderr
    assert not (tmp_path / "run" / "terminated.json.gz").exists()


def test_a_signal_says_why_the_recorded_steps_are_not_written(tmp_path: Path) -> None:
    found = run(tmp_path / "run", *COLLECT, "--steps", "5", "terminated.py", "SIGTERM", "outside", "full")
    assert found.returncode == -signal.SIGTERM, found.stderr
    assert re.search(r"terminated\.json\.gz: not written: .*[^.;]\. SIGTERM ends the script\.", found.stderr)


def test_a_handler_that_calls_the_one_before_it_lives_on(tmp_path: Path) -> None:
    found = run(tmp_path / "run", *COLLECT, "--steps", "5", "chained.py")
    assert (found.returncode, found.stdout) == (0, "checkpoint saved\n"), found.stderr
    assert whatif.read(tmp_path / "run" / "chained.json.gz").info.n_steps == 4


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_signal_to_a_thread_that_trains_leaves_a_file_or_says_why_not(tmp_path: Path, where: str) -> None:
    found = run(tmp_path / "run", *COLLECT, "interrupted.py", "SIGINT", "1" if where == "thread" else "2", where)
    assert found.returncode == -signal.SIGINT, found.stderr
    assert ("no recording of interrupted.py: interrupted while writing." in found.stderr) == (where == "main")
    assert ("interrupted.json.gz: recorded; next:" in found.stderr) == (where == "thread")
    assert (tmp_path / "run" / "interrupted.json.gz").exists() == (where == "thread")


# The script's profiler is on when collect's would start; starts right behind it, in its warm-up, with it recording; or
# starts when the recording is written.
@pytest.mark.parametrize("wait", [9, 10, 12, 14, 16])
def test_a_script_with_a_profiler_of_its_own_goes_first(tmp_path: Path, wait: int) -> None:
    words = ["profiled.py", "--wait", str(wait)]
    alone = run(tmp_path / "alone", *words)
    recorded = run(tmp_path / "recorded", *COLLECT, *words)
    assert (recorded.returncode, recorded.stdout) == (0, alone.stdout), recorded.stderr
    assert recorded.stderr.count("the script starts its own profiler") == (wait < 16)
    assert whatif.read(tmp_path / "recorded" / "profiled.json.gz").info.path


@pytest.mark.parametrize("options", [["--inference"], ["--wait", "0"], ["--wait", "12", "--steps", "30"]], ids=" ".join)
def test_what_the_scripts_own_profiler_leaves_is_recorded_or_reported(tmp_path: Path, options: list[str]) -> None:
    collect_options = options[:1] if options == ["--inference"] else []
    found = run(tmp_path / "run", *COLLECT, *collect_options, "profiled.py", *options)
    written = (tmp_path / "run" / "profiled.json.gz").exists()
    assert found.stdout.startswith("profiled"), found.stderr
    assert (found.returncode, written) in ((0, True), (1, False))
    assert written == ("--steps" not in options)
    assert ("steps without the script's own profiler, got" in found.stderr) == (not written)


@pytest.mark.parametrize("before", [0, 12])
def test_a_script_that_records_itself_goes_first(tmp_path: Path, before: int) -> None:
    found = run(tmp_path / "run", *COLLECT, "marked.py", str(before))
    assert found.stdout == "trained to the end\n", found.stderr
    assert found.returncode == 1
    assert "no recording of marked.py: expected 16 steps without the script's own profiler, got" in found.stderr
    assert whatif.read(tmp_path / "run" / "own.json.gz").info.path


def test_a_thread_that_ends_while_it_is_recorded_is_reported(tmp_path: Path) -> None:
    found = run(tmp_path / "run", *COLLECT, "--steps", "9", "thread.py")
    assert found.returncode == 1, found.stderr
    assert "expected the training thread to run until the steps are recorded" in found.stderr


# --multi_gpu asks for several processes; the script itself chooses the CPU.
ACCELERATE = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "script", "python"),
    [
        (TORCHRUN, "ranks", warm.python),
        (TORCHRUN, "accelerated", with_warm_ranks),
        (ACCELERATE, "accelerated", with_warm_ranks),
    ],
)
def test_each_process_of_a_launcher_is_recorded(
    tmp_path: Path, launcher: list[str], script: str, python: Starts
) -> None:
    if script == "accelerated":
        need("accelerate")
    found = run(tmp_path / "run", *COLLECT, *launcher, f"{script}.py", python=python)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "2 ranks trained\n"
    files = sorted((tmp_path / "run").glob(f"{script}.rank*.json.gz"))
    assert [file.name for file in files] == [f"{script}.rank{rank}.json.gz" for rank in range(2)]
    assert len(whatif.read_ranks(files).graph.info.ranks) == 2


def test_each_process_is_recorded_where_none_makes_a_group(tmp_path: Path) -> None:
    found = run(tmp_path / "run", *COLLECT, "--steps", "300", *TORCHRUN, "alone.py", python=with_warm_ranks)
    assert found.returncode == 0, found.stderr
    assert "whatif: " not in found.stderr
    for rank in range(2):
        name = f"alone.rank{rank}.json.gz"
        assert f"whatif (rank {rank}): running alone.py to its end; {name} is written after" in found.stderr
        assert f"whatif (rank {rank}): warning: the training ended after" in found.stderr
        assert f"whatif (rank {rank}): {name}: recorded; next: whatif explain {name}\n" in found.stderr
        assert whatif.read(tmp_path / "run" / name).info.path


def test_training_in_processes_that_the_script_started_is_named(tmp_path: Path) -> None:
    found = run(tmp_path / "run", *COLLECT, "spawns.py")
    assert found.stdout.count("trained") == 2
    assert "in this process, got none: processes that the script started did the work" in found.stderr
    assert found.returncode == 1


def test_accelerate_starts_the_script_under_collect(tmp_path: Path) -> None:
    need("accelerate")
    found = run(tmp_path / "run", *COLLECT, "accelerate", "launch", "--cpu", "train.py", "--steps", "20")
    assert found.returncode == 0, found.stderr
    assert "saved after 19" in found.stdout
    assert whatif.read(tmp_path / "run" / "train.json.gz").info.path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["notes.ipynb"], "expected a Python script, got a notebook; in the notebook run `%load_ext whatif`"),
        (["-m", "no_such_package.train"], "expected a module that Python finds from"),
        (["python", "train.py"], "expected a script, got Python itself; drop `python`"),
        (["nothing.py"], "expected a Python script, got no such file: check the path."),
        (["./nothing.ipynb"], "expected a Python script, got no such file: check the path."),
        (["."], "expected a Python script, got a folder: name the script in it."),
        (["pkg.train"], "got no such file: check the path, or run a module with `whatif collect -m pkg.train`."),
        (["accelerate", "test"], "expected `accelerate launch SCRIPT.py`"),
    ],
)
def test_what_cannot_be_run_is_answered_in_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    found = run(tmp_path / "run", *COLLECT, *words)
    assert found.returncode == 1
    assert len(found.stderr.splitlines()) == 1
    assert sentence in found.stderr
