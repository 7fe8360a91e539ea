"""The accelerators that are built into Google's machines.

A job's request names the accelerator, and so do quotas and prices, while a spec may leave it out; a spec that names
another one is refused (decision 0013). Which accelerators can be attached to a machine that has none, and whether a
machine accepts a disk or a way of scheduling, is not checked: Vertex AI refuses such a job when it is created, at no
cost (decision 0012). Source: Vertex AI, "Configure compute resources for training", table "GPUs".
"""

from __future__ import annotations

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


def built_in(machine: str) -> tuple[str, int] | None:
    """Return the accelerator of a machine and how many it has; None if there is none, or the machine is not known."""
    return _BUILT_IN.get(machine)


def of_machine(machine: str, accelerator: str | None, count: int | None) -> tuple[str, int] | None:
    """Return the accelerator that a job asks for and how many: those named, else those built into the machine."""
    name, built_in_count = _BUILT_IN.get(machine, (None, 1))
    name = accelerator or name
    return None if name is None else (name, built_in_count if count is None else count)
