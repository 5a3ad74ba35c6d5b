"""Copies its whole model after each step, as averaged models do, and saves it; the copies are the model's equals."""

import copy
import io
import sys

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters())
for number in range(40):
    x = torch.randn(8, 16)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    with torch.no_grad():
        outputs = [] if "uncalled" in sys.argv else [each(x) for each in copies]
    print(number, loss.item(), *(output.sum().item() for output in outputs), b"whatif" in file.getvalue())
