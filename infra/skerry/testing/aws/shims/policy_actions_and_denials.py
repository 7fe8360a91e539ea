"""moto 5.2.5 checks a bucket's policy for actions that AWS does not have, and denies without an error body.

A HEAD is checked as s3:HeadObject (AWS: s3:GetObject), and the start and the end of a multipart upload as s3:PostObject
(AWS: s3:PutObject), so that a policy with the real names does not match. Without a body, clients report the code "403"
and not AccessDenied.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from moto.s3.exceptions import S3AccessDeniedError
from moto.s3.models import FakeBucket
from moto.s3.responses import S3Response

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches

_REAL: Final = {"s3:HeadObject": "s3:GetObject", "s3:PostObject": "s3:PutObject"}


def install(patches: Patches) -> None:
    """Install the shim: check the real action names and return AWS's error."""

    def get_permission(self: Any, action: str, resource: str) -> Any:
        return moto_permission(self, _REAL.get(action, action), resource)

    def key_response(self: Any, request: Any, full_url: str) -> Any:
        answer = moto_response(self, request, full_url)
        if isinstance(answer, tuple) and answer[0] == 403 and not answer[2]:
            raise S3AccessDeniedError
        return answer

    moto_permission: Any = patches.replace(FakeBucket, "get_permission", get_permission)
    moto_response: Any = patches.replace(S3Response, "_key_response", key_response)
