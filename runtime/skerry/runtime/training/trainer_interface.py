"""The lifecycle's view of the model that one rank trains. `torchft_trainer` implements it; this needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch

Delta: TypeAlias = "tuple[torch.Tensor, ...]"
"""A pseudo-gradient of one fragment: shared minus own parameters, in the order of the model."""


class Trainer(Protocol):
    """Belongs to the thread that trains. Fragments are those of DiLoCo, numbered in the order of their exchanges."""

    @property
    def fragments(self) -> int:
        """Number of fragments; round r exchanges fragment r modulo this. 0 for LocalSGD and DDP."""
        ...

    def step_facts(self) -> tuple[float | None, float | None]:
        """Learning rate of the inner optimizer and L2 norm of its gradients, None if unknown. Before an inner step."""
        ...

    def empty_steps(self) -> AbstractContextManager[Callable[[], object]]:
        """Within it, each call is an inner step without gradients: parameters stay, the wrapper's hooks run."""
        ...

    def parameters_of(self, fragment: int) -> Sequence[tuple[str, int]]:
        """Names and elements on this rank of a fragment's parameters, in the order of the model; empty if unknown."""
        ...

    def contribution(self, fragment: int) -> Sequence[torch.Tensor]:
        """Copies of the tensors that the wrapper would exchange of a fragment now. Empty if it is not known."""
        ...

    def take_shared(self) -> None:
        """Set all own parameters to the shared ones: what was trained since the last exchanges is dropped."""
        ...

    def progress(self) -> tuple[Delta, ...]:
        """Of each fragment, its pseudo-gradient so far: a copy in CPU memory."""
        ...

    def set_outer(self, lr: float, momentum: float) -> None:
        """Take outer steps with these from now on; without effect for LocalSGD and DDP, which have no outer step."""
        ...

    def put_back(self, fragment: int, delta: Sequence[torch.Tensor]) -> None:
        """Set a fragment's own parameters so that `progress` returns `delta` for it."""
        ...

    def fits(self, progress: Sequence[Delta]) -> bool:
        """It is progress of this model."""
        ...
