"""The trained model in a checkpoint: the shared parameters in their places, shards of all ranks joined.

A checkpoint has the model as a script registered it, in the middle of its writer's inner steps, and apart from it the
global parameters of DiLoCo's fragments. The trained model is the first with the second in their places. Without DiLoCo
the registered state is the shared state itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch

from skerry.runtime.checkpointing.checkpoint import state_digest
from skerry.runtime.checkpointing.shared_state import (
    FRAGMENT,
    ORIGINAL,
    SHARED_TENSORS,
    is_optimizer_state,
    part_at,
    same_bits,
    tensors_in,
)
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.ranks.interface import combine_digests
from skerry.runtime.tensors.dtensor import is_packed_shard, join_shards, shape_of, shard_of, with_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.runtime.checkpointing.shared_state import Path, State

    _Slots: TypeAlias = Sequence[tuple[Path, object]]
    """The tensors of registered state in order, with their paths; shards are packed."""


_LISTED: Final = 8
"""Names in an error."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The trained model of one checkpoint.

    state: all that the script registered, with the trained parameters; None if some of them are not in it.
    fragments: then the trained parameters alone, by their names in DiLoCo's fragments.
    """

    state: Mapping[str, object] | None
    fragments: Mapping[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by their names in the model, without those of optimizers; none share memory.

        Names begin where they differ: `default.model.` is left out if all tensors are below it. Raises Invalid if two
        tensors have one name.
        """
        return dict(self.fragments) if self.state is None else _by_name(list(_of_model(self.state, ())))


def trained_model(ranks: Sequence[State]) -> TrainedModel:
    """Returns the model from the loaded state of every rank of a checkpoint's writer.

    Raises Corrupt for ranks that do not fit together, and Invalid for tensors that cannot be joined.
    """
    if any(state.keys() != ranks[0].keys() for state in ranks):
        raise Corrupt("the ranks of a checkpoint have different state")
    registered = [{key: value for key, value in state.items() if not _is_of_diloco(key)} for state in ranks]
    slots = [list(tensors_in(state)) for state in registered]
    if any(len(own) != len(slots[0]) for own in slots):
        raise Corrupt(f"the ranks of a checkpoint have different tensors: {[len(own) for own in slots]}")
    shared = [[tensor for fragment in _fragments(state) for tensor in fragment.values()] for state in ranks]
    places = _places(ranks[0], slots[0], len(shared[0]))
    if places is None:
        return TrainedModel(state=None, fragments=_of_fragments(ranks))
    state = _with_tensors(registered[0], _joined(slots, places, shared))
    return TrainedModel(state=cast("dict[str, object]", state), fragments={})


def with_model(
    own: State, last: Sequence[int], model: Mapping[str, torch.Tensor], rank: int, ranks: int
) -> dict[str, object]:
    """Returns this rank's state with the tensors of a trained model, as `TrainedModel.tensors` names them.

    last: `SharedState.last_positions`, because a parameter in two fragments has one value. What the script registered
    beside its model, such as optimizers, and the outer optimizers stay its own. Raises Invalid, with their names, if
    the models have other tensors, or tensors of another shape or type.
    """
    registered = {key: value for key, value in own.items() if not _is_of_diloco(key)}
    slots = list(tensors_in(registered))
    fragments = _fragments(own)
    places = _places(own, slots, sum(map(len, fragments)))
    if places is None:
        names = _fragment_names(fragments)
        shared = [tensor for fragment in fragments for tensor in fragment.values()]
        _check_same_tensors(dict(zip(names, shared, strict=True)), model)
        return _with_fragments(own, [model[name] for name in names])
    named = dict(zip(*_named(list(_of_model(registered, ()))), strict=True))
    _check_same_tensors(named, model)
    numbers = {path: number for number, (path, _) in enumerate(slots)}
    values = [value for _, value in slots]
    for (path, own_value), name in zip(_of_model(registered, ()), named, strict=True):
        whole = model[name]
        values[numbers[path]] = with_values(own_value, whole, rank, ranks) if is_packed_shard(own_value) else whole
    state = cast("dict[str, object]", _with_tensors(registered, iter(values)))
    by_place = {place: shard_of(value) for place, value in zip(places, values, strict=True)}
    return _with_fragments({**own, **state}, [by_place.get(number) for number in last])


def fragments_digest(ranks: Sequence[State]) -> str:
    """Returns the digest of the fragments' state, as receipts of this scope report it. ranks: the state of each."""
    paths = frozenset((key,) for key in ranks[0] if key.startswith(FRAGMENT))
    return combine_digests([state_digest(part_at(state, paths)) for state in ranks])


def _is_of_diloco(key: str) -> bool:
    return key.startswith(FRAGMENT) or key == SHARED_TENSORS


def _fragments(state: State) -> list[Mapping[str, torch.Tensor]]:
    """The global parameters of each fragment, in the order of the fragments."""
    keys = [key for key in state if key.startswith(FRAGMENT)]
    return [cast("Mapping[str, Mapping[str, torch.Tensor]]", state[key])[ORIGINAL] for key in keys]


def _with_fragments(state: State, values: Sequence[torch.Tensor | None]) -> dict[str, object]:
    """Returns `state` with the global parameters of all fragments in order; None keeps one."""
    remaining = iter(values)
    result = dict(state)
    for key in (key for key in state if key.startswith(FRAGMENT)):
        fragment = cast("Mapping[str, Mapping[str, torch.Tensor]]", state[key])
        originals = {
            name: own if (value := next(remaining)) is None else value for name, own in fragment[ORIGINAL].items()
        }
        result[key] = {**fragment, ORIGINAL: originals}
    return result


def _check_same_tensors(own: Mapping[str, object], model: Mapping[str, torch.Tensor]) -> None:
    """Raises Invalid with what is missing on either side, or has another shape or type. own: plain or packed."""
    both = [(name, _kind(model[name]), _kind(value)) for name, value in own.items() if name in model]
    differences = {
        "only in this script's model": [name for name in own if name not in model],
        "only in the model of that run": [name for name in model if name not in own],
        "of another shape or type": [f"{name}: {source} -> {here}" for name, source, here in both if source != here],
    }
    texts = [f"{what}: {_shortened(names)}" for what, names in differences.items() if names]
    if texts:
        raise Invalid("; ".join(texts))


def _kind(value: object) -> str:
    return f"{str(shard_of(value).dtype).removeprefix('torch.')} {shape_of(value)}"


def _shortened(names: Sequence[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _places(state: State, slots: _Slots, parameters: int) -> Sequence[int] | None:
    """The position of the global parameter of each registered tensor, or -1; None if the script registered not all."""
    places, needed = _stored_places(state, len(slots), parameters)
    if needed - set(places):  # an older version stored none; or the script registers copies that cannot be followed
        places = _places_by_names(_fragments(state), slots)
    return None if needed - set(places) else places


def _joined(
    slots: Sequence[_Slots], places: Sequence[int], shared: Sequence[Sequence[torch.Tensor]]
) -> Iterator[torch.Tensor]:
    """Yields each tensor of the registered state whole, with the shared values. slots, shared: of every rank."""
    for number, (_, layout) in enumerate(slots[0]):
        own = [shard_of(of_rank[number][1]) for of_rank in slots]
        if (place := places[number]) >= 0:
            if any(of_rank[place].shape != shard.shape for of_rank, shard in zip(shared, own, strict=True)):
                raise Corrupt(f"{SHARED_TENSORS} of a checkpoint is damaged: tensor={number} parameter={place}")
            own = [of_rank[place] for of_rank in shared]
            if not is_packed_shard(layout) and not all(same_bits(own[0], other) for other in own[1:]):
                raise Invalid(f"a parameter differs between the ranks of a replica and is no DTensor: tensor={number}")
        yield join_shards(layout, own) if is_packed_shard(layout) else own[0]


def _stored_places(state: State, tensors: int, parameters: int) -> tuple[Sequence[int], set[int]]:
    """Returns the places in SHARED_TENSORS, and the positions of the parameters that a whole model has.

    Without SHARED_TENSORS all places are -1. Raises Corrupt for impossible values.
    """
    stored = state.get(SHARED_TENSORS, {"places": [-1] * tensors, "repeated": []})
    fields = cast("dict[str, object]", stored) if isinstance(stored, dict) else {}
    places, repeated = (_positions(fields.get(name), parameters) for name in ("places", "repeated"))
    if places is None or repeated is None or len(places) != tensors:
        raise Corrupt(f"{SHARED_TENSORS} of a checkpoint is damaged")
    return places, set(range(parameters)) - set(repeated)


def _positions(value: object, parameters: int) -> list[int] | None:
    """Returns a list of positions below `parameters`, or -1; None for any other value."""
    if not isinstance(value, list):
        return None
    numbers = [
        number for number in cast("list[object]", value) if isinstance(number, int) and -1 <= number < parameters
    ]
    return numbers if len(numbers) == len(cast("list[object]", value)) else None


def _places_by_names(fragments: Sequence[Mapping[str, torch.Tensor]], slots: _Slots) -> Sequence[int]:
    """Finds the places by the names, shapes and dtypes of each fragment, if only one part of the state has all of them.

    Other tensors with the same bits as such a parameter are the same parameter: tied weights.
    """
    numbers = {path: number for number, (path, _) in enumerate(slots)}
    places = [-1] * len(slots)
    first = 0
    for fragment in fragments:
        matches = [match for start in _starts(fragment, numbers) if (match := _match(fragment, start, numbers, slots))]
        for position, number in enumerate(matches[0] if len(matches) == 1 else ()):
            places[number] = first + position
        first += len(fragment)
    for number, value in enumerate(shard_of(value) for _, value in slots):
        for other, place in enumerate(places if places[number] < 0 else ()):
            twin = shard_of(slots[other][1])
            if place >= 0 and (twin.shape, twin.dtype) == (value.shape, value.dtype) and same_bits(twin, value):
                places[number] = place
    return places


def _starts(fragment: Mapping[str, torch.Tensor], numbers: Mapping[Path, int]) -> list[Path]:
    """The paths that lead to the first name of a fragment, without that name; the last element is a prefix."""
    name = next(iter(fragment), "")
    ends = [(path[:-1], str(path[-1])) for path in numbers if path]
    return [(*folder, last.removesuffix(name)) for folder, last in ends if last == name or last.endswith(f".{name}")]


def _match(
    fragment: Mapping[str, torch.Tensor], start: Path, numbers: Mapping[Path, int], slots: _Slots
) -> list[int] | None:
    """The numbers of the tensors that have a fragment's names below `start`; None if one lacks or differs in shape."""
    matched: list[int] = []
    for name, parameter in fragment.items():
        number = numbers.get((*start[:-1], f"{start[-1]}{name}"))
        if number is None:
            return None
        value = shard_of(slots[number][1])
        if (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
            return None
        matched.append(number)
    return matched


def _of_fragments(ranks: Sequence[State]) -> dict[str, torch.Tensor]:
    """The shared parameters by their names in the fragments, which begin with the fragment's number if many."""
    if len(ranks) > 1:
        raise Invalid(
            "the trained parameters are sharded over the ranks of a replica, and the state that the script registered "
            "lacks some of them; register the model's whole state_dict"
        )
    fragments = _fragments(ranks[0])
    tensors = [tensor for fragment in fragments for tensor in fragment.values()]
    return dict(zip(_fragment_names(fragments), tensors, strict=True))


def _fragment_names(fragments: Sequence[Mapping[str, torch.Tensor]]) -> list[str]:
    """The names of all global parameters in their order, unique by the numbers of the fragments."""
    numbered = [(f"{number}." if len(fragments) > 1 else "", fragment) for number, fragment in enumerate(fragments)]
    return [f"{prefix}{name}" for prefix, fragment in numbered for name in fragment]


def _of_model(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    """Yields the tensors in nested state with their paths, packed if sharded; those of optimizers are left out."""
    if is_optimizer_state(value):
        return
    if is_packed_shard(value):
        yield path, value
    elif isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            yield from _of_model(item, (*path, key))
    else:
        yield from tensors_in(value, path)


def _named(placed: Sequence[tuple[Path, object]]) -> tuple[list[str], list[object]]:
    """The names of tensors, which are their paths without what all of these begin with, and the tensors."""
    folders = {path[:-1] for path, _ in placed}
    common = 0
    while folders and all(len(folder) > common for folder in folders) and len({f[common] for f in folders}) == 1:
        common += 1
    names = [".".join(map(str, path[common:])) for path, _ in placed]
    for name in (name for name, count in Counter(names).items() if count > 1):
        raise Invalid(f"two tensors of the registered state have the name {name!r}; export the state as .pt")
    return names, [tensor for _, tensor in placed]


def _by_name(placed: Sequence[tuple[Path, object]]) -> dict[str, torch.Tensor]:
    """The tensors by their names. Those that share memory are copied."""
    tensors: dict[str, torch.Tensor] = {}
    memory: set[int] = set()
    for name, tensor in zip(*_named(placed), strict=True):
        plain = shard_of(tensor)
        pointer = plain.untyped_storage().data_ptr()
        tensors[name] = plain.clone() if pointer in memory else plain.contiguous()
        memory.add(pointer)
    return tensors


def _with_tensors(value: object, tensors: Iterator[object]) -> object:
    """Returns `value` with its tensors replaced, in its order."""
    if isinstance(value, torch.Tensor) or is_packed_shard(value):
        return next(tensors)
    if isinstance(value, dict):
        items = cast("dict[object, object]", value)
        walked = {key: _with_tensors(item, tensors) for key, item in items.items()}
        return OrderedDict(walked) if isinstance(items, OrderedDict) else walked
    if isinstance(value, (list, tuple)):
        sequence = [_with_tensors(item, tensors) for item in cast("list[object]", value)]
        return sequence if isinstance(value, list) else tuple(sequence)
    return value
