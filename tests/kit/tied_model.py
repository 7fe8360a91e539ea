"""A small model that is not a plain list of layers."""

from __future__ import annotations

import torch
from torch import nn


class TiedModel(nn.Module):
    """Has two layers with one weight, a buffer, and layers of one shape."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inlet, self.middle, self.outlet = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.outlet.weight = self.inlet.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.outlet(torch.tanh(self.middle(self.inlet(x))))
