"""Implements the target kind `vertex`: groups of replicas as custom jobs of Vertex AI.

Google's SDK is imported when the first job is created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws import s3 as aws_storage
from skerry.infra.clouds.aws import tag_imported as aws_import
from skerry.infra.clouds.aws.iam import Role, Roles
from skerry.infra.clouds.aws.run_bucket_and_image_repository import AwsHome
from skerry.infra.clouds.bucket_and_image_checks import data_checks
from skerry.infra.clouds.google import run_bucket_and_image_repository as google_home
from skerry.infra.clouds.google.gcs import Buckets
from skerry.infra.clouds.google.label_imported import claim
from skerry.infra.clouds.google.secret_and_data_bindings import buckets_of
from skerry.infra.cost import prices
from skerry.infra.provision.graph import Ref
from skerry.infra.targets.vertex import checks, costs, job_views
from skerry.infra.targets.vertex.jobs import Jobs
from skerry.infra.targets.vertex.resource_graph import StoreInS3, build_resources
from skerry.infra.targets.vertex.resource_types import Job

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.clouds.google.session import Google
    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.handler import Desired, Handler, Observed, StateRecord
    from skerry.infra.provision.target_and_store_interfaces import Check, JobView, LogLine, Rate, RunContext
    from skerry.infra.spec.model import Replicas

_S3: Final = "s3://"


def open_target(access: OperatorAccess) -> Vertex:
    """Open the target `vertex`. Does no I/O."""
    return Vertex(access.google, access.aws, prices.own_file(access.environment))


class Vertex:
    """See Target. aws: used only for runs with a store in S3. own_prices: the user's file of prices."""

    job_kind: Final = Job.KIND

    def __init__(self, google: Google, aws: Aws, own_prices: Path | None = None) -> None:
        self.google = google
        self.aws = aws
        self._own_prices = own_prices

    def identity(self) -> Mapping[str, str]:
        """See Target.identity."""
        return {"google": self.google.identity().project}

    def resources(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Resource]:
        """See Target.resources. The spec's project is used, not that of the environment."""
        return (
            *google_home.repositories(context, self.google.project),
            *build_resources(context, groups, self._s3_store(context)),
        )

    def handlers(self) -> Mapping[str, Handler]:
        """See Target.handlers."""
        return {**google_home.handlers(self.google), Role.KIND: Roles(self.aws), Job.KIND: Jobs(self.google)}

    def claim(self, desired: Desired, observed: Observed) -> None:
        """See Target.claim."""
        if desired.resource.KIND == Role.KIND:
            aws_import.claim(self.aws, desired, observed)
        else:
            claim(self.google, desired, observed)

    def rates(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """See Target.rates. All prices are from tables."""
        return costs.rates(prices.load("google", self._own_prices), context.spec.limits, groups)

    def checks(self, context: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
        """See Target.checks."""
        yield from checks.checks(self.google, groups)
        if context.run_uri.startswith(_S3):
            # With a store in Cloud Storage, the store's cloud checks the images.
            yield from google_home.image_checks(self.google, context.images_of(groups))
        yield from data_checks(
            context, groups, buckets_of, lambda bucket, _: Buckets(self.google).look(bucket, context.run_uri)
        )

    def jobs(self, state_records: Sequence[StateRecord]) -> Sequence[JobView]:
        """See Target.jobs."""
        return job_views.views(self.google, state_records)

    def logs(self, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
        """See Target.logs."""
        return job_views.lines(self.google, state_record, cursor)

    def _s3_store(self, context: RunContext) -> StoreInS3 | None:
        mirrors = context.mirrors("s3")
        if context.run_uri.startswith(_S3):
            region: Text = AwsHome(self.aws).environment(context)["AWS_REGION"]
        elif mirrors:
            region = Ref(address=f"{aws_storage.Bucket.KIND}.{mirrors[0].key}", output="region")
        else:
            return None
        return StoreInS3(account=self.aws.identity().account, region=region)
