"""One what-if at many values of its options: as a table, as a curve, and for growing numbers of workers."""

from whatif.sweep.sweep import Point, Sweep, sweep
from whatif.sweep.values import Varied, parse_vary

__all__ = ["Point", "Sweep", "Varied", "parse_vary", "sweep"]
