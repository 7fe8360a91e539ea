"""Tags existing AWS resources as a run's own, for `skerry import`; each service has its own call for it.

Jobs cannot be imported: a job without the run's tag was not started for it. Neither can definitions, which every
change creates anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.clouds.aws.tags import tag_list, tags_in
from skerry.infra.clouds.handler_helpers import Absent
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.handler import Desired, Observed


def claim(aws: Aws, desired: Desired, observed: Observed) -> None:
    """Add this run's tags to the resource that `desired` names; `observed` was read of it."""
    region, tags, listed = desired.resource.region, desired.tags, tag_list(desired.tags)
    match desired.resource.KIND:
        case "aws_bucket":
            # The one call that replaces all tags.
            merged = {**_tags_of_bucket(aws, desired.name, region), **tags}
            aws.call("s3", region, "put_bucket_tagging", Bucket=desired.name, Tagging={"TagSet": tag_list(merged)})
        case "aws_role":
            aws.call("iam", region, "tag_role", RoleName=desired.name, Tags=listed)
        case "aws_instance_profile":
            aws.call("iam", region, "tag_instance_profile", InstanceProfileName=desired.name, Tags=listed)
        case "aws_repository":
            aws.call("ecr", region, "tag_resource", resourceArn=observed.outputs["arn"], tags=listed)
        case "aws_log_group":
            aws.call("logs", region, "tag_resource", resourceArn=observed.outputs["arn"].removesuffix(":*"), tags=tags)
        case "aws_security_group" | "aws_launch_template":
            aws.call("ec2", region, "create_tags", Resources=[observed.outputs["id"]], Tags=listed)
        case "aws_batch_environment" | "aws_batch_queue":
            aws.call("batch", region, "tag_resource", resourceArn=observed.outputs["arn"], tags=tags)
        case kind:
            raise Invalid(f"{kind} cannot be imported; `skerry apply` creates one")


def _tags_of_bucket(aws: Aws, name: str, region: str) -> Mapping[str, str]:
    try:
        return tags_in(aws.call("s3", region, "get_bucket_tagging", Bucket=name)["TagSet"])
    except Absent:
        return {}
