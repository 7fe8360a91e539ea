"""A run's home on Google: the bucket of its store, the repository of its image, and what can be checked beforehand."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.google import rights
from skerry.infra.clouds.google.bindings import BucketBinding, BucketBindings
from skerry.infra.clouds.google.claiming import claim
from skerry.infra.clouds.google.federation import Pool, Pools, Provider, Providers
from skerry.infra.clouds.google.identity import ServiceAccount, ServiceAccounts
from skerry.infra.clouds.google.registry import (
    Repositories,
    Repository,
    architectures,
    image_in_registry,
    vertex_agent,
)
from skerry.infra.clouds.google.services import Service, Services, service
from skerry.infra.clouds.google.session import Absent, Disabled, Google
from skerry.infra.clouds.google.storage import Bucket, Buckets
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
"""The bucket's key: its address is google_bucket.store."""
CLOUD: Final = "google"

REGION: Final = "CLOUDSDK_COMPUTE_REGION"
"""gcloud's own name for a region to be in, where no group of replicas is in one."""
_MACHINE: Final = "amd64"
# What a start-up check leaves behind if it is killed between its write and its delete.
_PROBE_DAYS: Final = 1


def open_home(clock: Clock, environment: Mapping[str, str], groups: Sequence[Replicas] = ()) -> GoogleHome:
    """The home of runs whose store is gs://. Asks nothing yet. groups: the first that names a project says which."""
    google = Google(clock, environment, project=project_of(groups))
    return GoogleHome(google, region=environment.get(REGION) or None)


def project_of(groups: Sequence[Replicas]) -> str | None:
    """The project that a group names; None if none does."""
    named = (getattr(group.target, "project", None) for group in groups)
    return next((project for project in named if isinstance(project, str) and project), None)


class GoogleHome:
    """See Home."""

    def __init__(
        self, google: Google, *, region: str | None = None, fetch: Callable[[str, str], bytes] | None = None
    ) -> None:
        self.google = google
        self._region = region
        self._fetch = fetch

    def identity(self) -> Mapping[str, str]:
        """See Home.identity."""
        return {"google": self.google.identity().project}

    def resources(self, ground: Ground) -> Sequence[Resource]:
        """See Home.resources."""
        bucket, prefix = place(ground.run_uri)
        store = Bucket(
            key=STORE,
            name=bucket,
            region=self.region_of(ground),
            why="the run's store",
            brought=ground.spec.byo.bucket,
            expire_days={f"{prefix}/{keys.PROBE}": _PROBE_DAYS},
        )
        return store, *repositories(ground, self.google.project)

    def environment(self, ground: Ground) -> Mapping[str, str]:
        """See Home.environment. A bucket is found by its name, wherever it is."""
        del ground
        return {}

    def handlers(self) -> Mapping[str, Handler]:
        """See Home.handlers. All that is made of Google besides jobs: targets give the same ones."""
        return handlers(self.google)

    def claim(self, wanted: Wanted, seen: Seen) -> None:
        """See Home.claim."""
        claim(self.google, wanted, seen)

    def checks(self, ground: Ground) -> Iterator[Check]:
        """See Home.checks. Without credentials there is nothing else to ask."""
        try:
            identity = self.google.identity()
        except (Unauthorized, Invalid) as error:
            yield Check(name="Google credentials", ok=False, text=str(error), advice="log in, then ask again")
            return
        text = f"project {identity.project} ({identity.number}), as {identity.principal}"
        yield Check(name="Google credentials", ok=True, text=text)
        yield _guarded("Google rights", lambda: self._rights(ground))
        yield _guarded("billing", self._billing)
        yield _guarded("bucket", lambda: self._bucket(ground))
        yield from image_checks(self.google, ground.images_in(CLOUD), self._fetch)

    def region_of(self, ground: Ground) -> str:
        """Where the bucket is made: beside the first group that is in a region here."""
        for region in ground.regions("google"):
            return region
        if self._region is not None or ground.spec.byo.bucket:
            return self._region or ""
        raise Invalid(
            f"no group of replicas is in a region of Google, so the bucket has none; set {REGION}, or make the bucket "
            "and say `byo: {bucket: true}`"
        )

    def _rights(self, ground: Ground) -> Check:
        needed = [*rights.HOME]
        needed += rights.ACCOUNTS if any(ground.regions("google")) else ()
        needed += rights.POOLS if any(ground.regions("aws")) else ()
        if any(one.KIND == Repository.KIND and not one.brought for one in self.resources(ground)):
            needed += rights.REPOSITORIES
        try:
            lacking = rights.lacking(self.google, needed)
        except Disabled as error:
            return Check(name="Google rights", ok=None, text=f"cannot be looked at: {error}")
        if not lacking:
            return Check(name="Google rights", ok=True, text=f"all {len(needed)} permissions that an apply needs")
        advice = "ask for a role of the project that has them; rights on single resources are not seen here"
        return Check(name="Google rights", ok=False, text=f"lacking: {', '.join(lacking)}", advice=advice)

    def _billing(self) -> Check:
        try:
            told = self.google.call("cloudbilling", "GET", f"v1/projects/{self.google.project}/billingInfo")
        except (Absent, Unauthorized) as error:
            return Check(name="billing", ok=None, text=f"cannot be looked at: {error}")
        if told.get("billingEnabled"):
            return Check(name="billing", ok=True, text="the project has a billing account")
        text = "the project has no billing account: nothing can be made in it"
        return Check(name="billing", ok=False, text=text, advice="link one in the console, under Billing")

    def _bucket(self, ground: Ground) -> Check:
        bucket, _ = place(ground.run_uri)
        region, brought = self.region_of(ground), ground.spec.byo.bucket
        look = Buckets(self.google).look(bucket, ground.run_uri)
        if look is None and brought:
            advice = "make it, or leave out `byo: {bucket: true}`: then `skerry apply` makes it"
            return Check(name="bucket", ok=False, text=f"there is no bucket {bucket}", advice=advice)
        if look is None:
            return Check(name="bucket", ok=True, text=f"the name {bucket} is free: it will be made in {region}")
        if not brought and look.owner != ground.run_uri:
            whose = "carries no label of a run" if look.owner is None else f"belongs to the run {look.owner}"
            advice = "if it is yours, say `byo: {bucket: true}`, else name another bucket at `store`"
            return Check(name="bucket", ok=False, text=f"{bucket} is there already and {whose}", advice=advice)
        if brought and not look.uniform:
            advice = f"gcloud storage buckets update gs://{bucket} --uniform-bucket-level-access"
            text = f"{bucket} has rights by object, and cannot have rights that are bound to prefixes"
            return Check(name="bucket", ok=False, text=text, advice=advice)
        if region and look.region != region:
            text = f"{bucket} is in {look.region}, replicas are in {region}: traffic between locations costs money"
            # One's own bucket may lie where it must; what we made is not where the spec says now, and is never moved.
            advice = "" if brought else f"name another bucket at `store`, or run in {look.region}"
            return Check(name="bucket", ok=brought, text=text, advice=advice)
        return Check(name="bucket", ok=True, text=f"{bucket} is there, and {'yours' if brought else 'of this run'}")


def repositories(ground: Ground, project: str) -> tuple[Resource, ...]:
    """Those of the run's images that lie in the project's Artifact Registry, each once, and the service before them."""
    registry = service("artifactregistry", "keeps the run's image")
    found: dict[tuple[str, str], Resource] = {}
    for key, reference in ground.images.items():
        image = image_in_registry(reference)
        # Another project's repository is its owner's.
        if image is None or image.project != project or (image.location, image.repository) in found:
            continue
        found[image.location, image.repository] = Repository(
            key=key,
            name=image.repository,
            region=image.location,
            why="the run's image",
            brought=ground.spec.byo.repository,
            after=(registry.address,),
        )
    return (registry, *found.values()) if found else ()


def image_checks(
    google: Google, images: Mapping[str, str], fetch: Callable[[str, str], bytes] | None = None
) -> Iterator[Check]:
    """Whether jobs at Google's will find what they run. images: by their names in the run. Asks the registry."""
    for key, reference in images.items():
        yield _guarded(key, functools.partial(_image, google, key, reference, fetch))


def _image(google: Google, name: str, reference: str, fetch: Callable[[str, str], bytes] | None) -> Check:
    image = image_in_registry(reference)
    if image is None:
        text = f"{reference} is not in Artifact Registry: jobs must be able to pull it without a login"
        return Check(name=name, ok=None, text=text)
    if not image.is_pinned:
        text = f"{reference} is named by a tag, which may come to mean another image"
        return Check(name=name, ok=False, text=text, advice="name it by its digest: repository@sha256:...")
    try:
        machines = architectures(google, image, fetch)
    except Absent as error:
        return Check(name=name, ok=False, text=str(error), advice="push it: scripts/image push")
    if _MACHINE not in machines:
        text = f"it runs on {', '.join(sorted(machines))}, and the machines are {_MACHINE}"
        return Check(name=name, ok=False, text=text, advice=f"build it with --platform linux/{_MACHINE}")
    there = f"{image.repository} has {image.reference[:19]} for {_MACHINE}"
    if image.project != google.project:
        agent = vertex_agent(google.identity().number)
        advice = f"let its owner give {agent} the role roles/artifactregistry.reader on it"
        return Check(name=name, ok=None, text=f"{there}, in the project {image.project}", advice=advice)
    return Check(name=name, ok=True, text=there)


def handlers(google: Google) -> Mapping[str, Handler]:
    """Who makes what there is of Google besides jobs, by kind."""
    return {
        Service.KIND: Services(google),
        Bucket.KIND: Buckets(google),
        Repository.KIND: Repositories(google),
        ServiceAccount.KIND: ServiceAccounts(google),
        Pool.KIND: Pools(google),
        Provider.KIND: Providers(google),
        BucketBinding.KIND: BucketBindings(google),
    }


def place(run_uri: str) -> tuple[str, str]:
    """Bucket and prefix of a run. Raises Invalid if its store is not Cloud Storage's."""
    scheme, _, rest = run_uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "gs" or not bucket or not prefix:
        raise Invalid(f"a run on Google needs a store in Cloud Storage, not {run_uri}")
    return bucket, prefix.rstrip("/")


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except Unauthorized as error:
        return Check(name=name, ok=False, text=str(error), advice="ask for the permission, or use other credentials")
    except Invalid as error:
        return Check(name=name, ok=False, text=str(error))
    except Retryable as error:
        return Check(name=name, ok=None, text=str(error))
