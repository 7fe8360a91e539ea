"""moto 5.2.5 refuses a signed POST with parameters in its URL: it hashes them as the body, which is empty.

Another cloud verifies an AWS identity with such a GetCallerIdentity. The gap matters only where rights are enforced.
Sources: IAM (Google), "Configure Workload Identity Federation with AWS"; AWS Signature Version 4.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moto.iam.access_control import IAMRequestBase

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches


def install(patches: Patches) -> None:
    """Install the shim: hash the body that was sent."""

    def create_aws_request(self: Any) -> Any:
        request = moto_create(self)
        if self._method == "POST" and "?" in self._path and not self._body:
            request.data = b""
        return request

    moto_create: Any = patches.replace(IAMRequestBase, "_create_aws_request", create_aws_request)
