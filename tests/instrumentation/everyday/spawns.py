"""Trains in two processes of its own."""

import torch
from torch import nn


def train(rank: int) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    print(rank, "trained", flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
