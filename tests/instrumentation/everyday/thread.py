"""Trains in a thread that ends before the program does."""

import threading

import torch


def train() -> None:
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


model = torch.nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters())
thread = threading.Thread(target=train)
thread.start()
thread.join()
