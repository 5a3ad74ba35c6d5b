"""Forks for an evaluation while it trains, during a recording and after it, and waits for each child."""

import os
import sys

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x, y = torch.randn(16, 32), torch.randint(0, 4, (16,))
for step in range(60):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if step in (2, 50):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            torch.save(model.state_dict(), f"at{step}.pt")
            print("evaluated after", step)
            raise SystemExit(7 if step == 50 else 0)
        print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
torch.save(model.state_dict(), "end.pt")
