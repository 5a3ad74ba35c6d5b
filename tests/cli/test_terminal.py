"""Terminal output: the first page, 80 columns, colour, quiet, progress, completion in a real shell."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whatif.cli import reading
from whatif.cli.completion import SHELLS, whole_parser
from whatif.cli.main import COMMANDS, main, parser_of
from whatif.cli.questions import QUESTIONS
from whatif.prediction.transform import built_in_names, load_transform
from whatif.questions.sweep import parse_vary
from whatif.report.transforms_text import fitted

ROOT = Path(__file__).resolve().parent.parent.parent
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|4[0-7]|9[0-7]|10[0-7]|38|48)(?:;\d+)*m")


def inner_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's subcommands, by name."""
    return next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))


# -- whatif alone ---------------------------------------------------------------------------------------------------


def test_whatif_alone_asks_five_questions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.findall(r"^  (\d)\. ", out, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert all(len(line) <= 80 for line in out.splitlines())
    assert all(question in out for question, _ in QUESTIONS)


@pytest.mark.parametrize("line", [line for _, lines in QUESTIONS for line in lines])
def test_the_command_of_a_question_exists(line: str) -> None:
    """Its parser takes it, and its what-ifs have these options."""
    _, command, *words = shlex.split(line)
    parser = parser_of(command, importlib.import_module(f"whatif.cli.{command}"))
    args = parser.parse_intermixed_args(words)
    positional = [word for word in words[: words.index("--vary") if "--vary" in words else None] if word[:2] != "--"]
    transforms = [load_transform(name) for name in positional[: positional.index("TRACE")]]
    for text in getattr(args, "vary", None) or ():
        parse_vary(text, transforms)
    assert "TRACE" in positional


@pytest.mark.parametrize("line", [line for _, lines in QUESTIONS for line in lines])
def test_the_command_of_a_question_answers_it(
    line: str, own_traces: Path, shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = own_traces / "transformer_cpu.json.gz"
    if "recommend" in line:  # asks of another GPU than the recorded one
        trace = shared_traces / "triosim-vgg13-h100" / "vgg13_bs512_adam.json.gz"
    assert main([word.replace("TRACE", str(trace)) for word in shlex.split(line)[1:]]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


# -- widths ---------------------------------------------------------------------------------------------------------

REPORTS = (
    "info {cpu}", "explain {cpu}", "explain {cpu} --sensitivity", "apply amp fused_adam {cpu}", "memory {cpu}",
    "compare {cpu} {fused}", "transforms", "sweep distributed {cpu} --vary workers=2,4", "scaling {cpu} --workers 1,2",
    "transforms amp", "transforms metaflow", "--help", "validate {pairs}",
)  # fmt: skip


@pytest.mark.parametrize("line", REPORTS)
def test_a_report_fits_80_columns(
    line: str, own_traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pairs = (own_traces / "pairs.toml").read_text(encoding="utf-8").split("\n\n")[-2]
    (own_traces_file := tmp_path / "pairs.toml").write_text(
        re.sub(r'"(\w+\.json\.gz)"', rf'"{own_traces}/\1"', pairs), encoding="utf-8"
    )
    places = {
        "cpu": own_traces / "transformer_cpu.json.gz",
        "fused": own_traces / "transformer_cpu_fused.json.gz",
        "pairs": own_traces_file,
    }
    assert main([word.format(**places) for word in line.split()]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) > 4
    # Where a thing lies is never broken.
    assert [text for text in out.splitlines() if len(text) > 80 and not text.startswith("source: ")] == []


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("inner", inner_parsers(inner_parsers(whole_parser())["opdb"]))
def test_help_of_a_command_of_a_command_fits_as_well(
    inner: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["opdb", inner, "--help"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    "words", [["--quiet", "opdb", "list"], ["opdb", "--quiet", "list"], ["opdb", "list", "--quiet"]]
)
def test_quiet_stands_anywhere_in_a_command_of_a_command(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--db", str(tmp_path)]) == 1
    assert "expected an op database" in capsys.readouterr().err


def test_a_docstring_is_filled_anew_only_where_it_is_too_wide() -> None:
    doc = "Short.\n\nModel:  one two three four\n        five six\n\nA list:\n\n- of\n- things"
    assert fitted(doc, 80) == doc.splitlines()
    assert fitted(doc, 20) == [
        "Short.", "", "Model:  one two", "        three four", "        five six", "", "A list:", "",
        "- of", "- things",
    ]  # fmt: skip
    words = " ".join(fitted(doc, 20)).split()
    assert words == doc.split()


# -- colour, progress, quiet ----------------------------------------------------------------------------------------


def in_a_terminal(words: list[str], **environment: str) -> tuple[str, str]:
    """What a command writes to stdout and to stderr where each is a terminal."""
    ends = pty.openpty(), pty.openpty()
    inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")}
    done = subprocess.Popen(
        [sys.executable, "-m", "whatif", *words], stdin=subprocess.DEVNULL, stdout=ends[0][1], stderr=ends[1][1],
        env={**inherited, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    texts = [b"", b""]
    for _, ours in ends:
        os.close(ours)
    theirs = {master: place for place, (master, _) in enumerate(ends)}
    while theirs:
        for master in select.select(list(theirs), [], [])[0]:
            try:
                piece = os.read(master, 1 << 16)
            except OSError:  # Linux says so where the other end is closed
                piece = b""
            texts[theirs[master]] += piece
            if not piece:
                del theirs[master]
                os.close(master)
    assert done.wait() == 0
    return texts[0].decode(), texts[1].decode()


def test_colour_only_on_a_terminal_and_where_it_is_wanted(own_traces: Path) -> None:
    words = ["explain", str(own_traces / "transformer_cpu.json.gz"), "--top", "3"]
    assert COLOUR.search(in_a_terminal(words)[0])
    assert not COLOUR.search(in_a_terminal(words, NO_COLOR="1")[0])
    assert "\x1b" not in in_a_terminal(words, TERM="dumb")[0]
    piped = subprocess.run([sys.executable, "-m", "whatif", *words], capture_output=True, text=True, check=True)
    assert "\x1b" not in piped.stdout + piped.stderr


def test_progress_shows_on_a_terminal_with_the_time_that_is_left(own_traces: Path) -> None:
    words = ["advise", str(own_traces / "transformer_cpu.json.gz"), "--top", "3"]
    out, err = in_a_terminal(words)
    assert "trying" in err
    assert re.search(r"\d:\d\d:\d\d", err)
    assert "trying" not in out
    _, silent = in_a_terminal([*words, "--quiet"])
    assert silent == ""


@pytest.mark.parametrize("before", [True, False])
def test_quiet_keeps_the_result_and_the_errors(
    before: bool, shared_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(shared_traces / "tracelens-h100-mi300" / "h100.gaunernst_bert-small-uncased__1016001.json.gz")
    assert main(["explain", trace]) == 0
    loud = capsys.readouterr()
    assert "whatif: warning: " in loud.err
    words = ["--quiet", "explain", trace] if before else ["explain", trace, "--quiet"]
    assert main(words) == 0
    assert capsys.readouterr() == (loud.out, "")
    assert main(["explain", "nowhere.json", "--quiet"]) == 1
    assert capsys.readouterr().err.startswith("whatif: nowhere.json: ")
    assert main(["explain", trace]) == 0  # and the next command is not quiet
    assert capsys.readouterr().err == loud.err


def test_nobody_watches_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with reading.progress_bar("reading") as progress:
        assert progress is None  # pytest's stderr is no terminal


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_what_takes_long_shows_that_it_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_quiet", False)  # an earlier command may have been quiet
    monkeypatch.setattr(reading, "PATIENCE_S", 0.05)
    monkeypatch.setattr(sys, "stderr", watched := Terminal())
    with reading.patience("predicting"):
        while "predicting" not in watched.getvalue():
            time.sleep(0.01)
    assert re.search(r"predicting.*0:00:00", watched.getvalue())
    monkeypatch.setattr(sys, "stderr", quick := Terminal())
    with reading.patience("predicting"):
        pass
    time.sleep(0.2)
    assert quick.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", silent := Terminal())
    monkeypatch.setattr(reading, "_quiet", True)
    with reading.patience("predicting"):
        time.sleep(0.2)
    assert silent.getvalue() == ""


# -- completion -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script of each shell and some files to complete."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        done = subprocess.run(
            [sys.executable, "-m", "whatif", "completion", shell], capture_output=True, text=True, check=True
        )
        (folder / f"script.{shell}").write_text(done.stdout, encoding="utf-8")
    for name in ("trace.json.gz", "my trace.json"):
        (folder / name).touch()
    (folder / "traces").mkdir()
    return folder


CASES = [
    ("", list(COMMANDS)),
    ("com", ["compare", "completion"]),
    ("--q", ["--quiet"]),
    ("apply fused", ["fused_adam"]),
    ("apply amp tr", ["trace.json.gz", "traces"]),
    ("apply amp tf", ["tf32"]),
    ("explain --cl", ["--clock"]),
    ("explain --clock ", ["gpu", "mark", "span"]),
    ("explain --top ", []),
    ("explain my", ["my trace.json"]),
    ("--quiet explain trace.", ["trace.json.gz"]),
    ("check --baseline trace.", ["trace.json.gz"]),
    ("check --max-regress ", []),
    ("compare trace.json.gz my", ["my trace.json"]),
    ("transforms --new my", ["my trace.json"]),
    ("opdb me", ["merge"]),
    ("opdb check --db traces", ["traces"]),
    ("completion z", ["zsh"]),
    ("predict --device A100-P", ["A100-PCIE-40", "A100-PCIE-80"]),
    ("recommend --devices L4", ["L4", "L40S"]),
    ("opdb query --device H20", ["H200-SXM-141"]),
    ("nonsense x", []),
]


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash_completes(line: str, expected: list[str], scripts: Path) -> None:
    words = ["whatif", *line.split(" ")]
    program = (
        'source ./script.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        '_shtab_whatif; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", *words], cwd=scripts, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert sorted(found for found in done.stdout.split("\n") if found) == sorted(expected)


@pytest.mark.parametrize(("line", "expected"), CASES if shutil.which("fish") else [])
def test_fish_completes(line: str, expected: list[str], scripts: Path) -> None:
    program = "source script.fish; complete -C $argv[1]"
    done = subprocess.run(
        ["fish", "--no-config", "-c", program, f"whatif {line}"],
        cwd=scripts,
        capture_output=True,
        text=True,
        check=True,
    )
    offered = [row.partition("\t")[0].rstrip("/") for row in done.stdout.splitlines()]
    assert sorted(offered) == sorted(expected)


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_a_shell_reads_its_script(shell: str, scripts: Path) -> None:
    done = subprocess.run([shell, "-n", f"script.{shell}"], cwd=scripts, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_script_has_all_there_is(shell: str, scripts: Path) -> None:
    text = (scripts / f"script.{shell}").read_text(encoding="utf-8")
    parsers = inner_parsers(whole_parser())
    assert list(parsers) == list(COMMANDS)
    for command, parser in [*parsers.items(), *inner_parsers(parsers["opdb"]).items()]:
        assert command in text
        for action in parser._actions:
            if action.help == argparse.SUPPRESS:
                continue
            flags = [flag for flag in action.option_strings if "--" in flag]
            assert all((flag.removeprefix("--") if shell == "fish" else flag) in text for flag in flags)
    assert all(name in text for name in built_in_names())


def test_zsh_completes_every_what_if_and_trace_of_a_command(scripts: Path) -> None:
    text = (scripts / "script.zsh").read_text(encoding="utf-8")
    assert re.search(r'^  "\*:.*:_whatif_name_or_file"$', text, re.MULTILINE)
    assert not re.search(r'^  "\(\*\)', text, re.MULTILINE)


def test_an_unknown_shell_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "'tcsh'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["memory"], ["recommend", "--devices", "T4"], ["scaling", "--workers", "1,2"], ["info"], ["explain"],
        ["sweep", "distributed:workers=2", "--vary", "bandwidth=1Gbps"], ["plan", "--gpus", "2"],
    ],
)  # fmt: skip
def test_json_holds_every_warning(words: list[str], own_traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, *options = words
    name = [options.pop(0)] if command == "sweep" else []
    trace = str(own_traces / "predicted" / "gpt2_h100_predicted.json.gz")
    assert main([command, *name, trace, *options]) == 0
    said = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert main([command, *name, trace, *options, "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    warnings = {*as_json["warnings"], *as_json.get("notes", ())}
    assert {text.removeprefix("warning: ").removeprefix("note: ") for text in said} <= warnings
    assert sum("predicted, not recorded" in text for text in as_json["warnings"]) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["apply", "distributed:workers=2"], ["scaling", "--workers", "1,2"],
        ["sweep", "distributed:workers=2", "--vary", "bandwidth=1Gbps"],
    ],
)  # fmt: skip
def test_what_a_what_if_assumes_is_a_note(
    words: list[str], own_traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, options = [word for word in words[1:2] if ":" in word], [word for word in words[1:] if ":" not in word]
    assert main([words[0], *names, str(own_traces / "transformer_cpu.json.gz"), *options]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "of gradients a step in" in line]
    assert said
    assert all(line.startswith("whatif: note: ") for line in said)
