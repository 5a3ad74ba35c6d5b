"""Predict training steps on this machine's CPU from an empty database, and train them: six small steps.

    python benchmarks/predict_on_cpu.py [NAME ...] [--threads 1]

Each network is predicted by `whatif predict FILE:NAME --device cpu --measure`, which measures its operators alone, and
then trained in this process, without a profiler. Prints one line per network: both times, the error, and what the
prediction left out. With one thread both are CPU time at the machine's fastest pace during the measurement of the
operators (docs/profile.md): the pace is measured with every step, whose time scales with it like that of a product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from whatif.instrumentation.operators import timing
from whatif.instrumentation.profile_ops import pace

BATCH = 16
# Steps before the prediction, and as many after it.
WARM_STEPS, STEPS = 5, 25


class Tokens(nn.Module):
    """A small GPT: blocks of causal attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of every position."""
        logits: torch.Tensor = self.head(self.blocks(self.embed(tokens)))
        return logits


class Recurrent(nn.Module):
    """Two layers of LSTM, and a class from the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of each sequence."""
        logits: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


def cnn() -> nn.Module:
    """Return three convolutions with batch normalization and pooling."""
    parts: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        parts += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def transformer() -> nn.Module:
    """Return the small GPT."""
    return Tokens()


def lstm() -> nn.Module:
    """Return the recurrent network."""
    return Recurrent()


# By name: the network, the optimizer, and the input as `--input` has it.
CASES: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "cnn-sgd": (cnn, "sgd", f"{BATCH},3,64,64"),
    "cnn-adam": (cnn, "adam", f"{BATCH},3,64,64"),
    "transformer-sgd": (transformer, "sgd", f"{BATCH},64:int64"),
    "transformer-adam": (transformer, "adam", f"{BATCH},64:int64"),
    "lstm-sgd": (lstm, "sgd", f"{BATCH},32,64"),
    "lstm-adam": (lstm, "adam", f"{BATCH},32,64"),
}


def predicted(name: str, threads: int) -> tuple[dict[str, Any], float | None]:
    """Predict a case from an empty database; returns the report, the messages, and the pace in ns."""
    build, optimizer, shape = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "whatif", "predict", f"{__file__}:{build.__name__}", "--device", "cpu", "--measure",
            "--input", shape, "--optimizer", optimizer, "--db", f"{folder}/db", "--json",
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": str(threads), "PATH": "", "WHATIF_CACHE": ""}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        if run.returncode:
            sys.exit(run.stderr)
        paces = Path(folder, "db", pace.FILE)
        at_ns = min(json.loads(paces.read_bytes()).values()) if paces.exists() else None
    found: dict[str, Any] = json.loads(run.stdout)
    return found | {"said": run.stderr}, at_ns


def measured(name: str, threads: int) -> list[tuple[float, float]]:
    """Train a case in this process; returns each step's time, ms, and the pace at that step, ns."""
    build, optimizer, shape = CASES[name]
    torch.manual_seed(0)
    sizes, _, kind = shape.partition(":")
    dims = [int(size) for size in sizes.split(",")]
    x = torch.randint(1000, dims) if kind else torch.randn(dims)
    model = build()
    make = torch.optim.SGD if optimizer == "sgd" else torch.optim.Adam
    update = make(model.parameters(), lr=1e-3)
    logits = model(x)
    target = torch.randint(logits.shape[-1], logits.shape[:-1])

    def step() -> None:
        update.zero_grad()
        logits = model(x)
        nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten()).backward()
        update.step()

    clock = timing.cpu_clock(threads)
    speed = pace.Pace(clock)
    found, before_ns = [], speed.sample()
    for _ in range(WARM_STEPS + STEPS):
        step_ns = clock(step)
        after_ns = speed.sample(step_ns)
        found.append((step_ns / 1e6, (before_ns + after_ns) / 2))
        before_ns = after_ns
    return found[WARM_STEPS:]


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], metavar="NAME")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print("network            predicted   measured   error", flush=True)
    for name in asked.names or CASES:
        steps = measured(name, asked.threads)
        found, at_ns = predicted(name, asked.threads)
        steps += measured(name, asked.threads)
        step_ms = statistics.median(ms * (at_ns / pace_ns if at_ns else 1.0) for ms, pace_ns in steps)
        ms = found["predicted_ms"]
        print(f"{name:18s} {ms:8.2f} ms {step_ms:7.2f} ms {100 * (ms / step_ms - 1):+6.1f} %", flush=True)
        for line in (*found["said"].splitlines(), *found["warnings"]):
            print(f"    {line}", flush=True)


if __name__ == "__main__":
    main()
