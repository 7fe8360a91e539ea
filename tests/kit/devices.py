"""The devices of tests that are to hold on all of them: the CPU everywhere, a GPU with `pytest -m gpu`."""

from __future__ import annotations

from typing import Final

import pytest
import torch

DEVICES: Final = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here; run `pytest -m gpu` where one is"),
        ],
    ),
]
