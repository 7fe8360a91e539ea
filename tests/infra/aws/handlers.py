"""What every handler promises, as one suite: each kind of resource subclasses it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

import pytest
from tests.infra.aws.account import OTHER, REGION, RUN, Killed, made, wanted

from skerry.infra.graph import as_json
from skerry.runtime.errors import Conflict

if TYPE_CHECKING:
    from tests.infra.aws.account import Listener

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler, Seen, Wanted

_MANY: Final = 60


class HandlerSuite:
    """Subclasses say what is made, how it is changed, and what must be there before."""

    REMEDY: ClassVar[str] = "delete it"
    """What the error about somebody else's advises."""
    UPDATES: ClassVar[bool] = True

    def handler(self, aws: Aws) -> Handler:
        raise NotImplementedError

    def resource(self, aws: Aws) -> Resource:
        raise NotImplementedError

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        """The same with another setting, and which."""
        raise NotImplementedError

    def test_what_is_not_there_is_read_as_nothing(self, aws: Aws) -> None:
        assert list(self.handler(aws).read([wanted(self.resource(aws))])) == [None]

    def test_what_was_made_is_read_as_it_was_wanted(self, aws: Aws) -> None:
        one = wanted(self.resource(aws))
        outputs = self.handler(aws).create(one)
        seen = self.seen(aws, one)
        assert seen.owner == RUN
        assert seen.outputs == outputs
        assert all(outputs.values())
        self.assert_as_wanted(one, seen)

    def test_a_second_create_finds_the_first(self, aws: Aws) -> None:
        one = wanted(self.resource(aws))
        assert self.handler(aws).create(one) == self.handler(aws).create(one)
        self.assert_as_wanted(one, self.seen(aws, one))

    @pytest.mark.slow
    @pytest.mark.parametrize("event", ["before-call", "after-call"])
    def test_a_create_cut_short_is_finished_by_the_next(self, aws: Aws, listener: Listener, event: str) -> None:
        resource = self.resource(aws)
        for number in range(1, _MANY):
            # A name of its own each time: the account in memory gives a new bucket the tags of one that was deleted.
            one = wanted(replace(resource, name=f"{resource.name}-{number}"))
            try:
                with listener.killing(number, event):
                    self.handler(aws).create(one)
            except Killed:
                outputs = self.handler(aws).create(one)
                assert outputs == self.seen(aws, one).outputs
                self.assert_as_wanted(one, self.seen(aws, one))
            else:
                break
        assert 1 < number < _MANY - 1

    @pytest.mark.slow
    def test_a_delete_cut_short_is_finished_by_the_next(self, aws: Aws, listener: Listener) -> None:
        one = wanted(self.resource(aws))
        for event in ("before-call", "after-call"):
            for number in range(1, _MANY):
                outputs = self.handler(aws).create(one)
                try:
                    with listener.killing(number, event):
                        self.handler(aws).delete(made(one, outputs))
                except Killed:
                    self.handler(aws).delete(made(one, outputs))
                else:
                    break
                finally:
                    assert list(self.handler(aws).read([one])) == [None]
            assert number < _MANY - 1

    def test_somebody_elses_is_left_alone(self, aws: Aws) -> None:
        resource = self.resource(aws)
        self.handler(aws).create(wanted(resource, OTHER))
        with pytest.raises(Conflict, match=self.REMEDY):
            self.handler(aws).create(wanted(resource))
        assert self.seen(aws, wanted(resource)).owner == OTHER

    def test_one_setting_is_changed_where_it_stands(self, aws: Aws) -> None:
        before = wanted(self.resource(aws))
        outputs = self.handler(aws).create(before)
        if not self.UPDATES:
            return
        resource, setting = self.changed(before.resource)
        after = wanted(resource)
        assert self.differing(after, self.seen(aws, after)) == {setting}
        # What refers to it was planned with them.
        assert self.handler(aws).update(after, {setting}) == outputs
        assert self.seen(aws, after).outputs == outputs
        self.assert_as_wanted(after, self.seen(aws, after))

    def test_a_create_over_another_version_of_it_changes_it(self, aws: Aws) -> None:
        before = wanted(self.resource(aws))
        self.handler(aws).create(before)
        if not self.UPDATES:
            return
        after = wanted(self.changed(before.resource)[0])
        self.handler(aws).create(after)
        self.assert_as_wanted(after, self.seen(aws, after))

    def test_what_was_deleted_is_gone_and_can_be_deleted_again(self, aws: Aws) -> None:
        one = wanted(self.resource(aws))
        outputs = self.handler(aws).create(one)
        for _ in range(2):
            self.handler(aws).delete(made(one, outputs))
            assert list(self.handler(aws).read([one])) == [None]

    def test_a_runs_own_are_found_and_nobody_elses(self, aws: Aws) -> None:
        one = wanted(self.resource(aws), generation=2)
        outputs = self.handler(aws).create(one)
        found = list(self.handler(aws).owned(RUN, [REGION]))
        assert [(found_.name, found_.address, found_.generation, found_.outputs) for found_ in found] == [
            (one.name, one.resource.address, 2, outputs)
        ]
        assert (found[0].region, found[0].life) == (one.resource.region, one.resource.LIFE)
        assert list(self.handler(aws).owned(OTHER, [REGION])) == []
        self.handler(aws).delete(found[0])
        assert list(self.handler(aws).owned(RUN, [REGION])) == []

    def test_several_are_read_in_the_order_asked(self, aws: Aws) -> None:
        there = wanted(self.resource(aws))
        missing = replace(there, generation=7)
        self.handler(aws).create(there)
        read = self.handler(aws).read([missing, there, missing])
        assert [seen is not None for seen in read] == [False, True, False]

    def seen(self, aws: Aws, one: Wanted) -> Seen:
        (seen,) = self.handler(aws).read([one])
        assert seen is not None
        return seen

    def assert_as_wanted(self, one: Wanted, seen: Seen) -> None:
        assert {name: as_json(value) for name, value in one.settings.items()} == dict(seen.settings)

    def differing(self, one: Wanted, seen: Seen) -> set[str]:
        return {name for name, value in one.settings.items() if as_json(value) != seen.settings[name]}
