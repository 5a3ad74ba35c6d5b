"""How a command ends: its exit statuses, and the error of a command line that is wrong."""

from __future__ import annotations

COULD_NOT, USAGE, INTERRUPTED = 1, 2, 130
# The reader of the output left: shells say so of the programs that SIGPIPE ends.
UNREAD = 141


class UsageError(Exception):
    """The command line itself is wrong. The message is one sentence: expected, got, what to do."""
