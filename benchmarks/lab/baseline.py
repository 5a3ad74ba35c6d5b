"""Record one worker alone, on its own core of a lab host: the recording from which everything is predicted.

In a real cluster each worker has its own machine. Here two of them share a chip: the baseline must include the
contention for caches and memory, so the same training runs on the other host meanwhile.
"""

from pathlib import Path
from typing import Any

from whatif.instrumentation.recorder import record

from benchmarks.campaign.trim import trim

from .jobs import Job, Layout
from .models import MODELS, Training
from .rank import Rank, run, undisturbed

RECORDED_STEPS, WARMUP_STEPS, UNTRACED_STEPS = 5, 3, 12
MOST_BYTES = 400_000


def jobs(out: Path, models: tuple[str, ...] = ()) -> list[Job]:
    """One recording of each model."""
    return [
        Job(f"record-{model}", __name__, Layout(), {"model": model, "trace": str((out / trace_name(model)).resolve())},
            made=(trace_name(model),), record=lambda results: None)
        for model in models or MODELS
    ]  # fmt: skip


def trace_name(model: str) -> str:
    """The file name of a model's recording."""
    return f"{model}.trace.json.gz"


def work(rank: Rank) -> dict[str, Any]:
    """Record on rank 0; the others train until it is done."""
    training = Training(rank.request["model"])
    done = Path(rank.request["result"]).with_name("done")
    if rank.number:
        with undisturbed():
            while not done.exists():
                training.step()
        return {}
    try:
        return record_worker(training, Path(rank.request["trace"]), MOST_BYTES)
    finally:
        done.touch()


def record_worker(training: Any, path: Path, most_bytes: int) -> dict[str, Any]:
    """Record the steps of a training (its `model`, `optimizer` and `step`); return the number that fit the file."""
    with undisturbed(), record(
        training.model, training.optimizer, path,
        steps=RECORDED_STEPS, warmup_steps=WARMUP_STEPS, untraced_steps=UNTRACED_STEPS,
    ) as recording:  # fmt: skip
        while not recording.done:
            training.step()
            recording.step()
    return {"steps": trim(path, most_bytes)}


if __name__ == "__main__":
    run(work, join=False)
