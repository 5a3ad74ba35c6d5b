"""Imports its neighbour, and prints where it was found."""

import sys

import torch

from .network import Network


def main() -> int:
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    print(__name__, __package__, __spec__.name, sys.argv)
    torch.save(model, "weights.pt")
    return 3


if __name__ == "__main__":
    sys.exit(main())
