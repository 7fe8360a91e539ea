"""A run's home on AWS: the bucket of its store, the repository of its image, and what can be checked beforehand."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws.claiming import claim
from skerry.infra.clouds.aws.policies import decisive
from skerry.infra.clouds.aws.registry import Repositories, Repository, architectures, fetched, image_in_ecr
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.aws.storage import Bucket, Buckets
from skerry.infra.clouds.handling import Absent
from skerry.infra.target import Check
from skerry.runtime import keys
from skerry.runtime.errors import Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler, Seen, Wanted
    from skerry.infra.spec import Replicas
    from skerry.infra.target import Ground
    from skerry.runtime.clock import Clock

STORE: Final = "store"
"""The bucket's key: its address is aws_bucket.store."""
CLOUD: Final = "aws"

_MACHINE: Final = "amd64"
# What a start-up check leaves behind if it is killed between its write and its delete.
_PROBE_DAYS: Final = 1


def open_home(clock: Clock, environment: Mapping[str, str], _groups: Sequence[Replicas] = ()) -> AwsHome:
    """The home of runs whose store is s3://. Asks nothing yet. Whose account it is the credentials say alone."""
    return AwsHome(Aws(clock, environment))


class AwsHome:
    """See Home."""

    def __init__(self, aws: Aws, *, fetch: Callable[[str], bytes] = fetched) -> None:
        self.aws = aws
        self._fetch = fetch

    def identity(self) -> Mapping[str, str]:
        """See Home.identity."""
        return {"aws": self.aws.identity().account}

    def resources(self, ground: Ground) -> Sequence[Resource]:
        """See Home.resources."""
        bucket, prefix = place(ground.run_uri)
        store = Bucket(
            key=STORE,
            name=bucket,
            region=self.region_of(ground),
            why="the run's store",
            brought=ground.spec.byo.bucket,
            protected=decisive(prefix),
            expire_days={f"{prefix}/{keys.PROBE}": _PROBE_DAYS},
        )
        return store, *repositories(ground)

    def environment(self, ground: Ground) -> Mapping[str, str]:
        """See Home.environment. Only a bucket of the user's own has to be asked where it is."""
        region = self.region_of(ground)
        if ground.spec.byo.bucket:
            look = Buckets(self.aws).look(place(ground.run_uri)[0], region)
            region = region if look is None else look.region
        return {"AWS_REGION": region}

    def handlers(self) -> Mapping[str, Handler]:
        """See Home.handlers."""
        return {Bucket.KIND: Buckets(self.aws), Repository.KIND: Repositories(self.aws)}

    def claim(self, wanted: Wanted, seen: Seen) -> None:
        """See Home.claim."""
        claim(self.aws, wanted, seen)

    def checks(self, ground: Ground) -> Iterator[Check]:
        """See Home.checks. Without credentials there is nothing else to ask."""
        try:
            identity = self.aws.identity()
        except (Unauthorized, Invalid) as error:
            yield Check(name="AWS credentials", ok=False, text=str(error), advice="log in, then ask again")
            return
        yield Check(name="AWS credentials", ok=True, text=f"account {identity.account}, as {identity.arn}")
        yield _guarded("bucket", lambda: self._bucket(ground))
        yield from image_checks(self.aws, ground.images_in(CLOUD), self._fetch)

    def region_of(self, ground: Ground) -> str:
        """Where the bucket is made: beside the first group that is in a region of AWS, else in that of the user."""
        region = next(iter(ground.regions(CLOUD)), None) or self.aws.region()
        if region is None:
            raise Invalid("no group of replicas is in a region of AWS, so the bucket has none; set AWS_REGION")
        return region

    def _bucket(self, ground: Ground) -> Check:
        bucket, _ = place(ground.run_uri)
        region, brought = self.region_of(ground), ground.spec.byo.bucket
        look = Buckets(self.aws).look(bucket, region)
        if look is None and brought:
            advice = "make it, or leave out `byo: {bucket: true}`: then `skerry apply` makes it"
            return Check(name="bucket", ok=False, text=f"there is no bucket {bucket}", advice=advice)
        if look is None:
            return Check(name="bucket", ok=True, text=f"the name {bucket} is free: it will be made in {region}")
        if not brought and look.owner != ground.run_uri and not look.bare:
            whose = "carries no tag of a run" if look.owner is None else f"belongs to the run {look.owner}"
            advice = "if it is yours, say `byo: {bucket: true}`, else name another bucket at `store`"
            return Check(name="bucket", ok=False, text=f"{bucket} is there already and {whose}", advice=advice)
        if look.region != region:
            text = f"{bucket} is in {look.region}, replicas are in {region}: traffic between regions costs money"
            # One's own bucket may lie where it must; what we made is not where the spec says now, and is never moved.
            advice = "" if brought else f"name another bucket at `store`, or run in {look.region}"
            return Check(name="bucket", ok=brought, text=text, advice=advice)
        return Check(name="bucket", ok=True, text=f"{bucket} is there, and {'yours' if brought else 'of this run'}")


def repositories(ground: Ground) -> tuple[Repository, ...]:
    """Those of the run's images that lie in ECR, each once, whoever's jobs run them."""
    found: dict[tuple[str, str], Repository] = {}
    for key, reference in ground.images.items():
        image = image_in_ecr(reference)
        if image is not None and (image.registry, image.repository) not in found:
            found[image.registry, image.repository] = Repository(
                key=key,
                name=image.repository,
                region=image.region,
                why="the run's image",
                brought=ground.spec.byo.repository,
                registry=image.registry,
            )
    return tuple(found.values())


def image_checks(aws: Aws, images: Mapping[str, str], fetch: Callable[[str], bytes] = fetched) -> Iterator[Check]:
    """Whether jobs on AWS will find what they run. images: by their names in the run. Asks the registry."""
    for key, reference in images.items():
        yield _guarded(key, functools.partial(_image, aws, key, reference, fetch))


def _image(aws: Aws, name: str, reference: str, fetch: Callable[[str], bytes]) -> Check:
    image = image_in_ecr(reference)
    if image is None:
        text = f"{reference} is not in ECR: jobs must be able to pull it without a login"
        return Check(name=name, ok=None, text=text)
    if not image.is_pinned:
        text = f"{reference} is named by a tag, which may come to mean another image"
        return Check(name=name, ok=False, text=text, advice="name it by its digest: repository@sha256:...")
    try:
        machines = architectures(aws, image, fetch)
    except Absent as error:
        return Check(name=name, ok=False, text=str(error), advice="push it: scripts/image push")
    if _MACHINE not in machines:
        text = f"it runs on {', '.join(sorted(machines))}, and the machines are {_MACHINE}"
        return Check(name=name, ok=False, text=text, advice=f"build it with --platform linux/{_MACHINE}")
    return Check(name=name, ok=True, text=f"{image.repository} has {image.reference[:19]} for {_MACHINE}")


def place(run_uri: str) -> tuple[str, str]:
    """Bucket and prefix of a run. Raises Invalid if its store is not S3's."""
    scheme, _, rest = run_uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket or not prefix:
        raise Invalid(f"a run on AWS needs a store in S3, not {run_uri}")
    return bucket, prefix.rstrip("/")


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except Unauthorized as error:
        return Check(name=name, ok=False, text=str(error), advice="ask for the right, or use other credentials")
    except Invalid as error:
        return Check(name=name, ok=False, text=str(error))
    except Retryable as error:
        return Check(name=name, ok=None, text=str(error))
