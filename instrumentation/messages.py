"""Messages to the user, prefixed with whatif and the rank of this process."""

import os
import shlex
import sys
from contextlib import suppress

import torch.distributed as dist


def trains_with_others() -> bool:
    """Whether this process is one of several in a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def this_rank() -> int | None:
    """Return the rank of this process in the process group, or the one set by a launcher; None for a single process.

    A launcher such as torchrun sets RANK and WORLD_SIZE, also for a script that creates no process group.
    """
    if trains_with_others():
        return dist.get_rank()
    rank, ranks = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() and ranks.isdecimal() and int(ranks) > 1 else None


def recorded(written: object, files: str = "", command: str = "whatif") -> str:
    """Return the message once a recording is `written`, with a command to view it, or `files` with a `*`."""
    words = "*".join(shlex.quote(part) for part in (files or str(written)).split("*"))
    return f"{written}: recorded; next: {command} explain {words}"


def tell(sentence: str) -> None:
    """Print a sentence on stderr, prefixed with whatif and, if there are several, the rank."""
    rank = this_rank()
    with suppress(Exception):  # the script may have closed stderr, or put something else in its place
        # In one write: several processes print at the same time.
        sys.stderr.write(f"whatif{'' if rank is None else f' (rank {rank})'}: {sentence}\n")
        sys.stderr.flush()
