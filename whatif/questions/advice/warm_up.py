"""Detect a recording of a program's warm-up: very long calls that later steps do not have."""

from __future__ import annotations

import numpy as np

from whatif.graph.types import TaskKind
from whatif.prediction.baseline import Baseline
from whatif.questions.explain import step_critical_ms
from whatif.simulation.steps import steady

# Loading modules and allocating memory take milliseconds; launches and operators' own work do not.
LONG_MS = 1.0
# Our choice: a call is long at a tenth of the step, and together they are reported at a quarter of it.
LONG_SHARE, NAMED_FROM = 0.1, 0.25
# With this many steps the reported one is the median, and its work recurs in the others.
REPEATED = 3


def warm_up(baseline: Baseline) -> str:
    """State the share of a few very long calls in the critical path of what may be a program's first step; else "".

    The work of operators and of copies, data loading and waiting do not count.
    """
    graph, step_ms = baseline.graph, baseline.step_ms
    n_steps = len(steady(graph.info.measured_step_ns[baseline.clock], graph, baseline.clock))
    if baseline.clock != "span" and n_steps >= REPEATED:
        return ""
    copies = graph.launch_of[graph.kind == TaskKind.MEMCPY]
    calls = np.isin(graph.kind, [TaskKind.GAP, TaskKind.RUNTIME])
    calls[copies[copies >= 0]] = False
    critical_ms, _ = step_critical_ms(baseline)
    long = np.flatnonzero(calls & (critical_ms >= max(LONG_MS, LONG_SHARE * step_ms)))
    total_ms = float(critical_ms[long].sum())
    if not len(long) or total_ms < NAMED_FROM * step_ms:
        return ""
    longest = long[np.argmax(critical_ms[long])]
    name = graph.names[graph.name[longest]]
    location = f"in {name}" if name else "between operators"
    claim = "is one stretch of CPU time" if len(long) == 1 else f"are {len(long)} stretches of CPU time, the longest"
    share = f"{total_ms:,.2f} of {step_ms:,.2f} ms ({100 * total_ms / step_ms:.0f} %)"
    return f"{share} {claim} {location}, which looks like a program's start"
