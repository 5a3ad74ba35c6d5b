"""bf16 autocast on a CPU: the operators that run in bf16, and their durations.

Source: PyTorch's autocast op reference (docs/source/amp.rst, CPU lists), and the types that reach each operator of a
transformer block, an LSTM and a residual block when they run under `torch.autocast("cpu")`: products, convolutions,
attention and recurrent layers run in bf16, and so do the operators that take their results; losses run in float32; an
embedding returns float32, so that a language model's residual stream (its additions and layer norms) stays float32.
"""

from __future__ import annotations

import re

import numpy as np

from whatif.graph.kernels import DTYPES, MATRIX_FAMILIES
from whatif.graph.recorded import Rates
from whatif.graph.task_graph import TaskGraph
from whatif.graph.types import Bool, Phase, among
from whatif.models.durations.estimator import Source, put, scaled
from whatif.models.durations.half_precision import cpu_bf16_gain, cpu_half_precision_ratio, is_half
from whatif.models.durations.measured import (
    OperatorTimes,
    form_ratio,
    scale_measured,
    with_form,
)
from whatif.models.kernels.mixed_precision import add_casts

_LOSS = r"loss|log_softmax|nll"
_LOOK_UP = r"embedding"
_STREAM = r"layer_norm|group_norm|rms_norm|::(add|sub|cat|stack|zeros|fill|zero|copy|clone)_?(\.|$)"


def autocast_on_cpu(graph: TaskGraph) -> TaskGraph:
    """Return the graph of a CPU recording under bf16 autocast, casts included.

    Operators measured alone take the ratio of their two times; the others follow the recorded, else a typical, ratio of
    bf16 to fp32 rates (``cpu_half_precision_ratio``). On a CPU that emulates bf16 unmeasured operators keep their time:
    they are too short to be measured, and their call outlasts their product.
    """
    ratio, spread = form_ratio(graph, "bf16")
    measured = np.isfinite(ratio)
    bf16 = runs_in_bf16(graph) if measured.any() else graph.phase != Phase.UPDATE
    changed = bf16 & measured
    others = bf16 & ~measured & (graph.family >= 0)
    rates = graph.info.recorded.rates
    gain = cpu_bf16_gain(rates)
    if gain is not None and gain < 1 and measured.any():
        rates = Rates(fp32_gflops=1.0, bf16_gflops=1.0)
    by, low, high = cpu_half_precision_ratio(graph.family[others], graph.dtype[others], rates)
    source = np.where((by == 1) & (low == 1) & (high == 1), Source.RECORDED, Source.ASSUMED)
    if gain is not None and gain < 1 and not measured.any():
        graph = graph.note(
            f"amp: this CPU multiplies bf16 {1 / gain:.3g} times slower than fp32 and this recording has no operators "
            "measured alone (whatif collect --measure-operators), so the range is wide"
        )
    graph = scale_measured(graph, changed, ratio, spread)
    graph = put(graph, others, scaled(graph, others, by, source, low=low, high=high))
    changed[others] = by != 1
    dtype = np.where(changed & ~is_half(graph.dtype), DTYPES.index("bf16"), graph.dtype).astype(np.int8)
    graph = with_form(graph.replace(dtype=dtype), changed, "bf16")
    return add_casts(graph, changed & among(graph.family, MATRIX_FAMILIES), None)


def runs_in_bf16(graph: TaskGraph) -> Bool:
    """Return a mask, shape (n_tasks,), of the forward and backward tasks that autocast would run in bf16."""
    passes = among(graph.phase, [Phase.FORWARD, Phase.BACKWARD])
    measured = OperatorTimes.of(graph.info.recorded).names
    stays, look_up = _named(graph, measured, _LOSS), _named(graph, measured, _LOOK_UP)
    if (look_up & passes).any():
        stays = stays | look_up | _named(graph, measured, _STREAM)
    return np.asarray(passes & ~stays & ~_before_first_product(graph), dtype=np.bool_)


def _named(graph: TaskGraph, measured: tuple[str, ...], pattern: str) -> Bool:
    """Tasks whose name, or whose measured operator's name, matches; that operator may be an enclosing one."""
    matches = np.array([re.search(pattern, name) is not None for name in measured] + [False])
    return np.asarray(graph.select(name=pattern) | matches[graph.measured], dtype=np.bool_)  # -1 is the last entry


def _before_first_product(graph: TaskGraph) -> Bool:
    """The forward tasks of each step before its first product: their input is still float32."""
    matrix = np.flatnonzero(among(graph.family, MATRIX_FAMILIES) & (graph.phase == Phase.FORWARD))
    steps, first = np.unique(graph.step[matrix], return_index=True)
    begins = np.zeros(int(graph.step.max(initial=0)) + 2, dtype=np.int64)
    begins[steps + 1] = matrix[first]
    before = np.arange(len(graph)) < begins[graph.step + 1]
    return np.asarray(before & (graph.phase == Phase.FORWARD), dtype=np.bool_)
