"""Reader of the output of nccl-tests and rccl-tests: one table of message sizes for each run.

Sizes are bytes of the whole buffer, also for all-gather and reduce-scatter, as in its `size` column.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from whatif.graph.described import Described
from whatif.opdb.devices import device_called
from whatif.opdb.importers.described import Timed, rows_of
from whatif.opdb.importers.found import Found, file_sha256, read_text
from whatif.opdb.provenance import Environment, Method, Origin, Source
from whatif.runtime.errors import WhatifError

_TYPES = {
    "float": "fp32", "half": "fp16", "bfloat16": "bf16", "double": "fp64", "f8e4m3": "fp8", "f8e5m2": "fp8",
    "int8": "int8", "uint8": "int8", "char": "int8", "int32": "int", "uint32": "int", "int64": "int", "uint64": "int",
    "int": "int",
}  # fmt: skip
_OPERATORS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "reduce": "reduce", "sendrecv": "send_recv",
}  # fmt: skip
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+?)\s*$")
_STARTING = re.compile(r"Collective test starting:\s*(\w+?)_perf")
# A larger size is no number of bytes.
_MOST_DIGITS = 15
_LIBRARY = re.compile(r"nccl-library=(\d+)")
# The printed rate is rounded to hundredths of GB/s; a larger difference means another unit of size or time.
_RATE_TOLERANCE, _RATE_ROUNDING = 0.02, 0.006


class Run(NamedTuple):
    """The result of one run of nccl-tests: its collective, the kinds and number of GPUs, and each size's times."""

    name: str
    gpus: list[str]
    ranks: int
    timed: list[Timed]


def read_nccl_tests(
    path: Path, *, operator: str | None = None, device: str | None = None, author: str | None = None
) -> Found:
    """Read the output of one run. Raises WhatifError if it is not one, or lacks its collective or its GPUs.

    ``operator`` and ``device`` supply what an old or truncated output lacks.
    """
    text = read_text(path)
    found = Found()
    run = parse_run(text, path, found, operator)
    if not run.ranks or (len(run.gpus) != 1 and device is None):
        raise WhatifError(
            f"{path}: expected the lines 'Rank … device …' of one kind of GPU, got {run.ranks} lines of "
            f"{len(run.gpus)} kinds; keep the header of nccl-tests' output."
        )
    library = _LIBRARY.search(text)
    origin = Origin(
        device=device_called(device or run.gpus[0]),
        environment=Environment(nccl=_version(library[1]) if library else None),
        method=Method(name="wall"),
        source=Source(author=author, tool="nccl-tests", sha256=file_sha256(path)),
    )
    for rows in rows_of(run.timed):
        found.keep(rows, origin)
    return found


def parse_run(text: str, path: Path, found: Found, operator: str | None = None) -> Run:
    """Read the table that nccl-tests printed and the ranks above it. Raises WhatifError if there is none."""
    ranks = [match for line in text.splitlines() if (match := _RANK.search(line))]
    started = _STARTING.search(text)
    name = operator or _OPERATORS.get((started[1] if started else path.name.split("_perf")[0].split(".")[0]).lower())
    if name is None or name not in _OPERATORS.values():
        raise WhatifError(
            f"{path}: expected the name of the collective in the output, got no known one; name the "
            f"file after it, such as all_reduce_perf.txt, or import it with --operator "
            f"({', '.join(sorted(_OPERATORS.values()))})."
        )
    timed = _rows(text, path, name, len(ranks), len({match[2] for match in ranks}), found)
    if not timed:
        raise WhatifError(f"{path}: expected the table of nccl-tests' output, got no rows.")
    return Run(name, sorted({match[3] for match in ranks}), len(ranks), timed)


def _rows(text: str, path: Path, name: str, ranks: int, nodes: int, found: Found) -> list[Timed]:
    columns: list[str] = []
    timed = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words[:2] == ["#", "size"]:
            columns = words[1:]
            continue
        if not columns or not words or not words[0].isdecimal():
            continue
        if len(words) != len(columns) or len(words[0]) > _MOST_DIGITS:
            found.dropped["lines of the table with a wrong number of columns or an impossible size"] += 1
            continue
        dtype = _TYPES.get(words[columns.index("type")], "unknown") if "type" in columns else "unknown"
        size = int(words[0])
        integers = (("bytes", size), ("ranks", ranks), ("nodes", nodes))
        places = [place for place, column in enumerate(columns) if column == "time"]
        for place, layout in zip(places, ("out_of_place", "in_place"), strict=False):
            try:
                time_us, rate = float(words[place]), float(words[place + 1])
            except (ValueError, IndexError):  # "N/A": this collective cannot run in place
                continue
            if size and time_us > 0:
                _check_rate(path, number, size, time_us, rate)
                timed.append(Timed(Described("collective", name, dtype, integers, layout=layout), time_us * 1e-6))
    return timed


def _check_rate(path: Path, number: int, size: int, time_us: float, rate: float) -> None:
    expected = size / time_us / 1e3
    if abs(rate - expected) > _RATE_TOLERANCE * expected + _RATE_ROUNDING:
        raise WhatifError(
            f"{path}: line {number}: expected a rate of {expected:.2f} GB/s from its size and time, got {rate:.2f}: "
            "its units are not those of nccl-tests."
        )


def _version(code: str) -> str:
    """NCCL_VERSION_CODE as people write it: X·10000 + Y·100 + Z since 2.9."""
    number = int(code[:9])
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
