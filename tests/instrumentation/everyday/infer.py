"""Runs a model and trains nothing."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
with torch.no_grad():
    total = sum(model(torch.randn(16, 64)).sum().item() for _ in range(40))
print("answered", total)
torch.save(model.state_dict(), "weights.pt")
