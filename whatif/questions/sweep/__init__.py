"""One what-if at many values of its options: as a table, as a curve, and for growing numbers of workers."""

from whatif.questions.sweep.sweep import Point, Sweep, sweep
from whatif.questions.sweep.values import Varied, parse_vary

__all__ = ["Point", "Sweep", "Varied", "parse_vary", "sweep"]
