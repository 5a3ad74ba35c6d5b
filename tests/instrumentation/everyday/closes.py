"""Closes its streams as daemons do: a forked child its output, the training its messages, and its output at the end."""

import os
import sys

import torch

if not (child := os.fork()):
    sys.stdout.close()
    sys.exit(3)
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(24):
    if step == 4:
        sys.stderr = None
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
print("trained", flush=True)
sys.stdout.close()
raise RuntimeError("with nowhere to print it")
