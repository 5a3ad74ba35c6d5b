"""Makes the recordings of this folder: two ranks of one training run, each on a core of its own, gradients over gloo.

python traces/ranks_cpu/record.py --rounds 3 [NAME ...]

A round runs all variants one after the other, each in two new processes. Of each variant the round with the median step
of rank 0 (without the profiler) is kept. Prints the rows of the table in README.md. Needs torch and two cores.
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from whatif.instrumentation.kept_memory import KEEP_FREED_MEMORY

FOLDER = Path(__file__).resolve().parent
# Name of the variant: the batch of each rank, and how long rank 1 sleeps ahead of each step, ms.
VARIANTS = {"even": (16, 16, 0), "twice_the_batch": (16, 32, 0), "sleeping": (16, 16, 40)}
PORT = 29741


def train(rank: int, batch: int, sleep_ms: int, output: str) -> None:
    """Train as one of two ranks, and record it."""
    import torch
    from torch import distributed, nn
    from whatif.instrumentation.recorder import record

    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo", rank=rank, world_size=2)

    def block(channels_in: int, channels: int, stride: int) -> nn.Module:
        convolution = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU())

    blocks = [block(3, 32, 1), block(32, 64, 2), block(64, 64, 1), block(64, 128, 2), block(128, 128, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*blocks, *head), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    with record(model, optimizer, output, steps=5) as recording:
        while not recording.done:
            if rank == 1 and sleep_ms:
                time.sleep(sleep_ms / 1e3)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            recording.step()
    distributed.destroy_process_group()


def run(name: str, folder: Path) -> None:
    """Record both ranks of a variant into a folder."""
    batches, sleep_ms = VARIANTS[name][:2], VARIANTS[name][2]
    environment = {
        **os.environ, **KEEP_FREED_MEMORY, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), str(batch), str(sleep_ms), str(folder / "run.json.gz")],
            env=environment,
        )
        for rank, batch in enumerate(batches)
    ]
    codes = [process.wait() for process in ranks]
    if any(codes):
        raise SystemExit(f"{name}: a rank failed with {codes}")


def untraced_ms(path: Path) -> dict[str, float]:
    """The step without the profiler, as the recording holds it."""
    with gzip.open(path) as file:
        return dict(json.load(file)["whatif"]["untraced_step_ms"])


def main() -> None:
    """Record the variants in rounds and keep the median ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", nargs=4)
    arguments = parser.parse_args()
    if arguments.rank:
        rank, batch, sleep_ms, output = arguments.rank
        train(int(rank), int(batch), int(sleep_ms), output)
        return
    names = arguments.names or [*VARIANTS]
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(arguments.rounds):
            for name in names:
                folder = Path(scratch) / str(number) / name
                folder.mkdir(parents=True)
                run(name, folder)
        for name in names:
            files = [Path(scratch) / str(number) / name / "run.rank0.json.gz" for number in range(arguments.rounds)]
            medians = [untraced_ms(file)["median"] for file in files]
            chosen = files[medians.index(statistics.median_low(medians))]
            kept = [FOLDER / name / f"rank{rank}.json.gz" for rank in range(2)]
            kept[0].parent.mkdir(exist_ok=True)
            for rank, file in enumerate(kept):
                shutil.copy(chosen.with_name(f"run.rank{rank}.json.gz"), file)
            told = [untraced_ms(file) for file in kept]
            cells = [f"{t['median']:.1f} ({t['q25']:.1f} … {t['q75']:.1f})" for t in told]
            print(f"| `{name}` | {' | '.join(cells)} | {', '.join(f'{ms:.1f}' for ms in medians)} |")


if __name__ == "__main__":
    main()
