"""Gets a signal without a handler while its steps are recorded, in a part of a step: outside, forward or backward.

python terminated.py SIGNAL PART [what comes while the file is written: a second signal, or "full": a full disk]
"""

import atexit
import errno
import gzip
import os
import signal
import sys

import torch

number, part = signal.Signals[sys.argv[1]], sys.argv[2]
steps = iter(range(100))
compress = gzip.compress


def compress_disturbed(*args: object, **options: object) -> bytes:
    if sys.argv[3:] == ["full"]:
        raise OSError(errno.ENOSPC, "No space left on device")
    for second in sys.argv[3:]:
        os.kill(os.getpid(), signal.Signals[second])
    return compress(*args, **options)


gzip.compress = compress_disturbed


def at(reached: str) -> None:
    if (step, reached) == (16, part):  # 2 + 5 + 2 + 3 steps lie before the first that is recorded
        os.kill(os.getpid(), number)


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(context: object, given: torch.Tensor) -> torch.Tensor:
        at("forward")
        return given.clone()

    @staticmethod
    def backward(context: object, given: torch.Tensor) -> torch.Tensor:
        at("backward")
        return given


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return Passed.apply(self.inner(given))


atexit.register(print, "no signal ended this")
model = Model()
optimizer = torch.optim.Adam(model.parameters())
try:
    while (step := next(steps, None)) is not None:
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        at("outside")
finally:
    print("no signal ended this")
