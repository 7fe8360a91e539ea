"""The parts of torchft's DiLoCo that tests look at and change, and that have no public names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torchft.local_sgd import DiLoCo


def fragments_in(diloco: DiLoCo) -> list[Any]:
    """Its fragments of the model, in order."""
    return list(diloco._fragments)  # noqa: SLF001  torchft has no other way


def originals_in(diloco: DiLoCo) -> list[dict[str, torch.Tensor]]:
    """The shared parameters of each fragment: the result of its last outer step."""
    return [fragment.original_parameters for fragment in fragments_in(diloco)]


def outer_optimizers_in(diloco: DiLoCo) -> list[torch.optim.Optimizer]:
    """The outer optimizer of each fragment."""
    return [fragment._outer_optimizer for fragment in fragments_in(diloco)]  # noqa: SLF001  as above
