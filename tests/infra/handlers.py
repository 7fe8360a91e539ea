"""What every handler promises, as one suite: each cloud says where it runs, each kind of resource what is made."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar

import pytest
from tests.infra import ground
from tests.infra.ground import Killed, made

from skerry.infra.graph import as_json
from skerry.runtime.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.infra.ground import Listener

    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler, Seen, Wanted

C = TypeVar("C")
_MANY: Final = 60


class HandlerSuite(ABC, Generic[C]):
    """C: who asks the cloud. Fixtures bring one, `cloud`, and the `listener` that hears what it asks.

    RUN, OTHER: two runs with their store in this cloud. REGIONS: where a run is looked for, its own first. STRANGER:
    what is told of the owner to whoever is not OTHER, as a regular expression. EXTRA: tags of the user's own.
    """

    RUN: ClassVar[str]
    OTHER: ClassVar[str]
    REGIONS: ClassVar[Sequence[str]]
    STRANGER: ClassVar[str]
    EXTRA: ClassVar[Mapping[str, str]]
    REMEDY: ClassVar[str] = "delete it"
    """What the error about somebody else's advises."""

    @abstractmethod
    def handler(self, cloud: C, /) -> Handler: ...

    @abstractmethod
    def resource(self, cloud: C, /) -> Resource:
        """Called once in each test: it may make what the resource needs."""

    @abstractmethod
    def changed(self, resource: Resource, /) -> tuple[Resource, str] | None:
        """The same with another setting, and which; None if nothing of it can be changed where it stands."""

    def named(self, resource: Resource, number: int) -> Resource:
        """The same under another name."""
        return replace(resource, name=f"{resource.name}-{number}")

    def test_what_is_not_there_is_read_as_nothing(self, cloud: C) -> None:
        assert list(self.handler(cloud).read([self.wanted(self.resource(cloud))])) == [None]

    def test_what_was_made_is_read_as_it_was_wanted(self, cloud: C) -> None:
        one = replace(self.wanted(self.resource(cloud)), extra=self.EXTRA)
        outputs = self.handler(cloud).create(one)
        seen = self.seen(cloud, one)
        assert seen.owner == self.RUN
        assert seen.outputs == outputs
        assert all(outputs.values())
        self.assert_as_wanted(one, seen)

    def test_a_second_create_finds_the_first(self, cloud: C) -> None:
        one = self.wanted(self.resource(cloud))
        assert self.handler(cloud).create(one) == self.handler(cloud).create(one)
        self.assert_as_wanted(one, self.seen(cloud, one))

    @pytest.mark.slow
    @pytest.mark.parametrize("event", ["before", "after"])
    def test_a_create_cut_short_is_finished_by_the_next(self, cloud: C, listener: Listener, event: str) -> None:
        resource, number = self.resource(cloud), 0
        for number in range(1, _MANY):
            # A name of its own each time: the account in memory gives a new bucket the tags of one that was deleted.
            one = self.wanted(self.named(resource, number))
            try:
                with listener.killing(number, event):
                    self.handler(cloud).create(one)
            except Killed:
                outputs = self.handler(cloud).create(one)
                assert outputs == self.seen(cloud, one).outputs
                self.assert_as_wanted(one, self.seen(cloud, one))
            else:
                break
        assert 1 < number < _MANY - 1

    @pytest.mark.slow
    def test_a_delete_cut_short_is_finished_by_the_next(self, cloud: C, listener: Listener) -> None:
        one, number = self.wanted(self.resource(cloud)), 0
        for event in ("before", "after"):
            for number in range(1, _MANY):
                outputs = self.handler(cloud).create(one)
                try:
                    with listener.killing(number, event):
                        self.handler(cloud).delete(made(one, outputs))
                except Killed:
                    self.handler(cloud).delete(made(one, outputs))
                else:
                    break
                finally:
                    assert list(self.handler(cloud).read([one])) == [None]
            assert number < _MANY - 1

    def test_somebody_elses_is_left_alone(self, cloud: C) -> None:
        resource = self.resource(cloud)
        self.handler(cloud).create(self.wanted(resource, self.OTHER))
        with pytest.raises(Conflict, match=self.REMEDY):
            self.handler(cloud).create(self.wanted(resource))
        assert self.seen(cloud, self.wanted(resource, self.OTHER)).owner == self.OTHER
        assert re.fullmatch(self.STRANGER, self.seen(cloud, self.wanted(resource)).owner or "")

    def test_one_setting_is_changed_where_it_stands(self, cloud: C) -> None:
        before = self.wanted(self.resource(cloud))
        outputs = self.handler(cloud).create(before)
        change = self.changed(before.resource)
        if change is None:
            return
        resource, setting = change
        after = self.wanted(resource)
        assert self.differing(after, self.seen(cloud, after)) == {setting}
        # What refers to it was planned with them.
        assert self.handler(cloud).update(after, {setting}) == outputs
        assert self.seen(cloud, after).outputs == outputs
        self.assert_as_wanted(after, self.seen(cloud, after))

    def test_a_create_over_another_version_of_it_changes_it(self, cloud: C) -> None:
        before = self.wanted(self.resource(cloud))
        self.handler(cloud).create(before)
        change = self.changed(before.resource)
        if change is None:
            return
        after = self.wanted(change[0])
        self.handler(cloud).create(after)
        self.assert_as_wanted(after, self.seen(cloud, after))

    def test_what_was_deleted_is_gone_and_can_be_deleted_again(self, cloud: C) -> None:
        one = self.wanted(self.resource(cloud))
        outputs = self.handler(cloud).create(one)
        for _ in range(2):
            self.handler(cloud).delete(made(one, outputs))
            assert list(self.handler(cloud).read([one])) == [None]

    def test_a_runs_own_are_found_and_nobody_elses(self, cloud: C) -> None:
        one = replace(self.wanted(self.resource(cloud)), generation=2)
        outputs = self.handler(cloud).create(one)
        found = list(self.handler(cloud).owned(self.RUN, self.REGIONS))
        assert [(found_.name, found_.address, found_.generation, found_.outputs) for found_ in found] == [
            (one.name, one.resource.address, 2, outputs)
        ]
        assert (found[0].region, found[0].life) == (one.resource.region, one.resource.LIFE)
        assert list(self.handler(cloud).owned(self.OTHER, self.REGIONS[:1])) == []
        self.handler(cloud).delete(found[0])
        assert list(self.handler(cloud).owned(self.RUN, self.REGIONS[:1])) == []

    def test_several_are_read_in_the_order_asked(self, cloud: C) -> None:
        there = self.wanted(self.resource(cloud))
        missing = replace(there, generation=7)
        self.handler(cloud).create(there)
        read = self.handler(cloud).read([missing, there, missing])
        assert [seen is not None for seen in read] == [False, True, False]

    def wanted(self, resource: Resource, run: str | None = None) -> Wanted:
        return ground.wanted(resource, run or self.RUN)

    def seen(self, cloud: C, one: Wanted) -> Seen:
        (seen,) = self.handler(cloud).read([one])
        assert seen is not None
        return seen

    def assert_as_wanted(self, one: Wanted, seen: Seen) -> None:
        assert {name: as_json(value) for name, value in one.settings.items()} == dict(seen.settings)

    def differing(self, one: Wanted, seen: Seen) -> set[str]:
        return {name for name, value in one.settings.items() if as_json(value) != seen.settings[name]}
