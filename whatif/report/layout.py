"""The look that all text reports share: aligned tables, units, small bars, nothing from a trace interpreted."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from whatif.report.printable import printable

# Wide enough for a kernel's name beside three numbers, where no terminal says how wide it is.
PIPED_WIDTH = 100
PAGE_HEIGHT = 25  # no report depends on it
MIN_WIDTH, MAX_WIDTH = 20, 1000
BAR_CELLS = 20
INDENT, COLUMN_GAP = 2, 3
# A name cut shorter than this says nothing.
MIN_NAME = 12


@contextmanager
def report() -> Iterator[Console]:
    """Give a console that shows text as it is (no markup, no emoji codes); what it prints goes to stdout at the end."""
    # With both sizes given, the environment's are not looked at: whatever they say, a report is shown.
    out = Console(file=sys.stdout, width=_page_width(), height=PAGE_HEIGHT, markup=False, emoji=False, highlight=False)
    with out.capture() as captured:
        yield out
    for line in captured.get().splitlines():
        print(line.rstrip())


def _page_width() -> int:
    """The terminal's width, or what the user says it is; a terminal that does not know its own says 0."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and len(asked) < 6 and int(asked):
        return min(max(int(asked), MIN_WIDTH), MAX_WIDTH)
    columns = shutil.get_terminal_size((PIPED_WIDTH, 0)).columns if sys.stdout.isatty() else PIPED_WIDTH
    return columns if MIN_WIDTH <= columns <= MAX_WIDTH else PIPED_WIDTH


def plain(text: str, style: str = "") -> Text:
    """Give text of a trace as it is shown: harmless, never markup."""
    return Text(printable(text), style=style)


def print_title(out: Console, text: str) -> None:
    """Print the heading of a table, with an empty line above it."""
    out.print()
    out.print(plain(text, "bold"))


def print_table(
    out: Console,
    headers: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    text_columns: int = 1,
    gives_way: int = 0,
) -> None:
    """Print a table: the first ``text_columns`` columns and those headed " " hold text, the others numbers.

    Where the page is too narrow the column ``gives_way`` does: the first one is cut, a later one wraps.
    """
    cells = [[cell if isinstance(cell, Text) else plain(cell) for cell in row] for row in rows]
    widths = [max([len(header), *(row[place].cell_len for row in cells)]) for place, header in enumerate(headers)]
    room = out.width - INDENT - COLUMN_GAP * (len(headers) - 1) - sum(widths) + widths[gives_way]
    widths[gives_way] = max(min(widths[gives_way], room), MIN_NAME)
    has_header = any(header.strip() for header in headers)
    result = Table(box=None, pad_edge=False, padding=(0, COLUMN_GAP, 0, 0), show_header=has_header, header_style="dim")
    for place, header in enumerate(headers):
        is_text = place < text_columns or header == " "
        wraps = place == gives_way and place > 0
        result.add_column(
            header,
            justify="left" if is_text else "right",
            width=widths[place],
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
        )
    for row in cells:
        result.add_row(*row)
    out.print(Padding(result, (0, 0, 0, INDENT)))


def ms_format(step_ms: float) -> Callable[[float | None], str]:
    """Give the function that writes the times of a report: so many digits that a thousandth of the step shows."""
    digits = 2 if step_ms >= 10 else 3 if step_ms >= 1 else 4

    def write(value: float | None) -> str:
        # Adding zero turns -0.0, which would be written with its sign, into 0.0.
        return "–" if value is None else f"{round(value, digits) + 0.0:,.{digits}f}"

    return write


def pct(part: float, whole: float = 100.0) -> str:
    """Give a share in percent, without the sign."""
    return f"{100.0 * part / whole:.1f}" if whole else "–"


def bar(part: float, whole: float) -> Text:
    """Give a small bar for a share."""
    cells = round(BAR_CELLS * max(part, 0.0) / whole) if whole > 0 else 0
    return Text("█" * min(cells, BAR_CELLS), style="blue")


# What people read for the words of the task graph.
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
BREAKDOWN_LABELS = (
    ("cpu_only_ms", "CPU only"),
    ("gpu_only_ms", "GPU only"),
    ("cpu_gpu_ms", "CPU and GPU together"),
    ("communication_ms", "exposed communication"),
    ("idle_ms", "neither"),
)
CLOCK_LABELS = {
    "gpu": "end to end of the GPU's work",
    "mark": "mark to mark",
    "span": "first to last task",
}
# The step without the profiler, by the clock that measured it.
UNTRACED_LABELS = {
    "wall": "the step without the profiler",
    "cpu": "the CPU time of the step without the profiler",
}
# What a report's times are of, by the clock.
CLOCK_SUBJECTS = {"gpu": "a step", "mark": "a step", "span": "the whole span"}
