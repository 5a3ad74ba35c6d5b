"""Balance ranks: give each rank of a distributed run the same pace.

Source: Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025: the step
        in which every rank's operations take the time of an even run, simulated with the same dependencies.
Model:  needs the recordings of several ranks. In each phase the CPU's and the GPU's work takes every rank as long as
        the followed one (`follow`): the fastest in that phase, the median, or the mean of all (the same work divided
        evenly). Transfers keep their times; the waits between ranks follow from the simulation.
Effort: medium: divide the work differently (batches, layers, experts), or fix or replace the cause of a slow rank.
"""

from typing import Literal

from whatif import TaskGraph
from whatif.questions.balance import balanced

ACROSS_RANKS = True
WHOLE_PASSES = True


def transform(graph: TaskGraph, *, follow: Literal["fastest", "median", "mean"] = "fastest") -> TaskGraph:
    """Scale the work of each phase on each rank to that of the followed rank."""
    return balanced(graph, "balance_ranks", follow)
