"""The op database's columns beside those of an operator (`whatif.graph.described`), their bounds, and its version."""

from __future__ import annotations

# Raised when a column or the meaning of one changes; a database of another version is refused, not guessed at.
SCHEMA_VERSION = 1

# How a time was taken. Times taken in different ways are never mixed: launches and caches make them other quantities.
METHODS = ("event_pair", "graph_replay", "kernel", "chain_difference", "trace", "wall", "unknown")
CACHE_STATES = ("hot", "cold", "unknown")
# Whether a launch is in a time, in words.
LAUNCHES = {True: "included", False: "excluded", None: "unknown"}

# What is stored of an operator beside its family's integers.
TEXTS = ("name", "phase", "dtype", "layout")
# What is stored of a measurement. The range holds 10 to 90 % of the repeats; NaN and -1 are not known.
TIMES = ("t_s", "t_low_s", "t_high_s")


# No operator of a step takes longer than an hour, none less than a nanosecond.
SHORTEST_S, LONGEST_S = 1e-9, 3600.0
# A shard holds at most this many rows, so that a small file cannot unfold into more memory than a machine has.
MOST_ROWS = 4_000_000
