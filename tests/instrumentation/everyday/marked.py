"""Makes a recording itself, after some steps without."""

import sys

import torch
import whatif.instrumentation

model = torch.nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters())


def step() -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()


for _ in range(int(sys.argv[1])):
    step()
with whatif.instrumentation.record(model, optimizer, "own.json.gz", untraced_steps=4) as recording:
    for _ in range(20):
        step()
        recording.step()
print("trained to the end")
