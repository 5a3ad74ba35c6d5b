"""Makes the recordings of this folder: each in a process of its own, in rounds, and keeps each one's median round.

python traces/record.py --rounds 3 [NAME ...]

A round runs all recordings one after the other, so that a noisy minute does not hit one side of a pair only. Of each
recording the round with the median untraced time is kept. Prints the rows of the table in README.md. Needs torch.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from whatif.instrumentation.kept_memory import KEEP_FREED_MEMORY

TRACES = Path(__file__).resolve().parent
EXAMPLES = TRACES.parent / "examples"

RESNET = "train_resnet.py --threads 1 --steps 100"
TRANSFORMER = "train_transformer.py --threads 1 --steps 100 --batch-size 4 --context 32"

# Name of the recording: the script and its arguments.
RECORDINGS = {
    "resnet18_cifar_cpu": f"{RESNET} --batch-size 32",
    "resnet18_cifar_cpu_bf16": f"{RESNET} --batch-size 32 --precision bf16",
    "resnet18_cifar_cpu_batch16": f"{RESNET} --batch-size 16",
    "resnet18_cifar_cpu_batch64": f"{RESNET} --batch-size 64",
    "resnet18_cifar_cpu_loader0": f"{RESNET} --batch-size 32 --augmentation heavy",
    "resnet18_cifar_cpu_loader2": f"{RESNET} --batch-size 32 --augmentation heavy --workers 2",
    "transformer_cpu": f"{TRANSFORMER} --adam for-loop",
    "transformer_cpu_foreach": f"{TRANSFORMER} --adam foreach",
    "transformer_cpu_fused": f"{TRANSFORMER} --adam fused",
}

STEPS = 5
UNTRACED_STEPS = 20


def record_here(name: str, output: Path) -> None:
    """Record in this process: the profiler must not have run in it before."""
    from whatif.instrumentation.collect import collect

    script, *args = RECORDINGS[name].split()
    if "--workers" not in args:  # Worker processes would share these pages, and each later write would copy one.
        touched = [b"\1" * (16 << 20) for _ in range(64)]  # 1 GiB that the process now has for good.
        del touched
    ended = collect(str(EXAMPLES / script), args, output, steps=STEPS, untraced_steps=UNTRACED_STEPS, stop=True)
    if ended.recording is None:
        sys.exit(f"{name}: no recording: {ended.failure}")


def record_in_rounds(names: list[str], rounds: int) -> dict[str, list[float]]:
    """Record each name in every round, keep the median one here; return the untraced medians in ms of all rounds."""
    medians_ms: dict[str, list[float]] = {name: [] for name in names}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **KEEP_FREED_MEMORY}
    with tempfile.TemporaryDirectory(dir=TRACES) as folder:
        attempts = {name: [Path(folder) / f"{name}.{number}.json.gz" for number in range(rounds)] for name in names}
        for number in range(rounds):
            for name in names:
                attempt = attempts[name][number]
                command = [sys.executable, __file__, "--into", str(attempt), name]
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
                medians_ms[name].append(metadata(attempt)["untraced_step_ms"]["median"])
        for name in names:
            # The fastest one would flatter some recordings: the machine's clock drifts by up to a tenth between rounds.
            kept = medians_ms[name].index(statistics.median_low(medians_ms[name]))
            attempts[name][kept].replace(TRACES / f"{name}.json.gz")
    return medians_ms


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        recording = json.load(file)
    assert isinstance(recording, dict)
    return recording


def metadata(path: Path) -> dict[str, Any]:
    found = read(path)["whatif"]
    assert isinstance(found, dict)
    return found


def table_row(name: str, medians_ms: list[float]) -> str:
    recording = read(TRACES / f"{name}.json.gz")
    wall, cpu = recording["whatif"]["untraced_step_ms"], recording["whatif"]["untraced_cpu_ms"]
    marks = [event for event in recording["traceEvents"] if str(event.get("name", "")).startswith("ProfilerStep#")]
    traced_ms = statistics.median(mark["dur"] for mark in marks) / 1e3
    rounds = ", ".join(f"{median_ms:.1f}" for median_ms in medians_ms)
    return (
        f"| `{name}` | `{RECORDINGS[name]}` | {wall['median']:.1f} ({wall['q25']:.1f} … {wall['q75']:.1f})"
        f" | {cpu['median']:.1f} | {traced_ms:.1f} | {rounds} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*RECORDINGS, []], help="which recordings; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--into", type=Path, help="record one name once, into this file")
    options = parser.parse_args()
    if options.into:
        record_here(options.names[0], options.into)
        return
    names = options.names or list(RECORDINGS)
    medians_ms = record_in_rounds(names, options.rounds)
    for name in names:
        print(table_row(name, medians_ms[name]))


if __name__ == "__main__":
    main()
