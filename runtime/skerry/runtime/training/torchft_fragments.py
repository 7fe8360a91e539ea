"""DiLoCo's model fragments, as torchft 0.2 has them: the only module that uses private names of torchft.

DiLoCo exchanges one fragment of the model per round. It does not expose its fragments; it registers functions that load
their shared state, and those functions close over them. `fragments_of` finds them there and refuses a torchft whose
fragments look different; `parameters_behind` finds the parameters of one, `save_without_copies` its state.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from skerry.runtime.errors import Invalid
from skerry.runtime.tensors.dtensor import local_shard, tensors_behind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_NEEDED = ("_model_fragment", "_outer_optimizer", "original_parameters", "restore_parameters", "use_bucketization")


class Fragment:
    """One fragment: its shared parameters, which the rounds change, and its own, which inner steps train."""

    def __init__(self, fragment: Any) -> None:
        """fragment: torchft's own object. Raises Invalid if it is not what torchft 0.2 makes."""
        missing = [name for name in _NEEDED if not hasattr(fragment, name)]
        if missing:
            raise Invalid(
                f"this torchft's DiLoCo is unknown to skerry: {type(fragment).__name__} lacks {', '.join(missing)}; "
                "install the torchft version that skerry.runtime requires"
            )
        self._fragment = fragment

    @property
    def parameters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of the shared and the own parameter on this rank, in the order of the model."""
        shared = self._fragment.original_parameters
        named = self._fragment._model_fragment.named_parameters()  # noqa: SLF001
        return [(shared[name], local_shard(own.data)) for name, own in named]

    @property
    def sizes(self) -> list[tuple[str, int]]:
        """Names and elements on this rank of the parameters, in the order of the model."""
        named = self._fragment._model_fragment.named_parameters()  # noqa: SLF001
        return [(name, local_shard(own.data).numel()) for name, own in named]

    def take_shared(self) -> None:
        """Set the own parameters to the shared ones: what was trained since the last exchange is dropped."""
        self._fragment.restore_parameters()

    def progress(self) -> tuple[torch.Tensor, ...]:
        """The pseudo-gradient so far, in CPU memory: shared minus own parameters."""
        with torch.no_grad():
            return tuple(shared.cpu() - own.cpu() for shared, own in self.parameters)

    def live_state(self) -> dict[str, Any]:
        """The state that torchft's save function returns, with the shared parameters themselves instead of copies."""
        return {
            "outer_optimizer": self._fragment._outer_optimizer.state_dict(),  # noqa: SLF001
            "original_parameters": dict(self._fragment.original_parameters),
        }

    def set_outer(self, **values: float) -> None:
        """Set these values in every group of the outer optimizer that has them."""
        for group in self._fragment._outer_optimizer.param_groups:  # noqa: SLF001
            group.update({name: value for name, value in values.items() if name in group})

    @property
    def is_bucketized(self) -> bool:
        """DiLoCo packs several tensors into one for its exchange."""
        return bool(self._fragment.use_bucketization)

    def own_parameters(self) -> list[torch.Tensor]:
        """Copies of the own parameters on this rank."""
        return [own.clone() for _, own in self.parameters]

    def set_own_parameters(self, values: Sequence[torch.Tensor]) -> None:
        """Set the own parameters on this rank."""
        with torch.no_grad():
            for (_, own), value in zip(self.parameters, values, strict=True):
                own.copy_(value)

    def put_back(self, progress: Sequence[torch.Tensor]) -> None:
        """Set the own parameters so that `progress` returns this pseudo-gradient."""
        with torch.no_grad():
            for (shared, own), delta in zip(self.parameters, progress, strict=True):
                own.copy_(shared.cpu() - delta)

    def fits(self, progress: Sequence[torch.Tensor]) -> bool:
        """The pseudo-gradient has this fragment's shapes and dtypes."""
        mine = [(shared.shape, shared.dtype) for shared, _ in self.parameters]
        return mine == [(delta.shape, delta.dtype) for delta in progress]


def fragments_of(loads: Iterable[Callable[[object], None]]) -> list[Fragment]:
    """The fragments whose load functions DiLoCo registered, in its order.

    Raises Invalid if torchft's functions do not close over a fragment any more.
    """
    return [Fragment(_closed_over(load)) for load in loads]


def shared_parameters_of(diloco: object) -> dict[str, torch.Tensor]:
    """The shared parameters of a DiLoCo's only fragment by name. Raises Invalid if torchft keeps it in another way."""
    [fragment] = getattr(diloco, "_fragments", None) or [None]
    return dict(Fragment(fragment).live_state()["original_parameters"])


def save_without_copies(load: Callable[..., object], save: Callable[[], object]) -> Callable[[], object]:
    """A function that returns what `save` does, but of a fragment of DiLoCo no copies: torchft clones all parameters.

    load, save: as they were registered.
    """
    fragment = _closed_over(load)
    is_fragment = fragment is not None and all(hasattr(fragment, name) for name in _NEEDED)
    return Fragment(fragment).live_state if is_fragment else save


def parameters_behind(load: Callable[..., object]) -> list[torch.Tensor]:
    """The parameters that a registered function loads into, if they can be found.

    Supports the function that DiLoCo registers for a fragment, and all that `tensors_behind` supports.
    """
    if inspect.isfunction(load):
        module = getattr(_closed_over(load), "_model_fragment", None)
        return list(module.parameters()) if isinstance(module, torch.nn.Module) else []
    return tensors_behind(load)


def _closed_over(load: Callable[..., object]) -> Any:
    """The `self` that a function closes over, or None. In a function that DiLoCo registered it is the fragment."""
    code, cells = getattr(load, "__code__", None), getattr(load, "__closure__", None)
    if code is None or not cells or "self" not in code.co_freevars:
        return None
    try:
        return cells[code.co_freevars.index("self")].cell_contents
    except ValueError:  # a function that is registered before its own `self` is assigned
        return None
