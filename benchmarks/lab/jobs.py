"""Jobs of the lab with their network, and the record that each writes to the folder of results."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from whatif.runtime.files import replacing

from .hosts import Hosts, burst_bytes
from .job import run_job, spread
from .network_first import network_first

SCHEMA = 1

Results = list[dict[str, Any]]


@dataclass(frozen=True)
class Layout:
    """The hosts of a job and their links; None is a link without a limit."""

    groups: tuple[int, ...] = (2,)
    rate_mbit_s: float | None = None
    uplink_mbit_s: float | None = None
    packet_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a record."""
        uplink = {"uplink_mbit_s": self.uplink_mbit_s} if len(self.groups) > 1 else {}
        burst = {} if self.rate_mbit_s is None else {"burst_bytes": burst_bytes(self.rate_mbit_s, self.packet_bytes)}
        return {"groups": list(self.groups), "rate_mbit_s": self.rate_mbit_s, **uplink, **burst}


@dataclass(frozen=True)
class Job:
    """One call of `run_job`, and the files that it writes to the folder of results."""

    name: str
    module: str
    layout: Layout
    request: dict[str, Any]
    made: tuple[str, ...]
    record: Callable[[Results], dict[str, Any] | None] = field(compare=False)
    timeout_s: float = 150.0

    def is_done(self, out: Path) -> bool:
        """Whether all of its files exist."""
        return all((out / name).exists() for name in self.made)

    def run(self, out: Path) -> None:
        """Build the network, run the workers, and write the record."""
        layout = self.layout
        links: dict[str, Any] = asdict(layout)
        with Hosts(links.pop("groups"), **links) as network, network_first():
            results = run_job(spread(network.hosts, self.module, self.request), timeout_s=self.timeout_s)
        found = self.record(results)
        if found is not None:
            head = {
                "schema": SCHEMA, "name": self.name, "measured": time.strftime("%Y-%m-%d %H:%M"),
                "network": layout.to_dict(), "workers": len(results),
            }  # fmt: skip
            tail = {"machine": results[0]["machine"], "load_average": [row["load_average"] for row in results]}
            write_record(out / self.made[0], {**head, **found, **tail})


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record atomically, with lists of numbers on one line."""
    with replacing(path) as part:
        part.write_text(_lines(record, 0) + "\n")


def _lines(value: Any, depth: int) -> str:
    """Encode JSON with a line for each key and each row; containers of plain values take one line."""
    if isinstance(value, dict) and value:
        flat = all(not isinstance(item, dict | list) for item in value.values())
        if not flat or depth < 2:
            pad = " " * (depth + 1)
            rows = [f"{pad}{json.dumps(key)}: {_lines(item, depth + 1)}" for key, item in value.items()]
            return "{\n" + ",\n".join(rows) + "\n" + " " * depth + "}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        pad = " " * (depth + 1)
        return "[\n" + ",\n".join(pad + json.dumps(item) for item in value) + "\n" + " " * depth + "]"
    return json.dumps(value)


def slower_rank(results: Results, name: str) -> list[dict[str, Any]]:
    """The samples of the slowest rank of each round: whoever exchanges gradients waits for it."""
    rounds = []
    for rows in zip(*(result["rounds"][name] for result in results), strict=True):
        medians = [statistics.median(row["samples_ms"][0]) for row in rows]
        slowest = rows[medians.index(max(medians))]
        rounds.append({**slowest, "ranks_ms": [round(median, 4) for median in medians]})
    return rounds


def quartiles(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Quartiles of all samples of some rounds, ms."""
    samples = [sample for row in rounds for block in row["samples_ms"] for sample in block]
    q25, median, q75 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median_ms": round(median, 4), "q25_ms": round(q25, 4), "q75_ms": round(q75, 4), "steps": len(samples)}
