"""What each command says of each damage: the table of docs/limits.md.

    python -m tests.trust.damage_table

"named" is a new finding in the command's JSON or, of a page or a timeline, a new warning; "refused" is status 1 with a
sentence, "void" that and the finding in a report; "same" is the same answer as without the damage, and "SILENT" another
answer with nothing said.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from tests import helpers as h
from tests.memory_traces import NODE
from tests.trust.common import Outcome, Trace, call, written
from tests.trust.retelling import damages

# The words of a command; TRACE, WHOLE and OUT stand for files.
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
    "memory": ["memory", "TRACE", "--json"],
    "dts": ["dts", "CLUSTER", "TRACE", "--architecture", "federated", "--json"],
    "scaling": ["scaling", "TRACE", "distributed:gradient_mb=2,bandwidth=1Gbps", "--workers", "1,2", "--json"],
    "validate": ["validate", "PAIRS", "--json"],
}
CLUSTER = """[[processor]]
name = "server"

[[processor]]
name = "board"
count = 3

[[link]]
between = ["server", "board"]
bandwidth = "1Gbps"
"""
PAIRS = """[[pair]]
question = "the damaged recording, predicted"
hardware = "V100"
baseline = "trace.json"
changed = "whole.json"
what_if = ["scale:factor=1.1"]
"""
CUT = "the file is cut at 60 %"
STEPS, STEP_US = 7, 1000
# Rows and columns of the weights of three layers, and the rows of a batch.
WEIGHTS, BATCH = ((512, 256), (512, 512), (128, 512)), 64


def gpu_recording() -> Trace:
    """Seven steps of three layers on two streams, as the profiler writes them: numbered operators and a last wait."""
    events: list[dict[str, Any]] = []
    numbers, launches = itertools.count(1), itertools.count(10_000)

    def product(name: str, at_us: float, layer: int, shapes: list[list[int]], tid: int = 1, **more: Any) -> None:
        for operator, begin_us, dur in ((name, at_us, 30), ("aten::addmm", at_us + 2, 25)):
            number = next(numbers)
            typed = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
            events.append(h.op(operator, begin_us, dur, tid, **{"External id": number}, **typed, **more))
        # The two streams overlap: merged into one, its tasks would run together.
        events.extend(h.launched("sgemm", at_us + 5, 5, at_us + 15, 180, next(launches), tid, 7 + layer % 2))

    for step in range(STEPS):
        start, sequence = STEP_US * step, len(WEIGHTS) * step
        events += [h.mark(f"ProfilerStep#{step}", start, STEP_US), h.mark("Optimizer.step#SGD.step", start + 700, 50)]
        for layer, (rows, columns) in enumerate(WEIGHTS):
            at_us = start + 100 * layer
            shapes = [[rows], [BATCH, columns], [columns, rows]]
            events.append(h.module(f"Linear_{layer}", at_us - 1, 35))
            product("aten::linear", at_us, layer, shapes, **{"Sequence number": sequence + layer})
            at_us = start + 100 * (2 * len(WEIGHTS) - 1 - layer)
            link = {"Sequence number": sequence + layer, "Fwd thread id": 1}
            product(f"{NODE}AddmmBackward0", at_us, layer + 1, [[BATCH, rows], [rows, columns]], tid=2, **link)
        events.append(h.op("aten::_foreach_add_", start + 705, 30, **{"External id": next(numbers)}))
        events += h.launched("multi_tensor_apply_kernel", start + 710, 5, start + 730, 60, next(launches))
    events += [h.call("cudaDeviceSynchronize", STEP_US * STEPS, 20, 10**6)]
    device = {"id": 0, "name": "Tesla V100-SXM2-32GB", "totalGlobalMem": 34_079_637_504}
    return {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": events}


def damaged(trace: Trace) -> dict[str, bytes]:
    """Return every damage of a trace as the bytes of its file."""
    whole = written(trace)
    gpu = [event for event in trace["traceEvents"] if event["cat"] in ("kernel", "cuda_runtime")]
    host_only = {**trace, "traceEvents": [event for event in trace["traceEvents"] if event not in gpu]}
    found = {what: written(changed) for what, changed in damages(trace).items()}
    return {
        CUT: whole[: len(whole) * 6 // 10],
        "a compressed file is cut, and another appended": gzip.compress(whole)[:-200] + gzip.compress(whole),
        "two JSON files, one behind the other": whole + whole,
        **found,
        "no GPU event": written(host_only),
    }


def run(command: str, folder: Path, whole: bytes, data: bytes) -> Outcome:
    """Run a command on a trace."""
    files = {name: folder / f"{name.lower()}.json" for name in ("WHOLE", "TRACE", "OUT")}
    files["OUT.html"] = folder / "out.html"
    files |= {"CLUSTER": folder / "cluster.toml", "PAIRS": folder / "pairs.toml"}
    files["CLUSTER"].write_text(CLUSTER)
    files["PAIRS"].write_text(PAIRS)
    files["WHOLE"].write_bytes(whole)
    files["TRACE"].write_bytes(data)
    return call(*(files.get(word, word) for word in COMMANDS[command]), seconds=60)


def _said(outcome: Outcome) -> set[str]:
    """The findings that doubt, or what was warned of."""
    if outcome.out.startswith("{"):
        as_json = json.loads(outcome.out)
        if "trust" not in as_json:  # validate says it of each pair, or why it compared none
            reasons = {left_out["reason"] for left_out in as_json["not_compared"]}
            return {doubt for pair in as_json["pairs"] for doubt in pair["doubts"]} | reasons
        return {found["sentence"] for found in as_json["trust"]["findings"] if found["severity"] != "note"}
    return set(outcome.err.splitlines())


def _answer(outcome: Outcome) -> Any:
    """The numbers of an answer; a page or a timeline is compared by what it warns of."""
    if not outcome.out.startswith("{"):
        return None
    as_json = json.loads(outcome.out)
    keys = ("baseline_ms", "predicted_ms", "replay_error_pct", "points", "best", "devices", "change_pct", "status",
            "peak_bytes", "architectures", "pairs", "rows")  # fmt: skip
    return {key: as_json[key] for key in keys if key in as_json}


def _alike(one: Any, other: Any) -> bool:
    """Whether two JSON values agree, numbers in three digits: a tie of medians may differ in the last ones."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-9)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def undamaged(command: str, folder: Path, whole: bytes) -> Outcome:
    """Return what a command says of the whole trace."""
    before = run(command, folder, whole, whole)
    assert before.status == 0, (command, before)
    return before


def cell(command: str, folder: Path, whole: bytes, before: Outcome, data: bytes) -> str:
    """Say what a command does with a damaged trace, in one word; ``before`` is what it says of the whole one."""
    after = run(command, folder, whole, data)
    assert after.is_sound, (command, after)
    assert after.status < 2, (command, after)
    named = bool(_said(after) - _said(before))
    if after.status == 1 and (command == "validate" or not after.out.startswith("{")):
        return "refused" if named or not after.out else "SILENT"
    if named:
        return "void" if command == "info" and after.status == 1 else "named"
    return "same" if _alike(_answer(after), _answer(before)) else "SILENT"


def table() -> list[str]:
    """Return the table of docs/limits.md, line by line."""
    trace = gpu_recording()
    whole = written(trace)
    lines = [
        "| damage | " + " | ".join(f"`{name}`" for name in COMMANDS) + " |",
        "|---" * (len(COMMANDS) + 1) + "|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = {command: undamaged(command, folder, whole) for command in COMMANDS}
        for what, data in damaged(trace).items():
            cells = [cell(command, folder, whole, before[command], data) for command in COMMANDS]
            lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
