"""Trains as people do: options, loader, dropout, schedule, clipping; cleans up, ends with a status of its own."""

import argparse
import atexit
import random
import sys

import torch
from torch import nn

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=40)
options.add_argument("--fail-at", type=int)
options.add_argument("--status", type=int, default=0)
options.add_argument("-o", default="weights.pt")
options = options.parse_args()

torch.manual_seed(0)
random.seed(0)
atexit.register(print, "exit handler ran")
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
data = torch.utils.data.TensorDataset(torch.randn(options.steps * 8, 16), torch.randint(4, (options.steps * 8,)))
try:
    for number, (x, y) in enumerate(torch.utils.data.DataLoader(data, 8, shuffle=True, num_workers=1)):
        if number == options.fail_at:
            raise ValueError("bad batch")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if number % 10 == 0:
            print(number, loss.item(), schedule.get_last_lr(), flush=True)
finally:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}, options.o)
    torch.save(model, "whole.pt")
    print("saved after", number, random.random(), torch.rand(1).item(), sys.argv[1:])
sys.exit(options.status)
