"""What every handler promises, as one suite: each kind of resource subclasses it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

import pytest
from tests.infra.google.ground import OTHER, REGION, RUN, Killed, made, wanted

from skerry.infra.graph import as_json
from skerry.runtime.errors import Conflict

if TYPE_CHECKING:
    from tests.infra.google.ground import Listener

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler, Seen, Wanted

_MANY: Final = 60


class HandlerSuite:
    """Subclasses say what is made, how it is changed, and what must be there before."""

    REMEDY: ClassVar[str] = "delete it"
    """What the error about somebody else's advises."""
    UPDATES: ClassVar[bool] = True

    def handler(self, google: Google) -> Handler:
        raise NotImplementedError

    def resource(self, google: Google) -> Resource:
        """Called once in each test: it may make what the resource needs."""
        raise NotImplementedError

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        """The same with another setting, and which."""
        raise NotImplementedError

    def named(self, resource: Resource, number: int) -> Resource:
        """The same under another name."""
        return replace(resource, name=f"{resource.name}-{number}")

    def test_what_is_not_there_is_read_as_nothing(self, google: Google) -> None:
        assert list(self.handler(google).read([wanted(self.resource(google))])) == [None]

    def test_what_was_made_is_read_as_it_was_wanted(self, google: Google) -> None:
        one = wanted(self.resource(google), team="Research & Co")
        outputs = self.handler(google).create(one)
        seen = self.seen(google, one)
        assert seen.owner == RUN
        assert seen.outputs == outputs
        assert all(outputs.values())
        self.assert_as_wanted(one, seen)

    def test_a_second_create_finds_the_first(self, google: Google) -> None:
        one = wanted(self.resource(google))
        assert self.handler(google).create(one) == self.handler(google).create(one)
        self.assert_as_wanted(one, self.seen(google, one))

    @pytest.mark.slow
    @pytest.mark.parametrize("event", ["before", "after"])
    def test_a_create_cut_short_is_finished_by_the_next(self, google: Google, listener: Listener, event: str) -> None:
        resource = self.resource(google)
        for number in range(1, _MANY):
            one = wanted(self.named(resource, number))
            try:
                with listener.killing(number, event):
                    self.handler(google).create(one)
            except Killed:
                outputs = self.handler(google).create(one)
                assert outputs == self.seen(google, one).outputs
                self.assert_as_wanted(one, self.seen(google, one))
            else:
                break
        assert 1 < number < _MANY - 1

    @pytest.mark.slow
    def test_a_delete_cut_short_is_finished_by_the_next(self, google: Google, listener: Listener) -> None:
        one = wanted(self.resource(google))
        for event in ("before", "after"):
            for number in range(1, _MANY):
                outputs = self.handler(google).create(one)
                try:
                    with listener.killing(number, event):
                        self.handler(google).delete(made(one, outputs))
                except Killed:
                    self.handler(google).delete(made(one, outputs))
                else:
                    break
                finally:
                    assert list(self.handler(google).read([one])) == [None]
            assert number < _MANY - 1

    def test_somebody_elses_is_left_alone(self, google: Google) -> None:
        resource = self.resource(google)
        self.handler(google).create(wanted(resource, OTHER))
        with pytest.raises(Conflict, match=self.REMEDY):
            self.handler(google).create(wanted(resource))
        assert self.seen(google, wanted(resource, OTHER)).owner == OTHER
        seen = self.seen(google, wanted(resource))
        assert seen.owner is not None
        assert seen.owner.startswith("with the label other-")

    def test_one_setting_is_changed_where_it_stands(self, google: Google) -> None:
        before = wanted(self.resource(google))
        outputs = self.handler(google).create(before)
        if not self.UPDATES:
            return
        resource, setting = self.changed(before.resource)
        after = wanted(resource)
        assert self.differing(after, self.seen(google, after)) == {setting}
        assert self.handler(google).update(after, {setting}) == outputs
        self.assert_as_wanted(after, self.seen(google, after))

    def test_a_create_over_another_version_of_it_changes_it(self, google: Google) -> None:
        before = wanted(self.resource(google))
        self.handler(google).create(before)
        if not self.UPDATES:
            return
        after = wanted(self.changed(before.resource)[0])
        self.handler(google).create(after)
        self.assert_as_wanted(after, self.seen(google, after))

    def test_what_was_deleted_is_gone_and_can_be_deleted_again(self, google: Google) -> None:
        one = wanted(self.resource(google))
        outputs = self.handler(google).create(one)
        for _ in range(2):
            self.handler(google).delete(made(one, outputs))
            assert list(self.handler(google).read([one])) == [None]

    def test_a_runs_own_are_found_and_nobody_elses(self, google: Google) -> None:
        one = wanted(self.resource(google), generation=2)
        outputs = self.handler(google).create(one)
        found = list(self.handler(google).owned(RUN, [REGION, "eu-central-1"]))
        assert [(found_.name, found_.address, found_.generation, found_.outputs) for found_ in found] == [
            (one.name, one.resource.address, 2, outputs)
        ]
        assert (found[0].region, found[0].life) == (one.resource.region, one.resource.LIFE)
        assert list(self.handler(google).owned(OTHER, [REGION])) == []
        self.handler(google).delete(found[0])
        assert list(self.handler(google).owned(RUN, [REGION])) == []

    def test_several_are_read_in_the_order_asked(self, google: Google) -> None:
        there = wanted(self.resource(google))
        missing = replace(there, generation=7)
        self.handler(google).create(there)
        read = self.handler(google).read([missing, there, missing])
        assert [seen is not None for seen in read] == [False, True, False]

    def seen(self, google: Google, one: Wanted) -> Seen:
        (seen,) = self.handler(google).read([one])
        assert seen is not None
        return seen

    def assert_as_wanted(self, one: Wanted, seen: Seen) -> None:
        assert {name: as_json(value) for name, value in one.settings.items()} == dict(seen.settings)

    def differing(self, one: Wanted, seen: Seen) -> set[str]:
        return {name for name, value in one.settings.items() if as_json(value) != seen.settings[name]}
