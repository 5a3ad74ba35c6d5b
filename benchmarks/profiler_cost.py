"""The overhead of torch's profiler on CPU training: measured pairs, and whatif's estimate from each trace alone.

    python -m benchmarks.profiler_cost record FOLDER [--models vgg19,gnmt] [--rounds 6]
    python -m benchmarks.profiler_cost evaluate [FOLDER]

``record`` trains the campaign's models, with a batch of one or two samples so that operators are short, in alternating
blocks with and without the profiler, one thread, all sixteen sets of options in random order each round. It writes
the overhead of a step, the median over the rounds of the difference of the blocks' median CPU times, and for each set
one trace of two steps. ``evaluate`` prints the error of the estimated step without the profiler.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import whatif
from whatif.prediction.baseline import Baseline

FOLDER = Path(__file__).resolve().parent.parent / "traces" / "profiler_cost_cpu"
OPTIONS = ("record_shapes", "with_stack", "profile_memory", "with_modules")
BATCH_FACTOR, STEPS, WARM_UP_STEPS, KEPT_STEPS = 0.15, 8, 1, 2
# Fields that readers of a trace do not need, or that name files of the recording machine.
LEFT_OUT = ("Call stack", "Ev Idx", "Record function id", "Input Strides", "Python id", "Python parent id")


@dataclass(frozen=True)
class Outcome:
    """A pair: the measured step without the profiler, and its estimate from the trace, ms."""

    model: str
    options: tuple[str, ...]
    measured_ms: float
    traced_ms: float
    estimated_ms: float
    low_ms: float
    high_ms: float

    @property
    def error(self) -> float:
        """The estimate's relative error."""
        return self.estimated_ms / self.measured_ms - 1

    @property
    def inside(self) -> bool:
        """Whether the range holds the measured step."""
        return self.low_ms <= self.measured_ms <= self.high_ms


def outcomes(folder: Path = FOLDER, models: Sequence[str] = ()) -> list[Outcome]:
    """Return the estimate of the step without the profiler from each trace of a folder, and the measurement."""
    found = []
    for pair in json.loads((folder / "pairs.json").read_text())["pairs"]:
        if models and pair["model"] not in models:
            continue
        baseline = Baseline.of(whatif.read(folder / pair["trace"]), "mark")
        estimated, recorded_ms = baseline.estimated_ms, baseline.measured_ns / 1e6
        assert estimated is not None, pair["trace"]
        # The trace covers one block: apply its share of overhead to the step of all blocks.
        traced_ms = pair["without_ms"] + pair["cost_ms"]
        ends = (traced_ms * estimated[end] / recorded_ms for end in ("estimate", "low", "high"))
        found.append(Outcome(pair["model"], tuple(pair["options"]), pair["without_ms"], traced_ms, *ends))
    return found


def summary(found: Sequence[Outcome]) -> str:
    """Return a line with the errors of the traced step and of the estimate, and coverage and width of the range."""
    raw = np.array([abs(outcome.traced_ms / outcome.measured_ms - 1) for outcome in found])
    error = np.array([outcome.error for outcome in found])
    width = np.array([(outcome.high_ms - outcome.low_ms) / outcome.measured_ms for outcome in found])
    inside = np.mean([outcome.inside for outcome in found])
    return (
        f"{len(found)} pairs: as traced {_share(raw)}, estimated {_share(np.abs(error))}, "
        f"mean {100 * error.mean():+.1f} %; {100 * inside:.0f} % inside the range, "
        f"median width {100 * np.median(width):.0f} %"
    )


def _share(errors: np.ndarray[Any, Any]) -> str:
    return f"{100 * np.median(errors):.1f} / {100 * np.percentile(errors, 90):.1f} % (median / 90th percentile)"


def record(folder: Path, models: Sequence[str], rounds: int) -> None:
    """Train each model with and without the profiler, and write the pairs and their traces."""
    import torch

    from benchmarks.campaign.models import TWINS
    from benchmarks.campaign.training import Training
    from benchmarks.campaign.variants import Options

    torch.set_num_threads(1)
    pairs = []
    for model in models or TWINS:
        training = Training(model, Options(batch_factor=BATCH_FACTOR), full=False)
        training.start(torch.device("cpu"))
        pairs += _pairs_of(model, training.step, folder, rounds)
        print(model, flush=True)
    description = {"torch": torch.__version__, "threads": 1, "clock": "CPU time of the thread", "pairs": pairs}
    (folder / "pairs.json").write_text(json.dumps(description, indent=1))


def _pairs_of(model: str, step: Callable[[], None], folder: Path, rounds: int) -> list[dict[str, Any]]:
    from torch.profiler import ProfilerActivity, profile

    sets = [chosen for n in range(len(OPTIONS) + 1) for chosen in itertools.combinations(OPTIONS, n)]
    times: dict[tuple[str, ...], list[tuple[float, float]]] = {chosen: [] for chosen in sets}
    _block_ms(step, 10)
    for last in (number == rounds - 1 for number in range(rounds)):
        for chosen in random.sample(sets, len(sets)):
            _block_ms(step, WARM_UP_STEPS)
            without_ms = _block_ms(step, STEPS)
            with profile(activities=[ProfilerActivity.CPU], **dict.fromkeys(chosen, True)) as profiler:
                _block_ms(step, WARM_UP_STEPS)
                traced_ms = _block_ms(step, STEPS)
            times[chosen].append((without_ms, traced_ms))
            if last:
                _write_trace(profiler, folder / _trace_of(model, chosen))
            del profiler
            gc.collect()
    return [_pair(model, chosen, np.array(blocks)) for chosen, blocks in times.items()]


def _block_ms(step: Callable[[], None], count: int) -> float:
    """The median CPU time of some steps."""
    taken_ns = []
    for _ in range(count):
        begin_ns = time.thread_time_ns()
        step()
        taken_ns.append(time.thread_time_ns() - begin_ns)
    return float(np.median(taken_ns)) / 1e6


def _pair(model: str, chosen: tuple[str, ...], blocks: np.ndarray[Any, Any]) -> dict[str, Any]:
    cost_ms = blocks[:, 1] - blocks[:, 0]
    return {
        "model": model, "options": list(chosen), "without_ms": round(float(np.median(blocks[:, 0])), 4),
        "cost_ms": round(float(np.median(cost_ms)), 4),
        "cost_quartiles_ms": np.percentile(cost_ms, [25, 75]).round(4).tolist(), "rounds": len(blocks),
        "trace": _trace_of(model, chosen),
    }  # fmt: skip


def _trace_of(model: str, chosen: tuple[str, ...]) -> str:
    return f"{model}--{'-'.join(option.split('_')[1] for option in chosen) or 'plain'}.trace.json.gz"


def _write_trace(profiler: Any, path: Path) -> None:
    """Write the last steps of a trace, without names of files of this machine."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        trace = json.loads(Path(file.name).read_text())
    for key in ("traceName", "trace_id", "host_name"):
        trace.pop(key, None)
    events = [event for event in trace["traceEvents"] if "ts" in event]
    updates = sorted(e["ts"] + e.get("dur", 0) for e in events if str(e.get("name")).startswith("Optimizer.step"))
    begin, end = updates[-KEPT_STEPS - 1], updates[-1] + 50
    kept = [event for event in events if begin <= event["ts"] and event["ts"] + event.get("dur", 0) <= end]
    for event in kept:
        if event.get("cat") == "python_function" and not event["name"].startswith("nn.Module"):
            event["name"], event["args"] = "f", {}
        for key in LEFT_OUT:
            event.get("args", {}).pop(key, None)
    trace["traceEvents"] = kept
    path.write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0))


def main() -> None:
    """Record or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "evaluate"))
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--models", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    models = [name for name in args.models.split(",") if name]
    if args.what == "record":
        args.folder.mkdir(parents=True, exist_ok=True)
        record(args.folder, models, args.rounds)
    found = outcomes(args.folder, models)
    for name, key in (("model", lambda each: each.model), ("options", lambda each: " ".join(each.options) or "plain")):
        for group in sorted({key(each) for each in found}):
            print(f"{name} {group}: {summary([each for each in found if key(each) == group])}")
    print(summary(found))


if __name__ == "__main__":
    main()
