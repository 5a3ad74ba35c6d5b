"""Bare all-reduces over gloo: the time of each size at each rate, as a table for calibrating what-ifs.

The table has the columns that `table=` of a what-if reads: operation, workers, size_bytes, time_us.
"""

import csv
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from whatif.runtime.files import replacing

from .ddp import RATES_MBIT_S, rate_name
from .jobs import Job, Layout, Results
from .rank import Rank, run, time_steps, undisturbed

SIZES_BYTES = tuple(1 << power for power in range(12, 25, 2))  # 4 KiB to 16 MiB
REPEATS, FEWEST, MOST_S = 9, 3, 2.5
FOUR_WORKERS_MBIT_S = (100.0, 1000.0)


def jobs(out: Path, models: tuple[str, ...] = ()) -> list[Job]:
    """Two workers at every rate, four at two of them; models do not matter."""
    pairs = [(2, rate) for rate in RATES_MBIT_S] + [(4, rate) for rate in FOUR_WORKERS_MBIT_S]
    return [_job(out, workers, rate) for workers, rate in pairs]


def _job(out: Path, workers: int, rate_mbit_s: float | None) -> Job:
    name = f"all_reduce-{workers}-{rate_name(rate_mbit_s)}"
    return Job(
        name, __name__, Layout((workers,), rate_mbit_s), {"sizes_bytes": SIZES_BYTES}, (f"{name}.csv",),
        lambda results: write_table(out / f"{name}.csv", workers, results),
    )  # fmt: skip


def write_table(path: Path, workers: int, results: Results) -> None:
    """Write the median of each size, for the slowest rank, since all have to finish."""
    with replacing(path) as part, part.open("w", newline="") as stream:
        lines = csv.writer(stream, lineterminator="\n")
        lines.writerow(["operation", "workers", "size_bytes", "time_us"])
        for size in results[0]["times_ms"]:
            slowest = [max(times) for times in zip(*(result["times_ms"][size] for result in results), strict=True)]
            lines.writerow(["all_reduce", workers, size, round(statistics.median(slowest) * 1e3, 1)])


def work(rank: Rank) -> dict[str, Any]:
    """Time every size of the request, `sizes_bytes`, several times each."""
    times: dict[str, list[float]] = {}
    with undisturbed():
        for size in rank.request["sizes_bytes"]:
            buffer = torch.zeros(size // 4)
            count, spent = REPEATS, 0.0
            dist.all_reduce(buffer)
            found: list[float] = []
            while len(found) < count:
                dist.barrier()
                found += time_steps(lambda buffer=buffer: dist.all_reduce(buffer), 1)[0]  # type: ignore[misc]
                if len(found) == 1:
                    # All ranks have to agree on the count, and a large buffer over a slow link takes long.
                    spent_ms = torch.tensor(found)
                    dist.broadcast(spent_ms, 0)
                    spent = float(spent_ms[0]) / 1e3
                    count = max(FEWEST, min(REPEATS, int(MOST_S / spent)))
            times[str(size)] = found
    return {"times_ms": times}


if __name__ == "__main__":
    run(work)
