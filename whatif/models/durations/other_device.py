"""The GPU tasks of a recording on another device: each kernel by the best source that covers both devices.

Operators that the database or a model covers on both devices take the ratio of two estimates of one source.
Convolutions that move to or from tensor cores have a separate model; all others take the ratio of two data sheets.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from whatif.graph.kernels import DTYPES, MATRIX_FAMILIES, KernelFamily
from whatif.graph.order import each_once
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import (
    Bool,
    Float64,
    Int8,
    Int64,
    TaskKind,
    among,
)
from whatif.hardware.gpu import Gpu
from whatif.hardware.roofline import memory_gbyte_s, on_tensor_cores
from whatif.models.durations.database import SOURCE_OF_ANSWER, dtype_as_called, grouped_operators
from whatif.models.durations.device_convolutions import convolution_ns
from whatif.models.durations.device_operators import by_operator
from whatif.models.durations.device_scaling import (
    Ratio,
    above_floor,
    counts_as,
    no_facts,
    roofline_ratio,
    spread_between,
    with_range,
)
from whatif.models.durations.estimator import (
    Estimates,
    Source,
    device,
    scaled,
)
from whatif.models.durations.forms import FORM, in_form, moving
from whatif.models.durations.half_precision import SPEEDUP_EXPONENT_HIGH, SPEEDUP_EXPONENT_LOW, is_half
from whatif.models.durations.measured import has_form, without_form
from whatif.models.durations.occupancy import RATE_DTYPES
from whatif.models.durations.precision import matrix_dtype
from whatif.models.durations.work_done import work_times
from whatif.opdb.tensor_convolutions import NHWC

# With and without tensor cores a convolution uses different algorithms; our estimate of the ratio's error.
_SWITCH_SPREAD = 1.5
# Without known shapes, speedup = (ratio of peaks) ** exponent. By the model for known shapes the convolutions of
# ResNet-50 on a V100 (a public recording) take 0.33 of their time on an A100 (exponent 0.48), 0.16 on an H100 (0.53).
_SWITCH_EXPONENT = 0.5
_FP32, _TF32 = DTYPES.index("fp32"), DTYPES.index("tf32")


def on_device(graph: TaskGraph, tasks: Int64, new: Gpu, *, tf32: bool) -> Estimates:
    """Estimate GPU ``tasks`` (ids, no collectives) on device ``new``; ``tf32``: fp32 convolutions use it if available.

    If the recorded device is unknown, each kernel's range is a quarter to four times its time.
    """
    old = device(graph)
    n = len(tasks)
    if old is None:
        unknown = no_facts(n)
        return scaled(graph, tasks, unknown.centre, Source.ASSUMED, low=unknown.low, high=unknown.high)
    given = graph
    graph, forms_by = _as_called(graph, tasks, new, tf32=tf32)
    dtype = matrix_dtype(graph)[tasks]
    new_dtype = formats_on(dtype, of_convolutions(graph)[tasks], old, new, tf32=tf32)
    found = roofline_ratio(graph, tasks, old, new, dtype, new_dtype)
    source = np.full(n, Source.ROOFLINE, dtype=np.int8)
    switched = np.flatnonzero(dtype != new_dtype)
    found.put(switched, _other_units(graph, tasks[switched], old, new, dtype[switched], new_dtype[switched]))
    copies = np.flatnonzero(graph.kind[tasks] == TaskKind.MEMCPY)
    found.put(copies, _copies(graph, tasks[copies], old, new))
    other_units = _convolutions(graph, tasks, (old, new), (dtype, new_dtype), found)
    called = dtype_as_called(graph)
    for place, ratios in by_operator(graph.info.operators, old, new):
        at, row = _tasks_of(graph, tasks, place)
        # An earlier what-if may have put a task into another format than its operator was recorded in.
        recorded = called[tasks[at]]
        good = np.isfinite(ratios.ratio[row]) & (dtype[at] == new_dtype[at]) & ~other_units[at]
        good &= (dtype[at] == recorded) | (dtype[at] == 0) | (recorded == 0)
        at, row = at[good], row[good]
        found.put(at, Ratio(ratios.ratio[row], ratios.low[row], ratios.high[row]))
        source[at] = SOURCE_OF_ANSWER[ratios.answered_by[row]]
    if graph.info.is_predicted:
        # A predicted step: the chain estimates the new device as it did the old one.
        formats = np.zeros(len(graph), dtype=np.int8)
        formats[tasks] = new_dtype
        of_matrix = in_form(graph, tasks, matrix_dtype(graph), target=(new, formats))
        for answers in (moving(graph, tasks, new=new), of_matrix):
            known = np.flatnonzero(answers.known & (graph.kind[tasks] == TaskKind.KERNEL))
            found.put(known, Ratio(answers.ratio[known], answers.low[known], answers.high[known]))
            source[known] = answers.source[known]
    low, high = np.minimum(found.low, found.centre), np.maximum(found.high, found.centre)
    return scaled(given, tasks, found.centre * forms_by, source, low=low * forms_by, high=high * forms_by)


def _as_called(graph: TaskGraph, tasks: Int64, new: Gpu, *, tf32: bool) -> tuple[TaskGraph, Float64]:
    """The graph in the formats in which its operators were called, and factors for the formats that what-ifs changed.

    Earlier what-ifs may have put products into 16 bits, or images into another layout: on ``new`` their gain is
    computed as if they came after. The factors have shape (tasks,), 1 for unchanged tasks.
    """
    by, gained, old = np.ones(len(tasks)), np.ones(len(tasks)), device(graph)
    called = dtype_as_called(graph)
    half = is_half(graph.dtype) & ~is_half(called) & (called > 0) & among(graph.family, MATRIX_FAMILIES)
    changed = np.flatnonzero(half[tasks])
    if old is None or not len(changed) or graph.info.is_predicted:
        return graph, by
    now, last = matrix_dtype(graph), has_form(graph, FORM)
    before = without_form(graph.replace(dtype=np.where(half, called, graph.dtype).astype(np.int8)), half, FORM)
    on_new = with_facts_of(before, new, tf32=tf32)
    for layout, rows in (("", changed[~last[tasks[changed]]]), (NHWC, changed[last[tasks[changed]]])):
        gains = [
            in_form(side, tasks[rows], matrix_dtype(side), layout=layout or None, target=(gpu, now)).ratio
            for side, gpu in ((before, old), (on_new, new))
        ]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = gains[1] / gains[0]
        good = np.isfinite(ratio) & (ratio > 0)
        by[rows[good]], gained[rows[good]] = ratio[good], gains[0][good]
    recorded_ns = np.rint(graph.duration_ns[tasks] / gained)
    return before.with_duration(tasks, recorded_ns), by


def of_convolutions(graph: TaskGraph) -> Bool:
    """Mask of the matrix kernels that compute a convolution, including its call's products, shape (n_tasks,)."""
    called = np.array([op.family == "conv" for op in graph.info.operators] + [False])[graph.called]
    return np.asarray((graph.family == KernelFamily.CONVOLUTION) | (called & (graph.family == KernelFamily.GEMM)))


def formats_on(dtype: Int8, convolution: Bool, old: Gpu, new: Gpu, *, tf32: bool) -> Int8:
    """Return the format in which each matrix kernel computes on ``new``, shape (n,), positions in `kernels.DTYPES`.

    ``convolution`` is the mask of a convolution's kernels. PyTorch's default: these run in TF32 on NVIDIA's devices
    that have it, other products do not. A kernel that could have used TF32 on the recorded device and did not stays in
    fp32; TF32 becomes fp32 on devices without it, and on AMD's, where programs must enable it.
    """
    result = dtype.copy()
    if not new.tf32_by_default:
        result[dtype == _TF32] = _FP32
    elif tf32 and not old.tf32_by_default:
        result[convolution & (dtype == _FP32)] = _TF32
    return result


def with_facts_of(graph: TaskGraph, new: Gpu, *, tf32: bool) -> TaskGraph:
    """Return the graph with the formats of device ``new`` and no measurements of the old one, for later what-ifs."""
    old = device(graph)
    changed = graph.replace(measured=np.full(len(graph), -1, dtype=np.int32))
    if old is not None:
        changed = changed.replace(dtype=formats_on(matrix_dtype(graph), of_convolutions(graph), old, new, tf32=tf32))
    recorded = graph.info.recorded.on_another_device()
    info = replace(graph.info, recorded=recorded, gpu=new.name, gpu_memory_bytes=new.memory_bytes)
    return changed.replace(info=info)


def notes_of(graph: TaskGraph, tasks: Int64, estimates: Estimates, new: Gpu) -> list[str]:
    """Return notes: the number of tasks and share of time by source, and the tasks that stay unchanged."""
    old = device(graph)
    time_ns = graph.duration_ns[tasks].astype(np.float64)
    total = max(float(time_ns.sum()), 1.0)
    counts = [
        f"{int(answered.sum()):,} ({time_ns[answered].sum() / total:.0%} of their time) by {_WORDS[source]}"
        for source, answered in ((source, estimates.source == source) for source in _WORDS)
        if answered.any()
    ]
    name = old.name if old else graph.info.gpu or "an unnamed GPU"
    found = [f"device: {name} to {new.name}, GPU tasks: {', '.join(counts) or 'none'}"]
    if old is None:
        why = f"{name} is not in whatif/hardware/gpus" if graph.info.gpu else "the recording does not name its GPU"
        found.append(f"device: {why}, so each kernel may take a quarter to four times as long")
    products = tasks[among(graph.family[tasks], MATRIX_FAMILIES)]
    unknown_ns = graph.duration_ns[products][(graph.flops[products] <= 0) & (graph.called[products] < 0)].sum()
    if unknown_ns > 0.5 * graph.duration_ns[products].sum():
        found.append(
            "device: shapes were not recorded (record_shapes=True): products are guessed from names, and the range is "
            "wider"
        )
    formats = [DTYPES[code] for code in each_once(matrix_dtype(graph)[products]).tolist()]
    pairs = ((form, counts_as(new, form)) for form in formats)
    found += [f"device: products in {form} count as {usual} on {new.name}" for form, usual in pairs if usual != form]
    if (graph.on_gpu & (graph.kind == TaskKind.COMMUNICATION)).any():
        found.append("device: recorded collectives keep their time: links belong to the cluster, not to the device")
    return found


_WORDS = {
    Source.DATABASE: "the op database", Source.LEARNED: "models of both devices",
    Source.OTHER_DEVICES: "other devices' measurements", Source.ROOFLINE: "data sheets", Source.ASSUMED: "assumption",
}  # fmt: skip


def _tasks_of(graph: TaskGraph, tasks: Int64, place: Int64) -> tuple[Int64, Int64]:
    """The tasks (places in ``tasks``) of operators ``place``, and each one's row in ``place``."""
    number = np.full(len(graph.info.operators) + 1, -1, dtype=np.int64)  # -1 is the last entry
    number[place] = np.arange(len(place))
    row = number[graph.called[tasks]]
    at = np.flatnonzero((row >= 0) & (graph.kind[tasks] == TaskKind.KERNEL))
    return at, row[at]


def _other_units(graph: TaskGraph, tasks: Int64, old: Gpu, new: Gpu, dtype: Int8, new_dtype: Int8) -> Ratio:
    """Matrix kernels with a new format and an unknown call: a power of the ratio of peaks."""
    recorded = graph.duration_ns[tasks].astype(np.float64)
    peaks = [np.array([gpu.matrix_tflops(name) for name in RATE_DTYPES]) for gpu in (old, new)]
    gain = peaks[1][new_dtype] / peaks[0][dtype]
    centre, one, other = (
        above_floor(recorded, gain**-by, old, new)
        for by in (_SWITCH_EXPONENT, SPEEDUP_EXPONENT_HIGH, SPEEDUP_EXPONENT_LOW)
    )
    return Ratio(centre, np.minimum(one, other), np.maximum(one, other))


def _copies(graph: TaskGraph, tasks: Int64, old: Gpu, new: Gpu) -> Ratio:
    """Copies by the link they cross; from pageable memory the host limits the rate."""
    recorded = graph.duration_ns[tasks].astype(np.float64)
    codes, inverse = np.unique(graph.name[tasks], return_inverse=True)
    names = [graph.names[code].lower() for code in codes.tolist()]
    hosts = ("htod", "dtoh", "hosttodevice", "devicetohost")
    between = np.array([any(way in name for way in hosts) for name in names], dtype=np.bool_)[inverse]
    pageable = np.array(["pageable" in name for name in names], dtype=np.bool_)[inverse]
    link, memory = old.pcie_gbyte_s / new.pcie_gbyte_s, memory_gbyte_s(old) / memory_gbyte_s(new)
    inside = with_range(recorded, np.full(len(tasks), memory), spread_between(old, new), old, new)
    # A faster link gains nothing if the host is the bottleneck.
    ends = min(link, 1.0), max(link, 1.0)
    across = [above_floor(recorded, by, old, new) for by in (np.where(pageable, 1.0, link), *ends)]
    columns = zip(across, (inside.centre, inside.low, inside.high), strict=True)
    return Ratio(*(np.where(between, one, other) for one, other in columns))


def _convolutions(
    graph: TaskGraph, tasks: Int64, devices: tuple[Gpu, Gpu], formats: tuple[Int8, Int8], found: Ratio
) -> Bool:
    """Give all kernels of a convolution's call the same ratio, including its layout changes.

    Returns a mask of the tasks, shape (n,), whose calls move to or from tensor cores.
    """
    other_units, in_nhwc = np.zeros(len(tasks), dtype=np.bool_), has_form(graph, FORM)[tasks]
    for place, ops in grouped_operators(graph.info.operators):
        at, row = _tasks_of(graph, tasks, place) if ops.family == "conv" else (place[:0], place[:0])
        if not len(at):
            continue
        recorded = graph.duration_ns[tasks[at]].astype(np.float64)
        _, first, call = np.unique(graph.operator[tasks[at]], return_index=True, return_inverse=True)
        call = np.asarray(call).reshape(-1)
        call_ns = np.maximum(np.bincount(call, weights=recorded), 1.0)
        times = work_times(graph)[tasks[at[first]]]
        products = among(graph.family[tasks[at]], (KernelFamily.CONVOLUTION, KernelFamily.GEMM))
        operator_dtype = np.array([DTYPES.index(d) if d in DTYPES else _FP32 for d in ops.texts["dtype"].table])
        operator_dtype = operator_dtype[ops.texts["dtype"].codes][row[first]]
        before, after = (_of_calls(form[at], products, call, operator_dtype) for form in formats)
        pair = before.astype(np.int64) * len(DTYPES) + after
        for code in each_once(pair).tolist():
            names = [DTYPES[form] for form in divmod(code, len(DTYPES))]
            calls = np.flatnonzero(pair == code)
            subset = ops.take(row[first[calls]])
            old_ns, new_ns = (
                convolution_ns(subset, gpu, form, channels_last=in_nhwc[at[first[calls]]])
                for gpu, form in zip(devices, names, strict=True)
            )
            on_units = [on_tensor_cores(gpu, form) for gpu, form in zip(devices, names, strict=True)]
            # Other units use another algorithm: the old one's efficiency does not apply.
            switched = on_units[0] != on_units[1]
            ratio = np.ones(len(first))
            base_ns = call_ns[calls] / times[calls] if switched else np.maximum(old_ns, 1e-9)
            ratio[calls] = new_ns / base_ns
            members = np.flatnonzero(pair[call] == code)
            other_units[at[members]] = switched
            spread = max(spread_between(*devices), _SWITCH_SPREAD if switched else 1.0)
            found.put(at[members], with_range(recorded[members], ratio[call[members]], spread, *devices))
    return other_units


def _of_calls(form: Int8, products: Bool, call: Int64, operator_dtype: Int64) -> Int8:
    """The format of each call: its products', else its operator's."""
    result = np.zeros(len(operator_dtype), dtype=np.int8)
    np.maximum.at(result, call[products], form[products])
    return np.where(result > 0, result, operator_dtype).astype(np.int8)
