"""A training step with a planted cause, `python script.py CAUSE`; with --time, how long a step takes with and without.

The line of each cause ends with the comment "planted CAUSE". Both are timed in blocks
that take turns, each beside one of the other, so that other programs slow both alike.
"""

import contextlib
import gc
import io
import os
import statistics
import sys
import time

import torch
from torch import nn

CAUSE, TIMED = sys.argv[1], "--time" in sys.argv
BLOCKS, STEPS = 24, 12

torch.set_num_threads(1)
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
        sample = torch.full((256,), float(index % 7))
        if self.slow:
            sample = sum(sample * k for k in range(12)) / 66  # planted transform
        return sample, index % 10


model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())], nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
garbage = [[number] for number in range(60_000 if CAUSE == "gc" else 0)]
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
        total = sum(value.item() for value in model[0].weight[:4].flatten())  # planted item
        assert total == total
    if planted and CAUSE == "gc" and number % 3 == 0:
        gc.collect()  # planted gc
    if planted and CAUSE == "print":
        with contextlib.redirect_stdout(out):
            print(model[0].weight[:40])  # planted print


def epoch(steps, planted):
    """Train for some steps."""
    data = Squares()
    data.slow = planted and CAUSE == "transform"
    loader = iter(torch.utils.data.DataLoader(data, batch_size=96))
    for number in range(steps):
        batch, labels = next(loader)
        train(batch, labels, number, planted)


if not TIMED:
    epoch(1000, True)
else:
    epoch(4, True)
    shares = []
    for _ in range(BLOCKS):
        seconds = []
        for planted in (True, False):
            began = time.process_time()
            epoch(STEPS, planted)
            seconds.append(time.process_time() - began)
        shares.append(seconds[1] / seconds[0])
    print("without/with", statistics.median(shares))
