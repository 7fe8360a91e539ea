"""Tensors that are sharded over the ranks of a replica (FSDP2, HSDP): each rank moves its own shard and nothing else.

In stored state a sharded tensor is a plain dict that holds this rank's shard and how the whole is laid out. It comes
back on a device mesh of the model it is loaded into: a mesh is processes, and cannot be stored.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from skerry.runtime.errors import Diverged, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

_MARK: Final = "skerry.sharded"
_SHARD: Final = re.compile(r"shard (\d+)")
State: TypeAlias = object


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in the tensor's own memory; an unsharded tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def apart(state: State) -> State:
    """`state` with a dict in place of each sharded tensor. Raises Invalid for a placement that cannot be stored."""
    return _walk(state, _apart)


def together(state: State, meshes: Callable[[], list[DeviceMesh]]) -> State:
    """What `apart` was given, on the first of the meshes that has the right shape; they are asked for if needed.

    Raises Diverged if none has: the model is not sharded as the one that was saved.
    """
    found: list[DeviceMesh] | None = None

    def back(value: object) -> object:
        nonlocal found
        if not isinstance(value, dict) or _MARK not in value:
            return cast("object", value)
        found = meshes() if found is None else found
        return _together(cast("dict[str, object]", value), found)

    return _walk(state, back)


def tensors_behind(load: Callable[..., object]) -> list[torch.Tensor]:
    """The parameters that a registered function loads into, as far as they can be found.

    That is a method of a module or an optimizer, or what torchft's DiLoCo registers: a closure over its fragment.
    """
    owner = getattr(load, "__self__", None)
    if owner is None and inspect.isfunction(load):
        fragment = inspect.getclosurevars(load).nonlocals.get("self")
        owner = getattr(fragment, "_model_fragment", None)
    if isinstance(owner, torch.nn.Module):
        return list(owner.parameters())
    if isinstance(owner, torch.optim.Optimizer):
        return [one for group in owner.param_groups for one in cast("list[torch.Tensor]", group["params"])]
    return []


def meshes_of(*states: State) -> list[DeviceMesh]:
    """The device meshes of all sharded tensors in these states."""
    found: list[DeviceMesh] = []

    def look(value: object) -> object:
        if isinstance(value, DTensor) and value.device_mesh not in found:
            found.append(value.device_mesh)
        return value

    for state in states:
        _walk(state, look)
    return found


def _walk(value: object, change: Callable[[object], object]) -> object:
    """`value` with `change` made to everything in it, innermost last; the same object where nothing changes."""
    changed = change(value)
    if changed is not value:
        return changed
    kind = type(value)
    if kind in {dict, OrderedDict}:
        items = cast("dict[object, object]", value)
        walked = {key: _walk(one, change) for key, one in items.items()}
        if all(walked[key] is one for key, one in items.items()):
            return value
        return walked if kind is dict else OrderedDict(walked)
    if kind in {list, tuple}:
        sequence = cast("list[object]", value)
        ones = [_walk(one, change) for one in sequence]
        if all(new is old for new, old in zip(ones, sequence, strict=True)):
            return value
        return ones if kind is list else tuple(ones)
    return value


def _apart(value: object) -> object:
    if not isinstance(value, DTensor):
        return value
    return {
        _MARK: value.to_local().detach(),
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "mesh": list(value.device_mesh.shape),
        "placements": [_text(one) for one in value.placements],
    }


def _together(value: dict[str, object], meshes: list[DeviceMesh]) -> DTensor:
    layout = cast("dict[str, list[int]]", value)
    mesh = next((one for one in meshes if list(one.shape) == layout["mesh"]), None)
    if mesh is None:
        raise Diverged(
            f"stored state is sharded over a mesh of {layout['mesh']}, this model over "
            f"{[list(one.shape) for one in meshes]}; register the state of a model that is sharded the same way"
        )
    local = cast("torch.Tensor", layout[_MARK])
    return DTensor.from_local(
        local.to(mesh.device_type),
        mesh,
        [_placement(one) for one in cast("list[str]", layout["placements"])],
        run_check=False,
        shape=torch.Size(layout["shape"]),
        stride=tuple(layout["stride"]),
    )


def _text(placement: Placement) -> str:
    if type(placement) is Shard:
        return f"shard {placement.dim}"
    if isinstance(placement, Replicate):
        return "replicate"
    raise Invalid(f"state cannot be stored: placement={placement}; only Shard and Replicate have a value of their own")


def _placement(text: str) -> Placement:
    shard = _SHARD.fullmatch(text)
    return Replicate() if shard is None else Shard(int(shard[1]))
