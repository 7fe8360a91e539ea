"""moto 5.2.5 checks the rights on secrets and parameters without their names.

There a role that may read one secret may read all of them. This shim passes the ARN of the requested secret or
parameter, so that a policy is evaluated for exactly that resource.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's responses have no types.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.secretsmanager.responses import SecretsManagerResponse
from moto.ssm.responses import SimpleSystemManagerResponse

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches


def install(patches: Patches) -> None:
    """Install the shim: name the resource of a request."""

    def secret(self: Any) -> str:
        return _arn(self, "secretsmanager", "SecretId", "secret:")

    def parameter(self: Any) -> str:
        return _arn(self, "ssm", "Name", "parameter/")

    patches.replace(SecretsManagerResponse, "_determine_resource", secret)
    patches.replace(SimpleSystemManagerResponse, "_determine_resource", parameter)


def _arn(response: Any, service: str, parameter: str, start: str) -> str:
    name = response._get_param(parameter)  # noqa: SLF001  moto has no other way
    if not isinstance(name, str) or name.startswith("arn:"):
        return name or "*"
    return f"arn:aws:{service}:{response.region}:{DEFAULT_ACCOUNT_ID}:{start}{name.lstrip('/')}"
