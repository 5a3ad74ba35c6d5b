"""Reader of the measurements in the package aiconfigurator-core (Apache-2.0): products, attention and collectives.

One Parquet file a system, framework and version, SYSTEM/gemm/FRAMEWORK/VERSION/gemm_perf.parquet. Times are
milliseconds of a kernel in a replayed CUDA graph, inputs warm in the second-level cache. A collective's `message_size`
counts elements: here they are bytes. Attention of a prompt (`context`) is causal, over `isl` new tokens and `step` that
are cached; of one more token (`generation`) over `step` + 1; that of an encoder is not causal. A cache in another
format than the products, and a window, are recorded in the operator's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from whatif.graph.described import DTYPE_BYTES, LONGEST_TEXT
from whatif.graph.types import Int64
from whatif.opdb.devices import device_called
from whatif.opdb.importers.found import Found, file_sha256, integers, numbers
from whatif.opdb.provenance import Environment, Method, Origin, Source
from whatif.opdb.rows import Operators, Rows, measurements, operators
from whatif.opdb.schema import MOST_ROWS
from whatif.opdb.shard import LARGEST_SHARD_BYTES, parquet
from whatif.runtime.errors import WhatifError, expecting

_DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32", "int8": "int8", "fp8": "fp8",
    "nvfp4": "fp4",
}  # fmt: skip
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
_GEMM = ("framework", "device", "op_name", "gemm_dtype", "m", "n", "k", "latency")
_NCCL = ("version", "device", "op_name", "nccl_dtype", "num_gpus", "message_size", "latency")
_ATTENTION = ("framework", "device", "op_name", "attn_dtype", "batch_size", "isl", "num_heads", "head_dim", "latency")
# Optional columns of the tables.
_OPTIONAL = ("num_key_value_heads", "step", "window_size", "beam_width", "kv_cache_dtype", "kernel_source")
# The longest name of a device, framework or kernel, characters.
LONGEST_NAME = 500
# Systems whose table of collectives is broken: 8 GPUs at 1 to 2 GB/s.
_BROKEN_COLLECTIVES = ("l40s",)


def read_aiconfigurator(path: Path, *, author: str | None = None) -> Found:
    """Read the tables of products, attention and collectives below ``path``. Raises WhatifError if there are none."""
    found = Found()
    files = [file for file in sorted(path.rglob("*.parquet")) if file.name in _TABLES]
    if not files:
        raise WhatifError(f"{path}: expected the folder systems/data of aiconfigurator-core, got none of its tables.")
    for file in files:
        _read_file(file, author, found)
    return found


def _read_file(file: Path, author: str | None, found: Found) -> None:
    columns, operators_in = _TABLES[file.name]
    table = _table(file, columns)
    if table is None:
        found.dropped["a table without the columns needed (rows not counted)"] += 1
        return
    is_nccl = file.name == "nccl_perf.parquet"
    if is_nccl and any(part in _BROKEN_COLLECTIVES for part in file.parts):
        found.dropped["a table of collectives that is known to be broken"] += len(table)
        return
    library = "version" if is_nccl else "framework"
    nameless = table[["device", library]].isna().any(axis=1)
    found.drop(nameless.sum(), "no device, framework or version is given")
    version = file.parent.name
    for reported, part in table.groupby("device", sort=True):
        for library_name, rows in part.groupby(library, sort=True):
            # Folder and table both give NCCL's version; if they differ, it is unknown.
            agreed = not is_nccl or str(library_name) == version
            origin = Origin(
                device=device_called(str(reported)),
                environment=Environment(
                    framework=None if is_nccl else str(library_name).lower(),
                    framework_version=None if is_nccl else version,
                    nccl=version if is_nccl and agreed else None,
                ),
                method=Method(name="graph_replay", includes_launch=False, cache="hot"),
                source=Source(
                    author=author or "NVIDIA", tool="aiconfigurator-core", licence="Apache-2.0",
                    sha256=file_sha256(file), uri="https://pypi.org/project/aiconfigurator-core",
                    note=None if agreed else f"NCCL {version} by its folder, {library_name} by its table",
                ),
            )  # fmt: skip
            for measured in operators_in(rows, found):
                found.keep(measured, origin)


def _table(file: Path, needed: tuple[str, ...]) -> pd.DataFrame | None:
    reader = parquet()
    import pyarrow as pa

    damage = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError)
    with expecting(f"{file}: expected a Parquet file", *damage):
        with reader.ParquetFile(file) as opened:
            names, rows = opened.schema_arrow.names, opened.metadata.num_rows
            texts = [field.name for field in opened.schema_arrow if pa.types.is_string(field.type)]
            groups = range(opened.metadata.num_row_groups)
            stored = sum(opened.metadata.row_group(group).total_byte_size for group in groups)
        if not 0 < rows <= MOST_ROWS or not 0 <= stored <= LARGEST_SHARD_BYTES:
            raise WhatifError(f"{file}: expected a table of measurements, got {rows:,} rows of {stored:,} bytes.")
        if set(needed) - set(names):
            return None
        columns = [*needed, *(name for name in _OPTIONAL if name in names)]
        # One long text a million times is small in the file: check lengths before decoding.
        with reader.ParquetFile(file, read_dictionary=texts) as opened:
            table = opened.read(columns=columns, use_threads=False)
        for name in set(texts) & set(columns):
            longest = max(
                (len(t or "") for chunk in table[name].chunks for t in chunk.dictionary.to_pylist()), default=0
            )
            if longest > LONGEST_NAME:
                raise WhatifError(f"{file}: expected names in {name!r}, got a text of {longest:,} characters.")
        frame = table.to_pandas(strings_to_categorical=False)
    return pd.DataFrame(frame.astype(dict.fromkeys(set(texts) & set(columns), object)))


def _products(table: pd.DataFrame, found: Found) -> Iterator[Rows]:
    chosen, dtypes = _known(table, "gemm_dtype", table["op_name"].notna(), found)
    if len(chosen):
        sizes = {name: integers(chosen, name) for name in ("m", "n", "k")}
        yield _timed(operators("matmul", {"batch": 1, **sizes}, name="linear", dtype=dtypes), chosen)


def _collectives(table: pd.DataFrame, found: Found) -> Iterator[Rows]:
    chosen, dtypes = _known(table, "nccl_dtype", table["op_name"].isin(list(_COLLECTIVES)), found)
    if len(chosen):
        element = np.array([int(DTYPE_BYTES[dtype]) for dtype in dtypes])  # NCCL sends whole bytes
        moved = integers(chosen, "message_size") * element
        yield _timed(
            operators(
                "collective", {"bytes": moved, "ranks": integers(chosen, "num_gpus"), "nodes": 1},
                name=[_COLLECTIVES[name] for name in chosen["op_name"]], dtype=dtypes,
            ), chosen,
        )  # fmt: skip


def _attention(table: pd.DataFrame, found: Found) -> Iterator[Rows]:
    one_beam = _column_or(table, "beam_width", 1) == 1
    known = table["op_name"].isin(("context_attention", "generation_attention", "encoder_attention")) & one_beam
    chosen, dtypes = _known(table, "attn_dtype", known, found)
    if not len(chosen):
        return
    new, cached, heads = integers(chosen, "isl"), _column_or(chosen, "step", 0), integers(chosen, "num_heads")
    yield _timed(
        operators(
            "attention",
            {
                "batch": integers(chosen, "batch_size"), "query_length": new,
                "key_length": np.where((new > 0) & (cached >= 0), new + cached, -1), "heads": heads,
                # An encoder lists only its heads.
                "kv_heads": _column_or(chosen, "num_key_value_heads", 0) if "num_key_value_heads" in chosen else heads,
                "head_size": integers(chosen, "head_dim"),
                "causal": (chosen["op_name"] == "context_attention").to_numpy(),
            },
            name="attention", dtype=dtypes, layout=_layouts(chosen, dtypes),
        ), chosen,
    )  # fmt: skip


def _layouts(table: pd.DataFrame, dtypes: list[str]) -> list[str]:
    """Layouts: the attention window in tokens, and the format of keys and values if it differs."""
    windows = _column_or(table, "window_size", 0).tolist()
    stored = table["kv_cache_dtype"].astype(str) if "kv_cache_dtype" in table else [""] * len(table)
    return [
        " ".join(filter(None, (f"window={window}" if window > 0 else "", _cache(_DTYPES.get(cache, cache), dtype))))
        for window, cache, dtype in zip(windows, stored, dtypes, strict=True)
    ]


def _cache(cache: str, dtype: str) -> str:
    return f"cache={cache[:40]}" if cache and cache != dtype else ""


def _column_or(table: pd.DataFrame, column: str, default: int) -> Int64:
    return integers(table, column) if column in table else np.full(len(table), default, dtype=np.int64)


def _known(
    table: pd.DataFrame, dtype_column: str, wanted: pd.Series[bool], found: Found
) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows with a known operator and number format, and those formats; count the others as dropped."""
    formats = table[dtype_column].astype(str)
    known = formats.isin(list(_DTYPES)) & wanted
    # Block-scaled fp8 and quantized weights are other operators than a product of that format.
    found.drop((~known).sum(), "quantized products and operators that the database cannot describe")
    return table[known], [_DTYPES[name] for name in formats[known]]


def _timed(ops: Operators, table: pd.DataFrame) -> Rows:
    kernels = [str(name)[:LONGEST_TEXT] for name in table["kernel_source"]] if "kernel_source" in table else None
    return measurements(ops, numbers(table, "latency") * 1e-3, **({} if kernels is None else {"kernels": kernels}))


# Tables that are read: the required columns, and the function that makes operators of the rows.
_TABLES: dict[str, tuple[tuple[str, ...], Callable[[pd.DataFrame, Found], Iterator[Rows]]]] = {
    "gemm_perf.parquet": (_GEMM, _products),
    "nccl_perf.parquet": (_NCCL, _collectives),
    "context_attention_perf.parquet": (_ATTENTION, _attention),
    "generation_attention_perf.parquet": (_ATTENTION, _attention),
    "encoder_attention_perf.parquet": (_ATTENTION, _attention),
}
