"""The record of a run: its measurements and status, which `whatif validate` reads beside its trace.

`<model>--<variant>.json` holds, besides name, options and batch: `status` (complete: timed and traced; timed: no trace;
failed; skipped: with its `reason`), `untraced` (ms of all rounds together), `rounds` (each with its samples), `beside`
(the rounds of its baseline, if both took turns), `memory` (bytes), `checkpointed` (layers), `machine`, `trace` and,
after an error, `failure`.
"""

import json
import statistics
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whatif.questions.validate.validate_records import step_time_of
from whatif.questions.validate.validate_truth import paced
from whatif.runtime.errors import WhatifError
from whatif.runtime.files import replacing

from .variants import Job

SCHEMA = 1

# A failed part is tried once more, by a later call.
MOST_FAILURES = 2

# Fields of the machine that must be equal to compare times.
MACHINE_KEYS = ("device", "gpu", "cpu", "torch", "threads")


class Record:
    """One run's record in the folder; every change rewrites the whole file immediately."""

    def __init__(self, out: Path, job: Job, *, full: bool) -> None:
        self.path = out / f"{job.name}.json"
        size = "full" if full else "twin"
        self.data: dict[str, Any] = _read(self.path) or {
            "schema": SCHEMA,
            "name": job.name,
            "model": job.model,
            "variant": job.variant,
            "size": size,
            "status": "failed",
            "options": asdict(job.options),
        }
        if self.data.get("size") != size or self.data.get("schema") != SCHEMA:
            raise WhatifError(
                f"{self.path}: expected a record of this campaign's {size} models, got another; name another folder."
            )

    @property
    def rounds(self) -> int:
        """The number of processes that timed the run: when runs take turns, one process has many rounds."""
        return sum("first_step_ms" in row for row in self.data.get("rounds", ()))

    @property
    def traced(self) -> bool:
        return "trace" in self.data

    def gave_up(self, part: str) -> bool:
        """Whether the part (time | trace | operators | update) failed so often that it is not tried again."""
        return self.failures(part) >= MOST_FAILURES

    def failures(self, part: str) -> int:
        return int(self.data.get("failures", {}).get(part, {}).get("count", 0))

    def expected_s(self, part: str) -> float | None:
        """How long the part took when it last succeeded."""
        seconds = self.data.get("seconds", {}).get(part)
        return None if seconds is None else float(seconds)

    def skip(self, reason: str) -> None:
        """Mark the run as skipped, with the reason; measurements from elsewhere stay."""
        if not self.rounds:
            self.data |= {"status": "skipped", "reason": reason}
            self._write()

    def add(self, part: str, result: dict[str, Any], seconds: float) -> None:
        """Store the result of a part of the run. Raises WhatifError for times of another machine."""
        if part == "time":
            self._add_rounds(result)
        elif part == "trace":
            self.data["trace"] = {"file": f"{self.data['name']}.trace.json.gz", **result}
        else:
            self.data[part] = result
        self.data["status"] = "complete" if self.traced else "timed"
        self.data.pop("reason", None)
        self.data.setdefault("seconds", {})[part] = round(seconds, 1)
        self.data.get("failures", {}).pop(part, None)
        self._write()

    def fail(self, part: str, message: str) -> None:
        """Record the failure of a part, with a one-line reason."""
        count = self.failures(part) + 1
        self.data.setdefault("failures", {})[part] = {"count": count, "message": message}
        if not self.rounds:
            self.data["status"] = "failed"
        self._write()

    def _add_rounds(self, result: dict[str, Any]) -> None:
        machine = result["machine"]
        if self.rounds and _identity(machine) != _identity(self.data["machine"]):
            raise WhatifError(
                f"{self.path}: expected times of the earlier rounds' machine ({_identity(self.data['machine'])}),"
                f" got {_identity(machine)}; use one folder per machine."
            )
        self.data |= {"machine": machine, "batch": result["samples"]}
        if result["checkpointed"]:
            self.data["checkpointed"] = result["checkpointed"]
        if "memory" in result:
            self.data["memory"] = result["memory"]
        self.data.setdefault("rounds", []).extend(result["rounds"])
        self.data["untraced"] = summarize(self.data["rounds"])
        if "beside" in result:
            before = self.data.get("beside", {"rounds": []})["rounds"]
            rounds = [*before, *result["beside"]["rounds"]]
            pct = spread_pct(rounds, self.data["rounds"], result["beside"]["clock"])
            self.data["beside"] = {**result["beside"], "spread_pct": round(pct, 2), "rounds": rounds}

    def _write(self) -> None:
        failures = self.data.pop("failures", {})
        self.data.pop("failure", None)
        if failures:
            text = "; ".join(f"{part}: {failure['message']}" for part, failure in failures.items())
            self.data |= {"failures": failures, "failure": text}
        with replacing(self.path) as part:
            part.write_text(json.dumps(self.data, indent=1) + "\n")


def summarize(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, quartiles and minimum in ms of the steps of all rounds, and the median of each block.

    `cpu_thread_ms` is each block's median CPU time of the training thread; `throttled` counts, by reason, the blocks
    in which the GPU throttled.
    """
    reasons = Counter(reason for row in rounds for clocks in row.get("clocks", ()) for reason in clocks["throttled"])
    blocks = [block for row in rounds for block in row["samples_ms"]]
    cpu_blocks = [block for row in rounds for block in row["cpu_samples_ms"]]
    samples = [sample for block in blocks for sample in block]
    q25, median, q75 = statistics.quantiles(samples, n=4, method="inclusive")
    return {
        "median_ms": round(median, 4),
        "q25_ms": round(q25, 4),
        "q75_ms": round(q75, 4),
        "min_ms": min(samples),
        "block_medians_ms": [round(statistics.median(block), 4) for block in blocks],
        "cpu_thread_ms": [round(statistics.median(block), 4) for block in cpu_blocks],
        "steps": len(samples),
        **({"throttled": dict(reasons)} if reasons else {}),
    }


def spread_pct(baseline: list[dict[str, Any]], changed: list[dict[str, Any]], clock: str) -> float:
    """Return the ± of the ratio of two runs that took turns, percent (nominal 90 %): infinite for a single round."""
    before, after = (step_time_of(rounds, clock) for rounds in (baseline, changed))
    pct = paced(after, before).spread_pct if before and after else None
    return float("inf") if pct is None else pct


def _identity(machine: dict[str, Any]) -> dict[str, Any]:
    return {key: machine.get(key) for key in MACHINE_KEYS}


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WhatifError(f"{path}: expected a record of a run, got {error}: remove it.") from error
    if not isinstance(data, dict):
        raise WhatifError(f"{path}: expected a record of a run, got a {type(data).__name__}: remove it.")
    return data
