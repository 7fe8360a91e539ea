"""moto 5.2.5 shares one environment list between all jobs of a submission and appends to it at every read.

The list grows without bound and has the ids of siblings. AWS reports the requested variables, SubmitJob's before the
definition's; the variables that AWS adds itself are not reported.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moto.batch.models import Job

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches


def install(patches: Patches) -> None:
    """Install the shim: build a new list for each job."""

    def get_container_property(self: Any, p: str, default: Any) -> Any:
        if p != "environment":
            return moto_property(self, p, default)
        variables: dict[str, str] = {}
        for properties in (self.job_definition.container_properties, self.container_overrides):
            variables |= {variable["name"]: variable.get("value", "") for variable in properties.get(p) or ()}
        return [{"name": name, "value": value} for name, value in variables.items()]

    moto_property: Any = patches.replace(Job, "_get_container_property", get_container_property)
