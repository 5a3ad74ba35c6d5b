"""The entry point: help at once, one sentence an error, exit codes 0, 1, 2 and 130."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import whatif
from tests.helpers import launched, write_trace
from whatif.cli import main as entry
from whatif.cli.main import COMMANDS, main
from whatif.runtime.loops import all_plain

PLAIN = " (plain: the hot loops are not compiled)"
HEAVY = {"numpy", "rich", "msgspec", "pandas", "networkx", "json", "importlib.metadata", "torch"}


def in_a_process(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "whatif", *words], capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_trace(tmp_path / "one.json", launched("gemm", 0, 5, 7, 100, 1)))


@pytest.mark.parametrize(
    "words", [["--help"], ["apply", "--help"], ["explain", "-h"], ["collect", "--help"], ["--version"]]
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys; before = set(sys.modules); from whatif.cli.main import main; status = main(sys.argv[1:]);"
        f"print(sorted((set(sys.modules) - before) & {HEAVY!r})); sys.exit(status)"
    )
    found = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: whatif {command}" in capsys.readouterr().out
    module = importlib.import_module(f"whatif.cli.{command}")
    assert module.__doc__


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"whatif {whatif.__version__}{PLAIN if all_plain() else ''}\n"


@pytest.mark.parametrize("plain", ["1", "0"])
def test_a_long_command_without_compiled_loops_says_so_once(plain: str, own_traces: Path) -> None:
    """Long is any time here, and else five seconds."""
    code = "import sys; from whatif.cli import main; main._LONG_S = 0; sys.exit(main.main(sys.argv[1:]))"
    environment = {**os.environ, "WHATIF_PLAIN": plain}
    words = ["info", str(own_traces / "resnet18_cifar_cpu.json.gz")]
    found = subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True)
    said = found.stderr.count("the hot loops run as plain Python")
    assert (found.returncode, said) == (0, int(plain == "1" or all_plain()))
    found = subprocess.run(
        [sys.executable, "-m", "whatif", "--version"], env=environment, capture_output=True, text=True
    )
    assert (PLAIN in found.stdout) == (plain == "1" or all_plain())


def test_module_can_be_run() -> None:
    found = in_a_process("--version")
    assert (found.returncode, found.stdout.startswith(f"whatif {whatif.__version__}")) == (0, True)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["aply"], "expected a command, got 'aply'; did you mean 'apply'?"),
        (["--jsn"], "there is no option '--jsn' before the command"),
        (["info"], "info: the following arguments are required: TRACE; see `whatif info --help`."),
        (["info", "a.json", "--b"], "info: unrecognized arguments: --b"),
        (["apply", "amp", "a.json", "--clok", "gpu"], "unrecognized arguments: --clok gpu; did you mean '--clock'?"),
        (["explain", "a.json", "--top", "0"], "explain: argument --top: expected a whole number of 1 or more, got '0'"),
        (["apply", "scale", "a.json", "--clock", "sun"], "invalid choice: 'sun'"),
        (["apply", "scale"], "expected a trace as the last argument, got the transform 'scale'"),
        (["apply", "foo"], "expected NAME and TRACE, got only 'foo'"),
        (["export", "a.json"], "the following arguments are required: -o/--output"),
        (["export", "scale", "-o", "x.json"], "expected a trace as the first argument, got the transform 'scale'"),
        (["collect", "--steps", "many", "train.py"], "invalid int value: 'many'"),
    ],
)
def test_usage_errors_exit_with_2_and_say_what_to_do(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("whatif: ")
    assert err.count("\n") == 1
    assert sentence in err


@pytest.mark.parametrize(("command", "threads"), [("info", "1"), ("collect", "None")])
def test_one_thread_for_matrices_unless_a_users_code_may_want_more(command: str, threads: str) -> None:
    code = (
        f"import os, sys; sys.argv[1:] = [{command!r}, '--help']; from whatif.__main__ import main; main();"
        "print(os.environ.get('OPENBLAS_NUM_THREADS'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == threads


def test_a_trace_alone_names_the_command(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([trace]) == 2
    assert f"`whatif explain {trace}`" in capsys.readouterr().err


def test_a_wrong_order_names_the_right_one(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["apply", trace, "scale:factor=0.5", "--json"]) == 2
    assert f"try `whatif apply scale:factor=0.5 {trace}`" in capsys.readouterr().err
    assert main(["apply", trace]) == 2
    assert "got only the trace" in capsys.readouterr().err
    assert main(["export", "scale", trace, "-o", "x.json"]) == 2
    assert f"try `whatif export {trace} scale -o out.json`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["info", "nowhere.json"], "nowhere.json: expected a readable trace file"),
        (["explain", "."], "expected a folder with the recordings of a run's ranks"),
        (["advise", "."], "expected a folder with the recordings of a run's ranks"),
        (["apply", "scale", "nowhere.json"], "nowhere.json: expected a readable trace file"),
        (["apply", "scael", "nowhere.json"], "there is no transform 'scael'; did you mean 'scale'?"),
        (["apply", "scale:fctor=2", "nowhere.json"], "there is no option 'fctor'; did you mean 'factor'?"),
        (["transforms", "nothing_like_it"], "there is no transform 'nothing_like_it'"),
    ],
)
def test_what_cannot_be_done_exits_with_1(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("whatif: ")
    assert err.count("\n") == 1
    assert sentence in err


@pytest.mark.parametrize("words", [["--debug", "info", "nowhere.json"], ["info", "nowhere.json", "--debug"]])
def test_debug_shows_the_traceback(words: list[str]) -> None:
    with pytest.raises(whatif.WhatifError):
        main(words)


def test_a_second_trace_is_reported(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(tmp_path / "other")
    Path(other).write_text("{}")
    assert main(["export", trace, "amp", other, "-o", str(tmp_path / "out.json")]) == 2
    assert "expected one trace, as the first" in (err := capsys.readouterr().err)
    assert repr(other) in err
    # Behind one another they are ranks of a run; with a name between them they are not.
    assert main(["apply", other, "amp", trace]) == 2
    assert "expected one trace, as the last" in (err := capsys.readouterr().err)
    assert repr(other) in err
    assert "for several ranks name their folder" in err


def test_arguments_of_the_script_are_not_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect"]) == 2
    assert "the following arguments are required: SCRIPT.py;" in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["0", "-3", "x", "1", "9" * 5000, "120"])
def test_any_page_width_shows_a_report(
    columns: str, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["info", trace]) == 0
    assert "Tasks" in (out := capsys.readouterr().out)
    assert len(out) < 100_000


class Full:
    """A stream behind which the disk is full."""

    encoding = "utf-8"

    def __init__(self, at: str) -> None:
        self._at = at

    def write(self, text: str) -> int:
        if self._at == "write":
            raise OSError(28, "No space left on device")
        return len(text)

    def flush(self) -> None:
        raise OSError(28, "No space left on device")

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise OSError("no file")


@pytest.mark.parametrize("at", ["write", "flush"])
@pytest.mark.parametrize("words", [["info"], ["info", "--json"], ["--help"]])
def test_output_that_finds_no_space_is_one_sentence(
    at: str, words: list[str], trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Full(at))
    assert main([*words, trace]) == 1
    assert capsys.readouterr().err == "whatif: expected to write the output, got 'No space left on device'.\n"


@pytest.mark.parametrize("words", [["info"], ["info", "--json"], ["info", "nowhere.json"]])
def test_a_closed_output_is_one_sentence(words: list[str], trace: str) -> None:
    command = [sys.executable, "-m", "whatif", *words, *([trace] if len(words) < 2 or words[1] == "--json" else [])]
    found = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (
        1,
        "whatif: expected an open standard output, got a closed one.\n",
    )


def test_closed_errors_do_not_end_up_in_the_output(trace: str) -> None:
    command = [sys.executable, "-m", "whatif", "info", trace + ".none"]
    found = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command], stdout=subprocess.PIPE, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (1, "")


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        raise error

    module = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "whatif.cli.info", module)


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (KeyboardInterrupt(), 130, "whatif: interrupted.\n"),
        (MemoryError(), 1, "whatif: there is not enough memory"),
        (KeyError("x\x1b[31m"), 1, "please report it with the output of --debug"),
        (ZeroDivisionError(), 1, "unexpected error (ZeroDivisionError)"),
    ],
)
def test_no_exception_reaches_the_user(
    error: BaseException,
    status: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(error, monkeypatch)
    assert main(["info"]) == status
    err = capsys.readouterr().err
    assert sentence in err
    assert "\x1b" not in err
    assert "Traceback" not in err
    with pytest.raises(type(error)):
        main(["info", "--debug"])


def test_an_interrupt_that_a_library_takes_for_another_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As numpy does where Ctrl-C is pressed while it is imported."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background

    def run(args: object) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("Error importing numpy") from None
        return 0

    module = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setitem(sys.modules, "whatif.cli.info", module)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "whatif: interrupted.\n"
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    failing(ImportError("nothing was pressed"), monkeypatch)
    assert main(["info"]) == 1


def test_a_closed_pipe_is_no_error(trace: str) -> None:
    """The reader is gone before anything is written."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        found = subprocess.run(
            [sys.executable, "-m", "whatif", "info", trace],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write_end)
    assert found.stderr == ""
    assert found.returncode == 141  # as of cat, grep and others in a pipeline


def test_an_ascii_terminal_does_not_fail(trace: str) -> None:
    found = in_a_process("info", trace, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert found.returncode == 0
    assert "launch lag" in found.stdout


def test_errors_are_printed_in_one_place() -> None:
    """Commands raise; only the entry point and the warnings write to stderr."""
    folder = Path(entry.__file__).parent
    writers = {path.name for path in folder.glob("*.py") if "stderr" in path.read_text()}
    assert writers == {"as_python.py", "main.py", "reading.py"}  # The first hands them to a script.
    assert not [path for path in folder.glob("*.py") if "sys.exit" in path.read_text()]
