"""Reader of the measurements in the package aiconfigurator-core (Apache-2.0): matrix products and NCCL collectives.

One Parquet file a system, framework and version, SYSTEM/gemm/FRAMEWORK/VERSION/gemm_perf.parquet. Times are
milliseconds of a kernel in a replayed CUDA graph, inputs warm in the second-level cache. A collective's `message_size`
counts elements: here they are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from whatif.errors import WhatifError
from whatif.opdb.devices import device_called
from whatif.opdb.importers.found import Found, file_sha256, integers, numbers
from whatif.opdb.provenance import Environment, Method, Origin, Source
from whatif.opdb.rows import Operators, measurements, operators
from whatif.opdb.schema import MOST_ROWS
from whatif.opdb.shard import parquet

_DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32", "int8": "int8", "fp8": "fp8",
    "nvfp4": "fp4",
}  # fmt: skip
_ELEMENT_BYTES = {"half": 2, "int8": 1}
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
_GEMM = ("framework", "device", "op_name", "gemm_dtype", "m", "n", "k", "latency")
_NCCL = ("version", "device", "op_name", "nccl_dtype", "num_gpus", "message_size", "latency")
_FILES = {"gemm_perf.parquet": _GEMM, "nccl_perf.parquet": _NCCL}
# Systems whose table of collectives is broken: 8 GPUs at 1 to 2 GB/s.
_BROKEN_COLLECTIVES = ("l40s",)


def read_aiconfigurator(path: Path, *, author: str | None = None) -> Found:
    """Read the tables of matrix products and collectives below ``path``. Raises WhatifError where there are none."""
    found = Found()
    files = [file for file in sorted(path.rglob("*.parquet")) if file.name in _FILES]
    if not files:
        raise WhatifError(f"{path}: expected the folder systems/data of aiconfigurator-core, got none of its tables.")
    for file in files:
        _read_file(file, author, found)
    return found


def _read_file(file: Path, author: str | None, found: Found) -> None:
    table = _table(file, _FILES[file.name])
    if table is None:
        found.dropped["a table that does not tell its device (its rows are not counted)"] += 1
        return
    is_gemm = file.name == "gemm_perf.parquet"
    if not is_gemm and any(part in _BROKEN_COLLECTIVES for part in file.parts):
        found.dropped["a table of collectives that is known to be broken"] += len(table)
        return
    library = "framework" if is_gemm else "version"
    nameless = table[["device", library]].isna().any(axis=1)
    if nameless.any():
        found.dropped["no device, or no framework or version, is named"] += int(nameless.sum())
    version = file.parent.name
    for told, part in table.groupby("device", sort=True):
        for named, rows in part.groupby(library, sort=True):
            # Both name NCCL's version; where they contradict one another, it is not known.
            agreed = is_gemm or str(named) == version
            origin = Origin(
                device=device_called(str(told)),
                environment=Environment(
                    framework=str(named).lower() if is_gemm else None,
                    framework_version=version if is_gemm else None,
                    nccl=None if is_gemm or not agreed else version,
                ),
                method=Method(name="graph_replay", includes_launch=False, cache="hot"),
                source=Source(
                    author=author or "NVIDIA", tool="aiconfigurator-core", licence="Apache-2.0",
                    sha256=file_sha256(file), uri="https://pypi.org/project/aiconfigurator-core",
                    note=None if agreed else f"NCCL {version} by its folder, {named} by its table",
                ),
            )  # fmt: skip
            for ops, chosen in _operators(rows, is_gemm=is_gemm, found=found):
                found.keep(measurements(ops, numbers(chosen, "latency") * 1e-3), origin)


def _table(file: Path, needed: tuple[str, ...]) -> pd.DataFrame | None:
    reader = parquet()
    import pyarrow as pa

    try:
        with reader.ParquetFile(file) as opened:
            if not 0 < opened.metadata.num_rows <= MOST_ROWS:
                raise WhatifError(f"{file}: expected a table of measurements, got {opened.metadata.num_rows:,} rows.")
            if set(needed) - set(opened.schema_arrow.names):
                return None
            table = opened.read(columns=list(needed), use_threads=False).to_pandas()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise WhatifError(f"{file}: expected a Parquet file, got '{str(error).splitlines()[0][:120]}'.") from error
    return pd.DataFrame(table)


def _operators(table: pd.DataFrame, *, is_gemm: bool, found: Found) -> Iterator[tuple[Operators, pd.DataFrame]]:
    told = table["gemm_dtype" if is_gemm else "nccl_dtype"].astype(str)
    known = told.isin(list(_DTYPES)) & (is_gemm | table["op_name"].isin(list(_COLLECTIVES)))
    if (~known).any():
        # Block-scaled fp8 and quantized weights are other operators than a product of that format.
        found.dropped["quantized products and collectives that the database has no word for"] += int((~known).sum())
    chosen = table[known]
    if not len(chosen):
        return
    dtypes = [_DTYPES[name] for name in told[known]]
    if is_gemm:
        sizes = {name: integers(chosen, name) for name in ("m", "n", "k")}
        yield operators("matmul", {"batch": 1, **sizes}, name="linear", dtype=dtypes), chosen
    else:
        element = np.array([_ELEMENT_BYTES.get(name, 1) for name in told[known]])
        moved = integers(chosen, "message_size") * element
        yield operators(
            "collective", {"bytes": moved, "ranks": integers(chosen, "num_gpus"), "nodes": 1},
            name=[_COLLECTIVES[name] for name in chosen["op_name"]], dtype=dtypes,
        ), chosen  # fmt: skip
