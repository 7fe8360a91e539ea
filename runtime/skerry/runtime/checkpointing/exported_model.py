"""The trained model as one state: the shared parameters of a checkpoint in their places, shards of all ranks joined.

A checkpoint has the model as a script registered it, in the middle of its writer's inner steps, and apart from it the
global parameters of DiLoCo's fragments. The trained model is the first with the second in their places.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch

from skerry.runtime.checkpointing.shared_state import (
    FRAGMENT,
    ORIGINAL,
    SHARED_TENSORS,
    is_optimizer_state,
    tensors_in,
)
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.tensors.dtensor import is_packed_shard, join_shards, shard_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.runtime.checkpointing.shared_state import Path, State


def registered_state(ranks: Sequence[State]) -> dict[str, object]:
    """Returns the state that the script registered, with the shared parameters, and complete tensors.

    ranks: the loaded state of every rank of the checkpoint's writer. Without DiLoCo it is the shared state itself.
    Raises Invalid for a checkpoint of DiLoCo that does not say where shared parameters belong, and Corrupt for ranks
    that do not fit together.
    """
    if any(state.keys() != ranks[0].keys() for state in ranks):
        raise Corrupt("the ranks of a checkpoint have different state")
    registered = [{key: value for key, value in state.items() if not _is_of_diloco(key)} for state in ranks]
    places = _places(ranks[0])
    shared = [_shared_parameters(state) for state in ranks]
    slots = [list(tensors_in(list(state.values()))) for state in registered]
    if any(len(own) != len(places) for own in slots if places) or any(len(own) != len(slots[0]) for own in slots):
        raise Corrupt(f"tensors of a checkpoint differ between ranks: {[len(own) for own in slots]} of {len(places)}")
    joined: list[torch.Tensor] = []
    for number, (_, layout) in enumerate(slots[0]):
        place = places[number] if places else -1
        parts = [
            shard_of(own[number][1]) if place < 0 else parameters[place].view_as(shard_of(own[number][1]))
            for own, parameters in zip(slots, shared, strict=True)
        ]
        joined.append(join_shards(layout, parts) if is_packed_shard(layout) else parts[0])
    tensors = iter(joined)
    return {key: _with_tensors(value, tensors) for key, value in registered[0].items()}


def model_tensors(ranks: Sequence[State]) -> dict[str, torch.Tensor]:
    """Returns the tensors of the trained model by their names in it; none of them share memory.

    Those of optimizers are left out. If a script registered its model beside other state, names begin where they
    differ. If it registered no model, these are the shared parameters of DiLoCo by their names in the fragments.
    """
    named: list[tuple[Path, torch.Tensor]] = [
        (path, cast("torch.Tensor", tensor)) for path, tensor in _without_optimizers(registered_state(ranks), ())
    ]
    if not named or not _has_shared(ranks[0]):
        return _of_fragments(ranks) | _by_name(named)
    return _by_name(named)


def _by_name(named: Sequence[tuple[Path, torch.Tensor]]) -> dict[str, torch.Tensor]:
    folders = {path[:-1] for path, _ in named}
    common = 0
    while folders and all(len(folder) > common for folder in folders) and len({f[common] for f in folders}) == 1:
        common += 1
    tensors: dict[str, torch.Tensor] = {}
    memory: set[int] = set()
    for path, tensor in named:
        name = ".".join(map(str, path[common:]))
        if name in tensors:
            raise Invalid(f"two tensors of the registered state have the name {name!r}; export the state as .pt")
        pointer = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if pointer in memory else tensor.contiguous()
        memory.add(pointer)
    return tensors


def _is_of_diloco(key: str) -> bool:
    return key.startswith(FRAGMENT) or key == SHARED_TENSORS


def _has_shared(state: State) -> bool:
    return not _fragments(state) or any(place >= 0 for place in _places(state))


def _fragments(state: State) -> list[Mapping[str, torch.Tensor]]:
    """The global parameters of each fragment, in the order of the fragments."""
    keys = [key for key in state if key.startswith(FRAGMENT)]
    return [cast("Mapping[str, Mapping[str, torch.Tensor]]", state[key])[ORIGINAL] for key in keys]


def _shared_parameters(state: State) -> list[torch.Tensor]:
    return list(chain.from_iterable(fragment.values() for fragment in _fragments(state)))


def _places(state: State) -> list[int]:
    """The value of SHARED_TENSORS; empty without DiLoCo."""
    if not _fragments(state):
        return []
    places = state.get(SHARED_TENSORS)
    if places is None:
        raise Invalid(
            "this checkpoint was written before skerry stored where DiLoCo's parameters belong in the model; "
            "continue the run for one round and export again"
        )
    count = len(_shared_parameters(state))
    if not isinstance(places, list) or not all(
        isinstance(place, int) and -1 <= place < count for place in cast("list[object]", places)
    ):
        raise Corrupt(f"{SHARED_TENSORS} of a checkpoint is damaged")
    return cast("list[int]", places)


def _of_fragments(ranks: Sequence[State]) -> dict[str, torch.Tensor]:
    """The shared parameters under their names in the fragments, which begin with the fragment's number if many."""
    fragments = _fragments(ranks[0])
    if fragments and len(ranks) > 1:
        raise Invalid(
            "the parameters of DiLoCo are sharded over ranks and not in the registered state; register the model"
        )
    numbered = [(f"{number}." if len(fragments) > 1 else "", fragment) for number, fragment in enumerate(fragments)]
    return {f"{prefix}{name}": tensor for prefix, fragment in numbered for name, tensor in fragment.items()}


def _without_optimizers(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    if is_optimizer_state(value):
        return
    if isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            yield from _without_optimizers(item, (*path, key))
    else:
        yield from tensors_in(value, path)


def _with_tensors(value: object, tensors: Iterator[torch.Tensor]) -> object:
    """Returns `value` with its tensors replaced, in its order."""
    if isinstance(value, torch.Tensor) or is_packed_shard(value):
        return next(tensors)
    if isinstance(value, (dict, OrderedDict)):
        items = cast("dict[object, object]", value).items()
        return type(value)((key, _with_tensors(item, tensors)) for key, item in items)
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(item, tensors) for item in cast("list[object]", value))
    return value
