"""A training step with a planted cause, `python script.py CAUSE`; with --time, the share of the step that it takes.

The line of each cause ends with the comment "planted CAUSE". Steps with and without it are timed
in blocks that take turns, so that other programs slow both alike. The rank runs as two processes.
"""

import contextlib
import gc
import io
import itertools
import os
import statistics
import sys
import time

import torch
from torch import nn

CAUSE, TIMED = sys.argv[1], "--time" in sys.argv
BLOCKS, STEPS = 24, 6

torch.set_num_threads(1)
torch.set_printoptions(profile="full")
torch.manual_seed(0)
RANK = int(os.environ.get("RANK", "0"))
if CAUSE == "rank":
    torch.distributed.init_process_group("gloo")


class Squares(torch.utils.data.Dataset):
    """Samples that are made by a slow transform, where that is the cause."""

    slow = CAUSE == "transform"

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        sample = torch.full((1024,), float(index % 7))
        if self.slow:
            sample = sum(sample * k for k in range(24)) / 276  # planted transform
        return sample, index % 10


model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())], nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
garbage = [[number] for number in range(300_000 if CAUSE == "gc" else 0)]
gc.disable()
out = io.StringIO()


def train(batch, labels, number, planted):
    """One step."""
    loss = nn.functional.cross_entropy(model(batch), labels)
    loss.backward()
    if CAUSE == "rank":
        if planted and RANK == 1:
            torch.linalg.svd(torch.ones(256, 256))  # planted rank
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        torch.distributed.all_reduce(flat)
    optimizer.step()
    optimizer.zero_grad()
    if planted and CAUSE == "item":
        total = sum(value.item() for value in model[0].weight[:10].flatten())  # planted item
        assert total == total
    if planted and CAUSE == "gc" and number % 3 == 0:
        gc.collect()  # planted gc
    if planted and CAUSE == "print":
        with contextlib.redirect_stdout(out):
            print(model[0].weight[:2])  # planted print


def epoch(steps, planted):
    """Train for some steps; return their times in seconds."""
    data = Squares()
    data.slow = planted and CAUSE == "transform"
    loader = iter(torch.utils.data.DataLoader(data, batch_size=256))
    ends = [clock()]
    for number in range(steps):
        batch, labels = next(loader)
        train(batch, labels, number, planted)
        ends.append(clock())
    return [end - start for start, end in itertools.pairwise(ends)]


# As `whatif` predicts them: the mean step's CPU time without a line, and the median step of all ranks.
clock, middle = (time.perf_counter, statistics.median) if CAUSE == "rank" else (time.process_time, statistics.fmean)
if not TIMED:
    epoch(1000, True)
else:
    epoch(4, True)
    pairs = [[middle(epoch(STEPS, planted)) for planted in (True, False)] for _ in range(BLOCKS)]
    share = statistics.median(1 - without_s / with_s for with_s, without_s in pairs)
    print(f"{share:.4f} of {1e3 * statistics.median(with_s for with_s, _ in pairs):.2f} ms")
