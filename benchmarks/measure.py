"""Measuring functions: process CPU time, the minimum of interleaved rounds, one row per figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Row:
    """One figure with its budget and stretch goal, both upper limits if ``at_most``; None: not measured."""

    area: str
    what: str
    value: float | None
    unit: str
    budget: float | None = None
    stretch: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        """Return whether the figure meets its budget or its stretch goal; "" if it has none."""
        if self.value is None:
            return "not measured"
        if self.stretch is not None and self._meets(self.stretch):
            return "stretch"
        if self.budget is None:
            return ""
        return "met" if self._meets(self.budget) else "missed"

    def _meets(self, limit: float) -> bool:
        assert self.value is not None
        return self.value <= limit if self.at_most else self.value >= limit


def least_cpu_s(candidates: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the minimum CPU time of each candidate, s; every round calls each of them once, in turn."""
    least = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, call in candidates.items():
            begin_s = time.process_time()
            call()
            least[name] = min(least[name], time.process_time() - begin_s)
    return least


def command_cpu_s(command: Sequence[str], environment: dict[str, str] | None = None) -> float:
    """Return the CPU time of one process and its children, s. Raises RuntimeError if it fails."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **(environment or {})}
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def candidate(name: str, path: Path, python: str = sys.executable) -> dict[str, Any]:
    """Run one candidate of ``candidate.py`` in a fresh process; return its report, or {"error": message}.

    As in a command of whatif, OpenBLAS starts no threads, which would still spin as the time begins: in no candidate.
    """
    command = [python, "-P", str(HERE / "candidate.py"), name, str(path)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def best_of(results: list[dict[str, Any]], field: str) -> float | None:
    """Return the minimum of a field over the rounds; None if a round failed."""
    return None if any("error" in result for result in results) else min(float(result[field]) for result in results)
