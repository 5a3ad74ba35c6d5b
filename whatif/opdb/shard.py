"""Shards: the rows of one contribution as a Parquet file. Columns are checked, nothing is unpickled."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from whatif.graph.described import FAMILIES
from whatif.opdb.rows import Operators, Rows, Texts
from whatif.opdb.schema import MOST_ROWS, TEXTS, TIMES
from whatif.runtime.errors import WhatifError, expecting

# Text may decompress ten-thousandfold, so the size stated in the file is checked before decompressing.
LARGEST_SHARD_BYTES = 2_000_000_000
_TEXT_COLUMNS = (*TEXTS, "kernels")


def parquet() -> ModuleType:
    """Return pyarrow.parquet. Raises WhatifError, which says how to install it, if it is missing."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise WhatifError(
            "opdb: expected the package pyarrow, which reads and writes the database's Parquet files, got none; "
            "install it with `pip install 'whatif-profiler[opdb]'`."
        ) from error
    return pyarrow.parquet  # type: ignore[no-any-return]


def columns_of(family: str) -> tuple[str, ...]:
    """Return the columns of a shard, in the order in which they are written."""
    return (*TEXTS, *FAMILIES[family].attributes, *TIMES, "repeats", "kernels")


def write_shard(path: Path, rows: Rows) -> None:
    """Write rows as Parquet (zstd) to a path that no reader uses yet."""
    file_format = parquet()
    import pyarrow as pa

    arrays: list[Any] = []
    for name in columns_of(rows.family):
        if name in _TEXT_COLUMNS:
            texts = rows.kernels if name == "kernels" else rows.ops.texts[name]
            arrays.append(pa.DictionaryArray.from_arrays(pa.array(texts.codes), pa.array(texts.table, pa.string())))
        elif name in TIMES:
            arrays.append(pa.array(getattr(rows, name), pa.float64()))
        elif name == "repeats":
            arrays.append(pa.array(rows.repeats, pa.int32()))
        else:
            arrays.append(pa.array(rows.ops.integers[name], pa.int64()))
    table = pa.Table.from_arrays(arrays, names=list(columns_of(rows.family)))
    file_format.write_table(table, path, compression="zstd", store_schema=False, write_page_checksum=True)


def read_shard(path: Path, family: str) -> Rows:
    """Read the rows of a shard, sound or not. Raises WhatifError if it is no shard of ``family``."""
    file_format = parquet()
    import pyarrow as pa

    damage = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError)
    with expecting(f"{path}: expected a Parquet file of measurements", *damage, hint="; fetch it again"):
        with path.open("rb") as source:
            with file_format.ParquetFile(source) as file:
                _check_size(path, file.metadata)
                _check_columns(path, family, file.schema_arrow)
            source.seek(0)
            # Texts stay dictionary-encoded: decoded, one long text a million times would fill the memory.
            with file_format.ParquetFile(
                source, read_dictionary=list(_TEXT_COLUMNS), page_checksum_verification=True
            ) as file:
                table = file.read(use_threads=False)
        table.validate(full=True)  # codes beyond their table would be read from foreign memory
        return _rows(path, family, table)


def _check_size(path: Path, metadata: Any) -> None:
    unfolded = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    if not 0 < metadata.num_rows <= MOST_ROWS or not 0 <= unfolded <= LARGEST_SHARD_BYTES:
        raise WhatifError(
            f"{path}: expected a shard of 1 to {MOST_ROWS:,} rows, got one of {metadata.num_rows:,} rows and "
            f"{unfolded:,} bytes; fetch it again."
        )


def _check_columns(path: Path, family: str, schema: Any) -> None:
    import pyarrow as pa

    wanted = columns_of(family)
    if tuple(schema.names) != wanted:
        odd = sorted(set(schema.names) ^ set(wanted)) or ["their order"]
        raise WhatifError(
            f"{path}: expected the columns of the family {family!r}, got others ({', '.join(odd)[:120]}); "
            "it is not a shard of this version."
        )
    for name in wanted:
        kind = schema.field(name).type
        if name in _TEXT_COLUMNS:
            fits = pa.types.is_string(kind.value_type if pa.types.is_dictionary(kind) else kind)
        else:
            fits = kind == (pa.float64() if name in TIMES else pa.int32() if name == "repeats" else pa.int64())
        if not fits:
            raise WhatifError(f"{path}: expected the usual type of column {name!r}, got {kind}; fetch it again.")


def _rows(path: Path, family: str, table: Any) -> Rows:
    if any(table.column(name).null_count for name in table.column_names):
        raise WhatifError(f"{path}: expected a value in every cell, got empty cells; fetch it again.")
    texts = {name: _texts(table.column(name)) for name in _TEXT_COLUMNS}

    def numbers(name: str) -> Any:
        return np.ascontiguousarray(table.column(name).to_numpy())

    integers = {name: numbers(name) for name in FAMILIES[family].attributes}
    kernels = texts.pop("kernels")
    t, low, high = (numbers(name) for name in TIMES)
    return Rows(Operators(family, texts, integers), t, low, high, numbers("repeats"), kernels)


def _texts(column: Any) -> Texts:
    import pyarrow as pa

    combined = column.combine_chunks() if not pa.types.is_dictionary(column.type) else column.unify_dictionaries()
    combined = combined.combine_chunks() if isinstance(combined, pa.ChunkedArray) else combined
    encoded = combined if pa.types.is_dictionary(combined.type) else combined.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0)
    table = tuple(encoded.dictionary.to_pylist())
    return Texts(np.ascontiguousarray(encoded.indices.to_numpy(zero_copy_only=False), dtype=np.int32), table)
