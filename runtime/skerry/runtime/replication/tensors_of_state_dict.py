"""Takes a state dict apart into tensors and the rest, and puts it together; by the names of NVIDIA's extension."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, ValuesView


class TensorAwareStateDict(ABC):
    """A state whose tensors can be taken out and put back. Without them it is hollow, and can be pickled."""

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out. Raises an error if the state is hollow."""

    @property
    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors, in the order of `pop_tensors`."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """The tensors were taken out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Put tensors in, in the order of `pop_tensors`."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Put in new tensors of the same shapes, dtypes and devices, without values."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: FBT001, FBT002  the extension's signature
        """Replace the tensors by copies in CPU memory."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:  # noqa: FBT001, FBT002  as above
        """Move the tensors to the devices that they had before `copy_tensors_to_cpu`."""

    def values(self) -> ValuesView[Any]:
        """The values of the object's own attributes."""
        return vars(self).values()


@dataclass(frozen=True)
class TensorPlaceholder:
    """The place of a tensor in a hollow state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """Tensors on any device, nested in dicts, lists and tuples. Never changes the given dict."""

    def __init__(self, state_dict: Any) -> None:
        self.state_dict = state_dict
        self._is_hollow = False
        self._devices: tuple[str, ...] | None = None

    def pop_tensors(self) -> list[torch.Tensor]:
        """See TensorAwareStateDict. Raises Invalid if the state is hollow."""
        tensors = list(self.tensors)
        self._replace(
            torch.Tensor, lambda tensor: TensorPlaceholder(tuple(tensor.shape), tensor.dtype, tensor.device.type)
        )
        self._is_hollow = True
        return tensors

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        """See TensorAwareStateDict. Raises Invalid if the state is hollow."""
        if self._is_hollow:
            raise Invalid("the state is hollow: its tensors were taken out; put them back with insert_tensors")
        tensors: list[torch.Tensor] = []
        _map(self.state_dict, torch.Tensor, tensors.append)
        return tensors

    @property
    def is_hollow(self) -> bool:
        """See TensorAwareStateDict."""
        return self._is_hollow

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """See TensorAwareStateDict. Raises Invalid unless the state is hollow and these are as many as it had."""
        tensors, count = list(tensor_data), 0

        def place(placeholder: TensorPlaceholder) -> TensorPlaceholder:
            nonlocal count
            count += 1
            return placeholder

        _map(self.state_dict, TensorPlaceholder, place)
        if not self._is_hollow or count != len(tensors):
            raise Invalid(f"cannot insert {len(tensors)} tensors: hollow={self._is_hollow} places={count}")
        remaining = iter(tensors)
        self._replace(TensorPlaceholder, lambda _: next(remaining))
        self._is_hollow = False

    def init_tensors(self) -> None:
        """See TensorAwareStateDict."""
        self._replace(TensorPlaceholder, lambda place: torch.empty(place.shape, dtype=place.dtype, device=place.device))
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: FBT001, FBT002  the extension's signature
        """See TensorAwareStateDict."""
        self._devices = tuple(tensor.device.type for tensor in self.tensors)
        self._replace(torch.Tensor, lambda tensor: tensor.to("cpu", non_blocking=non_blocking))

    def restore_tensor_device(self, non_blocking: bool = True) -> None:  # noqa: FBT001, FBT002  as above
        """See TensorAwareStateDict. On another machine the current device of the same type."""
        if self._devices is not None:
            remaining = iter(self._devices)
            self._replace(torch.Tensor, lambda tensor: tensor.to(next(remaining), non_blocking=non_blocking))

    def _replace(self, kind: type[Any], change: Callable[[Any], object]) -> None:
        self.state_dict = _map(self.state_dict, kind, change)


def _map(value: Any, kind: type[Any], change: Callable[[Any], object]) -> Any:
    """A copy of nested dicts, lists and tuples with every value of `kind` changed, in order."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        items = cast("dict[object, object]", value)
        changed = {key: _map(inner, kind, change) for key, inner in items.items()}
        return OrderedDict(changed) if isinstance(items, OrderedDict) else changed
    if type(value) in {list, tuple}:
        nested = [_map(inner, kind, change) for inner in cast("list[object]", value)]
        return nested if type(value) is list else tuple(nested)
    return value
