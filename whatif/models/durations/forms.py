"""What recorded kernels take with their operands in another number format, or images in another layout.

One chain answers of the operator before and after, down to the data sheet, and the ratio of the two times changes the
recorded one; a step that was predicted takes the chain's answer itself. What moves bytes and computes little is asked
by its bytes. Where a recording has no shapes, usual operators of the kind in its names stand in.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from msgspec.structs import replace

from whatif.graph.described import DTYPE_BYTES, Described
from whatif.graph.edit import as_ids
from whatif.graph.kernels import DTYPES, MATRIX_FAMILIES, KernelFamily, classify_operator
from whatif.graph.order import each_once
from whatif.graph.structure_cache import found
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Array, Bool, Float64, Int8, Int32, Int64, Phase, TaskKind, among
from whatif.hardware.gpu import Gpu
from whatif.hardware.roofline import kernel_floor_ns
from whatif.ingest.operator_calls import as_attention
from whatif.models.durations.changed_operators import Changed, side_of
from whatif.models.durations.database import SOURCE_OF_ANSWER, Ratios, estimator_of, same_source_ratio
from whatif.models.durations.estimator import Estimates, Source, device
from whatif.models.durations.measured import has_form
from whatif.opdb import data_sheet
from whatif.opdb.chain import AnswerSource, Estimator
from whatif.opdb.importers.described import operators_of
from whatif.opdb.rows import Operators, operators
from whatif.opdb.tensor_convolutions import NHWC, converted, layout_changes

# What a what-if puts images into whose channels are to lie innermost (``whatif.models.durations.measured``).
FORM = "channels_last"
# What stands for operators of which a recording has no shapes: convolutions of ResNet-50, and square products. Each
# in several sizes, of which that counts whose time is a kernel's own.
_CONVOLUTIONS = ((64, 64, 56, 3), (64, 256, 56, 1), (512, 128, 28, 1), (256, 256, 14, 3), (1024, 256, 14, 1))
_BATCHES = (4, 32, 256)
_SIDES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def _convolution(batch: int, sizes: tuple[int, int, int, int], phase: str) -> Described:
    channels, outputs, side, kernel = sizes
    integers = {
        "batch": batch, "in_channels": channels, "out_channels": outputs, "in_h": side, "in_w": side,
        **dict.fromkeys(("kernel_h", "kernel_w"), kernel), **dict.fromkeys(("padding_h", "padding_w"), kernel // 2),
        **dict.fromkeys(("stride_h", "stride_w", "dilation_h", "dilation_w", "groups"), 1),
    }  # fmt: skip
    return Described("conv", "conv2d", "fp32", tuple(integers.items()), phase)


def _product(side: int) -> Described:
    return Described("matmul", "linear", "fp32", (("batch", 1), ("m", side), ("n", side), ("k", side)))


# Series of growing size: products, then convolutions of the forward and of the backward pass.
_USUAL: tuple[tuple[tuple[Described, ...], ...], ...] = (
    (tuple(map(_product, _SIDES)),),
    *(
        tuple(
            tuple(_convolution(batch, sizes, phase) for batch in _BATCHES)
            for phase in phases
            for sizes in _CONVOLUTIONS
        )
        for phases in (("fwd",), ("dgrad", "wgrad"))
    ),
)
# Daydream, section 5.1: "up to 3x on the most compute-intensive workloads". The range is our estimate: from nothing to
# the ratio of Volta's peaks.
_DAYDREAM = (1 / 3, 1 / 8, 1.0)


def in_form(
    graph: TaskGraph, tasks: Array, formats: Int8, *, dtype: str = "", layout: str | None = None, sheet: bool = False,
    there: tuple[Gpu, Int8] | None = None,
) -> Changed:  # fmt: skip
    """Return what matrix kernels ``tasks`` (a mask or ids) take in another number format, layout or on another device.

    ``formats``, shape (n_tasks,), are positions in `kernels.DTYPES`. ``layout`` is "nhwc", or "" for NCHW; "" and None
    leave format and layout as they are now. ``there`` is another device, and the formats on it. Down to the data sheet,
    or by it alone (``sheet``), with what the layout's changes around a convolution take: kernels of their own where the
    recording has them.
    """
    ids = as_ids(graph, tasks)
    side = side_of(graph)
    nothing = _same(len(ids), np.nan, Source.RECORDED)
    able = graph.on_gpu.mask[ids] & among(graph.family[ids], (*MATRIX_FAMILIES, KernelFamily.LAYOUT))
    table = [as_attention(what) for what in graph.info.operators]
    of_matrix = np.array([what.family in data_sheet.MATRIX_FAMILIES for what in table] + [False])
    places = np.flatnonzero(able & of_matrix[graph.called[ids]])
    if side is None or side.gpu is None or not len(places):
        return nothing
    asked = ids[places]
    sides = side, side if there is None else estimator_of(there[0].name)
    of_layout = graph.family[asked] == KernelFamily.LAYOUT
    # Transposes move bytes of whatever is multiplied in the format of their operator.
    now_in, then_in = (
        _multiplied(graph, asked, of_layout, form) for form in (formats, formats if there is None else there[1])
    )
    last = has_form(graph, FORM)[asked]
    backward = graph.phase[asked] == Phase.BACKWARD
    key = graph.called[asked].astype(np.int64) * len(DTYPES) ** 2 + now_in.astype(np.int64) * len(DTYPES) + then_in
    key = (key * 2 + last) * 2 + backward
    codes, first, which = np.unique(key, return_index=True, return_inverse=True)
    before, after = [], []
    for place in first.tolist():
        what = table[graph.called[asked[place]]]
        now = NHWC if last[place] else what.layout
        old = DTYPES[now_in[place]] or what.dtype
        before.append(_in_pass(converted(what, old, now), backward=bool(backward[place])))
        new = dtype or (old if there is None else DTYPES[then_in[place]] or what.dtype)
        changed = converted(what, new, now if layout is None else layout)
        after.append(_in_pass(changed, backward=bool(backward[place])))
    whole, product, changes = _priced(
        sides, tuple(before), tuple(after), told=graph.info.recorded.predicted is not None, sheet=sheet
    )
    # Where the layout's changes are kernels of their own, each kind of kernel takes its own ratio.
    transposed = each_once(graph.called[graph.family == KernelFamily.LAYOUT])
    own = np.isfinite(changes.ratio) & np.isin(codes // (4 * len(DTYPES) ** 2), transposed)
    for part, mask in ((whole, ~own[which]), (changes, own[which] & of_layout), (product, own[which] & ~of_layout)):
        nothing.put(places[mask], part.take(which[mask]))
    return nothing


def _multiplied(graph: TaskGraph, tasks: Array, of_layout: Bool, formats: Int8) -> Int8:
    """The format in which the operators of ``tasks`` (ids) multiply: transposes move what is multiplied."""
    by_call = np.zeros(len(graph.info.operators), dtype=np.int8)
    by_call[graph.called[tasks[~of_layout]]] = formats[tasks[~of_layout]]
    return np.where(of_layout, by_call[graph.called[tasks]], formats[tasks]).astype(np.int8)


def usual(
    graph: TaskGraph, tasks: Int64, formats: Int8, *, dtype: str = "", layout: str | None = None,
    changes_apart: bool = False, sheet: bool = False,
) -> Changed:  # fmt: skip
    """Return what matrix kernels ``tasks`` (ids) of unknown shapes take in another format or layout, as ``in_form``.

    Usual operators of the recorded device stand in, by the name of the operator that called, else by the kernel's own;
    the range holds each of them. ``changes_apart``: without what changing the layout takes, which other kernels do. On
    a device that is not known, and of attentions, Daydream's speedup of a format.
    """
    found = _same(len(tasks), 1.0, Source.PAPER if dtype else Source.RECORDED)
    if dtype:
        for column, end in zip((found.ratio, found.low, found.high), _DAYDREAM, strict=True):
            column[:] = end
    side = side_of(graph)
    if side is None or side.gpu is None:
        return found
    convolves = of_convolutions(graph, tasks)
    kind = np.where(convolves, np.where(graph.phase[tasks] == Phase.BACKWARD, 2, 1), 0)
    kind[~convolves & (graph.family[tasks] == KernelFamily.ATTENTION)] = -1
    key = (kind * len(DTYPES) + formats[tasks]) * 2 + has_form(graph, FORM)[tasks]
    for code in each_once(key[kind >= 0]).tolist():
        of_code = key == code
        own_s = graph.duration_ns[tasks[of_code]] / 1e9
        logs, ends, answered_by = [], [], []
        for old_s, whole, product in _usual_prices(side, code, dtype, layout, sheet):
            answer = product if changes_apart else whole
            logs.append(np.interp(np.log(np.maximum(own_s, 1e-9)), np.log(old_s), np.log(answer.ratio)))
            ends.append((answer.low.min(), answer.high.max()))
            answered_by.append(int(answer.source.max()))
        found.source[of_code] = max(answered_by)
        # An operator of unknown shapes is not assumed to get slower.
        found.ratio[of_code] = np.minimum(np.exp(np.mean(logs, axis=0)), 1.0)
        found.low[of_code] = np.minimum(found.ratio[of_code], min(low for low, _ in ends))
        found.high[of_code] = np.maximum(found.ratio[of_code], max(high for _, high in ends))
    return found


@lru_cache(maxsize=256)
def _usual_prices(
    side: Estimator, code: int, dtype: str, layout: str | None, sheet: bool
) -> list[tuple[Float64, Changed, Changed]]:
    """Of each series of a kind: old times, and new over old time with and without what changing the layout takes.

    ``code`` holds the kind, the old format and whether channels lie innermost, as ``usual`` counts them. The device and
    its database alone decide, so the answers are kept.
    """
    if sheet:
        side = side.restricted((AnswerSource.ANALYTIC,))
    old = DTYPES[code // 2 % len(DTYPES)] or "fp32"
    now = NHWC if code % 2 else ""
    prices = []
    for series in _USUAL[code // (2 * len(DTYPES))]:
        before = tuple(converted(what, old, now) for what in series)
        after = tuple(converted(what, dtype or old, now if layout is None else layout) for what in series)
        whole, product, _ = _priced((side, side), before, after, told=_knows(side, before) and _knows(side, after))
        # A size's own time grows with it.
        prices.append((np.maximum.accumulate(side_times(side, before)), whole, product))
    return prices


def _knows(side: Estimator, whats: Sequence[Described]) -> bool:
    """Whether measurements of the device's own chip tell all of the operators."""
    return all(bool((side.estimate(ops).answered_by <= AnswerSource.SAME_CHIP).all()) for _, ops in operators_of(whats))


def of_convolutions(graph: TaskGraph, tasks: Int64 | None = None) -> Bool:
    """Return a mask, shape (n,), of the matrix kernels among ``tasks`` (ids; None: all) that a convolution runs.

    Its operator's name or theirs shows it: cuDNN runs many as products, whose names say nothing else.
    """
    ids = np.arange(len(graph)) if tasks is None else tasks
    family = graph.family[ids]
    mask, matrix = family == KernelFamily.CONVOLUTION, np.flatnonzero(among(family, MATRIX_FAMILIES))
    named = np.array([classify_operator(name) == KernelFamily.CONVOLUTION for name in graph.names] + [False])
    mask[matrix] |= named[operator_names(graph, ids[matrix])]
    return np.asarray(mask, dtype=np.bool_)


def operator_names(graph: TaskGraph, tasks: Int64) -> Int32:
    """Return the name of the operator that called each of ``tasks`` (ids), a position in ``graph.names``; -1: unknown.

    The pieces of an operator on the CPU, around its calls, have its name.
    """
    names, operator, name = found(graph, "names of operators", _names_of_operators)
    if operator is not graph.operator or name is not graph.name:  # an edit that leaves the structure
        names = _names_of_operators(graph)[0]
    return names[graph.operator[tasks]]


def _names_of_operators(graph: TaskGraph) -> tuple[Int32, Int32, Int32]:
    """The name of each operator, shape (n_operators + 1,), -1 where none is known, and the columns that tell it."""
    pieces = np.flatnonzero(graph.on_cpu & (graph.operator >= 0) & (graph.kind != TaskKind.RUNTIME))
    names = np.full(int(graph.operator.max(initial=-1)) + 2, -1, dtype=np.int32)
    names[graph.operator[pieces]] = graph.name[pieces]
    return names, graph.operator, graph.name


def in_traffic(graph: TaskGraph, tasks: Int64, left: Float64) -> Changed:
    """Return what ``tasks`` (ids), which move bytes and compute little, take with a share of them left.

    ``left``, shape (3, n): the share and its range. A kernel whose bytes are not recorded is known by its time above
    that of the shortest ones.
    """
    side, gpu = side_of(graph), device(graph)
    duration_ns = graph.duration_ns[tasks].astype(np.float64)
    floor_ns = np.minimum(duration_ns, kernel_floor_ns(gpu))
    ratio, low, high = ((floor_ns + (duration_ns - floor_ns) * part) / np.maximum(duration_ns, 1.0) for part in left)
    # What the operands' formats leave open.
    low, high = (np.where(ratio > 0, end / np.maximum(ratio, 1e-9), 1.0) for end in (low, high))
    source = np.full(len(tasks), Source.PAPER, dtype=np.int8)
    known = np.flatnonzero(graph.size_bytes[tasks] > 0)
    if side is not None and side.gpu is not None and len(known):
        shares, share = np.unique(left[0][known], return_inverse=True)
        pairs, of = np.unique(graph.size_bytes[tasks[known]] * len(shares) + share, return_inverse=True)
        sizes, share = np.divmod(pairs, len(shares))
        distinct, which = np.unique(_rounded(np.stack([sizes, sizes * shares[share]])), axis=1, return_inverse=True)
        told = _moved(side, *map(tuple, distinct.tolist()))
        at = which.reshape(-1)[of]
        good = np.isfinite(told.ratio)[at]
        ratio[known[good]] = told.ratio[at[good]]
        source[known[good]] = SOURCE_OF_ANSWER[told.answered_by[at[good]]]
    return Changed(ratio, ratio * np.minimum(low, 1.0), ratio * np.maximum(high, 1.0), source)


@lru_cache(maxsize=64)
def _moved(side: Estimator, old: tuple[float, ...], new: tuple[float, ...]) -> Ratios:
    """The times of moving ``new`` bytes over those of ``old``. The answers are kept: the device alone decides."""
    before, after = (elementwise_of(np.array(sizes)) for sizes in (old, new))
    return same_source_ratio(before, after, side, side, worst=AnswerSource.ANALYTIC)


def moving_there(graph: TaskGraph, tasks: Int64, new: Gpu) -> Changed:
    """Return what predicted kernels ``tasks`` (ids) that move bytes and compute little take on ``new``, by their bytes.

    NaN where the bytes are not known.
    """
    found, side = _same(len(tasks), np.nan, Source.RECORDED), side_of(graph)
    known = np.flatnonzero((graph.size_bytes[tasks] > 0) & ~among(graph.family[tasks], MATRIX_FAMILIES))
    if side is None or not len(known):
        return found
    sizes, which = np.unique(_rounded(graph.size_bytes[tasks[known]].astype(np.float64)), return_inverse=True)
    ops = elementwise_of(sizes)
    old, answers = side.estimate(ops), estimator_of(new.name).estimate(ops)
    ratios = [getattr(answers, name) / getattr(old, name) for name in ("t_s", "low_s", "high_s")]
    told = Changed(ratios[0], ratios[1], ratios[2], SOURCE_OF_ANSWER[answers.answered_by])
    found.put(known, told.take(which.reshape(-1)))
    return found


def estimates(graph: TaskGraph, tasks: Int64, parts: Sequence[tuple[Array, Changed]]) -> Estimates:
    """Return the times of ``tasks`` (ids) where each of ``parts``, a mask or places among them, takes its ratio.

    The others take what they took, and keep their source.
    """
    ends = [column[tasks].astype(np.float64) for column in (graph.duration_ns, graph.low_ns, graph.high_ns)]
    source = np.full(len(tasks), Source.RECORDED, dtype=np.int8)
    for places, changed in parts:
        for end, by in zip(ends, changed[:3], strict=True):
            end[places] *= by
        source[places] = changed.source
    return Estimates.of(ends[0], source, ends[1], ends[2])


def _in_pass(what: Described, *, backward: bool) -> Described:
    """The same product, of the backward pass where that makes a difference (``whatif.hardware.roofline``)."""
    return replace(what, phase="bwd") if backward and (what.family, what.dtype) == ("matmul", "tf32") else what


def elementwise_of(size_bytes: Float64) -> Operators:
    """Return the operators of one input in fp32 that move so many bytes, shape (n,): memory asks for no format."""
    elements = np.maximum(np.rint(size_bytes / (2 * DTYPE_BYTES["fp32"])), 1).astype(np.int64)
    return operators("elementwise", {"elements": elements, "tensors": np.ones_like(elements)}, name="relu",
                     dtype="fp32")  # fmt: skip


def _same(n: int, ratio: float, source: Source) -> Changed:
    ratios = [np.full(n, ratio) for _ in range(3)]
    return Changed(ratios[0], ratios[1], ratios[2], np.full(n, source, dtype=np.int8))


def _rounded(sizes: Float64) -> Float64:
    """Three digits: a graph has thousands of sizes, which differ by less than any estimate knows."""
    distinct, which = np.unique(sizes, return_inverse=True)
    step = 10.0 ** (np.floor(np.log10(np.maximum(distinct, 1))) - 2)
    return np.asarray((np.rint(distinct / step) * step)[which].reshape(sizes.shape))


@lru_cache(maxsize=256)
def _priced(
    sides: tuple[Estimator, Estimator], before: tuple[Described, ...], after: tuple[Described, ...], *, told: bool,
    sheet: bool = False,
) -> tuple[Changed, Changed, Changed]:  # fmt: skip
    """New over old time of n operators, of their products alone, and of the layout's changes (NaN without any before).

    ``told``: the old time is what the chain itself said, so that the new one is too, whoever answers. By the data sheet
    alone (``sheet``). The devices and their databases alone decide, so the answers are kept.
    """
    if sheet:
        sides = sides[0].restricted((AnswerSource.ANALYTIC,)), sides[1].restricted((AnswerSource.ANALYTIC,))
    n, (side, there) = len(before), sides
    ratio, low, high, t = (np.full(n, np.nan) for _ in range(4))
    source = np.full(n, Source.ROOFLINE, dtype=np.int8)
    for (places, old), (_, new) in zip(operators_of(before), operators_of(after), strict=True):
        first = side.estimate(old)
        t[places] = first.t_s
        if told:
            answers = there.estimate(new)
            columns = [answers.t_s / first.t_s, answers.low_s / first.low_s, answers.high_s / first.high_s]
            answered_by = answers.answered_by
        else:
            ratios = same_source_ratio(old, new, side, there, worst=AnswerSource.ANALYTIC)
            columns, answered_by = [ratios.ratio, ratios.low, ratios.high], ratios.answered_by
        for column, values in zip((ratio, low, high), columns, strict=True):
            column[places] = values
        source[places] = SOURCE_OF_ANSWER[answered_by]
    product = Changed(ratio, low, high, source)
    old_s, new_s = _changes_s(side, before), _changes_s(there, after)
    whole = Changed(
        (t * ratio + new_s) / (t + old_s), (t * low + new_s) / (t + old_s), (t * high + new_s) / (t + old_s), source
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        by = np.where(old_s > 0, new_s / old_s, np.nan)
    return whole, product, Changed(by, by, by, source)


def side_times(side: Estimator, whats: Sequence[Described]) -> Float64:
    """Return what the chain says of operators of one family, seconds, shape (n,)."""
    ((_, ops),) = operators_of(whats)
    return side.estimate(ops).t_s


def _changes_s(side: Estimator, whats: Sequence[Described]) -> Float64:
    """What changing the layout around each convolution takes, seconds, shape (n,)."""
    total = np.zeros(len(whats))
    if side.gpu is None:
        return total
    sizes = [(place, size) for place, what in enumerate(whats) for _, size in layout_changes(side.gpu, what)]
    if sizes:
        at, moved = np.array([place for place, _ in sizes]), np.array([size for _, size in sizes])
        np.add.at(total, at, side.estimate(elementwise_of(2 * moved)).t_s)
    return total
