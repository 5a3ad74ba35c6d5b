"""The look that all text reports share: aligned tables, units, small bars, nothing from a trace interpreted."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from whatif.report.columns import COLUMN_GAP, MIN_NAME, Bar, Cell, Column, fitted, wrapped
from whatif.report.printable import printable

if TYPE_CHECKING:
    from whatif.graph.task_graph import TaskGraph
    from whatif.prediction.baseline import Baseline

# The width without a terminal: enough for a kernel's name beside three numbers.
PIPED_WIDTH = 100
PAGE_HEIGHT = 25  # no report depends on it
MIN_WIDTH, MAX_WIDTH = 20, 1000
INDENT = 2


class Report:
    """A text report on a console: sentences, notes, titles and tables, in which nothing from a trace is markup."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.width = console.width

    def say(self, sentence: str = "", style: str = "", *, soft_wrap: bool = False) -> None:
        """Print a sentence, or an empty line; with ``soft_wrap`` on one line at any page width."""
        self._console.print(plain(sentence, style), soft_wrap=soft_wrap)

    def note(self, sentence: str, style: str = "") -> None:
        """Print a sentence with the indentation of tables, including its wrapped lines."""
        self._console.print(Padding(plain(sentence, style), (0, 0, 0, INDENT)))

    def step(self, baseline: Baseline, more: str = "", on: str = "") -> None:
        """Print the name of the recording and the time of its step, followed by ``more``."""
        step_ms = baseline.step_ms
        takes = f"{CLOCK_SUBJECTS[baseline.clock]} takes {ms_format(step_ms)(step_ms)} ms"
        name = Path(baseline.graph.info.path).name
        clock = CLOCK_LABELS[baseline.clock]
        info = baseline.graph.info
        how = clock if info.is_recorded else f"{clock}; {info.made}, not recorded"
        self.say(f"{name}{on}: {takes} ({how}){more}", "dim")
        self.without_profiler(baseline)

    def without_profiler(self, baseline: Baseline) -> None:
        """Print both steps if the one without the profiler is an estimate."""
        if estimated := baseline.estimated_ms:
            ms = ms_format(estimated["estimate"])
            self.say(
                f"without the profiler {ms(estimated['estimate'])} ms, estimated "
                f"({ms(estimated['low'])} … {ms(estimated['high'])}); recorded {ms(baseline.measured_ns / 1e6)} ms "
                "(the baseline with --as-recorded)",
                "dim",
            )

    def title(self, text: str) -> None:
        """Print a heading, with an empty line above it."""
        self.say()
        self.say(text, "bold")

    def points(self, title: str, sentences: Sequence[str]) -> None:
        """Print a list of sentences below its title, if there are any."""
        if sentences:
            self.title(title)
        for sentence in sentences:
            self.note(f"- {sentence}")

    def table(
        self,
        title: str | None,
        headers: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        *,
        text_columns: int = 1,
        gives_way: int = 0,
        wraps: bool = False,
        keys: int | None = None,
    ) -> None:
        """Print a table below its title, if it has rows; the title "" is an empty line, None is omitted.

        The first ``text_columns`` columns and those headed " " hold text, the others numbers. If the page is too
        narrow, the column ``gives_way`` shrinks: the first column is cut, unless its text ``wraps`` like that of all
        later ones. Numbers are never cut: columns that do not fit go into a table below, which repeats the first
        ``keys`` columns (by default the leading text columns).
        """
        if not rows:
            return
        if title:
            self.title(title)
        elif title is not None:
            self.say()
        cells = [[plain(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        columns = [
            # Aligns the tables below each other if their names are short.
            Column.of(
                place, header, [row[place] for row in cells], is_text=place < text_columns or header == " ",
                at_least=MIN_NAME if place == gives_way else 0,
            )
            for place, header in enumerate(headers)
        ]  # fmt: skip
        if keys is None:
            leading = (place for place, column in enumerate(columns) if not column.is_text or column.is_bar)
            keys = max(next(leading, len(columns)), 1)
        for place, table in enumerate(fitted(columns, self.width - INDENT, keys=keys, gives_way=gives_way)):
            if place:
                self.say()
            drawn = _table(table, cells, cut=None if wraps or gives_way else 0)
            self._console.print(Padding(drawn, (0, 0, 0, INDENT)))


@contextmanager
def report() -> Iterator[Report]:
    """Return a report that is printed to stdout at the end, verbatim: no markup, no emoji codes."""
    # NO_COLOR (no-color.org) disables colours in rich; bold and dim are not colours, and stay.
    # With both sizes given, rich ignores the environment's, which may be invalid.
    out = Console(file=sys.stdout, width=_page_width(), height=PAGE_HEIGHT, markup=False, emoji=False, highlight=False)
    with out.capture() as captured:
        yield Report(out)
    for line in captured.get().splitlines():
        print(line.rstrip())


def _page_width() -> int:
    """The terminal's width, or the user's setting; a terminal of unknown width reports 0."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and len(asked) < 6 and int(asked):
        return min(max(int(asked), MIN_WIDTH), MAX_WIDTH)
    columns = shutil.get_terminal_size((PIPED_WIDTH, 0)).columns if sys.stdout.isatty() else PIPED_WIDTH
    return columns if MIN_WIDTH <= columns <= MAX_WIDTH else PIPED_WIDTH


def plain(text: str, style: str = "") -> Text:
    """Return text of a trace for display: harmless, never markup."""
    return Text(printable(text), style=style)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown; text of a record or a trace is escaped and stays in its cell."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(markdown_text(cell) for cell in line) + " |" for line in lines)


def markdown_text(text: str) -> str:
    """Return text for a sentence or a cell in Markdown, without line ends, column separators or tags."""
    return printable(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _table(columns: Sequence[tuple[Column, int]], cells: Sequence[Sequence[Text | Bar]], cut: int | None) -> Table:
    """Draw columns at their widths; text is broken if necessary, except in the column that is ``cut``."""
    tops = [wrapped(column.header, width) for column, width in columns]
    height = max(top.count("\n") for top in tops)
    has_header = any(column.header.strip() for column, _ in columns)
    # The gaps are columns: whether the last column has padding depends on the version of rich (pad_edge).
    result = Table(box=None, padding=0, show_header=has_header, header_style="dim")
    for (column, width), top in zip(columns, tops, strict=True):
        if result.columns:
            result.add_column(width=COLUMN_GAP)
        lower = "\n" * (height - top.count("\n"))
        justify: Literal["left", "right"] = "left" if column.is_text else "right"
        result.add_column(lower + top, justify=justify, width=width, no_wrap=True, overflow="ellipsis")
    for row in cells:
        shown: list[Text | str] = []
        for column, width in columns:
            shown += [""] if shown else []
            cell = row[column.place]
            if isinstance(cell, Bar):
                shown.append(cell.drawn(width))
            elif column.place == cut:
                shown.append(cell)
            else:
                shown.append(Text(wrapped(cell.plain, width), style=cell.style))
        result.add_row(*shown)
    return result


def distinct_names(paths: Sequence[str]) -> list[str]:
    """Return the names of files, each with as many of its folders as distinguish different files."""
    parts = [Path(path).parts for path in paths]
    depth = 1
    while len({path[-depth:] for path in parts}) < len(set(parts)):
        depth += 1
    return [str(Path(*path[-depth:])) if path else "" for path in parts]


def ms_format(step_ms: float) -> Callable[[float | None], str]:
    """Return a formatter for the times of a report, with enough digits to show a thousandth of the step."""
    digits = 2 if step_ms >= 10 else 3 if step_ms >= 1 else 4

    def write(value: float | None) -> str:
        # Adding zero turns -0.0, which would be printed with its sign, into 0.0.
        return "–" if value is None else f"{round(value, digits) + 0.0:,.{digits}f}"

    return write


def pct(part: float, total: float = 100.0) -> str:
    """Return a share in percent, without the sign."""
    return f"{100.0 * part / total:.1f}" if total else "–"


def number(value: float | None, form: str = ",.1f", unit: str = "") -> str:
    """Format a number with its unit; a dash if it is unknown."""
    return "–" if value is None else f"{value:{form}}{unit}"


def significant(value: float) -> str:
    """Format a number with four digits, or all digits before its point."""
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def rate(per_s: float) -> str:
    """Format a rate with one decimal; below 10 with three digits."""
    return f"{per_s:,.1f}" if per_s >= 10 else f"{per_s:,.3g}"


def some_of(title: str, shown: int, available: int) -> str:
    """Return the title of a table, with the number of rows shown if it does not have all of them."""
    return f"{title} ({shown:,} of {available:,})" if shown < available else title


def count(tasks: float) -> str:
    """Format a number of tasks per step."""
    return f"{tasks:,.0f}" if tasks >= 0.5 or not tasks else "<1"


def signed(change: float, ms: Callable[[float | None], str]) -> str:
    """Format a change of a time with its sign."""
    text = ms(change)
    return text if text.startswith("-") else f"+{text}"


def kind_label(kind: str, graph: TaskGraph) -> str:
    """Return the display name of a kind of tasks in a graph."""
    return COMMUNICATION_CALLS if kind == "runtime" and not graph.has_gpu else KIND_LABELS[kind]


def sentence_case(text: str) -> str:
    """Capitalize the first letter of a text."""
    return text[:1].upper() + text[1:]


def bar(part: float, total: float) -> Bar:
    """Return a small bar for a share."""
    return Bar(part / total if total > 0 else 0.0)


# Display names of the task graph's terms.
KIND_LABELS = {
    "cpu_op": "operators on the CPU",
    "runtime": "CUDA / HIP calls",
    "gap": "other CPU time (Python, framework)",
    "kernel": "kernels",
    "memcpy": "copies",
    "memset": "memsets",
    "communication": "communication",
    "data_loading": "data loading",
    "wait": "waits",
    "lag": "launch and hand-over lag",
}
# Without a GPU, the only calls are those that start an exchange between workers.
COMMUNICATION_CALLS = "communication calls"
BREAKDOWN_LABELS = (
    ("cpu_only_ms", "CPU only"),
    ("gpu_only_ms", "GPU only"),
    ("cpu_gpu_ms", "CPU and GPU together"),
    ("communication_ms", "exposed communication"),
    ("idle_ms", "neither"),
)
CLOCK_LABELS = {
    "gpu": "step end to step end on the GPU",
    "mark": "mark to mark",
    "span": "first to last task of the device",
}
# The step without the profiler, by the clock that measured it.
UNTRACED_LABELS = {
    "wall": "the step without the profiler",
    "cpu": "the CPU time of the step without the profiler",
}
# The subject of a report's times, by clock.
CLOCK_SUBJECTS = {"gpu": "a step", "mark": "a step", "span": "the whole span"}
