"""Marks what is there as a run's own: `skerry import`. One call, and each service has another for it.

Jobs are left out: a job that carries no tag of the run was not started for it. So are definitions, which are made
anew at every change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.clouds.aws.handling import tag_list, tags_in
from skerry.infra.clouds.handling import Absent
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.handler import Seen, Wanted


def claim(aws: Aws, wanted: Wanted, seen: Seen) -> None:
    """Put this run's tags on what `wanted` names, beside those it has. seen: what was read of it."""
    region, tags, listed = wanted.resource.region, wanted.tags, tag_list(wanted.tags)
    match wanted.resource.KIND:
        case "aws_bucket":
            # The one call that replaces all tags.
            kept = {**_tags_of_bucket(aws, wanted.name, region), **tags}
            aws.call("s3", region, "put_bucket_tagging", Bucket=wanted.name, Tagging={"TagSet": tag_list(kept)})
        case "aws_role":
            aws.call("iam", region, "tag_role", RoleName=wanted.name, Tags=listed)
        case "aws_instance_profile":
            aws.call("iam", region, "tag_instance_profile", InstanceProfileName=wanted.name, Tags=listed)
        case "aws_repository":
            aws.call("ecr", region, "tag_resource", resourceArn=seen.outputs["arn"], tags=listed)
        case "aws_log_group":
            aws.call("logs", region, "tag_resource", resourceArn=seen.outputs["arn"].removesuffix(":*"), tags=tags)
        case "aws_security_group" | "aws_launch_template":
            aws.call("ec2", region, "create_tags", Resources=[seen.outputs["id"]], Tags=listed)
        case "aws_batch_environment" | "aws_batch_queue":
            aws.call("batch", region, "tag_resource", resourceArn=seen.outputs["arn"], tags=tags)
        case kind:
            raise Invalid(f"{kind} cannot be imported; `skerry apply` makes one")


def _tags_of_bucket(aws: Aws, name: str, region: str) -> Mapping[str, str]:
    try:
        return tags_in(aws.call("s3", region, "get_bucket_tagging", Bucket=name)["TagSet"])
    except Absent:
        return {}
