"""The promises of every handler for what costs nothing: each test has names of its own, and its things go with it."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from tests.cloud.place import NAME, Place, allowed
from tests.cloud.settings import Settings, suffix, until
from tests.infra.clouds.aws import account as aws_ground
from tests.infra.clouds.aws import test_ecr as ecr
from tests.infra.clouds.aws import test_iam as roles
from tests.infra.clouds.aws import test_logs as logs
from tests.infra.clouds.aws import test_s3 as s3
from tests.infra.clouds.aws.handlers import AwsHandlerSuite
from tests.infra.clouds.google import test_artifact_registry as artifacts
from tests.infra.clouds.google import test_bucket_bindings as bindings
from tests.infra.clouds.google import test_gcs as gcs
from tests.infra.clouds.google import test_service_accounts as accounts
from tests.infra.clouds.google import test_workload_identity as federation
from tests.infra.clouds.google.handlers import GoogleHandlerSuite
from tests.infra.kit import Listener, wanted

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.google.gcs import Buckets
from skerry.infra.clouds.google.service_accounts import ServiceAccounts, email_of
from skerry.infra.clouds.google.session import Google
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired, Handler, StateRecord
    from skerry.runtime.clock import Clock


class Noted:
    """A handler whose creations are written down before they are asked for, and which knows that listings come late."""

    def __init__(self, handler: Handler, notes: list[tuple[Handler, Desired]], clock: Clock) -> None:
        self._handler, self._notes, self._clock = handler, notes, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def create(self, desired: Desired) -> Mapping[str, str]:
        self._notes.append((self._handler, desired))
        return self._handler.create(desired)

    def list_owned(self, run: str, regions: Collection[str]) -> list[StateRecord]:
        """Return the listed resources once they match, or the last list."""
        mine = [item for handler, item in self._notes if type(handler) is type(self._handler) and item.run == run]
        existing = sorted({item.name for item in mine if self._handler.read([item])[0] is not None})
        result: list[StateRecord] = []

        def as_it_is() -> bool:
            result[:] = self._handler.list_owned(run, regions)
            return sorted(item.name for item in result) == existing

        until(self._clock, as_it_is)
        return result


class InAccount:
    """Mixin for a HandlerSuite that leaves nothing in an account; it precedes the suite among the bases."""

    KIND: ClassVar[str]
    """Of a target in a spec that knows all kinds of resource here."""

    @pytest.fixture(autouse=True)
    def _own(self, settings: Settings, clock: Clock) -> Iterator[None]:
        """Names of their own, all of which can be told to be of these tests."""
        scheme, cloud = ("gs", "google") if self.KIND == "vertex" else ("s3", "aws")
        self.where = allowed(settings, cloud)
        self.clock = clock
        self.label = f"{NAME}{suffix()}"
        store = f"{scheme}://{self.label}"
        self.RUN, self.OTHER, self.REGIONS = f"{store}/{self.label}", f"{store}/{self.label}-x", (self.where["region"],)
        self.STRANGER = ".*" + self.label + ".*"
        self.notes: list[tuple[Handler, Desired]] = []
        # The ladder names what these describe, also if the process is interrupted while it takes it away.
        self.places = [
            Place.spelled(settings, name, [self.KIND], 1, store=store, jobs=False)
            for name in (self.label, f"{self.label}-x")
        ]
        yield
        self._remove()

    def noted(self, handler: Handler) -> Any:
        return Noted(handler, self.notes, self.clock)

    def _remove(self) -> None:
        """Take away what was made, newest first."""
        left = []
        for handler, item in reversed(self.notes):
            try:
                (seen,) = handler.read([item])
                if seen is not None:
                    handler.delete(item.to_record(seen.outputs))
            except SkerryError as error:
                left.append(f"{item.resource.KIND} {item.name}: {error}")
        if left:
            commands = [f"skerry destroy {place.spec} --yes --data" for place in self.places]
            pytest.fail("\n".join(["LEFT in the account:", *left, "take it away:", *commands]), pytrace=False)
        for place in self.places:
            shutil.rmtree(place.spec.parent)


class InAws(InAccount, AwsHandlerSuite):
    KIND = "aws_batch"

    @pytest.fixture
    def listener(self) -> aws_ground.Listener:
        return aws_ground.Listener()

    @pytest.fixture
    def cloud(self, listener: aws_ground.Listener) -> Aws:
        return Aws(self.clock, os.environ, client_made=listener.client_made)


class InGoogle(InAccount, GoogleHandlerSuite):
    KIND = "vertex"

    @pytest.fixture
    def listener(self) -> Listener:
        return Listener()

    @pytest.fixture
    def cloud(self, listener: Listener) -> Google:
        return Google(self.clock, os.environ, project=self.where["project"], heard=listener.heard)


class OfTheRun:
    """A run has one bucket, which its URI names: there is no other generation of it."""

    def test_list_owned_finds_only_the_runs_resources(self, cloud: Any) -> None:
        desired = self.wanted(self.resource(cloud))
        outputs = self.handler(cloud).create(desired)
        (record,) = self.handler(cloud).list_owned(self.RUN, self.REGIONS)
        assert (record.address, record.outputs) == (desired.resource.address, outputs)
        assert list(self.handler(cloud).list_owned(self.OTHER, self.REGIONS)) == []


class TestS3Buckets(OfTheRun, InAws):
    REMEDY = s3.TestBuckets.REMEDY
    CHANGE = s3.TestBuckets.CHANGE

    def handler(self, cloud: Aws) -> Handler:
        return self.noted(s3.Buckets(cloud))

    def resource(self, cloud: Aws) -> Resource:
        del cloud
        return replace(s3.BUCKET, name=self.label, region=self.where["region"])


class TestRoles(InAws):
    CHANGE = roles.TestRoles.CHANGE

    def handler(self, cloud: Aws) -> Handler:
        return self.noted(roles.Roles(cloud))

    def resource(self, cloud: Aws) -> Resource:
        del cloud
        return replace(roles.ROLE, name=self.label)


class TestLogGroups(InAws):
    CHANGE = logs.TestLogGroups.CHANGE

    def handler(self, cloud: Aws) -> Handler:
        return self.noted(logs.LogGroups(cloud))

    def resource(self, cloud: Aws) -> Resource:
        del cloud
        return replace(logs.GROUP, name=f"/skerry/{self.label}", region=self.where["region"])


class TestEcrRepositories(InAws):
    REMEDY = ecr.TestRepositories.REMEDY
    CHANGE = ecr.TestRepositories.CHANGE

    def handler(self, cloud: Aws) -> Handler:
        return self.noted(ecr.Repositories(cloud))

    def resource(self, cloud: Aws) -> Resource:
        region = self.where["region"]
        return replace(ecr.REPOSITORY, name=self.label, region=region, registry=cloud.identity().account)


class TestGoogleBuckets(OfTheRun, InGoogle):
    REMEDY = gcs.TestBuckets.REMEDY
    CHANGE = gcs.TestBuckets.CHANGE

    def handler(self, cloud: Google) -> Handler:
        return self.noted(Buckets(cloud))

    def resource(self, cloud: Google) -> Resource:
        del cloud
        return replace(gcs.BUCKET, name=self.label, region=self.where["region"])


class TestServiceAccounts(InGoogle):
    CHANGE = accounts.TestServiceAccounts.CHANGE

    def handler(self, cloud: Google) -> Handler:
        return self.noted(ServiceAccounts(cloud))

    def resource(self, cloud: Google) -> Resource:
        del cloud
        return replace(accounts.ACCOUNT, name=self.label)


class TestBucketBindings(InGoogle):
    CHANGE = bindings.TestBucketBindings.CHANGE

    def handler(self, cloud: Google) -> Handler:
        return self.noted(bindings.BucketBindings(cloud))

    def resource(self, cloud: Google) -> Resource:
        bucket = replace(gcs.BUCKET, name=self.label, region=self.where["region"])
        self.noted(Buckets(cloud)).create(wanted(bucket, self.RUN))
        self.noted(ServiceAccounts(cloud)).create(wanted(replace(accounts.ACCOUNT, name=self.label), self.RUN))
        member = f"serviceAccount:{email_of(self.label, self.where['project'])}"
        return replace(bindings.BINDING, name=self.label, bucket=self.label, member=member)


class TestPools(InGoogle):
    CHANGE = federation.TestPools.CHANGE

    def handler(self, cloud: Google) -> Handler:
        return self.noted(federation.Pools(cloud))

    def resource(self, cloud: Google) -> Resource:
        del cloud
        return replace(federation.POOL, name=self.label)


class TestProviders(InGoogle):
    CHANGE = federation.TestProviders.CHANGE

    def handler(self, cloud: Google) -> Handler:
        return self.noted(federation.Providers(cloud))

    def resource(self, cloud: Google) -> Resource:
        pool = wanted(replace(federation.POOL, name=self.label), self.RUN)
        where = self.noted(federation.Pools(cloud)).create(pool)["name"]
        return replace(federation.PROVIDER, name=f"{self.label}/aws-batch", pool=where)


class TestArtifactRepositories(InGoogle):
    REMEDY = artifacts.TestRepositories.REMEDY
    CHANGE = artifacts.TestRepositories.CHANGE

    def handler(self, cloud: Google) -> Handler:
        return self.noted(artifacts.Repositories(cloud))

    def resource(self, cloud: Google) -> Resource:
        del cloud
        return replace(artifacts.REPOSITORY, name=self.label, region=self.where["region"])
