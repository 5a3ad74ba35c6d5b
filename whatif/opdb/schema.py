"""The op database's schema version, its columns beyond those of an operator (`whatif.graph.described`), and bounds."""

from __future__ import annotations

# Raised when a column or the meaning of one changes; a database of another version is refused, not guessed at.
SCHEMA_VERSION = 1

# Measuring methods. Times of different methods are never mixed: launches and caches make them different quantities.
METHODS = ("event_pair", "graph_replay", "kernel", "chain_difference", "trace", "wall", "unknown")
CACHE_STATES = ("hot", "cold", "unknown")
# Whether a launch is in a time, in words.
LAUNCHES = {True: "included", False: "excluded", None: "unknown"}

# Columns of an operator in addition to its family's integers.
TEXTS = ("name", "phase", "dtype", "layout")
# Columns of a measurement. The range holds 10 to 90 % of the repeats; NaN and -1 mean unknown.
TIMES = ("t_s", "t_low_s", "t_high_s")


# No operator of a step takes longer than an hour, none less than a nanosecond.
SHORTEST_S, LONGEST_S = 1e-9, 3600.0
# The most rows of a shard, so that a small file cannot decompress to more memory than a machine has.
MOST_ROWS = 4_000_000
