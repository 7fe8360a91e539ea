"""Promises that both clouds make for buckets, repositories and homes; each cloud's tests subclass these suites."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from tests.infra.handlers import HandlerSuite
from tests.infra.kit import brought, failing, wanted
from tests.support.clocks import FakeClock

from skerry.infra import clouds
from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.provision.handler import Contents
from skerry.runtime.errors import Conflict, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.provision.handler import Desired, StateRecord
    from skerry.infra.provision.target_and_store_interfaces import RunContext, StoreCloud


class BucketSuite(HandlerSuite[Any]):
    """FOREIGN: a region beside the run's own."""

    REMEDY = r"byo: \{bucket: true\}"
    FOREIGN: str

    @abstractmethod
    def put(self, cloud: Any, key: str) -> None:
        """Write 12345 at a key of the run's bucket."""

    @abstractmethod
    def put_bytes(self, cloud: Any, key: str, body: bytes) -> None:
        """Write these bytes at a key of the run's bucket."""

    @abstractmethod
    def make_foreign(self, cloud: Any) -> None:
        """Create the bucket without tags in the region FOREIGN, as another tool would."""

    # Settings with which a bucket keeps deleted objects.
    KEEPING: Mapping[str, Any]

    @abstractmethod
    def delete(self, cloud: Any, key: str) -> None:
        """Delete a key of the run's bucket."""

    @abstractmethod
    def read_object(self, cloud: Any, key: str) -> bytes | None:
        """The bytes at a key of the run's bucket."""

    @abstractmethod
    def set_time(self, cloud: Any, time: datetime) -> None:
        """Set the clock of the cloud; it stands still."""

    def bucket(self, cloud: Any) -> Desired:
        return self.wanted(self.resource(cloud))

    def test_deleted_and_replaced_objects_are_as_they_were(self, cloud: Any) -> None:
        start = datetime.now(UTC).replace(microsecond=0)
        record = self.created(cloud, self.wanted(replace(self.resource(cloud), **self.KEEPING)))
        self.set_time(cloud, start + timedelta(minutes=1))
        for name in ("deleted", "replaced", "untouched", "twice"):
            self.put(cloud, f"runs/checkpoints/{name}")
        self.put(cloud, "runs/other/deleted")
        self.set_time(cloud, start + timedelta(minutes=2))
        self.delete(cloud, "runs/checkpoints/twice")
        self.set_time(cloud, start + timedelta(minutes=3))
        self.put(cloud, "runs/checkpoints/twice")
        attack = start + timedelta(minutes=4)
        self.set_time(cloud, attack)
        for name in ("checkpoints/deleted", "checkpoints/replaced", "checkpoints/twice", "other/deleted"):
            self.delete(cloud, f"runs/{name}")
        self.set_time(cloud, start + timedelta(minutes=5))
        self.put_bytes(cloud, "runs/checkpoints/replaced", b"other")
        self.put(cloud, "runs/checkpoints/new")
        assert self.handler(cloud).undelete(record, "runs/checkpoints/", attack) == Contents(objects=3, size_bytes=15)
        stored = {
            name: self.read_object(cloud, f"runs/checkpoints/{name}") for name in ("deleted", "replaced", "twice")
        }
        assert stored == dict.fromkeys(stored, b"12345")
        assert self.read_object(cloud, "runs/checkpoints/untouched") == b"12345"
        assert self.read_object(cloud, "runs/checkpoints/new") == b"12345"
        assert self.read_object(cloud, "runs/other/deleted") is None

    def test_list_owned_finds_only_the_runs_resources(self, cloud: Any) -> None:
        record, scheme = self.created(cloud, self.bucket(cloud)), self.RUN.partition(":")[0]
        (listed,) = self.handler(cloud).list_owned(self.RUN, [self.FOREIGN])
        assert (listed.outputs, listed.address, listed.region) == (record.outputs, record.address, record.region)
        elsewhere = "gs" if scheme == "s3" else "s3"
        for run in (self.OTHER, f"{elsewhere}://acme-runs/x", f"{scheme}://no-such-bucket/x", f"{scheme}://"):
            assert list(self.handler(cloud).list_owned(run, self.REGIONS[:1])) == []

    def test_brought_bucket_is_read_in_any_region(self, cloud: Any) -> None:
        self.make_foreign(cloud)
        seen = self.seen(cloud, self.wanted(replace(self.resource(cloud), brought=True)))
        assert (seen.owner, seen.outputs["region"], seen.settings["region"]) == (None, self.FOREIGN, self.FOREIGN)

    def test_emptying_one_run_keeps_the_others(self, cloud: Any) -> None:
        record, buckets = self.created(cloud, self.bucket(cloud)), self.handler(cloud)
        for key in (f"teams/{run}/heartbeats/{number}.json" for run in ("tiny-gpt", "tiny-gpt-2") for number in (0, 1)):
            self.put(cloud, key)
        two, reported = Contents(objects=2, size_bytes=10), list[Contents]()
        assert buckets.empty(record, "teams/tiny-gpt/", reported.append) == two
        assert reported == [two]
        assert buckets.contents(record) == two
        assert buckets.contents(record, "teams/tiny-gpt/") == Contents(objects=0, size_bytes=0)


class RepositorySuite(HandlerSuite[Any]):
    REMEDY = r"byo: \{repository: true\}"

    def assert_kept(self, cloud: Any, record: StateRecord, held: Contents) -> None:
        """Assert that a repository with these images is not deleted: other runs may use them."""
        repositories = self.handler(cloud)
        with pytest.raises(Conflict, match=rf"holds {held.objects} images"):
            repositories.delete(record)
        assert repositories.contents(record) == held


class HomeSuite:
    """Fixtures provide `ground`, a run with its store in this cloud, and `cloud`, a session.

    NAME: the cloud's name in its checks. ACCOUNT: the name of the cloud, and its account or project. KINDS: of a run's
    resources. UNOWNED: those of them that no run owns. OTHER_IMAGES: images in another registry.
    """

    NAME: ClassVar[str]
    ACCOUNT: ClassVar[tuple[str, str]]
    KINDS: ClassVar[Sequence[str]]
    UNOWNED: ClassVar[Sequence[str]] = ()
    OTHER_IMAGES: ClassVar[Sequence[str]]

    @abstractmethod
    def home(self, cloud: Any) -> StoreCloud: ...

    def planned(self, ground: RunContext) -> StoreCloud:
        """The home before any call."""
        return clouds.open_home(ground.run_uri, OperatorAccess(FakeClock(), {}, ground.spec))

    @pytest.mark.parametrize("what", ["bucket", "repository"])
    def test_brought_resources_are_marked(self, ground: RunContext, what: str) -> None:
        resources = self.planned(ground).resources(brought(ground, **{what: True}))
        assert [(resource.KIND, resource.brought) for resource in resources] == [
            (kind, kind.endswith(what)) for kind in self.KINDS
        ]

    def test_image_of_another_registry_needs_no_repository(self, ground: RunContext) -> None:
        for image in self.OTHER_IMAGES:
            resources = self.planned(ground).resources(replace(ground, image=image))
            assert [resource.KIND for resource in resources] == [self.KINDS[0]]

    def test_created_resources_are_listed_as_owned(self, cloud: Any, ground: RunContext) -> None:
        home = self.home(cloud)
        assert list(home.identity().items()) == [self.ACCOUNT]
        for resource in home.resources(ground):
            handler = home.handlers()[resource.KIND]
            handler.create(wanted(resource, ground.run_uri))
            owned = handler.list_owned(ground.run_uri, ground.regions(self.ACCOUNT[0]))
            assert [record.address for record in owned] == ([] if resource.KIND in self.UNOWNED else [resource.address])

    def test_missing_credentials_end_the_checks(
        self, cloud: Any, ground: RunContext, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(cloud), "identity", failing(Unauthorized("no credentials")))
        (check,) = self.home(cloud).checks(ground)
        assert (check.name, check.ok) == (f"{self.NAME} credentials", False)
        assert check.advice

    def assert_no_calls(self, cloud: Any, ground: RunContext, calls: Sequence[str]) -> None:
        """Assert that planning in this session adds nothing to `calls`."""
        home = self.home(cloud)
        home.resources(ground)
        home.handlers()
        home.environment(ground)
        assert not calls
