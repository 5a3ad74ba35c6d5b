"""A model in a module of its own."""

from torch import Tensor, nn


class Network(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())
