"""Make the recordings of traces/memory_cpu: a campaign's twin models with every allocation, one process each.

python -m benchmarks.memory_recordings [MODEL ...]

Their times are not meaningful: the profiler also records every allocation and every free. Needs
torch.
"""

import os
import subprocess
import sys
from pathlib import Path

from whatif.instrumentation.recording_file import read_recording, rewrite_recording

from benchmarks.campaign.models import TWINS
from benchmarks.campaign.training import Training
from benchmarks.campaign.variants import baseline_options

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "traces" / "memory_cpu"
UNREAD = ("Input Strides", "Ev Idx", "Record function id", "Total Reserved", "finished")
STEPS, WARMUP_STEPS, UNTRACED_STEPS = 3, 2, 4


def record_here(name: str) -> None:
    """Record the baseline of one twin in this process."""
    import torch
    from whatif.instrumentation.recorder import record

    torch.set_num_threads(1)
    training = Training(name, baseline_options(TWINS[name]), full=False)
    training.start(torch.device("cpu"))
    with record(
        training.model,
        training.optimizer,
        FOLDER / f"{name}.trace.json.gz",
        steps=STEPS,
        warmup_steps=WARMUP_STEPS,
        untraced_steps=UNTRACED_STEPS,
        memory=True,
    ) as recording:
        while not recording.done:
            training.step()
            recording.step()
    shorten(FOLDER / f"{name}.trace.json.gz")


def shorten(path: Path) -> None:
    """Remove the parts of a recording that no reader needs, to keep it small."""
    recording, compressed = read_recording(path)
    for event in recording["traceEvents"]:
        for unread in UNREAD:
            event.get("args", {}).pop(unread, None)
    rewrite_recording(recording, path, compress=compressed)


def main() -> None:
    """Record the models that are named, or all."""
    names = sys.argv[1:]
    if names[:1] == ["--here"]:
        record_here(names[1])
        return
    for name in names or TWINS:
        command = [sys.executable, "-m", "benchmarks.memory_recordings", "--here", name]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
