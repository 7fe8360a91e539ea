"""The state that consumers registered with a manager: captured, compared, checked and loaded.

Replicas compare only what the log determines. With DiLoCo these are its fragments: global parameters and outer
optimizers. Otherwise (DDP, LocalSGD) they are the parameters and the optimizers' states in what a script registered.
Buffers of a model, such as the running statistics of BatchNorm, are each replica's own: checkpoints have them, but no
receipt covers them (decision 0019).
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import torch
from torch.overrides import TorchFunctionMode

from skerry.runtime.errors import Diverged, Invalid
from skerry.runtime.tensors.dtensor import (
    collect_meshes,
    is_packed_shard,
    local_shard,
    pack_shards,
    tensors_behind,
    unpack_shards,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from skerry.runtime.log.records import Scope

State: TypeAlias = "Mapping[str, object]"
Load: TypeAlias = "Callable[[object], None]"
"""A function that a consumer registered: it loads a piece of shared state."""
Path: TypeAlias = "tuple[object, ...]"
"""The keys and positions that lead to a value in nested state."""

FRAGMENT = "StreamingDiLoCoFragment_"
"""Key prefix of the state that torchft's DiLoCo registers: global parameters and outer optimizer of a fragment."""
ORIGINAL = "original_parameters"
"""Key of a fragment's global parameters in its state, by their names in the fragment."""
SHARED_TENSORS = "skerry.shared_tensors"
"""Key in a checkpoint. Its `places` are, for each tensor of the state that scripts registered, in its order
(`tensors_in`), the position of the global parameter that belongs there among those of all fragments, or -1. `repeated`
are the positions of parameters that a later fragment has, too: its value is the one of the model, as after a load."""
_OPTIMIZER = frozenset({"state", "param_groups"})
"""The keys of every `torch.optim.Optimizer.state_dict()`."""


class SharedState:
    """The shared state, as consumers registered it by key."""

    def __init__(self, parameters_of: Callable[[Load], list[torch.Tensor]] = tensors_behind) -> None:
        """parameters_of: the parameters that a load function loads into; shards are restored on their meshes."""
        self._parameters_of = parameters_of
        self._loads: dict[str, Load] = {}
        self._saves: dict[str, Callable[[], object]] = {}

    def __bool__(self) -> bool:
        return bool(self._saves)

    def register(self, key: str, load: Load, save: Callable[[], object]) -> None:
        """Raises Invalid if the key is taken."""
        if key in self._saves:
            raise Invalid(f"state is registered twice under {key!r}")
        self._loads[key] = load
        self._saves[key] = save

    @property
    def fragment_loads(self) -> list[Load]:
        """The functions that load DiLoCo's fragments, in order."""
        return [load for key, load in self._loads.items() if key.startswith(FRAGMENT)]

    @property
    def fragments(self) -> int:
        """Number of fragments that DiLoCo registered; round r exchanges fragment r modulo this."""
        return sum(key.startswith(FRAGMENT) for key in self._saves)

    def values(self) -> dict[str, object]:
        """Returns the live state by key, as consumers registered it."""
        return {key: save() for key, save in self._saves.items()}

    def capture(self) -> dict[str, object]:
        """Returns references to the live state; copy it before training continues.

        A sharded tensor is represented by this rank's shard.
        """
        return cast("dict[str, object]", pack_shards(self.values()))

    def for_checkpoint(self) -> dict[str, object]:
        """Returns `capture`, and with DiLoCo where its global parameters belong in the state that a script registered.

        A script registers its model, whose values are in the middle of this replica's inner steps (decision 0025).
        """
        with _ParameterTrace() as trace:
            live = self.values()
        state = cast("dict[str, object]", pack_shards(live))
        parameters, positions = self._fragment_parameters()
        if parameters:

            def place(value: torch.Tensor) -> int:
                position = positions.get(trace.origin(value), -1)
                return position if position >= 0 and _is_copy(value, parameters[position]) else -1

            registered = [value for key, value in live.items() if not key.startswith(FRAGMENT)]
            state[SHARED_TENSORS] = {
                "places": [place(cast("torch.Tensor", value)) for _, value in tensors_in(registered)],
                "repeated": sorted(set(range(len(parameters))) - set(positions.values())),
            }
        return state

    def last_positions(self) -> list[int]:
        """For each global parameter of DiLoCo, the position of the last one that is the same parameter of the model."""
        parameters, positions = self._fragment_parameters()
        return [positions[id(parameter)] for parameter in parameters]

    def _fragment_parameters(self) -> tuple[list[torch.Tensor], dict[int, int]]:
        """The model's parameters in the order of all fragments, and the last position of each by its id."""
        parameters = [parameter for load in self.fragment_loads for parameter in self._parameters_of(load)]
        return parameters, {id(parameter): position for position, parameter in enumerate(parameters)}

    def compared(self, scope: Scope) -> dict[str, object]:
        """Returns references to the part of the live state that receipts of this scope cover."""
        if scope == "fragments":
            return {key: pack_shards(save()) for key, save in self._saves.items() if key.startswith(FRAGMENT)}
        live, paths = self._traced()
        return part_at(cast("State", pack_shards(live)), paths)

    def paths(self, scope: Scope) -> frozenset[Path]:
        """The places of the part that receipts of this scope cover: the same in every replica's state."""
        if scope == "average":
            return frozenset()
        if scope == "fragments":
            return frozenset((key,) for key in self._saves if key.startswith(FRAGMENT))
        return self._traced()[1]

    def _traced(self) -> tuple[dict[str, object], frozenset[Path]]:
        """The live state, and the places of parameters and optimizer states in it."""
        with _ParameterTrace() as trace:
            live = self.values()
        return live, frozenset(trace.places(live, ()))

    def check(self, state: State, where: str) -> None:
        """Raises Diverged if `state` is of another model or another script."""
        if missing := sorted(self._loads.keys() - state.keys()):
            raise Diverged(
                f"{where} lacks the state registered as {', '.join(missing)}; was it written by another script?"
            )
        for key, mine in self.capture().items():
            _check_same_model(mine, state[key], f"{where}: {key}")

    def restore(self, state: State) -> None:
        """Loads every registered key from a checked state."""
        for key, load in self._loads.items():
            load(
                unpack_shards(
                    state[key],
                    lambda: collect_meshes(
                        list(self.values().values()), *map(self._parameters_of, self._loads.values())
                    ),
                )
            )

    def with_own(self, state: State) -> State:
        """Returns `state` with this replica's own values wherever replicas need not be equal."""
        paths = self.paths("fragments" if self.fragments else "registered")
        return cast("State", _replaced(self.capture(), state, paths, ()))


def part_at(state: State, paths: frozenset[Path]) -> dict[str, object]:
    """Returns the values at these places, by place; places that `state` lacks are left out.

    A whole key is named by itself, as receipts of DiLoCo's fragments always did.
    """
    return {str(path[0]) if len(path) == 1 else repr(path): value for path, value in _values(state, paths, ())}


def is_state(loaded: object) -> TypeGuard[State]:
    """Returns True if this can be the state of a checkpoint: values by the keys under which they were registered."""
    return isinstance(loaded, dict) and all(isinstance(key, str) for key in cast("dict[object, object]", loaded))


def tensors_in(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Yields the tensors in nested state with their paths, in its order; a sharded one is one, packed or not."""
    if isinstance(value, torch.Tensor) or is_packed_shard(value):
        yield path, value
        return
    for key, item in _items(value):
        yield from tensors_in(item, (*path, key))


def is_optimizer_state(value: object) -> bool:
    """Returns True for the state of a `torch.optim.Optimizer`."""
    return isinstance(value, dict) and cast("dict[object, object]", value).keys() >= _OPTIMIZER


def _is_copy(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Returns True if `value` has the shape, dtype and elements of a parameter. Free if they share memory."""
    own, other = local_shard(value), local_shard(parameter).detach()
    if (value.shape, own.shape, own.dtype) != (parameter.shape, other.shape, other.dtype):
        return False
    if own.device == other.device and (own.data_ptr(), own.stride()) == (other.data_ptr(), other.stride()):
        return True
    return same_bits(own, other)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns True if two tensors of one dtype have the same elements, NaN included."""
    one_device = second.detach().to(first.device)
    flat = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (first, one_device)]
    return torch.equal(*flat)


def synchronize_device() -> None:
    """Waits for device copies: DiLoCo copies its parameters to host memory asynchronously."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class _ParameterTrace(TorchFunctionMode):
    """While active, remembers every tensor that is made from a parameter: `state_dict()` returns no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[torch.Tensor, int]] = {}

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        del types
        result = func(*args, **(kwargs or {}))
        if args and isinstance(result, torch.Tensor) and self._is_parameter(args[0]):
            # The reference to the result keeps its id from being used again.
            self._made[id(result)] = result, self.origin(args[0])
        return result

    def origin(self, value: object) -> int:
        """Returns the id of the parameter that `value` is or was made from; of anything else its own."""
        return self._made[id(value)][1] if id(value) in self._made else id(value)

    def places(self, value: object, path: Path) -> Iterator[Path]:
        """Yields where in `value` parameters and whole optimizer states are."""
        if self._is_parameter(value) or is_optimizer_state(value):
            yield path
            return
        for key, item in _items(value):
            yield from self.places(item, (*path, key))

    def _is_parameter(self, value: object) -> bool:
        return isinstance(value, torch.nn.Parameter) or id(value) in self._made


def _items(value: object) -> list[tuple[object, object]]:
    """The keys or positions of a container with what is there; nothing for other values."""
    if isinstance(value, (dict, OrderedDict)):
        return list(cast("dict[object, object]", value).items())
    return list(enumerate(cast("list[object]", value))) if isinstance(value, (list, tuple)) else []


def _values(value: object, paths: frozenset[Path], path: Path) -> Iterator[tuple[Path, object]]:
    if path in paths:
        yield path, value
        return
    for key, item in _items(value):
        yield from _values(item, paths, (*path, key))


def _replaced(own: object, other: object, paths: frozenset[Path], path: Path) -> object:
    """Returns `own` with the values of `other` at these places."""
    if path in paths:
        return other
    other_items = dict(_items(other))
    if type(own) is not type(other) or not other_items:
        return own
    items = {key: _replaced(item, other_items.get(key, item), paths, (*path, key)) for key, item in _items(own)}
    if isinstance(own, OrderedDict):
        return OrderedDict(items)
    if isinstance(own, dict):
        return items
    return list(items.values()) if isinstance(own, list) else tuple(items.values())


def _check_same_model(own: object, loaded: object, where: str) -> None:
    """Raises Diverged if tensors under one path differ in shape or dtype. Either optimizer state may be missing."""
    if isinstance(own, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if own.shape != loaded.shape or own.dtype != loaded.dtype:
            raise Diverged(
                f"{where} is {loaded.dtype} {tuple(loaded.shape)}, this model has {own.dtype} {tuple(own.shape)}; "
                "do all replicas run the same model?"
            )
    elif isinstance(own, dict) and isinstance(loaded, dict):
        own_items, loaded_items = cast("dict[object, object]", own), cast("dict[object, object]", loaded)
        tensors = {key for key, value in own_items.items() if isinstance(value, torch.Tensor)}
        if absent := sorted(str(key) for key in tensors - loaded_items.keys()):
            raise Diverged(f"{where} lacks {', '.join(absent)}; do all replicas run the same model?")
        for key in (key for key in own_items if key in loaded_items):
            _check_same_model(own_items[key], loaded_items[key], f"{where}.{key}")
