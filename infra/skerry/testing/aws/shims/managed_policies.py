"""moto 5.2.5 has AWS's managed policies only if an environment variable says so when a backend is made.

Without them AttachRolePolicy of AmazonEC2ContainerServiceforEC2Role is NoSuchEntity, which it never is on AWS. With the
variable they are made anew for every partition, half a second each time; here for the one that is used.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from moto.iam.aws_managed_policies import aws_managed_policies_data
from moto.iam.models import AWSManagedPolicy, IAMBackend

if TYPE_CHECKING:
    from skerry.infra.testing.shims.patches import Patches


def install(patches: Patches) -> None:
    """Put them into every account that is made from now on."""

    def init_aws_policies(self: Any) -> list[AWSManagedPolicy]:
        if self.partition != "aws":
            return []
        known = _known()
        return [AWSManagedPolicy.from_data(name, self.account_id, self.region_name, known[name]) for name in known]

    patches.replace(IAMBackend, "_init_aws_policies", init_aws_policies)


@functools.cache
def _known() -> dict[str, Any]:
    return json.loads(aws_managed_policies_data)
