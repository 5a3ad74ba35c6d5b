"""Messages to people, named for whatif and for the rank of this process."""

import os
import shlex
import sys

import torch.distributed as dist


def trains_with_others() -> bool:
    """Whether this process is one of several in a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def this_rank() -> int | None:
    """Return the rank of this process among those that train together, or that a launcher started; None if it is alone.

    A launcher such as torchrun sets RANK and WORLD_SIZE, also for a script that makes no process group.
    """
    if trains_with_others():
        return dist.get_rank()
    rank, ranks = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() and ranks.isdecimal() and int(ranks) > 1 else None


def recorded(written: object, files: str = "", command: str = "whatif") -> str:
    """Return what is said once a recording is `written`, and how to look at it, or at several `files` by a `*`."""
    words = "*".join(shlex.quote(part) for part in (files or str(written)).split("*"))
    return f"{written}: recorded; next: {command} explain {words}"


def tell(sentence: str) -> None:
    """Print a sentence on stderr, named for whatif, with the rank where there are several."""
    rank = this_rank()
    # In one piece: several processes write at the same time.
    sys.stderr.write(f"whatif{'' if rank is None else f' (rank {rank})'}: {sentence}\n")
    sys.stderr.flush()
