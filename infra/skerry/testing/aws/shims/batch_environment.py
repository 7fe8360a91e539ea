"""moto 5.2.5 keeps one environment list for all jobs of a submission and appends to it whenever it is looked at.

It grows without bound and holds the ids of siblings. AWS tells what was asked for: SubmitJob's word before the
definition's. The variables that AWS adds itself are the container's and are not told.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moto.batch.models import Job

if TYPE_CHECKING:
    from skerry.infra.testing.shims.patches import Patches


def install(patches: Patches) -> None:
    """Make a list of its own each time."""

    def get_container_property(self: Any, p: str, default: Any) -> Any:
        if p != "environment":
            return moto_s(self, p, default)
        told: dict[str, str] = {}
        for properties in (self.job_definition.container_properties, self.container_overrides):
            told |= {one["name"]: one.get("value", "") for one in properties.get(p) or ()}
        return [{"name": name, "value": value} for name, value in told.items()]

    moto_s: Any = patches.replace(Job, "_get_container_property", get_container_property)
