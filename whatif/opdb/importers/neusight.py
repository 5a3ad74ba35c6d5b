"""Reader of NeuSight's measurements (Lee et al., ASPLOS 2025; MIT licence): its `collect` folder, or its archive.

One CSV for each device and operator: fp32 forward passes of PyTorch 2.1, times in milliseconds between CUDA events
around the call, so they include launches. A `linear` or `bmm` of (B, M, N, K) multiplies (M, N) by (N, K).
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from msgspec.structs import replace

from whatif.graph.described import LONGEST_TEXT
from whatif.graph.types import Float64
from whatif.opdb.devices import device_called
from whatif.opdb.importers.found import Found, file_sha256, integers, numbers, read_table
from whatif.opdb.importers.growing_overhead import growing_overhead
from whatif.opdb.provenance import Environment, Method, Origin, Source
from whatif.opdb.rows import Operators, Rows, measurements, operators
from whatif.opdb.work import work
from whatif.runtime.errors import WhatifError

NOTE = (
    "times corrected by importer: an overhead that grew from row to row, {:.3f} ms at the end of the table, is taken "
    "out (docs/opdb.md)"
)
_NEEDED = ("OPName", "Latency", "Device")
# NeuSight's operator names; those that end in u take a number as the second operand.
_ELEMENTWISE = {
    "add": ("add", 2), "mul": ("mul", 2), "div": ("div", 2), "pow": ("pow", 2),
    "addu": ("add_scalar", 1), "mulu": ("mul_scalar", 1), "divu": ("div_scalar", 1), "powu": ("pow_scalar", 1),
    "relu": ("relu", 1), "gelu": ("gelu", 1), "tanh": ("tanh", 1),
}  # fmt: skip
_NORMALIZATION = {"ln": "layer_norm", "softmax": "softmax"}
_MATMUL = ("bmm", "linear")
_LARGEST_MEMBER_BYTES = 200_000_000
_MOST_MEMBERS = 5000
# FOLDER/OPERATOR/VERSION/DEVICE.csv; FOLDER/OPERATOR.csv repeats the same rows.
_FEWEST_FOLDERS = 2


def read_neusight(path: Path, *, author: str | None = None) -> Found:
    """Read all tables below ``path``: a folder, one CSV, or a .tar.gz. Raises WhatifError if there are none."""
    found = Found()
    tables = [table for where, file in _files(path) if (table := _table(file, where, found)) is not None]
    if not tables:
        raise WhatifError(f"{path}: expected NeuSight's tables OPERATOR/VERSION/DEVICE.csv, got none.")
    everything = pd.concat(tables, ignore_index=True)
    nameless = everything["Device"].isna()
    found.drop(nameless.sum(), "no device is named")
    everything = everything[~nameless].copy()
    for column in ("Torch Version", "CUDNN Version", "CUDA Version"):
        everything[column] = everything[column].astype(str) if column in everything else ""
    sha256 = file_sha256(path) if path.is_file() else None
    keys = ["Device", "Torch Version", "CUDNN Version", "CUDA Version"]
    for (reported, torch, cudnn, cuda), table in everything.groupby(keys, sort=True, dropna=False):
        origin = Origin(
            device=device_called(str(reported)),
            environment=Environment(
                framework="pytorch", framework_version=str(torch).removeprefix("p"), cudnn=str(cudnn), cuda=str(cuda)
            ),
            method=Method(name="event_pair", includes_launch=True),
            source=Source(
                author=author or "NeuSight (sitar-lab)", tool="neusight", licence="MIT", sha256=sha256,
                uri="https://github.com/sitar-lab/NeuSight",
            ),
        )  # fmt: skip
        for rows, corrected in _families(table, found):
            note = None if corrected is None else NOTE.format(corrected)
            found.keep(rows, replace(origin, source=replace(origin.source, note=note)))
    return found


def _files(path: Path) -> Iterator[tuple[str, io.BytesIO | Path]]:
    try:
        if path.is_dir():
            for file in sorted(path.rglob("*.csv")):
                if len(file.relative_to(path).parts) > _FEWEST_FOLDERS:
                    yield str(file), file
        elif path.suffix == ".csv":
            yield str(path), path
        else:
            with tarfile.open(path, "r:*") as archive:
                yield from _members(path, archive)
    except (OSError, tarfile.TarError, EOFError) as error:
        raise WhatifError(f"{path}: expected NeuSight's collect folder, a CSV or a .tar.gz, got '{error}'.") from error


def _members(path: Path, archive: tarfile.TarFile) -> Iterator[tuple[str, io.BytesIO]]:
    """The tables of an archive; nothing is unpacked onto the disk."""
    for place, member in enumerate(archive):
        if place >= _MOST_MEMBERS or member.size > _LARGEST_MEMBER_BYTES:
            raise WhatifError(f"{path}: expected a few hundred tables, got an archive of too many or too large files.")
        # The first folder of the archive is `collect` itself.
        if not member.isfile() or not member.name.endswith(".csv") or member.name.count("/") <= _FEWEST_FOLDERS:
            continue
        file = archive.extractfile(member)
        if file is not None:
            yield f"{path}: {member.name}", io.BytesIO(file.read())


def _table(file: io.BytesIO | Path, where: str, found: Found) -> pd.DataFrame | None:
    try:
        return read_table(file, where, _NEEDED)
    except WhatifError:
        found.dropped["tables that are not NeuSight's"] += 1
        return None


def _families(table: pd.DataFrame, found: Found) -> Iterator[tuple[Rows, float | None]]:
    """Return each family's rows, and the correction of the times at the end of the table, ms, if any."""
    named = table["OPName"].astype(str)
    known = named.isin([*_MATMUL, "conv", *_ELEMENTWISE, *_NORMALIZATION])
    found.drop((~known).sum(), "unknown operators")
    for chosen, build in (
        (named.isin(_MATMUL), _matmul),
        (named == "conv", _conv),
        (named.isin(list(_ELEMENTWISE)), _elementwise),
        (named.isin(list(_NORMALIZATION)), _normalization),
    ):
        if chosen.any():
            part = table[chosen]
            ops, t_s, corrected = build(part), numbers(part, "Latency") * 1e-3, None
            if ops.family == "conv":
                t_s, corrected = _without_growth(ops, t_s)
            yield measurements(ops, t_s, kernels=_kernels(part)), corrected


def _without_growth(ops: Operators, t_s: Float64) -> tuple[Float64, float | None]:
    """Times without the overhead that grew from row to row, and its final size, ms."""
    sound = np.isfinite(t_s) & (t_s > 0) & ops.possible()
    overhead = np.zeros(len(t_s))
    flops, moved = work(ops.take(sound))
    overhead[sound] = growing_overhead(flops, moved, t_s[sound])
    return t_s - overhead, float(overhead.max()) * 1e3 if overhead.any() else None


def _matmul(table: pd.DataFrame) -> Operators:
    sizes = {"batch": "B", "m": "M", "n": "K", "k": "N"}
    return operators(
        "matmul", {ours: integers(table, theirs) for ours, theirs in sizes.items()}, name=table["OPName"].tolist(),
        dtype="fp32",
    )  # fmt: skip


def _conv(table: pd.DataFrame) -> Operators:
    theirs = {
        "batch": "B", "in_channels": "Input_Channel", "out_channels": "Output_Channel", "in_h": "Input_Size",
        "in_w": "Input_Size", "kernel_h": "Kernel_Szie", "kernel_w": "Kernel_Szie", "stride_h": "Stride",
        "stride_w": "Stride", "padding_h": "Padding", "padding_w": "Padding",
    }  # fmt: skip
    columns = {ours: integers(table, name) for ours, name in theirs.items()}
    once = np.ones(len(table), dtype=np.int64)
    return operators(
        "conv", {**columns, "dilation_h": once, "dilation_w": once, "groups": once}, name="conv2d", dtype="fp32",
        layout="nchw",
    )  # fmt: skip


def _elementwise(table: pd.DataFrame) -> Operators:
    ours = [_ELEMENTWISE[name] for name in table["OPName"]]
    sides = [integers(table, name) for name in ("B", "H")]
    sane = np.all([(side > 0) & (side < 2**31) for side in sides], axis=0)  # so that their product does not overflow
    return operators(
        "elementwise",
        {"elements": np.where(sane, sides[0] * sides[1], -1), "tensors": np.array([n for _, n in ours])},
        name=[name for name, _ in ours], dtype="fp32",
    )  # fmt: skip


def _normalization(table: pd.DataFrame) -> Operators:
    return operators(
        "normalization", {"rows": integers(table, "B"), "columns": integers(table, "H")},
        name=[_NORMALIZATION[name] for name in table["OPName"]], dtype="fp32",
    )  # fmt: skip


def _kernels(table: pd.DataFrame) -> list[str]:
    """The kernels of each call; lists too long for a cell are truncated."""
    named = table["Kernels"] if "Kernels" in table else table.get("Kernel Name", pd.Series("", index=table.index))
    return [str(text).strip(";")[:LONGEST_TEXT] if isinstance(text, str) else "" for text in named]
