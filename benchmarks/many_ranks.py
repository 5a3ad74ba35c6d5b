"""Synthesize recordings of many ranks from that of one, and measure the time and memory to explain them.

``python benchmarks/many_ranks.py`` writes 256 ranks into the cache folder and measures ``whatif explain`` on them. Each
rank is the same recording on its own clock. Between two collectives its work takes a random share longer, most
on one rank; its collectives begin later by as much, and end on all ranks together.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from inputs import CACHE, HERE, PUBLIC
from numpy.typing import NDArray

SOURCE = PUBLIC / "modded-nanogpt-8xh100" / "current.rank0.json.gz"
OWN = HERE.parent / "traces" / "lab_ranks_cpu" / "ranks-gpt2-1000mbit-2" / "rank0.json.gz"  # it exchanges gradients
# Shares by which work takes longer than recorded, and offsets of clocks: our choice.
JITTER, SLOWER, CLOCK_US = 0.01, 0.05, 20_000.0
SLOW_RANK = 0.64  # of all ranks
_COLLECTIVE = re.compile(r"nccl\w*Kernel|^gloo:")

Times = NDArray[np.float64]


def write_ranks(source: Path, count: int, folder: Path) -> int:
    """Write ``count`` ranks into ``folder``, after emptying it, and return the slow rank."""
    trace = msgspec.json.decode(gzip.decompress(source.read_bytes()))
    # Flows repeat the information of correlation ids.
    events = [event for event in trace["traceEvents"] if event.get("ph") not in ("s", "f")]
    timed = [event for event in events if "ts" in event]
    starts = np.array([float(event["ts"]) for event in timed])
    ends = starts + np.array([float(event.get("dur", 0)) for event in timed])
    meets = np.array([bool(_COLLECTIVE.search(str(event.get("name")))) for event in timed])
    begin, end = _together(starts[meets], ends[meets])
    slow, draw = int(count * SLOW_RANK), np.random.default_rng(0)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for rank in range(count):
        longer = np.full(len(begin), SLOWER) if rank == slow else draw.uniform(0, JITTER, len(begin))
        knots, placed = _paced(begin, end, longer)
        clock_us = float(draw.uniform(-CLOCK_US, CLOCK_US)) if rank else 0.0
        new_starts, new_ends = (np.interp(times, knots, placed) + clock_us for times in (starts, ends))
        for event, new_start, new_end in zip(timed, new_starts.tolist(), new_ends.tolist(), strict=True):
            event["ts"] = round(new_start, 3)
            if "dur" in event:
                event["dur"] = round(new_end - new_start, 3)
        header: dict[str, Any] = {**trace, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": count}}
        (folder / f"rank{rank}.json").write_bytes(msgspec.json.encode({**header, "traceEvents": events}))
    return slow


def _together(starts: Times, ends: Times) -> tuple[Times, Times]:
    """Starts and ends of collectives, (n,) each, with overlapping ones merged."""
    order = np.argsort(starts)
    starts, latest = starts[order], np.maximum.accumulate(ends[order])
    new = np.append(True, starts[1:] > latest[:-1])
    return starts[new], latest[np.append(np.flatnonzero(new)[1:] - 1, len(latest) - 1)]


def _paced(begin: Times, end: Times, longer: Times) -> tuple[Times, Times]:
    """Return recorded times, and those on a rank whose work before each collective takes a share ``longer`` more."""
    work = begin - np.append(begin[0], end[:-1])
    ends = begin[0] + np.cumsum(work * (1 + SLOWER) + (end - begin))
    begins = np.append(begin[0], ends[:-1]) + work * (1 + longer)
    far = 1e9
    knots = np.concatenate([[begin[0] - far], np.stack([begin, end], axis=1).ravel(), [end[-1] + far]])
    placed = np.concatenate([[begin[0] - far], np.stack([begins, ends], axis=1).ravel(), [ends[-1] + far]])
    return knots, placed


def main() -> None:
    """Write the ranks, explain them, and print time, memory and whether the slow rank was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--source", type=Path, default=SOURCE if SOURCE.is_file() else OWN)
    parser.add_argument("words", nargs="*", default=[], help="further options of `whatif explain`")
    args = parser.parse_args()
    folder = CACHE / f"ranks-{args.ranks}"
    slow = write_ranks(args.source, args.ranks, folder)
    megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    command = [sys.executable, "-m", "whatif", "explain", str(folder), *args.words]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "WHATIF_CACHE": ""})
    seconds = time.perf_counter() - began
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(done.stdout)
    print(f"{args.ranks} ranks, {megabytes:,.0f} MB: {seconds:.1f} s, {spent.ru_utime + spent.ru_stime:.1f} s CPU, "
          f"{spent.ru_maxrss / 1e6:.2f} GB in the largest process; the slow one is rank {slow}")  # fmt: skip


if __name__ == "__main__":
    main()
