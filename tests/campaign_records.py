"""Records of a campaign by hand, and the pairs that are found in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cli.test_commands import training
from tests.helpers import write_trace
from whatif.questions.validate.validate_pairs import Pair, find_pairs
from whatif.questions.validate.validate_records import DEFAULT_OPTIONS

Options = dict[str, Any]


SGD: Options = {"optimizer": "sgd", "implementation": "foreach"}


def record(
    folder: Path,
    variant: str,
    *,
    model: str = "net",
    trace: bool = True,
    cpu_ms: Any = (10.0, 11.0, 12.0),
    **changes: Any,
) -> Path:
    """A campaign's record, 20 ms by the wall clock, with five steps of a small trace beside it."""
    extra = {
        key: changes.pop(key)
        for key in ("status", "reason", "batch", "machine", "untraced", "rounds", "beside")
        if key in changes
    }
    options = {**DEFAULT_OPTIONS, **changes}
    content = {
        "schema": 1, "name": f"{model}--{variant}", "model": model, "variant": variant, "status": "complete",
        "options": options, "batch": int(8 * options["batch_factor"]), "machine": {"torch": "2.13", "gpu": None},
        "untraced": {"median_ms": 20.0, "q25_ms": 19.0, "q75_ms": 21.0, "cpu_thread_ms": list(cpu_ms), "steps": 9},
        **extra,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{model}--{variant}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    if trace:
        write_trace(folder / f"{model}--{variant}.trace.json.gz", training())
    return path


def pairs_of(folder: Path) -> dict[tuple[str, str], Pair]:
    """Each pair by the variants of its two sides."""
    return {
        (pair.baseline.name.partition(".")[0].partition("--")[2], pair.changed.stem.partition("--")[2]): pair
        for pair in find_pairs([folder])[0]
    }


def reasons(folder: Path) -> dict[str, str]:
    return {item.name: item.reason for item in find_pairs([folder])[1]}
