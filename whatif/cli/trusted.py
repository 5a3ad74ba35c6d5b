"""The trust value of a command: an answer that cannot be trusted is refused unless --force is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from whatif.runtime.errors import WhatifError

if TYPE_CHECKING:
    import argparse

    from whatif.graph.task_graph import TaskGraph
    from whatif.prediction.baseline import Baseline


def baseline_of(args: argparse.Namespace, graph: TaskGraph, *, refuses: bool = True) -> Baseline:
    """Return the baseline that a command's options request; `show` includes its trust value.

    Raises WhatifError, one sentence, if an answer would be void and --force is not given.
    """
    from whatif.prediction.baseline import Baseline

    baseline = Baseline.of(graph, getattr(args, "clock", None), calibrated=args.calibrated)
    weigh(args, baseline, refuses=refuses)
    return baseline


def weigh(args: argparse.Namespace, *baselines: Baseline, refuses: bool = True) -> None:
    """Keep the trust value of one recording, or of several, for `show`. Raises WhatifError as ``baseline_of``."""
    from whatif.prediction.trust import Trust, trust_of

    trusts = [trust_of(baseline) for baseline in baselines]
    names = [Path(baseline.graph.info.path).name for baseline in baselines]
    args.trust = trusts[0] if len(trusts) == 1 else Trust.together(trusts, names)
    for trust, baseline in zip(trusts, baselines, strict=True):
        refusal = trust.refusal(baseline.graph.info.path)
        if refuses and refusal and not args.force:
            raise WhatifError(refusal)
