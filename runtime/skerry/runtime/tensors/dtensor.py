"""Converts tensors that are sharded over the ranks of a replica (FSDP2, HSDP) to storable state and back.

In stored state a sharded tensor is a plain dict with this rank's shard and the layout of the complete tensor. It is
restored on a device mesh of the model it is loaded into, because a mesh consists of processes and cannot be stored.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import itertools
import math
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from skerry.runtime.errors import Corrupt, Diverged, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

_MARK: Final = "skerry.sharded"
_SHARD: Final = re.compile(r"shard (\d+)")
State: TypeAlias = object


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, in the tensor's own memory; an unsharded tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pack_shards(state: State) -> State:
    """Replace each sharded tensor in `state` by a dict. Raises Invalid for a placement that cannot be stored."""
    return _walk(state, _pack)


def unpack_shards(state: State, meshes: Callable[[], list[DeviceMesh]]) -> State:
    """Restore the state given to `pack_shards`, on the first mesh with the right shape. meshes: called only if needed.

    Raises Diverged if no mesh has it, because the model is sharded differently from the saved one.
    """
    available: list[DeviceMesh] | None = None

    def restore(value: object) -> object:
        nonlocal available
        if not isinstance(value, dict) or _MARK not in value:
            return cast("object", value)
        available = meshes() if available is None else available
        return _restore(cast("dict[str, object]", value), available)

    return _walk(state, restore)


def is_packed_shard(value: object) -> bool:
    """True for the dict by which stored state represents a sharded tensor."""
    return isinstance(value, dict) and _MARK in value


def shard_of(value: object) -> torch.Tensor:
    """The tensor itself, or of a sharded one in stored state this rank's shard."""
    return cast("torch.Tensor", cast("dict[str, object]", value)[_MARK] if is_packed_shard(value) else value)


def join_shards(layout: object, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The complete tensor from the shards of all ranks, in the order of the ranks.

    layout: what stored state holds for one of them. Raises Invalid for a mesh of only some of the ranks, because it is
    not stored which, and Corrupt if the shards are not those of this layout.
    """
    whole = shards[0].new_empty(shape_of(layout))
    for region, shard in zip(_regions(layout, whole, len(shards)), shards, strict=True):
        if region.shape != shard.shape:
            raise Corrupt(f"shard of {tuple(shard.shape)} instead of {tuple(region.shape)}: shape={tuple(whole.shape)}")
        region.copy_(shard)
    return whole


def with_values(packed: object, whole: torch.Tensor, rank: int, ranks: int) -> object:
    """The stored form of a sharded tensor, with this rank's shard of `whole`. Raises Invalid as `join_shards`."""
    regions = list(_regions(packed, whole, ranks))
    return {**cast("dict[str, object]", packed), _MARK: regions[rank].contiguous()}


def shape_of(value: object) -> tuple[int, ...]:
    """The shape of a tensor in stored state; of a sharded one, that of the complete tensor."""
    return tuple(value.shape if isinstance(value, torch.Tensor) else cast("dict[str, list[int]]", value)["shape"])


def _regions(layout: object, whole: torch.Tensor, ranks: int) -> Iterator[torch.Tensor]:
    """Each rank's region of the complete tensor, in the order of the ranks; views of it."""
    stored = cast("dict[str, list[int]]", layout)
    mesh = stored["mesh"]
    placements = [_placement(text) for text in cast("list[str]", stored["placements"])]
    if math.prod(mesh) != ranks or len(mesh) != len(placements):
        raise Invalid(
            f"cannot join a tensor that is sharded over a mesh of {mesh}: {ranks} ranks saved it; "
            "only meshes of all ranks of a replica are supported"
        )
    for place in itertools.product(*map(range, mesh)):
        region = whole
        for coordinate, pieces, placement in zip(place, mesh, placements, strict=True):
            if isinstance(placement, Shard):
                dim = cast("int", placement.dim)
                size = -(-region.shape[dim] // pieces)  # the pieces of torch.chunk: the last ones are shorter
                begin = min(coordinate * size, region.shape[dim])
                end = min(begin + size, region.shape[dim])
                region = region.narrow(dim, begin, end - begin)
        yield region


def tensors_behind(load: Callable[..., object]) -> list[torch.Tensor]:
    """The parameters that a registered function loads into, if they can be found.

    Supports methods of modules and optimizers.
    """
    owner = getattr(load, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return list(owner.parameters())
    if isinstance(owner, torch.optim.Optimizer):
        return [tensor for group in owner.param_groups for tensor in cast("list[torch.Tensor]", group["params"])]
    return []


def collect_meshes(*states: State) -> list[DeviceMesh]:
    """The device meshes of all sharded tensors in these states."""
    meshes: list[DeviceMesh] = []

    def collect(value: object) -> object:
        if isinstance(value, DTensor) and value.device_mesh not in meshes:
            meshes.append(value.device_mesh)
        return value

    for state in states:
        _walk(state, collect)
    return meshes


def _walk(value: object, change: Callable[[object], object]) -> object:
    """Apply `change` to `value` and everything in it, outermost first; returns the same object if nothing changed."""
    changed = change(value)
    if changed is not value:
        return changed
    kind = type(value)
    if kind in {dict, OrderedDict}:
        items = cast("dict[object, object]", value)
        walked = {key: _walk(item, change) for key, item in items.items()}
        if all(walked[key] is item for key, item in items.items()):
            return value
        return walked if kind is dict else OrderedDict(walked)
    if kind in {list, tuple}:
        sequence = cast("list[object]", value)
        changed_items = [_walk(item, change) for item in sequence]
        if all(new is old for new, old in zip(changed_items, sequence, strict=True)):
            return value
        return changed_items if kind is list else tuple(changed_items)
    return value


def _pack(value: object) -> object:
    if not isinstance(value, DTensor):
        return value
    return {
        _MARK: value.to_local().detach(),
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "mesh": list(value.device_mesh.shape),
        "placements": [_text(placement) for placement in value.placements],
    }


def _restore(value: dict[str, object], meshes: list[DeviceMesh]) -> DTensor:
    layout = cast("dict[str, list[int]]", value)
    mesh = next((mesh for mesh in meshes if list(mesh.shape) == layout["mesh"]), None)
    if mesh is None:
        raise Diverged(
            f"stored state is sharded over a mesh of {layout['mesh']}, this model over "
            f"{[list(mesh.shape) for mesh in meshes]}; register the state of a model that is sharded the same way"
        )
    local = cast("torch.Tensor", layout[_MARK])
    return DTensor.from_local(
        local.to(mesh.device_type),
        mesh,
        [_placement(text) for text in cast("list[str]", layout["placements"])],
        run_check=False,
        shape=torch.Size(layout["shape"]),
        stride=tuple(layout["stride"]),
    )


def _text(placement: Placement) -> str:
    if type(placement) is Shard:
        return f"shard {placement.dim}"
    if isinstance(placement, Replicate):
        return "replicate"
    raise Invalid(f"state cannot be stored: placement={placement}; only Shard and Replicate are supported")


def _placement(text: str) -> Placement:
    shard = _SHARD.fullmatch(text)
    return Replicate() if shard is None else Shard(int(shard[1]))
