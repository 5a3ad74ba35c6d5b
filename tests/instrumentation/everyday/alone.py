"""Makes no process group: each process that torchrun starts trains for itself."""

import os

import torch

model = torch.nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(30):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
if os.environ["RANK"] == "0":
    print(os.environ["WORLD_SIZE"], "ranks trained")
