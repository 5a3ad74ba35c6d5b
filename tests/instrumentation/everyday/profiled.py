"""Profiles some of its steps itself, and says what it saw."""

import argparse

import torch
from torch.profiler import profile, schedule

options = argparse.ArgumentParser()
options.add_argument("--wait", type=int, default=12)
options.add_argument("--steps", type=int, default=60)
options.add_argument("--inference", action="store_true")
options = options.parse_args()

model = torch.nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters())
with profile(schedule=schedule(wait=options.wait, warmup=2, active=4, repeat=1), record_shapes=True) as profiler:
    for _ in range(options.steps):
        loss = model(torch.randn(8, 16)).square().mean()
        if not options.inference:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        profiler.step()
print("profiled", sorted(event.name for event in profiler.events()))
