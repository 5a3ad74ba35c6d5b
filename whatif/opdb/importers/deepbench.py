"""Reader of the output of DeepBench's ``gemm_bench`` and ``conv_bench`` (baidu-research/DeepBench, Apache-2.0).

A table whose heading names its columns, in the order of ``code/nvidia/*.cu``; times are whole microseconds of one call,
averaged over some hundred calls in a row. Sizes are those after padding, which is what was measured: some number
formats need padded channels and rows. Import its spreadsheets of results as `csv`.
"""

from __future__ import annotations

import re
from pathlib import Path

from whatif.graph.described import Described
from whatif.opdb.devices import device_called
from whatif.opdb.importers.described import Timed, rows_of
from whatif.opdb.importers.found import Found, file_sha256, read_text
from whatif.opdb.provenance import Method, Origin, Source
from whatif.runtime.errors import WhatifError

_DTYPES = {"float": "fp32", "half": "fp16", "int8": "int8"}
_GEMM = ("m", "n", "k", "a_t", "b_t")
_CONV = ("w", "h", "c", "n", "k", "f_w", "f_h", "pad_w", "pad_h", "stride_w", "stride_h")
# Columns of times, and the phase of each; a heading names those that are present.
_PHASES = {"fwd_time": "fwd", "bwd_inputs_time": "dgrad", "bwd_params_time": "wgrad"}
# Padding by whether the program trains: the padded sizes, and the multiple (conv_bench.cu: eight
# channels for tensor cores; int8 inference four; gemm_bench.cu: int8, four rows).
_PADDED_CONV = {True: (("c",), 8), False: (("c", "w", "h"), 4)}
_PADDED_GEMM = (("m",), 4)


def read_deepbench(path: Path, *, device: str | None = None, author: str | None = None) -> Found:
    """Read the output of a run. Raises WhatifError if it has no table, or no device is given."""
    if device is None:
        raise WhatifError(f"{path}: expected the device that was measured, got none; name it with --device.")
    if path.is_dir():
        raise WhatifError(f"{path}: expected the output of a DeepBench program, got a folder; name the file.")
    found, timed, columns = Found(), [], None
    for line in read_text(path).splitlines():
        heading = _heading(line)
        if heading is not None:
            columns = heading
        elif columns is not None and re.match(r"\s*\d+\s+\d+\s+\d+\s", line):
            row = _row(line.split(), columns)
            if row is None:
                found.dropped["a line that does not match its heading, or is marked as not measured"] += 1
            else:
                timed += row
    if columns is None:
        raise WhatifError(f"{path}: expected the tables that gemm_bench or conv_bench print, got none of them.")
    origin = Origin(
        device=device_called(device), method=Method(name="wall", cache="hot"),
        source=Source(author=author, tool="DeepBench", sha256=file_sha256(path),
                      note="whole microseconds of calls that follow one another"),
    )  # fmt: skip
    for rows in rows_of(timed):
        found.keep(rows, origin)
    return found


def _heading(line: str) -> tuple[str, ...] | None:
    words = tuple(re.sub(r"\((usec|ms)\)", "", line).split())
    if words[: len(_GEMM) + 1] == (*_GEMM, "precision") or words[: len(_CONV) + 1] == (*_CONV, "precision"):
        return words
    return None


def _row(words: list[str], columns: tuple[str, ...]) -> list[Timed] | None:
    is_conv = columns[0] == "w"
    names = _CONV if is_conv else _GEMM
    cells = dict(zip(columns, words, strict=False))
    times = [name for name in columns if name == "time" or name in _PHASES]
    numbers = {name: cells.get(name, "") for name in (*names, *times)}
    if any(not re.fullmatch(r"\d{1,9}", number) for number in numbers.values()) or cells["precision"] not in _DTYPES:
        return None
    sizes = {name: int(numbers[name]) for name in names}
    # A column marks padding; its name has two spellings.
    if any(name.startswith("pad_ker") and cells.get(name) == "1" for name in columns):
        padded, to = _PADDED_CONV["bwd_inputs_time" in columns] if is_conv else _PADDED_GEMM
        sizes |= {name: -(-sizes[name] // to) * to for name in padded}
    dtype = _DTYPES[cells["precision"]]
    return [
        Timed(_operator(sizes, dtype, _PHASES.get(name, "fwd"), is_conv=is_conv), int(cells[name]) * 1e-6)
        for name in times
    ]


def _operator(sizes: dict[str, int], dtype: str, phase: str, *, is_conv: bool) -> Described:
    if not is_conv:
        layout = "".join("t" if sizes[name] else "n" for name in ("a_t", "b_t"))
        integers = {"batch": 1, "m": sizes["m"], "n": sizes["n"], "k": sizes["k"]}
        return Described("matmul", "mm", dtype, tuple(integers.items()), layout="" if layout == "nn" else layout)
    integers = {
        "batch": sizes["n"], "in_channels": sizes["c"], "out_channels": sizes["k"], "in_h": sizes["h"],
        "in_w": sizes["w"], "kernel_h": sizes["f_h"], "kernel_w": sizes["f_w"], "stride_h": sizes["stride_h"],
        "stride_w": sizes["stride_w"], "padding_h": sizes["pad_h"], "padding_w": sizes["pad_w"], "dilation_h": 1,
        "dilation_w": 1, "groups": 1,
    }  # fmt: skip
    return Described("conv", "conv2d", dtype, tuple(integers.items()), phase=phase)
