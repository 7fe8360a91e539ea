"""The contract of every handler, as one suite; each cloud and each kind of resource subclasses it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

import pytest
from tests.infra import kit
from tests.infra.kit import Killed

from skerry.infra.provision.graph import as_json
from skerry.runtime.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.infra.kit import Listener

    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired, Observed, StateRecord

C = TypeVar("C")
_MANY: Final = 60


class HandlerSuite(Generic[C]):
    """C: the cloud's session. Fixtures provide one, `cloud`, and the `listener` that records its calls.

    RUN, OTHER: two runs with their store in this cloud. REGIONS: the regions to search, the run's own first. STRANGER:
    a regular expression of the owner that RUN sees for a resource of OTHER. EXTRA: tags of the user. HANDLER: the class
    under test. RESOURCE: a resource of its kind. CHANGE: another value for a setting of it; None if none can be updated
    in place. REMEDY: the advice in the error about a resource of another owner.
    """

    RUN: ClassVar[str]
    OTHER: ClassVar[str]
    REGIONS: ClassVar[Sequence[str]]
    STRANGER: ClassVar[str]
    EXTRA: ClassVar[Mapping[str, str]]
    HANDLER: ClassVar[type]
    RESOURCE: ClassVar[Resource]
    CHANGE: ClassVar[tuple[str, object] | None] = None
    REMEDY: ClassVar[str] = "delete it"

    def handler(self, cloud: C, /) -> Any:
        return self.HANDLER(cloud)

    def resource(self, cloud: C, /) -> Resource:
        """A resource; called once in each test, so it may create what the resource needs."""
        del cloud
        return self.RESOURCE

    def changed(self, resource: Resource, /) -> tuple[Resource, str] | None:
        """The resource with one other setting, and its name; None if no setting can be updated in place."""
        if self.CHANGE is None:
            return None
        setting, value = self.CHANGE
        return replace(resource, **{setting: value}), setting

    def named(self, resource: Resource, number: int) -> Resource:
        """The resource under another name."""
        return replace(resource, name=f"{resource.name}-{number}")

    def test_missing_resource_is_read_as_none(self, cloud: C) -> None:
        assert list(self.handler(cloud).read([self.wanted(self.resource(cloud))])) == [None]

    def test_created_resource_is_read_as_desired(self, cloud: C) -> None:
        desired = replace(self.wanted(self.resource(cloud)), extra=self.EXTRA)
        outputs = self.handler(cloud).create(desired)
        seen = self.seen(cloud, desired)
        assert seen.owner == self.RUN
        assert seen.outputs == outputs
        assert all(outputs.values())
        self.assert_as_desired(desired, seen)

    def test_second_create_returns_the_first(self, cloud: C) -> None:
        desired = self.wanted(self.resource(cloud))
        assert self.handler(cloud).create(desired) == self.handler(cloud).create(desired)
        self.assert_as_desired(desired, self.seen(cloud, desired))

    @pytest.mark.slow
    @pytest.mark.parametrize("event", ["before", "after"])
    def test_killed_create_is_finished_by_the_next(self, cloud: C, listener: Listener, event: str) -> None:
        resource, number = self.resource(cloud), 0
        for number in range(1, _MANY):
            # A new name each time: moto gives a new bucket the tags of a deleted one of the same name.
            desired = self.wanted(self.named(resource, number))
            try:
                with listener.killing(number, event):
                    self.handler(cloud).create(desired)
            except Killed:
                outputs = self.handler(cloud).create(desired)
                assert outputs == self.seen(cloud, desired).outputs
                self.assert_as_desired(desired, self.seen(cloud, desired))
            else:
                break
        assert 1 < number < _MANY - 1

    @pytest.mark.slow
    def test_killed_delete_is_finished_by_the_next(self, cloud: C, listener: Listener) -> None:
        desired, number = self.wanted(self.resource(cloud)), 0
        for event in ("before", "after"):
            for number in range(1, _MANY):
                outputs = self.handler(cloud).create(desired)
                try:
                    with listener.killing(number, event):
                        self.handler(cloud).delete(desired.to_record(outputs))
                except Killed:
                    self.handler(cloud).delete(desired.to_record(outputs))
                else:
                    break
                finally:
                    assert list(self.handler(cloud).read([desired])) == [None]
            assert number < _MANY - 1

    def test_resource_of_another_run_is_not_changed(self, cloud: C) -> None:
        resource = self.resource(cloud)
        self.handler(cloud).create(self.wanted(resource, self.OTHER))
        with pytest.raises(Conflict, match=self.REMEDY):
            self.handler(cloud).create(self.wanted(resource))
        assert self.seen(cloud, self.wanted(resource, self.OTHER)).owner == self.OTHER
        assert re.fullmatch(self.STRANGER, self.seen(cloud, self.wanted(resource)).owner or "")

    def test_update_changes_one_setting_in_place(self, cloud: C) -> None:
        before = self.wanted(self.resource(cloud))
        outputs = self.handler(cloud).create(before)
        change = self.changed(before.resource)
        if change is None:
            return
        resource, setting = change
        after = self.wanted(resource)
        assert self.differing(after, self.seen(cloud, after)) == {setting}
        # Other resources were planned with these outputs.
        assert self.handler(cloud).update(after, {setting}) == outputs
        assert self.seen(cloud, after).outputs == outputs
        self.assert_as_desired(after, self.seen(cloud, after))

    def test_create_over_another_version_updates_it(self, cloud: C) -> None:
        before = self.wanted(self.resource(cloud))
        self.handler(cloud).create(before)
        change = self.changed(before.resource)
        if change is None:
            return
        after = self.wanted(change[0])
        self.handler(cloud).create(after)
        self.assert_as_desired(after, self.seen(cloud, after))

    def test_delete_can_be_repeated(self, cloud: C) -> None:
        desired = self.wanted(self.resource(cloud))
        outputs = self.handler(cloud).create(desired)
        for _ in range(2):
            self.handler(cloud).delete(desired.to_record(outputs))
            assert list(self.handler(cloud).read([desired])) == [None]

    def test_list_owned_finds_only_the_runs_resources(self, cloud: C) -> None:
        desired = replace(self.wanted(self.resource(cloud)), generation=2)
        outputs = self.handler(cloud).create(desired)
        records = list(self.handler(cloud).list_owned(self.RUN, self.REGIONS))
        assert [(record.name, record.address, record.generation, record.outputs) for record in records] == [
            (desired.name, desired.resource.address, 2, outputs)
        ]
        assert (records[0].region, records[0].life) == (desired.resource.region, desired.resource.LIFE)
        assert list(self.handler(cloud).list_owned(self.OTHER, self.REGIONS[:1])) == []
        self.handler(cloud).delete(records[0])
        assert list(self.handler(cloud).list_owned(self.RUN, self.REGIONS[:1])) == []

    def test_read_keeps_the_order_of_its_arguments(self, cloud: C) -> None:
        existing = self.wanted(self.resource(cloud))
        missing = replace(existing, resource=replace(existing.resource, name=f"{existing.name}-g7"))
        self.handler(cloud).create(existing)
        read = self.handler(cloud).read([missing, existing, missing])
        assert [seen is not None for seen in read] == [False, True, False]

    def wanted(self, resource: Resource, run: str | None = None) -> Desired:
        return kit.wanted(resource, run or self.RUN)

    def seen(self, cloud: C, desired: Desired) -> Observed:
        (seen,) = self.handler(cloud).read([desired])
        assert seen is not None
        return seen

    def assert_as_desired(self, desired: Desired, observed: Observed) -> None:
        assert {name: as_json(value) for name, value in desired.settings.items()} == dict(observed.settings)

    def differing(self, desired: Desired, observed: Observed) -> set[str]:
        return {name for name, value in desired.settings.items() if as_json(value) != observed.settings[name]}

    def created(self, cloud: C, desired: Desired) -> StateRecord:
        """The state record of a resource after its creation."""
        return desired.to_record(self.handler(cloud).create(desired))

    def assert_restored(self, cloud: C, desired: Desired, *settings: str) -> Observed:
        """Assert that just these settings differ, and that an update restores them. Returns what was seen before it."""
        seen = self.seen(cloud, desired)
        assert self.differing(desired, seen) == set(settings)
        self.handler(cloud).update(desired, set(settings))
        self.assert_as_desired(desired, self.seen(cloud, desired))
        return seen
