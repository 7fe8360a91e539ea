"""moto 5.2.5 refuses a signed POST whose question stands in its address: it hashes that as a body, which is empty.

So comes the GetCallerIdentity that a foreign cloud was given as a proof of who somebody is, where rights are enforced.
Sources: IAM (Google), "Configure Workload Identity Federation with AWS"; AWS Signature Version 4.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moto.iam.access_control import IAMRequestBase

if TYPE_CHECKING:
    from skerry.infra.testing.shims.patches import Patches


def install(patches: Patches) -> None:
    """Hash the body that came."""

    def create_aws_request(self: Any) -> Any:
        request = moto_s(self)
        if self._method == "POST" and "?" in self._path and not self._body:
            request.data = b""
        return request

    moto_s: Any = patches.replace(IAMRequestBase, "_create_aws_request", create_aws_request)
