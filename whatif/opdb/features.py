"""Features of an operator on a device for the learned estimators: logarithms of sizes and work, tiles, waves, shares.

A model learns the log of measured time over ``reference_s``, a simple estimate from the device's facts: a small factor
is left to learn, and predictions extrapolate beyond measured sizes. Both are computed for whole tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from whatif.graph.described import DTYPES, FAMILIES
from whatif.graph.types import Float64
from whatif.hardware.gpu import Gpu
from whatif.opdb.data_sheet import MATRIX_FAMILIES, rate_tflops, runs_at
from whatif.opdb.rows import Operators
from whatif.opdb.work import output_size, work

_Columns = dict[str, Float64]

# Increased when the meaning of a feature or the reference changes: models of another version are refused.
FEATURES_VERSION = 1
# Families that can be learned: the work of the others does not relate to a device's facts.
LEARNABLE = ("matmul", "conv", "elementwise", "normalization", "attention")
# The shortest time of a kernel, and of one with its launch: the data sheet's values when models were
# fitted, fixed for this ``FEATURES_VERSION``.
FLOOR_S, _LAUNCH_FLOOR_S = 3e-6, 20e-6
# Output tiles that libraries cut products into (NVIDIA, "Matrix Multiplication Background User's Guide").
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 32))
# Threads of one SM times elements of a thread: a wave of an elementwise kernel (ATen's vectorized kernels).
_ELEMENTS_AN_SM = 2048 * 4


class Sheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts of a device that features need, for one family: TFLOP/s by number format, GB/s, MB, SMs.

    The rates are peaks; those of fp32 products are sustained rates, if known.
    """

    sm_count: float
    tflops: dict[str, float]
    memory_gbyte_s: float
    l2_mbyte: float


def sheet_of(gpu: Gpu, family: str) -> Sheet:
    """Return a GPU's facts for a family; fp32 means fp32: NeuSight's convolutions on an A100 ran no tf32 kernel."""
    rates = {dtype: rate_tflops(gpu, dtype, family, tf32=False) for dtype in DTYPES}
    if family == "matmul" and gpu.fp32_sustained_tflops is not None:
        rates |= {dtype: gpu.fp32_sustained_tflops for dtype in DTYPES if runs_at(dtype) == "fp32"}
    return Sheet(
        sm_count=float(gpu.sm_count), tflops=rates, memory_gbyte_s=float(gpu.memory_gbyte_s),
        l2_mbyte=float(gpu.l2_mbyte),
    )  # fmt: skip


def reference_s(ops: Operators, sheet: Sheet, *, launch: bool) -> Float64:
    """Return the reference for measured times, seconds, shape (n,): the roofline in whole tiles, and a floor."""
    compute, memory = _roof(ops, sheet)
    if ops.family == "matmul":
        compute = compute * _best_share(_product(ops), sheet)
    return np.asarray(np.maximum(compute, memory) + (_LAUNCH_FLOOR_S if launch else FLOOR_S))


def features(ops: Operators, sheet: Sheet, names: Sequence[str], *, across: bool) -> tuple[Float64, tuple[str, ...]]:
    """Return the features of n operators, shape (n, f), and their names.

    ``names`` are the operators that a model covers, one indicator each if there are several; ``across`` adds columns
    that distinguish devices.
    """
    columns = _COLUMNS[ops.family](ops, sheet)
    if len(names) > 1:
        table = np.array([[name == known for known in names] for name in ops.texts["name"].table] or [[False]])
        columns |= {
            f"is {known}": column for known, column in zip(names, table[ops.texts["name"].codes].T, strict=True)
        }
    if across:
        columns |= _device_columns(ops, sheet)
    return np.stack([np.asarray(c, dtype=np.float64) for c in columns.values()], axis=1), tuple(columns)


def _logs(columns: Mapping[str, npt.NDArray[np.generic]]) -> _Columns:
    return {f"log2 {name}": np.log2(np.maximum(np.asarray(c, dtype=np.float64), 1e-12)) for name, c in columns.items()}


def _rates(ops: Operators, sheet: Sheet) -> Float64:
    table = [sheet.tflops.get(dtype, sheet.tflops["fp32"]) for dtype in ops.texts["dtype"].table] or [1.0]
    return np.asarray(np.array(table)[ops.texts["dtype"].codes])


def _roof(ops: Operators, sheet: Sheet) -> tuple[Float64, Float64]:
    """Seconds of the arithmetic and of the memory traffic at peak rates, shape (n,) both."""
    flops, moved = work(ops)
    return flops / 1e12 / _rates(ops, sheet), moved / 1e9 / sheet.memory_gbyte_s


def _roof_columns(ops: Operators, sheet: Sheet) -> _Columns:
    flops, moved = work(ops)
    compute, memory = _roof(ops, sheet)
    roof = np.maximum(compute, memory)
    columns = {"bytes": moved, "memory us": memory * 1e6, "share of cache": moved / (sheet.l2_mbyte * 1e6)}
    if flops.any() or ops.family in MATRIX_FAMILIES:
        columns |= {
            "flops": flops, "compute us": compute * 1e6, "roof us": roof * 1e6,
            "intensity over ridge": np.maximum(compute, 1e-12) / np.maximum(memory, 1e-12),
        }  # fmt: skip
    return _logs(columns)


def _device_columns(ops: Operators, sheet: Sheet) -> _Columns:
    rate = _rates(ops, sheet)
    size = len(ops)
    return _logs(
        {
            "peak of an SM": rate / sheet.sm_count,
            "bandwidth of an SM": np.full(size, sheet.memory_gbyte_s / sheet.sm_count),
            "cache of an SM": np.full(size, sheet.l2_mbyte / sheet.sm_count),
            "ridge": rate * 1e3 / sheet.memory_gbyte_s,
        }
    )


def _product(ops: Operators) -> _Columns:
    """The (batched) matrix product of an operator; for a convolution that of its implicit GEMM."""
    c = ops.floats
    if ops.family == "matmul":
        return {name: c[name] for name in ("batch", "m", "n", "k")}
    groups = np.maximum(c["groups"], 1)
    return {
        "batch": groups, "m": c["batch"] * output_size(c, "h") * output_size(c, "w"),
        "n": c["out_channels"] / groups, "k": c["in_channels"] / groups * c["kernel_h"] * c["kernel_w"],
    }  # fmt: skip


def _tile_counts(p: _Columns, sheet: Sheet, rows: int, columns: int) -> tuple[Float64, Float64]:
    """Waves of a tiling, and executed over useful work, shape (n,) both."""
    tiles = p["batch"] * np.ceil(p["m"] / rows) * np.ceil(p["n"] / columns)
    waves = np.ceil(tiles / sheet.sm_count)
    useful = np.maximum(p["batch"] * p["m"] * p["n"], 1.0)
    return waves, waves * sheet.sm_count * rows * columns / useful


def _best_share(p: _Columns, sheet: Sheet) -> Float64:
    """Executed over useful work with the best tiling, shape (n,)."""
    return np.asarray(np.min([_tile_counts(p, sheet, *tile)[1] for tile in _TILES], axis=0))


def _tile_columns(p: _Columns, sheet: Sheet) -> _Columns:
    columns: _Columns = {}
    for rows, wide in _TILES:
        waves, share = _tile_counts(p, sheet, rows, wide)
        columns |= {f"waves {rows}x{wide}": waves, f"executed {rows}x{wide}": share}
        tiles = p["batch"] * np.ceil(p["m"] / rows) * np.ceil(p["n"] / wide)
        columns[f"tiles an SM {rows}x{wide}"] = tiles / sheet.sm_count
    return _logs(columns)


def _divisible(columns: Mapping[str, Float64]) -> _Columns:
    """The largest power of two up to 256 that divides each size, log2: what alignment and whole tiles depend on."""
    result = {}
    for name, values in columns.items():
        integers = np.maximum(values, 1).astype(np.int64)
        result[f"two in {name}"] = np.log2(np.minimum(integers & -integers, 256).astype(np.float64))
    return result


def _matmul(ops: Operators, sheet: Sheet) -> _Columns:
    p = _product(ops)
    square = {"m over n": p["m"] / p["n"], "k over n": p["k"] / p["n"], "output": p["batch"] * p["m"] * p["n"]}
    tiles = _tile_columns(p, sheet)
    best = _logs({"best share": _best_share(p, sheet)})
    return {**_logs({**p, **square}), **_roof_columns(ops, sheet), **tiles, **best, **_divisible(p)}


def _conv(ops: Operators, sheet: Sheet) -> _Columns:
    c, p = ops.floats, _product(ops)
    sizes = {name: c[name] for name in FAMILIES["conv"].sizes}
    out = {"out_h": output_size(c, "h"), "out_w": output_size(c, "w")}
    modes = {name: c[name] for name in ("kernel_h", "kernel_w", "stride_h", "dilation_h", "groups")}
    out |= _winograd(c, out["out_h"], out["out_w"], sheet)
    ratios = {
        "channels ratio": c["in_channels"] / np.maximum(c["out_channels"], 1),
        "product m": p["m"],
        "product k": p["k"],
    }
    aligned = _divisible({name: c[name] for name in ("batch", "in_channels", "out_channels")} | {"out_w": out["out_w"]})
    return {
        **_logs({**sizes, **out, **modes, **ratios}),
        **_roof_columns(ops, sheet),
        **_tile_columns(p, sheet),
        **aligned,
    }


# The output of one block of cuDNN's fused Winograd kernel: channels, rows, columns (from the grids in NeuSight's
# profiles).
_WINOGRAD_BLOCK = (32, 8, 16)


def _winograd(c: _Columns, out_h: Float64, out_w: Float64, sheet: Sheet) -> _Columns:
    """The cost of 3x3 convolutions that first transform input tiles: F(2x2) in one kernel, F(4x4) in several."""
    channels, rows, columns = _WINOGRAD_BLOCK
    blocks = c["batch"] * np.ceil(c["out_channels"] / channels) * np.ceil(out_h / rows) * np.ceil(out_w / columns)
    waves = np.ceil(blocks / sheet.sm_count)
    # 36 products of (tiles, in_channels) by (in_channels, out_channels), and their operands through memory.
    tiles = c["batch"] * np.ceil(out_h / 4) * np.ceil(out_w / 4)
    products = 36 * tiles * c["in_channels"] * c["out_channels"]
    moved = 36 * tiles * (c["in_channels"] + c["out_channels"])
    padded = {
        f"whole {side}": np.ceil(out_h / side) * np.ceil(out_w / side) * side * side / np.maximum(out_h * out_w, 1)
        for side in (2, 4, 6)
    }
    return {
        "fused waves": waves, "fused waves of channels": waves * c["in_channels"], "products of tiles": products,
        "bytes of tiles": moved, "tiles an SM": tiles / sheet.sm_count, **padded,
    }  # fmt: skip


def _elementwise(ops: Operators, sheet: Sheet) -> _Columns:
    c = ops.floats
    waves = c["elements"] / (_ELEMENTS_AN_SM * sheet.sm_count)
    columns = {"elements": c["elements"], "tensors": c["tensors"], "waves": waves, "whole waves": np.ceil(waves)}
    return {**_logs(columns), **_roof_columns(ops, sheet), **_divisible({"elements": c["elements"]})}


def _normalization(ops: Operators, sheet: Sheet) -> _Columns:
    c = ops.floats
    # One row per block, or per warp if rows are short.
    blocks = {"rows an SM": c["rows"] / sheet.sm_count, "whole rows an SM": np.ceil(c["rows"] / sheet.sm_count / 8)}
    padded = {"whole columns": np.ceil(c["columns"] / 1024) * 1024 / c["columns"], "warps": np.ceil(c["columns"] / 32)}
    power = {"next power": np.exp2(np.ceil(np.log2(c["columns"]))) / c["columns"]}
    columns = {
        "rows": c["rows"],
        "columns": c["columns"],
        "elements": c["rows"] * c["columns"],
        **blocks,
        **padded,
        **power,
    }
    return {**_logs(columns), **_roof_columns(ops, sheet), **_divisible({"columns": c["columns"]})}


def _attention(ops: Operators, sheet: Sheet) -> _Columns:
    c = ops.floats
    blocks = c["batch"] * c["heads"] * np.ceil(c["query_length"] / 128)
    blocks_and_waves = {"blocks an SM": blocks / sheet.sm_count, "waves": np.ceil(blocks / sheet.sm_count)}
    sizes = {name: c[name] for name in FAMILIES["attention"].attributes}
    return {
        **_logs({**sizes, **blocks_and_waves, "queries a key head": c["heads"] / np.maximum(c["kv_heads"], 1)}),
        **_roof_columns(ops, sheet),
    }


_COLUMNS = {
    "matmul": _matmul, "conv": _conv, "elementwise": _elementwise, "normalization": _normalization,
    "attention": _attention,
}  # fmt: skip
