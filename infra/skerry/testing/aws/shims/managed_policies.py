"""moto 5.2.5 has AWS's managed policies only if an environment variable is set when a backend is created.

Without them AttachRolePolicy of AmazonEC2ContainerServiceforEC2Role fails with NoSuchEntity, which AWS never does. With
the variable moto builds them for every partition, half a second each; this shim builds them only for "aws".
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
    from skerry.testing.aws.shims.patching import Patches


def install(patches: Patches) -> None:
    """Install the shim: add the policies to every account created from now on."""

    def init_aws_policies(self: Any) -> list[AWSManagedPolicy]:
        if self.partition != "aws":
            return []
        return [_in_account(policy, self.account_id) for policy in _policies(self.region_name)]

    patches.replace(IAMBackend, "_init_aws_policies", init_aws_policies)


@functools.cache
def _policies(region: str) -> list[AWSManagedPolicy]:
    """All policies, built once: a thousand documents are as much work as all the rest of a new account."""
    documents = json.loads(aws_managed_policies_data)
    return [AWSManagedPolicy.from_data(name, "", region, documents[name]) for name in documents]


def _in_account(policy: AWSManagedPolicy, account_id: str) -> AWSManagedPolicy:
    # copy.copy takes ten times as long, for a thousand policies.
    copied: AWSManagedPolicy = object.__new__(AWSManagedPolicy)
    vars(copied).update(vars(policy), account_id=account_id, tags={}, versions=list(policy.versions))
    return copied
