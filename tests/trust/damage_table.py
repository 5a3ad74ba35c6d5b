"""What each command says of each damage: the table of docs/limits.md.

    python -m tests.trust.damage_table

"named" is a new finding in the command's JSON or, of a page or a timeline, a new warning; "refused" is status 1 with a
sentence; "same" is the same answer as without the damage, and "SILENT" another answer with nothing said.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests import helpers as h
from tests.trust.common import Outcome, Trace, call, written
from tests.trust.retelling import damages

# The words of a command; TRACE and OUT stand for files.
COMMANDS = {
    "info": ["info", "TRACE", "--json"],
    "apply": ["apply", "scale:kind=gpu,factor=0.5", "TRACE", "--json"],
    "explain": ["explain", "TRACE", "--json"],
    "advise": ["advise", "TRACE", "--json"],
    "sweep": ["sweep", "scale:kind=gpu", "TRACE", "--vary", "factor=0.5,0.7", "--json"],
    "recommend": ["recommend", "TRACE", "--devices", "T4,A100-SXM-80", "--json"],
    "compare": ["compare", "WHOLE", "TRACE", "--json"],
    "check": ["check", "TRACE", "--baseline", "WHOLE", "--max-regress", "5%", "--json"],
    "report": ["report", "TRACE", "scale:factor=0.5", "-o", "OUT.html"],
    "export": ["export", "TRACE", "scale:factor=0.5", "-o", "OUT"],
}
CUT = "the file is cut at 60 %"
STEPS, LAYERS, STEP_US = 7, 6, 1000


def gpu_recording() -> Trace:
    """Seven steps of six layers on two streams, as the profiler writes them: numbered operators and a last wait."""
    events: list[dict[str, Any]] = []
    number = 0
    for step in range(STEPS):
        start = STEP_US * step
        events += [h.mark(f"ProfilerStep#{step}", start, STEP_US), h.mark("Optimizer.step#SGD.step", start + 700, 50)]
        for layer in range(LAYERS):
            ts = start + 100 * layer
            for name, at, dur in (("aten::linear", ts, 30), ("aten::addmm", ts + 2, 25)):
                number += 1
                events.append(h.op(name, at, dur, **{"External id": number}))
            side = layer % 2
            launch = STEPS * LAYERS + number
            # The two streams overlap: merged into one, its tasks would run together.
            events += h.launched("sgemm", ts + 5, 5, ts + 15, 180, launch, stream=7 + side)
    end = STEP_US * STEPS
    events += [h.call("cudaDeviceSynchronize", end, 20, 10**6)]
    device = {"id": 0, "name": "Tesla V100-SXM2-32GB", "totalGlobalMem": 34_079_637_504}
    return {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": events}


def damaged(trace: Trace) -> dict[str, bytes]:
    """Return every damage of a trace as the bytes of its file."""
    whole = written(trace)
    gpu = [event for event in trace["traceEvents"] if event["cat"] in ("kernel", "cuda_runtime")]
    host_only = {**trace, "traceEvents": [event for event in trace["traceEvents"] if event not in gpu]}
    found = {what: written(changed) for what, changed in damages(trace).items()}
    return {CUT: whole[: len(whole) * 6 // 10], **found, "no GPU event": written(host_only)}


def run(command: str, folder: Path, whole: bytes, data: bytes) -> Outcome:
    """Run a command on a trace."""
    files = {name: folder / f"{name.lower()}.json" for name in ("WHOLE", "TRACE", "OUT")}
    files["OUT.html"] = folder / "out.html"
    files["WHOLE"].write_bytes(whole)
    files["TRACE"].write_bytes(data)
    return call(*(files.get(word, word) for word in COMMANDS[command]), seconds=60)


def _said(outcome: Outcome) -> set[str]:
    """The findings that doubt, or what was warned of."""
    if outcome.out.startswith("{"):
        findings = json.loads(outcome.out)["trust"]["findings"]
        return {found["sentence"] for found in findings if found["severity"] != "note"}
    return set(outcome.err.splitlines())


def _answer(outcome: Outcome) -> Any:
    """The numbers of an answer; a page or a timeline is compared by what it warns of."""
    if not outcome.out.startswith("{"):
        return None
    told = json.loads(outcome.out)
    keys = ("baseline_ms", "predicted_ms", "replay_error_pct", "points", "best", "devices", "change_pct", "status")
    return _rounded({key: told[key] for key in keys if key in told})


def _rounded(value: Any) -> Any:
    """A JSON value whose numbers have three digits: a tie of medians may differ in the last ones."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def cell(command: str, folder: Path, whole: bytes, data: bytes) -> str:
    """Say what a command does with a damaged trace, in one word."""
    before, after = (run(command, folder, whole, each) for each in (whole, data))
    assert before.status == 0, (command, before)
    assert after.is_sound, (command, after)
    assert after.status < 2, (command, after)
    if after.status == 1 and not after.out.startswith("{"):
        return "refused"
    if _said(after) - _said(before):
        return "named"
    return "same" if _answer(after) == _answer(before) else "SILENT"


def table() -> list[str]:
    """Return the table of docs/limits.md, line by line."""
    trace = gpu_recording()
    whole = written(trace)
    lines = [
        "| damage | " + " | ".join(f"`{name}`" for name in COMMANDS) + " |",
        "|---" * (len(COMMANDS) + 1) + "|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for what, data in damaged(trace).items():
            cells = [cell(command, Path(folder), whole, data) for command in COMMANDS]
            lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
