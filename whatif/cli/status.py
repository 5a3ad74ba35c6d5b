"""The exit statuses of a command, and the error of a wrong command line."""

from __future__ import annotations

COULD_NOT, USAGE, INTERRUPTED = 1, 2, 130
# The reader closed the output: the status that shells report for programs ended by SIGPIPE.
UNREAD = 141


class UsageError(Exception):
    """The command line itself is wrong. The message is one sentence: expected, got, what to do."""
