"""Trains with accelerate, in as many processes as a launcher starts."""

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for _ in range(30):
    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(16, 64)).square().mean())
    optimizer.step()
if accelerator.is_main_process:
    print(accelerator.num_processes, "ranks trained")
accelerator.end_training()
