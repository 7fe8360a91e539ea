"""Which accelerators Google puts into which machines, as its training service takes them. Does no I/O.

Machines whose names begin with a2, a3, a4, g2 or g4 have theirs built in; those of n1 take some, by their vCPUs.
Sources: Vertex AI, "Configure compute resources for training", tables "GPUs" and "A100, H100, L4, ..."; Compute Engine,
"GPU machine types"; Vertex AI, "Schedule training jobs based on resource availability", "Use Spot VMs with training".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_BUILT_IN: Final[Mapping[str, tuple[str, int]]] = {
    **{f"a2-highgpu-{count}g": ("nvidia-tesla-a100", count) for count in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("nvidia-tesla-a100", 16),
    **{f"a2-ultragpu-{count}g": ("nvidia-a100-80gb", count) for count in (1, 2, 4, 8)},
    **{f"a3-highgpu-{count}g": ("nvidia-h100-80gb", count) for count in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("nvidia-h100-mega-80gb", 8),
    "a3-ultragpu-8g": ("nvidia-h200-141gb", 8),
    "a4-highgpu-8g": ("nvidia-b200", 8),
    **{
        f"g2-standard-{vcpus}": ("nvidia-l4", count)
        for vcpus, count in ((4, 1), (8, 1), (12, 1), (16, 1), (24, 2), (32, 1), (48, 4), (96, 8))
    },
    **{
        f"g4-standard-{vcpus}": ("nvidia-rtx-pro-6000", count)
        for vcpus, count in ((48, 1), (96, 2), (192, 4), (384, 8))
    },
}
# How many vCPUs a machine may have at the most, by how many of the accelerator it has.
_ATTACHED: Final[Mapping[str, Mapping[int, int]]] = {
    "nvidia-tesla-p100": {1: 16, 2: 32, 4: 64},
    "nvidia-tesla-p4": {1: 24, 2: 48, 4: 96},
    "nvidia-tesla-t4": {1: 24, 2: 48, 4: 96},
    "nvidia-tesla-v100": {1: 12, 2: 24, 4: 48, 8: 96},
}
KNOWN: Final = frozenset({*_ATTACHED, *(accelerator for accelerator, _ in _BUILT_IN.values())})
"""By the names that gcloud has for them."""
_SIZED: Final = re.compile(r"[a-z][a-z0-9]*-[a-z]+-([0-9]+)[a-z]*")
_BUILT_IN_SERIES: Final = re.compile(r"(a[2-9]x?|g[2-9])-")
# The replica image is built for x86_64.
_ARM: Final = ("a4x-", "c4a-", "n4a-", "t2a-")
# Those that Google only has as spot or flex-start machines.
_SCARCE: Final = ("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g")
# Those that queue for a flex start.
_QUEUED: Final = (
    "nvidia-a100-80gb",
    "nvidia-b200",
    "nvidia-h100-80gb",
    "nvidia-h100-mega-80gb",
    "nvidia-h200-141gb",
    "nvidia-l4",
    "nvidia-tesla-a100",
)
_HYPERDISK: Final = ("a3-ultragpu-", "a4-", "g4-")
_PERSISTENT: Final = ("a2-", "e2-", "g2-", "n1-", "n2-", "n2d-")


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """An option that cannot be. option: its name in a target. text: why, and what to write."""

    option: str
    text: str


def fitted(machine: str, accelerator: str | None, count: int | None) -> tuple[str, int] | None:
    """What a machine has: its own, or what is asked for; None for none."""
    if machine in _BUILT_IN:
        return _BUILT_IN[machine]
    return None if accelerator is None else (accelerator, 1 if count is None else count)


def wrong_machine(machine: str) -> Wrong | None:
    """Why no replica can run on such a machine."""
    if machine.startswith(_ARM):
        text = f"{machine} is an ARM machine, and the replica image is built for x86_64; write e.g. g2-standard-8"
        return Wrong(option="machine", text=text)
    if _BUILT_IN_SERIES.match(machine) and machine not in _BUILT_IN:
        series = machine.partition("-")[0]
        known = [one for one in _BUILT_IN if one.startswith(f"{series}-")] or list(_BUILT_IN)
        return Wrong(option="machine", text=f"there is no {machine}; there are {', '.join(known)}")
    return None


def wrong_accelerator(machine: str, accelerator: str | None, count: int | None) -> Wrong | None:
    """Why a machine cannot have so many of this accelerator."""
    if machine in _BUILT_IN:
        return _unlike_built_in(machine, accelerator, count)
    if accelerator is None:
        text = "is a number of accelerators, and none is named; write e.g. accelerator: nvidia-tesla-t4"
        return None if count is None else Wrong(option="accelerators", text=text)
    if accelerator not in _ATTACHED:
        machines = [name for name, (own, _) in _BUILT_IN.items() if own == accelerator]
        text = f"{accelerator} is built into {', '.join(machines)}; write one of these at machine"
        return Wrong(option="accelerator", text=text)
    return _unfit_to_attach(machine, accelerator, 1 if count is None else count)


def wrong_scheduling(machine: str, accelerator: str | None, scheduling: str | None) -> Wrong | None:
    """Why such a machine is not to be had in this way. accelerator: as fitted."""
    if machine in _SCARCE and scheduling in (None, "standard"):
        text = f"{machine} is only to be had as spot or flex_start; write scheduling: spot"
        return Wrong(option="scheduling", text=text)
    if scheduling == "flex_start" and accelerator not in _QUEUED:
        what = "machines without accelerators" if accelerator is None else accelerator
        text = f"{what} cannot be queued for; flex_start is for {', '.join(_QUEUED)}; write scheduling: standard"
        return Wrong(option="scheduling", text=text)
    return None


def wrong_disk(machine: str, kind: str) -> Wrong | None:
    """Why a machine cannot start from such a disk."""
    if kind == "hyperdisk-balanced" and machine.startswith(_PERSISTENT):
        return Wrong(option="disk_type", text=f"{machine} has no {kind}; write pd-ssd or pd-standard")
    if kind != "hyperdisk-balanced" and machine.startswith(_HYPERDISK):
        return Wrong(option="disk_type", text=f"{machine} has no {kind}; write hyperdisk-balanced")
    return None


def _unlike_built_in(machine: str, accelerator: str | None, count: int | None) -> Wrong | None:
    own, number = _BUILT_IN[machine]
    if accelerator not in (None, own):
        return Wrong(option="accelerator", text=f"{machine} has {own}; write accelerator: {own}, or leave it out")
    if count not in (None, number):
        text = f"{machine} has {number}; write accelerators: {number}, or leave it out"
        return Wrong(option="accelerators", text=text)
    return None


def _unfit_to_attach(machine: str, accelerator: str, count: int) -> Wrong | None:
    sized = _SIZED.fullmatch(machine)
    if not machine.startswith("n1-") or sized is None:
        text = f"{machine} takes no accelerator; {accelerator} goes with n1 machines, e.g. machine: n1-standard-8"
        return Wrong(option="accelerator", text=text)
    allowed = [number for number, most in _ATTACHED[accelerator].items() if int(sized[1]) <= most]
    if not allowed:
        text = f"{machine} has more vCPUs than any number of {accelerator} goes with; write a smaller machine"
        return Wrong(option="accelerator", text=text)
    if count not in allowed:
        text = f"{machine} takes {' or '.join(map(str, allowed))} of {accelerator}; write accelerators: {allowed[0]}"
        return Wrong(option="accelerators", text=text)
    return None
