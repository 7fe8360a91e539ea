"""What executors on AWS have in common: where the run's bucket is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.aws.session import Aws

_S3 = "s3://"


def region_of_store(aws: Aws, run: str, region: str, variables: Mapping[str, str]) -> Mapping[str, str]:
    """What leads clients to a bucket in S3, who sign for its region. Nothing for a store elsewhere.

    region: of the jobs, where the bucket is looked for. variables: of the user, who may say it.
    """
    if not run.startswith(_S3):
        return {}
    there = variables.get("AWS_REGION")
    if there is None:
        bucket = run.removeprefix(_S3).partition("/")[0]
        there = str(aws.call("s3", region, "head_bucket", Bucket=bucket).get("BucketRegion") or region)
    return {"AWS_REGION": there, "AWS_DEFAULT_REGION": there}
