"""Records of the lab: runs over a real network beside the plain steps of the same session (docs/lab.md).

A record names the recording of one worker that every prediction starts from, and for each of its runs the what-ifs that
lead there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whatif.questions.validate.validate_records import StepTime, step_time_of


@dataclass(frozen=True)
class LabRun:
    """One run of a record: its steps beside those of the baseline; or the reason why it cannot be predicted."""

    name: str  # record/run
    record: Path
    trace: Path
    what_ifs: tuple[str, ...]
    compute: str  # "real", or "replayed" where the steps slept as long as the recorded ones computed
    baseline: StepTime | None
    changed: StepTime | None
    reason: str = ""


def is_lab_record(content: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a record of the lab."""
    return isinstance(content.get("baseline"), dict) and isinstance(content.get("runs"), list)


def lab_runs(path: Path, content: Mapping[str, Any]) -> list[LabRun]:
    """Return the runs of a record of the lab, in its order; rows that are none are left out."""
    baseline = content["baseline"]
    # A record names a file of its own folder only.
    trace = path.parent / Path(str(baseline.get("trace", ""))).name
    plain = step_time_of(baseline.get("rounds"), "samples_ms")
    found = []
    for row in content["runs"]:
        if not isinstance(row, dict):
            continue
        what_ifs = row.get("what_if")
        changed = step_time_of(row.get("rounds"), "samples_ms")
        specs = tuple(map(str, what_ifs)) if isinstance(what_ifs, list) else ()
        run = LabRun(
            name=f"{path.stem}/{row.get('name', '')}", record=path, trace=trace, what_ifs=specs,
            compute=str(row.get("compute", "real")), baseline=plain, changed=changed,
            reason=_why_not(specs, trace, plain, changed),
        )  # fmt: skip
        found.append(run)
    return found


def _why_not(specs: tuple[str, ...], trace: Path, plain: StepTime | None, changed: StepTime | None) -> str:
    if plain is None or changed is None:
        return "its record holds no step time"
    if not specs:
        return "no what-if yet for what it does"
    return "" if trace.is_file() else f"its baseline {trace.name} has no recording"
