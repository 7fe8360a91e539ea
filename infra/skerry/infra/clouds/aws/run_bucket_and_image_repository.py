"""A run's home on AWS: the bucket of its store, the repository of its image, and the checks before an apply."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.ecr import Repositories, Repository, fetched, image_in_ecr, read_manifest
from skerry.infra.clouds.aws.policies import DECISIVE
from skerry.infra.clouds.aws.s3 import Bucket, Buckets
from skerry.infra.clouds.aws.tag_imported import claim
from skerry.infra.clouds.bucket_and_image_checks import bucket_check, guarded_check, image_check
from skerry.infra.clouds.handler_helpers import split_run_uri
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.clouds.session_credentials_for_store_client import StoreCredentials
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired, Handler, Observed
    from skerry.infra.provision.target_and_store_interfaces import RunContext

STORE: Final = "store"
"""The bucket's key: its address is aws_bucket.store."""
CLOUD: Final = "aws"

# A start-up check that is killed between its write and its delete leaves its object.
_PROBE_DAYS: Final = 1


def open_home(access: OperatorAccess) -> AwsHome:
    """The home of runs with a store in s3://. Makes no calls. The account is the credentials' own."""
    return AwsHome(access.aws)


class AwsHome:
    """See StoreCloud."""

    def __init__(self, aws: Aws, *, fetch: Callable[[str], bytes] = fetched) -> None:
        self.aws = aws
        self._fetch = fetch

    def identity(self) -> Mapping[str, str]:
        """See StoreCloud.identity."""
        return {"aws": self.aws.identity().account}

    def resources(self, context: RunContext) -> Sequence[Resource]:
        """See StoreCloud.resources."""
        bucket, prefix = place(context.run_uri)
        store = Bucket(
            key=STORE,
            name=bucket,
            region=self.region_of(context),
            why="the run's store",
            brought=context.spec.byo.bucket,
            protected=DECISIVE,
            expire_days={f"{prefix}/{keys.PROBE}": _PROBE_DAYS},
        )
        return store, *repositories(context)

    def mirrors(self, context: RunContext) -> Sequence[Resource]:
        """See StoreCloud.mirrors."""
        return [
            Bucket(
                key=mirror.key,
                name=mirror.bucket,
                region=mirror.region or self.region_of(context),
                why="a mirror of the run",
                brought=mirror.brought,
                protected=DECISIVE,
            )
            for mirror in context.mirrors("s3")
        ]

    def environment(self, context: RunContext) -> Mapping[str, str]:
        """See StoreCloud.environment. Reads the region of a bucket of the user's own; others are in `region_of`."""
        region = self.region_of(context)
        if context.spec.byo.bucket:
            look = Buckets(self.aws).look(place(context.run_uri)[0], region)
            region = region if look is None else look.region
        return {"AWS_REGION": region}

    def credentials(self) -> StoreCredentials | None:
        """See StoreCloud.credentials."""
        return self.aws.store_credentials()

    def handlers(self) -> Mapping[str, Handler]:
        """See StoreCloud.handlers."""
        return {Bucket.KIND: Buckets(self.aws), Repository.KIND: Repositories(self.aws)}

    def claim(self, desired: Desired, observed: Observed) -> None:
        """See StoreCloud.claim."""
        claim(self.aws, desired, observed)

    def checks(self, context: RunContext) -> Iterator[Check]:
        """See StoreCloud.checks."""
        try:
            identity = self.aws.identity()
        except (Unauthorized, Invalid) as error:
            yield Check(name="AWS credentials", ok=False, text=str(error), advice="log in, then run it again")
            return
        yield Check(name="AWS credentials", ok=True, text=f"account {identity.account}, as {identity.arn}")
        yield guarded_check("bucket", lambda: self._bucket(context))
        yield from image_checks(self.aws, context.images_in(CLOUD), self._fetch)

    def region_of(self, context: RunContext) -> str:
        """The bucket's region: that of the first group in AWS, else that of the user's environment."""
        region = next(iter(context.regions(CLOUD)), None) or self.aws.region()
        if region is None:
            raise Invalid("no group of replicas is in a region of AWS, so the bucket has no region; set AWS_REGION")
        return region

    def _bucket(self, context: RunContext) -> Check:
        bucket, region = place(context.run_uri)[0], self.region_of(context)
        return bucket_check(context, bucket, region, Buckets(self.aws).look(bucket, region))


def repositories(context: RunContext) -> tuple[Repository, ...]:
    """The repositories of the run's images in ECR, each once, whatever cloud its jobs run in."""
    by_place: dict[tuple[str, str], Repository] = {}
    for key, reference in context.images.items():
        image = image_in_ecr(reference)
        if image is not None and (image.registry, image.repository) not in by_place:
            by_place[image.registry, image.repository] = Repository(
                key=key,
                name=image.repository,
                region=image.region,
                why="the run's image",
                brought=context.spec.byo.repository,
                registry=image.registry,
            )
    return tuple(by_place.values())


def image_checks(aws: Aws, images: Mapping[str, str], fetch: Callable[[str], bytes] = fetched) -> Iterator[Check]:
    """Checks that jobs on AWS find their images. images: by their names in the run. Calls the registry."""
    for name, reference in images.items():
        yield guarded_check(name, functools.partial(_image_check, aws, name, reference, fetch))


def _image_check(aws: Aws, name: str, reference: str, fetch: Callable[[str], bytes]) -> Check:
    return image_check(name, reference, image_in_ecr(reference), "ECR", lambda image: read_manifest(aws, image, fetch))


def place(run_uri: str) -> tuple[str, str]:
    """Bucket and prefix of a run. Raises Invalid if its store is not in S3."""
    return split_run_uri(run_uri, "s3", "AWS", "S3")
