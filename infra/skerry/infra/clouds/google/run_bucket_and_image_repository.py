"""A run's home on Google: the bucket of its store, the repository of its image, and the checks before an apply."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.bucket_and_image_checks import bucket_check, guarded_check, image_check
from skerry.infra.clouds.google import permissions
from skerry.infra.clouds.google.artifact_registry import (
    Repositories,
    Repository,
    image_in_registry,
    read_manifest,
    vertex_agent,
)
from skerry.infra.clouds.google.bucket_bindings import BucketBinding, BucketBindings
from skerry.infra.clouds.google.gcs import Bucket, Buckets
from skerry.infra.clouds.google.label_imported import claim
from skerry.infra.clouds.google.secret_bindings import SecretBinding, SecretBindings
from skerry.infra.clouds.google.service_accounts import ServiceAccount, ServiceAccounts
from skerry.infra.clouds.google.services import Service, Services, service
from skerry.infra.clouds.google.session import Disabled
from skerry.infra.clouds.google.workload_identity import (
    OidcProvider,
    OidcProviders,
    Pool,
    Pools,
    Provider,
    Providers,
)
from skerry.infra.clouds.handler_helpers import Absent, split_run_uri
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.clouds.session_credentials_for_store_client import StoreCredentials
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired, Handler, Observed
    from skerry.infra.provision.target_and_store_interfaces import RunContext

STORE: Final = "store"
"""The bucket's key: its address is google_bucket.store."""
CLOUD: Final = "google"

REGION: Final = "CLOUDSDK_COMPUTE_REGION"
"""gcloud's own variable for the region; used if no group of replicas is in one."""
# A start-up check that is killed between its write and its delete leaves its object.
_PROBE_DAYS: Final = 1


def open_home(access: OperatorAccess) -> GoogleHome:
    """The home of runs with a store in gs://. Makes no calls."""
    return GoogleHome(access.google, region=access.environment.get(REGION) or None)


class GoogleHome:
    """See StoreCloud."""

    def __init__(
        self, google: Google, *, region: str | None = None, fetch: Callable[[str, str], bytes] | None = None
    ) -> None:
        self.google = google
        self._region = region
        self._fetch = fetch

    def identity(self) -> Mapping[str, str]:
        """See StoreCloud.identity."""
        return {"google": self.google.identity().project}

    def resources(self, context: RunContext) -> Sequence[Resource]:
        """See StoreCloud.resources."""
        bucket, prefix = place(context.run_uri)
        store = Bucket(
            key=STORE,
            name=bucket,
            region=self.region_of(context),
            why="the run's store",
            brought=context.spec.byo.bucket,
            expire_days={f"{prefix}/{keys.PROBE}": _PROBE_DAYS},
        )
        return store, *repositories(context, self.google.project)

    def mirrors(self, context: RunContext) -> Sequence[Resource]:
        """See StoreCloud.mirrors."""
        return [
            Bucket(
                key=mirror.key,
                name=mirror.bucket,
                region=mirror.region or self.region_of(context, brought=mirror.brought),
                why="a mirror of the run",
                brought=mirror.brought,
            )
            for mirror in context.mirrors("gs")
        ]

    def environment(self, context: RunContext) -> Mapping[str, str]:
        """See StoreCloud.environment. A bucket is found by its name in any region."""
        del context
        return {}

    def credentials(self) -> StoreCredentials | None:
        """See StoreCloud.credentials."""
        return self.google.login.store_credentials(self.google.clock)

    def handlers(self) -> Mapping[str, Handler]:
        """See StoreCloud.handlers. Targets return the same ones."""
        return handlers(self.google)

    def claim(self, desired: Desired, observed: Observed) -> None:
        """See StoreCloud.claim."""
        claim(self.google, desired, observed)

    def checks(self, context: RunContext) -> Iterator[Check]:
        """See StoreCloud.checks."""
        try:
            identity = self.google.identity()
        except (Unauthorized, Invalid) as error:
            yield Check(name="Google credentials", ok=False, text=str(error), advice="log in, then run it again")
            return
        text = f"project {identity.project} ({identity.number}), as {identity.principal}"
        yield Check(name="Google credentials", ok=True, text=text)
        yield guarded_check("Google rights", lambda: self._rights(context))
        yield guarded_check("billing", self._billing)
        yield guarded_check("bucket", lambda: self._bucket(context))
        yield from image_checks(self.google, context.images_in(CLOUD), self._fetch)

    def region_of(self, context: RunContext, *, brought: bool | None = None) -> str:
        """The bucket's region: that of the first group in Google Cloud, else that of the user's environment.

        brought: the bucket is the user's own; None asks the spec about the run's.
        """
        for region in context.regions("google"):
            return region
        if self._region is not None or (context.spec.byo.bucket if brought is None else brought):
            return self._region or ""
        raise Invalid(
            f"no group of replicas is in a region of Google, so the bucket has no region; set {REGION}, or create the "
            "bucket and set `byo: {bucket: true}`"
        )

    def _rights(self, context: RunContext) -> Check:
        needed = [*permissions.HOME]
        needed += permissions.ACCOUNTS if any(context.regions("google")) else ()
        needed += permissions.POOLS if any(context.regions("aws")) else ()
        if any(resource.KIND == Repository.KIND and not resource.brought for resource in self.resources(context)):
            needed += permissions.REPOSITORIES
        try:
            lacking = permissions.lacking(self.google, needed)
        except Disabled as error:
            return Check(name="Google rights", ok=None, text=f"cannot be checked: {error}")
        if not lacking:
            return Check(name="Google rights", ok=True, text=f"all {len(needed)} permissions that an apply needs")
        advice = "ask for a role of the project with them; permissions on single resources are not checked"
        return Check(name="Google rights", ok=False, text=f"lacking: {', '.join(lacking)}", advice=advice)

    def _billing(self) -> Check:
        try:
            billing = self.google.call("cloudbilling", "GET", f"v1/projects/{self.google.project}/billingInfo")
        except (Absent, Unauthorized) as error:
            return Check(name="billing", ok=None, text=f"cannot be checked: {error}")
        if billing.get("billingEnabled"):
            return Check(name="billing", ok=True, text="the project has a billing account")
        text = "the project has no billing account: nothing can be created in it"
        return Check(name="billing", ok=False, text=text, advice="link one in the console, under Billing")

    def _bucket(self, context: RunContext) -> Check:
        bucket, region = place(context.run_uri)[0], self.region_of(context)
        look = Buckets(self.google).look(bucket, context.run_uri)
        if look is not None and context.spec.byo.bucket and not look.uniform:
            advice = f"gcloud storage buckets update gs://{bucket} --uniform-bucket-level-access"
            text = f"{bucket} has permissions by object, and cannot have permissions that are limited to prefixes"
            return Check(name="bucket", ok=False, text=text, advice=advice)
        return bucket_check(context, bucket, region, look)


def repositories(context: RunContext, project: str) -> tuple[Resource, ...]:
    """The repositories of the run's images in the project's registry, each once, and the service before them."""
    registry = service("artifactregistry", "holds the run's image")
    by_place: dict[tuple[str, str], Resource] = {}
    for key, reference in context.images.items():
        image = image_in_registry(reference)
        # Another project's repository belongs to that project.
        if image is None or image.project != project or (image.location, image.repository) in by_place:
            continue
        by_place[image.location, image.repository] = Repository(
            key=key,
            name=image.repository,
            region=image.location,
            why="the run's image",
            brought=context.spec.byo.repository,
            after=(registry.address,),
        )
    return (registry, *by_place.values()) if by_place else ()


def image_checks(
    google: Google, images: Mapping[str, str], fetch: Callable[[str, str], bytes] | None = None
) -> Iterator[Check]:
    """Checks that jobs on Google find their images. images: by their names in the run. Calls the registry."""
    for key, reference in images.items():
        yield guarded_check(key, functools.partial(_image_check, google, key, reference, fetch))


def _image_check(google: Google, name: str, reference: str, fetch: Callable[[str, str], bytes] | None) -> Check:
    image = image_in_registry(reference)
    check = image_check(name, reference, image, "Artifact Registry", lambda image: read_manifest(google, image, fetch))
    if image is None or not check.ok or image.project == google.project:
        return check
    agent = vertex_agent(google.identity().number)
    advice = f"let its owner give {agent} the role roles/artifactregistry.reader on it"
    return replace(check, ok=None, text=f"{check.text}, in the project {image.project}", advice=advice)


def handlers(google: Google) -> Mapping[str, Handler]:
    """The handlers of all resources but jobs, by kind."""
    return {
        Service.KIND: Services(google),
        Bucket.KIND: Buckets(google),
        Repository.KIND: Repositories(google),
        ServiceAccount.KIND: ServiceAccounts(google),
        Pool.KIND: Pools(google),
        Provider.KIND: Providers(google),
        OidcProvider.KIND: OidcProviders(google),
        BucketBinding.KIND: BucketBindings(google),
        SecretBinding.KIND: SecretBindings(google),
    }


def place(run_uri: str) -> tuple[str, str]:
    """Bucket and prefix of a run. Raises Invalid if its store is not in Cloud Storage."""
    return split_run_uri(run_uri, "gs", "Google", "Cloud Storage")
