"""Finds the region of the run's bucket in S3; shared by the executors on AWS."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.aws.session import Aws

_S3 = "s3://"


def region_of_store(aws: Aws, run: str, region: str, variables: Mapping[str, str]) -> Mapping[str, str]:
    """The region variables that clients of a bucket in S3 need to sign requests; empty for another store.

    region: of the jobs; its endpoint is asked. variables: of the user; their AWS_REGION takes precedence.
    """
    if not run.startswith(_S3):
        return {}
    bucket_region = variables.get("AWS_REGION")
    if bucket_region is None:
        bucket = run.removeprefix(_S3).partition("/")[0]
        bucket_region = str(aws.call("s3", region, "head_bucket", Bucket=bucket).get("BucketRegion") or region)
    return {"AWS_REGION": bucket_region, "AWS_DEFAULT_REGION": bucket_region}
