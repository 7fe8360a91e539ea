"""moto 5.2.5 ignores the tags in the configuration of a CreateBucket.

Without this shim a bucket has no tags after the call that creates it.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import xmltodict  # pyright: ignore[reportMissingTypeStubs]
from moto.s3.responses import S3Response

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches

_CONFIGURATION: Final = "CreateBucketConfiguration"


def install(patches: Patches) -> None:
    """Install the shim: store the tags of a new bucket."""

    def put(self: Any, request: Any, bucket_name: str, querystring: Any) -> Any:
        existed = bucket_name in self.backend.buckets
        response = moto_put(self, request, bucket_name, querystring)
        if not existed and bucket_name in self.backend.buckets and (tags := _tags(self.body)):
            self.backend.put_bucket_tagging(bucket_name, tags)
        return response

    moto_put: Any = patches.replace(S3Response, "_bucket_response_put", put)


def _tags(body: Any) -> dict[str, str]:
    parsed = xmltodict.parse(body, force_list={"Tag"}) if body else {}
    listed = ((parsed.get(_CONFIGURATION) or {}).get("Tags") or {}).get("Tag", ())
    return {str(tag["Key"]): str(tag["Value"] or "") for tag in listed}
