"""The trainer of a torch model: torchft's wrapper around an inner optimizer, and DiLoCo's fragments."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from skerry.runtime.checkpointing.shared_state import synchronize_device
from skerry.runtime.errors import Invalid
from skerry.runtime.tensors.dtensor import local_shard
from skerry.runtime.training.torchft_fragments import Fragment, fragments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from skerry.runtime.checkpointing.shared_state import SharedState
    from skerry.runtime.training.trainer_interface import Delta


class TorchTrainer:
    """Implements `Trainer` for the state that torchft's wrapper registered with the manager."""

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._optimizer: torch.optim.Optimizer | None = None

    def use(self, inner_optimizer: torch.optim.Optimizer) -> None:
        """Take empty steps with this optimizer from now on. Raises Invalid if its step needs a closure."""
        closure = inspect.signature(type(inner_optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise Invalid(f"{type(inner_optimizer).__name__} needs a closure, so it cannot follow with empty steps")
        self._optimizer = inner_optimizer

    @property
    def fragments(self) -> int:
        """Number of fragments that DiLoCo registered."""
        return self._state.fragments

    def step_facts(self) -> tuple[float | None, float | None]:
        """Learning rate of the inner optimizer's first group, and L2 norm of this rank's gradients (4 digits)."""
        if self._optimizer is None:
            return None, None
        groups = self._optimizer.param_groups
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        dense = [part for part in map(local_shard, gradients) if not part.is_sparse]
        # Four digits: the rest of a sum depends on the processor.
        norm = float(f"{float(torch.nn.utils.get_total_norm(dense)):.4g}") if dense else None
        return float(groups[0]["lr"]) if "lr" in groups[0] else None, norm

    @contextmanager
    def empty_steps(self) -> Generator[Callable[[], object]]:
        """Within it gradients are set aside; each call is a step of the inner optimizer."""
        optimizer = self._optimizer
        if optimizer is None:
            raise Invalid("empty steps need the inner optimizer: call catch_up with it")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield optimizer.step
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def parameters_of(self, fragment: int) -> Sequence[tuple[str, int]]:
        """Names and elements on this rank of a fragment's parameters, in the order of the model."""
        return self._fragments()[fragment].sizes

    def contribution(self, fragment: int) -> Sequence[torch.Tensor]:
        """Copies of the tensors that DiLoCo would exchange of a fragment now. Empty if it packs them in buckets."""
        synchronize_device()
        chosen = self._fragments()[fragment]
        return () if chosen.is_bucketized else chosen.progress()

    @contextmanager
    def shared_parameters(self) -> Generator[None]:
        """Within it the own parameters are the shared ones; after it they are what they were, bit for bit."""
        synchronize_device()
        kept = [fragment.own_parameters() for fragment in self._fragments()]
        self.take_shared()
        try:
            yield
        finally:
            for fragment, own in zip(self._fragments(), kept, strict=True):
                fragment.set_own_parameters(own)

    def take_shared(self) -> None:
        """Set all own parameters to the shared ones."""
        for fragment in self._fragments():
            fragment.take_shared()

    def progress(self) -> tuple[Delta, ...]:
        """Of each fragment, its pseudo-gradient so far: a copy in CPU memory."""
        synchronize_device()
        return tuple(fragment.progress() for fragment in self._fragments())

    def set_outer(self, lr: float, momentum: float) -> None:
        """Set both in every group of the outer optimizers that has them."""
        for fragment in self._fragments():
            fragment.set_outer(lr=lr, momentum=momentum)

    def put_back(self, fragment: int, delta: Sequence[torch.Tensor]) -> None:
        """Set a fragment's own parameters so that `progress` returns `delta` for it."""
        self._fragments()[fragment].put_back(delta)

    def fits(self, progress: Sequence[Delta]) -> bool:
        """It is progress of this model: of as many fragments, of the same shapes and dtypes."""
        fragments = self._fragments()
        return len(fragments) == len(progress) and all(map(Fragment.fits, fragments, progress))

    def _fragments(self) -> list[Fragment]:
        return fragments_of(self._state.fragment_loads)
