"""Times of recorded kernels with their operands in another number format, or images in another layout.

One estimator chain, down to the data sheet, gives the operator's time before and after; the recorded time changes by
their ratio. A predicted step takes the chain's new time itself. Memory-bound kernels are estimated by their bytes. If a
recording has no shapes, typical operators of the kind in its names are used instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
from msgspec.structs import replace

from whatif.graph.described import DTYPE_BYTES, Described
from whatif.graph.edit import as_ids
from whatif.graph.kernels import DTYPES, MATRIX_FAMILIES, KernelFamily, classify_operator
from whatif.graph.order import each_once
from whatif.graph.structure_cache import of_columns
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Bool, Float64, Int8, Int32, Int64, Phase, TaskKind, among
from whatif.hardware.gpu import Gpu
from whatif.hardware.roofline import kernel_floor_ns
from whatif.ingest.operator_calls import as_attention
from whatif.models.durations.changed_operators import Changed, side_of
from whatif.models.durations.database import (
    SOURCE_OF_ANSWER,
    Ratios,
    best_ratio,
    chain_ratio,
    estimator_of,
    same_source_ratio,
)
from whatif.models.durations.estimator import Estimates, Source, device
from whatif.models.durations.measured import has_form
from whatif.opdb import data_sheet
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.exact import SIGMAS_OF_90
from whatif.opdb.importers.described import operators_of
from whatif.opdb.rows import Operators, operators
from whatif.opdb.tensor_convolutions import NHWC, converted, layout_changes

# The form of images in channels-last layout (``whatif.models.durations.measured``).
FORM = "channels_last"
# Substitutes for operators without recorded shapes: convolutions of ResNet-50 and products, each in several sizes, of
# which the one with the kernel's time is used.
_CONVOLUTIONS = ((64, 64, 56, 3), (64, 256, 56, 1), (512, 128, 28, 1), (256, 256, 14, 3), (1024, 256, 14, 1))
_BATCHES = (4, 32, 256)
_SIDES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Rows and terms of a sum over the columns: square products, few rows, long sums. Together they miss the products of
# models by 0.18 (log, rms), square ones alone by 0.21; their differences are a part of the range
# (``benchmarks/without_shapes.py``).
_ASPECTS = ((1, 1), (1 / 8, 1), (1, 16))
# Batches of products are attention's: tokens in a sequence, features of a head, and sequences times heads.
_TOKENS, _FEATURES, _HEADS = (128, 512, 2048), 64, (8, 32, 128, 512, 2048)
# Fused attention: sequences times heads, and growing sequences.
_FUSED_HEADS, _SEQUENCES = (16, 128, 1024), (32, 128, 512, 2048, 8192)


def _convolution(batch: int, sizes: tuple[int, int, int, int], phase: str) -> Described:
    channels, outputs, side, kernel = sizes
    integers = {
        "batch": batch, "in_channels": channels, "out_channels": outputs, "in_h": side, "in_w": side,
        **dict.fromkeys(("kernel_h", "kernel_w"), kernel), **dict.fromkeys(("padding_h", "padding_w"), kernel // 2),
        **dict.fromkeys(("stride_h", "stride_w", "dilation_h", "dilation_w", "groups"), 1),
    }  # fmt: skip
    return Described("conv", "conv2d", "fp32", tuple(integers.items()), phase)


def product_series(rows: float, terms: int) -> tuple[Described, ...]:
    """Return products of growing size; ``rows`` and ``terms`` of their sums are relative to the columns."""
    return tuple(_product("linear", 1, int(side * rows), side, side * terms) for side in _SIDES)


def _product(name: str, batch: int, m: int, n: int, k: int) -> Described:
    return Described("matmul", name, "fp32", (("batch", batch), ("m", m), ("n", n), ("k", k)))


def _attention(batch: int, tokens: int) -> Described:
    sizes = (
        ("batch", batch), ("query_length", tokens), ("key_length", tokens), ("heads", 1), ("kv_heads", 1),
        ("head_size", _FEATURES), ("causal", 0),
    )  # fmt: skip
    return Described("attention", "attention", "fp32", sizes)


# Series of growing size for each kind: products, convolutions, batches of products and fused attention of the forward
# pass, then those of the backward pass.
_USUAL: tuple[tuple[tuple[Described, ...], ...], ...] = tuple(
    series
    for phases in (("fwd",), ("dgrad", "wgrad"))
    for series in (
        tuple(product_series(*aspect) for aspect in _ASPECTS),
        tuple(
            tuple(_convolution(batch, sizes, phase) for batch in _BATCHES)
            for phase in phases
            for sizes in _CONVOLUTIONS
        ),
        tuple(
            tuple(_product("bmm", heads, tokens, *sizes) for heads in _HEADS)
            for tokens in _TOKENS
            for sizes in ((tokens, _FEATURES), (_FEATURES, tokens))
        ),
        tuple(tuple(_attention(heads, tokens) for tokens in _SEQUENCES) for heads in _FUSED_HEADS),
    )
)
_PRODUCT, _CONVOLUTION, _BATCH, _FUSED, _KINDS = range(5)  # the last: their number
# Daydream, section 5.1: "up to 3x on the most compute-intensive workloads". The range is our estimate: from nothing to
# the ratio of Volta's peaks.
_DAYDREAM = (1 / 3, 1 / 8, 1.0)


def in_form(
    graph: TaskGraph, tasks: Array, formats: Int8, *, dtype: str = "", layout: str | None = None, sheet: bool = False,
    target: tuple[Gpu, Int8] | None = None,
) -> Changed:  # fmt: skip
    """Return the times of matrix kernels ``tasks`` (mask or ids) in another number format, layout or on another device.

    ``formats``, shape (n_tasks,), are positions in `kernels.DTYPES`. ``layout`` is "nhwc", or "" for NCHW; "" and None
    keep the present format and layout. ``target`` is another device with the formats on it. Sources go down to the data
    sheet, or are it alone (``sheet``). Layout changes around a convolution are included, as separate kernels if the
    recording has them.
    """
    ids = as_ids(graph, tasks)
    side = side_of(graph)
    nothing = _same(len(ids), np.nan, Source.RECORDED)
    able = graph.on_gpu.mask[ids] & among(graph.family[ids], (*MATRIX_FAMILIES, KernelFamily.LAYOUT))
    table = [as_attention(op) for op in graph.info.operators]
    of_matrix = np.array([op.family in data_sheet.MATRIX_FAMILIES for op in table] + [False])
    places = np.flatnonzero(able & of_matrix[graph.called[ids]])
    if side is None or side.gpu is None or not len(places):
        return nothing
    matched = ids[places]
    sides = side, side if target is None else estimator_of(target[0].name)
    of_layout = graph.family[matched] == KernelFamily.LAYOUT
    # Transposes move data in the format in which their operator multiplies.
    now_in, then_in = (
        _multiplied(graph, matched, of_layout, form) for form in (formats, formats if target is None else target[1])
    )
    last = has_form(graph, FORM)[matched]
    backward = graph.phase[matched] == Phase.BACKWARD
    key = graph.called[matched].astype(np.int64) * len(DTYPES) ** 2 + now_in.astype(np.int64) * len(DTYPES) + then_in
    key = (key * 2 + last) * 2 + backward
    codes, first, row = np.unique(key, return_index=True, return_inverse=True)
    before, after = [], []
    for place in first.tolist():
        op = table[graph.called[matched[place]]]
        now = NHWC if last[place] else op.layout
        old = DTYPES[now_in[place]] or op.dtype
        before.append(_in_pass(converted(op, old, now), backward=bool(backward[place])))
        new = dtype or (old if target is None else DTYPES[then_in[place]] or op.dtype)
        changed = converted(op, new, now if layout is None else layout)
        after.append(_in_pass(changed, backward=bool(backward[place])))
    total, product, changes = _priced(
        sides, tuple(before), tuple(after), chain_ratio if graph.info.is_predicted else _one_source, sheet=sheet
    )
    # If layout changes are separate kernels, each kind of kernel takes its own ratio.
    transposed = each_once(graph.called[graph.family == KernelFamily.LAYOUT])
    apart = np.isfinite(changes.ratio) & np.isin(codes // (4 * len(DTYPES) ** 2), transposed)
    for part, mask in ((total, ~apart[row]), (changes, apart[row] & of_layout), (product, apart[row] & ~of_layout)):
        nothing.put(places[mask], part.take(row[mask]))
    return nothing


def _multiplied(graph: TaskGraph, tasks: Array, of_layout: Bool, formats: Int8) -> Int8:
    """The format in which the operators of ``tasks`` (ids) multiply, for transposes as well."""
    by_call = np.zeros(len(graph.info.operators), dtype=np.int8)
    by_call[graph.called[tasks[~of_layout]]] = formats[tasks[~of_layout]]
    return np.where(of_layout, by_call[graph.called[tasks]], formats[tasks]).astype(np.int8)


def usual(
    graph: TaskGraph, tasks: Int64, formats: Int8, *, dtype: str = "", layout: str | None = None,
    changes_apart: bool = False, sheet: bool = False,
) -> Changed:  # fmt: skip
    """Return the times of matrix kernels ``tasks`` (ids) of unknown shapes in another format or layout, as ``in_form``.

    Uses typical operators on the recorded device, chosen by the calling operator's name, else by the kernel's, at the
    size that takes the kernel's time; the range holds their errors and the differences among them. ``changes_apart``:
    layout changes are separate kernels and not included. For an unknown device, Daydream's speedup of a format.
    """
    found = _same(len(tasks), 1.0, Source.PAPER if dtype else Source.RECORDED)
    if dtype:
        for column, end in zip((found.ratio, found.low, found.high), _DAYDREAM, strict=True):
            column[:] = end
    side = side_of(graph)
    if side is None or side.gpu is None:
        return found
    convolves, backward = of_convolutions(graph, tasks), graph.phase[tasks] == Phase.BACKWARD
    fused = graph.family[tasks] == KernelFamily.ATTENTION
    found_kinds = (convolves, fused, of_batches(graph, tasks))
    kind = np.select(found_kinds, (_CONVOLUTION, _FUSED, _BATCH), default=_PRODUCT) + _KINDS * backward
    key = (kind * len(DTYPES) + formats[tasks]) * 2 + has_form(graph, FORM)[tasks]
    for code in each_once(key).tolist():
        of_code = key == code
        own = np.log(np.maximum(graph.duration_ns[tasks[of_code]] / 1e9, 1e-9))
        logs, answered_by = [], []
        for old_s, total, product in _usual_prices(side, code, dtype, layout, sheet):
            answer = product if changes_apart else total
            logs.append([np.interp(own, np.log(old_s), np.log(end)) for end in answer[:3]])
            answered_by.append(int(answer.source.max()))
        found.source[of_code] = max(answered_by)
        # Axes: series, (ratio, low, high), tasks.
        by_series = np.array(logs)
        ratio, low, high = by_series.mean(axis=0)
        kinds = SIGMAS_OF_90 * by_series[:, 0].std(axis=0)
        found.low[of_code] = np.exp(ratio - np.hypot(ratio - low, kinds))
        most = np.exp(ratio + np.hypot(high - ratio, kinds))
        # An operator of unknown shapes is assumed not to get slower; in another format, not even at the upper end.
        found.ratio[of_code] = np.minimum(np.exp(ratio), 1.0)
        found.low[of_code] = np.minimum(found.ratio[of_code], found.low[of_code])
        found.high[of_code] = np.maximum(found.ratio[of_code], np.minimum(most, 1.0) if dtype else most)
    return found


@lru_cache(maxsize=256)
def _usual_prices(
    side: Estimator, code: int, dtype: str, layout: str | None, sheet: bool
) -> list[tuple[Float64, Changed, Changed]]:
    """For each series of a kind: old times, and new over old time with and without layout changes.

    ``code`` encodes the kind, the old format and channels-last, as in ``usual``. The result depends only on the device
    and its database, so it is cached.
    """
    if sheet:
        side = side.restricted((AnswerSource.ANALYTIC,))
    kind, old = code // (2 * len(DTYPES)), DTYPES[code // 2 % len(DTYPES)] or "fp32"
    now = NHWC if code % 2 else ""
    prices = []
    for series in _USUAL[kind]:
        before, after = (
            tuple(_in_pass(converted(op, form, images), backward=kind >= _KINDS) for op in series)
            for form, images in ((old, now), (dtype or old, now if layout is None else layout))
        )
        known = _knows(side, before) and _knows(side, after)
        total, product, _ = _priced((side, side), before, after, best_ratio if known else _one_source)
        # Times grow with the size.
        prices.append((np.maximum.accumulate(side_times(side, before)), total, product))
    return prices


def _knows(side: Estimator, table: Sequence[Described]) -> bool:
    """Whether measurements of the device's chip cover all operators."""
    return all(bool((side.estimate(ops).answered_by <= AnswerSource.SAME_CHIP).all()) for _, ops in operators_of(table))


def of_convolutions(graph: TaskGraph, tasks: Int64 | None = None) -> Bool:
    """Return a mask, shape (n,), of the matrix kernels among ``tasks`` (ids; None: all) that belong to a convolution.

    Decided by the operator's name or the kernel's: cuDNN runs many as products, whose names do not show it.
    """
    ids = np.arange(len(graph)) if tasks is None else tasks
    family = graph.family[ids]
    mask, matrix = family == KernelFamily.CONVOLUTION, np.flatnonzero(among(family, MATRIX_FAMILIES))
    mask[matrix] |= _names_convolution(graph)[operator_names(graph, ids[matrix])]
    return np.asarray(mask, dtype=np.bool_)


def of_batches(graph: TaskGraph, tasks: Int64) -> Bool:
    """Return a mask, shape (n,), of the tasks (ids) that compute a batch of products, by the operator's name."""
    batches = np.array(["bmm" in name for name in graph.names] + [False])
    return np.asarray(batches[operator_names(graph, tasks)], dtype=np.bool_)


@of_columns("names")
def _names_convolution(graph: TaskGraph) -> Bool:
    """Mask of the names of convolutions among ``graph.names``; the last entry is for no name."""
    return np.array([classify_operator(name) == KernelFamily.CONVOLUTION for name in graph.names] + [False])


def operator_names(graph: TaskGraph, tasks: Int64) -> Int32:
    """Return the name of each task's calling operator (``tasks``: ids), a position in ``graph.names``; -1 if unknown.

    The pieces of an operator on the CPU, around its calls, have its name.
    """
    return _names_of_operators(graph)[graph.operator[tasks]]


@of_columns("operator", "name")
def _names_of_operators(graph: TaskGraph) -> Int32:
    """The name of each operator, shape (n_operators + 1,), -1 if unknown."""
    pieces = np.flatnonzero(graph.on_cpu & (graph.operator >= 0) & (graph.kind != TaskKind.RUNTIME))
    names = np.full(int(graph.operator.max(initial=-1)) + 2, -1, dtype=np.int32)
    names[graph.operator[pieces]] = graph.name[pieces]
    return names


def in_traffic(graph: TaskGraph, tasks: Int64, left: Float64) -> Changed:
    """Return the times of memory-bound ``tasks`` (ids) with a share of their bytes left.

    ``left``, shape (3, n): the share and its range. A kernel without recorded bytes scales its time above that of the
    shortest kernels.
    """
    side, gpu = side_of(graph), device(graph)
    duration_ns = graph.duration_ns[tasks].astype(np.float64)
    floor_ns = np.minimum(duration_ns, kernel_floor_ns(gpu))
    ratio, low, high = ((floor_ns + (duration_ns - floor_ns) * part) / np.maximum(duration_ns, 1.0) for part in left)
    # The uncertainty of the operands' formats.
    low, high = (np.where(ratio > 0, end / np.maximum(ratio, 1e-9), 1.0) for end in (low, high))
    source = np.full(len(tasks), Source.PAPER, dtype=np.int8)
    known = np.flatnonzero(graph.size_bytes[tasks] > 0)
    if side is not None and side.gpu is not None and len(known):
        shares, share = np.unique(left[0][known], return_inverse=True)
        pairs, of = np.unique(graph.size_bytes[tasks[known]] * len(shares) + share, return_inverse=True)
        sizes, share = np.divmod(pairs, len(shares))
        distinct, inverse = np.unique(_rounded(np.stack([sizes, sizes * shares[share]])), axis=1, return_inverse=True)
        ratios = _moved(side, *map(tuple, distinct.tolist()))
        at = inverse.reshape(-1)[of]
        good = np.isfinite(ratios.ratio)[at]
        ratio[known[good]] = ratios.ratio[at[good]]
        source[known[good]] = SOURCE_OF_ANSWER[ratios.answered_by[at[good]]]
    return Changed(ratio, ratio * np.minimum(low, 1.0), ratio * np.maximum(high, 1.0), source)


@lru_cache(maxsize=64)
def _moved(side: Estimator, old: tuple[float, ...], new: tuple[float, ...]) -> Ratios:
    """The times of moving ``new`` bytes over those of ``old``, cached: they depend on the device alone."""
    before, after = (elementwise_of(np.array(sizes)) for sizes in (old, new))
    return same_source_ratio(before, after, side, side, worst=AnswerSource.ANALYTIC)


def moving(graph: TaskGraph, tasks: Int64, *, new: Gpu | None = None, factor: float = 1.0) -> Changed:
    """Return the times of predicted memory-bound kernels ``tasks`` (ids) by their bytes, times ``factor``, on ``new``.

    By default on the same device. NaN if the bytes are unknown.
    """
    found, side = _same(len(tasks), np.nan, Source.RECORDED), side_of(graph)
    known = np.flatnonzero((graph.size_bytes[tasks] > 0) & ~among(graph.family[tasks], MATRIX_FAMILIES))
    if side is None or not len(known):
        return found
    sizes, inverse = np.unique(_rounded(graph.size_bytes[tasks[known]].astype(np.float64)), return_inverse=True)
    after = estimator_of(new.name) if new else side
    ratios = chain_ratio(elementwise_of(sizes), elementwise_of(sizes * factor), side, after)
    changed = Changed(ratios.ratio, ratios.low, ratios.high, SOURCE_OF_ANSWER[ratios.answered_by])
    found.put(known, changed.take(inverse.reshape(-1)))
    return found


def estimates(graph: TaskGraph, tasks: Int64, parts: Sequence[tuple[Array, Changed]]) -> Estimates:
    """Return the times of ``tasks`` (ids) after each of ``parts``, a mask or places among them, takes its ratio.

    The others keep their time and source.
    """
    ends = [column[tasks].astype(np.float64) for column in (graph.duration_ns, graph.low_ns, graph.high_ns)]
    source = np.full(len(tasks), Source.RECORDED, dtype=np.int8)
    for places, changed in parts:
        for end, by in zip(ends, changed[:3], strict=True):
            end[places] *= by
        source[places] = changed.source
    return Estimates.of(ends[0], source, ends[1], ends[2])


def _in_pass(op: Described, *, backward: bool) -> Described:
    """The same product in the backward pass, if that makes a difference (``whatif.hardware.roofline``)."""
    return replace(op, phase="bwd") if backward and (op.family, op.dtype) == ("matmul", "tf32") else op


def elementwise_of(size_bytes: Float64) -> Operators:
    """Return fp32 operators of one input that move ``size_bytes``, shape (n,): the format does not matter to memory."""
    elements = np.maximum(np.rint(size_bytes / (2 * DTYPE_BYTES["fp32"])), 1).astype(np.int64)
    return operators("elementwise", {"elements": elements, "tensors": np.ones_like(elements)}, name="relu",
                     dtype="fp32")  # fmt: skip


def _same(n: int, ratio: float, source: Source) -> Changed:
    ratios = [np.full(n, ratio) for _ in range(3)]
    return Changed(ratios[0], ratios[1], ratios[2], np.full(n, source, dtype=np.int8))


def _rounded(sizes: Float64) -> Float64:
    """Round to three digits: a graph has thousands of sizes, which differ by less than any estimate resolves."""
    distinct, inverse = np.unique(sizes, return_inverse=True)
    step = 10.0 ** (np.floor(np.log10(np.maximum(distinct, 1))) - 2)
    return np.asarray((np.rint(distinct / step) * step)[inverse].reshape(sizes.shape))


@lru_cache(maxsize=256)
def _priced(
    sides: tuple[Estimator, Estimator], before: tuple[Described, ...], after: tuple[Described, ...],
    between: Callable[[Operators, Operators, Estimator, Estimator], Ratios], *, sheet: bool = False,
) -> tuple[Changed, Changed, Changed]:  # fmt: skip
    """New over old time of n operators, of their products alone, and of their layout changes (NaN without any before).

    ``between`` gives the ratio of two operators on the two sides. ``sheet``: by the data sheet alone.
    The result depends only on the devices and their databases, so it is cached.
    """
    if sheet:
        sides = sides[0].restricted((AnswerSource.ANALYTIC,)), sides[1].restricted((AnswerSource.ANALYTIC,))
    n, (side, new_side) = len(before), sides
    ratio, low, high, t = (np.full(n, np.nan) for _ in range(4))
    source = np.full(n, Source.ROOFLINE, dtype=np.int8)
    for (places, old), (_, new) in zip(operators_of(before), operators_of(after), strict=True):
        first = side.estimate(old)
        t[places] = first.t_s
        ratios = between(old, new, side, new_side)
        for column, values in zip((ratio, low, high), (ratios.ratio, ratios.low, ratios.high), strict=True):
            column[places] = values
        source[places] = SOURCE_OF_ANSWER[ratios.answered_by]
    product = Changed(ratio, low, high, source)
    old_s, new_s = _changes_s(side, before), _changes_s(new_side, after)
    total = Changed(
        (t * ratio + new_s) / (t + old_s), (t * low + new_s) / (t + old_s), (t * high + new_s) / (t + old_s), source
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        by = np.where(old_s > 0, new_s / old_s, np.nan)
    return total, product, Changed(by, by, by, source)


_one_source = partial(same_source_ratio, worst=AnswerSource.ANALYTIC)


def side_times(side: Estimator, table: Sequence[Described]) -> Float64:
    """Return the chain's times of operators of one family, seconds, shape (n,)."""
    ((_, ops),) = operators_of(table)
    return side.estimate(ops).t_s


def _changes_s(side: Estimator, table: Sequence[Described]) -> Float64:
    """The time of layout changes around each convolution, seconds, shape (n,)."""
    total = np.zeros(len(table))
    if side.gpu is None:
        return total
    sizes = [(place, size) for place, op in enumerate(table) for _, size in layout_changes(side.gpu, op)]
    if sizes:
        at, moved = np.array([place for place, _ in sizes]), np.array([size for _, size in sizes])
        np.add.at(total, at, side.estimate(elementwise_of(2 * moved)).t_s)
    return total
