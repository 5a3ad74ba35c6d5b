"""The text report of ``whatif explain --by line|layer|file``."""

from __future__ import annotations

import re

from whatif.questions.flame import Flame
from whatif.questions.lines import LineParts
from whatif.report.layout import bar, count, ms_format, pct, report, some_of
from whatif.report.text_explain import short_name
from whatif.simulation.steps import CLOCK_NOUNS

# The folders of a path except the last one.
_FOLDERS = re.compile(r"/(?:[^/( ]+/)+(?=[^/( ]+/[^/( ]+\(\d+\))")


def short_line(text: str) -> str:
    """Shorten absolute paths of files in a text to the last folder."""
    return _FOLDERS.sub("", text)


def print_flame(found: Flame) -> None:
    """Print, as a tree, the frames of a flame graph that take at least a hundredth of the step."""
    ms, whole_ms = ms_format(found.baseline.step_ms), found.whole_ms
    with report() as out:
        out.say(found.headline, "bold")
        out.step(found.baseline)
        rows = [
            ("· " * frame.depth + short_name(short_line(frame.name)), ms(frame.ms), f"{pct(frame.ms, whole_ms)} %",
             bar(frame.ms, whole_ms), ms(frame.self_ms))
            for frame in found.wide
        ]  # fmt: skip
        out.table("Frames of 1 % or more, each below those that call it", ["", "ms", "", " ", "itself"], rows)


def print_lines(found: LineParts) -> None:
    """Print the lines, files or layers of a step, and the time each waits for the GPU."""
    baseline = found.baseline
    has_gpu = baseline.graph.has_gpu
    ms = ms_format(baseline.step_ms)
    with report() as out:
        out.say(short_line(found.headline), "bold")
        out.step(baseline)
        headers = ["", *(["GPU ms"] if has_gpu else []), "CPU ms", "mean CPU ms", "critical ms"]
        headers += ["waits", "blocked ms"] if has_gpu else []
        headers += ["gain without it"] if found.by != "file" else []
        rows = []
        for line in found.shown:
            part = line.part
            row = [
                part.name,
                *([ms(part.gpu_ms)] if has_gpu else []),
                ms(part.cpu_ms),
                ms(line.mean_ms),
                ms(part.critical_ms),
            ]
            row += [count(line.waits), ms(line.blocked_ms)] if has_gpu else []
            row += [ms(line.gain_ms)] if found.by != "file" else []
            rows.append(row)
        title, noun = some_of(f"By {found.by}", len(found.shown), len(found.parts)), CLOCK_NOUNS[baseline.clock]
        out.table(f"{title}, ms a {noun}", headers, rows, wraps=True)
        out.say()
        out.say(f"mean CPU: the main thread's mean work per {noun}, including work of only some steps", "dim")
        if found.by != "file":
            out.say(f"gain without it: how much shorter the mean {noun} is without its CPU work and GPU waits", "dim")
