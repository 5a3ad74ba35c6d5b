"""Handles SIGTERM with a status of its own; writes `ready` when it has trained for long enough."""

import signal
import sys
import time
from pathlib import Path

import torch


def bye(*_: object) -> None:
    print("handler", flush=True)
    sys.exit(7)


signal.signal(signal.SIGTERM, bye)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters())
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
for _ in range(30):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
Path("ready").touch()
while True:
    time.sleep(0.01)
