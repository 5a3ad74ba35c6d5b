"""Receives the given signal the given number of times while its recording is written, and prints the outcome.

python interrupted.py SIGNAL TIMES [thread]
"""

import gzip
import os
import signal
import sys
import threading

import torch

number, times = signal.Signals[sys.argv[1]], int(sys.argv[2])
compress = gzip.compress


def compress_interrupted(*args: object, **options: object) -> bytes:
    for _ in range(times):
        os.kill(os.getpid(), number)
    return compress(*args, **options)


def bye(*_: object) -> None:
    print("handler", flush=True)
    sys.exit(7)


def train() -> None:
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


gzip.compress = compress_interrupted
if number == signal.SIGHUP:
    signal.signal(number, bye)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters())
if sys.argv[3:] == ["thread"]:
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
else:
    train()
print("trained to the end")
