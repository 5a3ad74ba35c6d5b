"""Lines that are placed in steps without a trace of lines."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from whatif.instrumentation import line_marks
from whatif.instrumentation.line_marks import LineMarks, RanLine
from whatif.instrumentation.line_steps import placed_lines

THREAD = 7


def step(number: int, begin: float, end: float, *operators: tuple[str, float, float]) -> list[dict[str, Any]]:
    """A step's mark and its operators, each with start and end, us."""
    rows = [("user_annotation", f"ProfilerStep#{number}", begin, end), *(("cpu_op", *row) for row in operators)]
    return [
        {"ph": "X", "cat": cat, "name": name, "tid": THREAD, "ts": start, "dur": stop - start}
        for cat, name, start, stop in rows
    ]


def ran(line: int, start_us: float, end_us: float) -> RanLine:
    return RanLine(int(start_us * 1000), int(end_us * 1000), "train.py", line, "main")


def place(events: list[dict[str, Any]], *lines: Any, count: int = 1) -> list[tuple[int, float, float]]:
    return [(line.line, start, end) for line, start, end in placed_lines(events, lines, THREAD, 0, 0, count)]


def test_operators_lead_from_one_step_to_the_other() -> None:
    """Step 0 has no lines; in step 1 all but the operators takes ten times as long.

    ::

        step 0  0  |mm 10-20|  |add 22-32|  40
        step 1  100        |mm 200-210|          |add 230-240|       320
        lines      |-- 1 ---------------| |- 2 -|     |- 3 (calls 4 inside) --|
    """
    events = step(0, 0, 40, ("mm", 10, 20), ("add", 22, 32)) + step(1, 100, 320, ("mm", 200, 210), ("add", 230, 240))
    found = place(events, ran(1, 90, 215), ran(2, 215, 225), ran(3, 225, 330), ran(4, 230, 240))
    assert found[0] == (1, 0, pytest.approx(20.5))
    assert found[1] == (2, pytest.approx(20.5), pytest.approx(21.5))
    assert found[2] == (3, pytest.approx(21.5), 40)
    assert found[3] == (4, 22, 32)


def test_a_step_takes_the_lines_of_one_with_equal_operators() -> None:
    """Every second step prints, in line 9; the steps with lines come in the other order."""
    plain, printing = (("mm", 1, 2),), (("mm", 1, 2), ("print", 4, 6))
    events = step(0, 0, 8, *plain) + step(1, 10, 18, *[(n, s + 10, e + 10) for n, s, e in printing])
    events += step(2, 20, 28, *[(n, s + 20, e + 20) for n, s, e in printing]) + step(3, 30, 38, ("mm", 31, 32))
    found = place(events, ran(8, 20, 23), ran(9, 23, 28), ran(8, 30, 39), count=2)
    assert [(line, start) for line, start, _ in found] == [(8, 0), (8, 10), (9, 13)]


def test_what_differs_is_bridged() -> None:
    """The step with lines has an operator more in its middle: what is before and behind it stays in place."""
    events = step(0, 0, 30, ("a", 1, 2), ("b", 20, 21)) + step(
        1, 100, 130, ("a", 101, 102), ("x", 110, 111), ("b", 120, 121)
    )
    found = place(events, ran(9, 99, 100), ran(1, 101, 102), ran(2, 120, 121), ran(9, 130, 131))
    assert found == [(1, 1, 2), (2, 20, 21)]


def test_without_a_whole_step_of_lines_nothing_is_placed() -> None:
    events = step(0, 0, 10, ("a", 1, 2)) + step(1, 20, 30, ("a", 21, 22))
    assert place(events, ran(1, 21, 29)) == []
    assert place(events) == []


def test_files_are_named_without_the_folders_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the folder in which the program was started, else by the one that Python imports from."""
    for folder, name in (("project/src", "apart"), ("packages", "inside")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{name}.py").write_text("def work():\n    return 1\n")
    monkeypatch.setattr(line_marks, "_STARTED_IN", str(tmp_path / "project"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "project" / "src"), str(tmp_path / "packages"), *sys.path])
    monkeypatch.chdir(tmp_path)  # The program may go elsewhere, also into a folder that is gone.
    programs = [importlib.import_module(name) for name in ("apart", "inside")]
    marks = LineMarks()
    marks.start()
    try:
        for program in programs:
            program.work()
    finally:
        marks.stop()
    names = [marks.event(line, 0.0, 1.0)["name"] for line in marks.ran if line.function == "work"]
    assert names == ["src/apart.py(1): work", "src/apart.py(2): work", "inside.py(1): work", "inside.py(2): work"]
