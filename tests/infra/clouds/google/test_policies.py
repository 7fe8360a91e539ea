"""Conditions, claim by claim: as the expressions say, whatever the key; and within what IAM takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.aws.test_policies import NEVER, OF_A_SLOT, SHARED
from tests.infra.google.ground import check_golden

from skerry.infra.clouds.google.policies import (
    CREATOR,
    MOST_OPERATORS,
    USER,
    VIEWER,
    Rule,
    expression,
    operators,
    replica_rules,
)
from skerry.infra.testing.google import cel
from skerry.infra.testing.google.roles import ROLES
from skerry.runtime import keys
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

BUCKET = "acme-runs"
PREFIX = "teams/tiny-gpt"
OBJECTS = f"projects/_/buckets/{BUCKET}/objects/"
COLLECTED = (keys.PAYLOADS, keys.CHECKPOINTS, keys.PROBE)


def rules(*, slots: Sequence[str] = ("batch-1",), group: str | None = None) -> tuple[Rule, ...]:
    return replica_rules(prefix=PREFIX, slots=slots, group=group)


def roles_on(found: Sequence[Rule], name: str) -> set[str]:
    """The roles that somebody with these rules has on this resource."""
    context = {"resource.name": name}
    return {rule.role for rule in found if cel.holds(expression(BUCKET, rule), context)}


def on(key: str, found: Sequence[Rule] | None = None) -> set[str]:
    return roles_on(rules() if found is None else found, f"{OBJECTS}{PREFIX}/{key}")


@pytest.mark.parametrize("key", [*OF_A_SLOT, *SHARED])
def test_a_replica_creates_its_own_and_what_all_share(key: str) -> None:
    for found in (rules(), rules(slots=["batch-0", "batch-1"], group="batch")):
        roles = on(key, found)
        assert VIEWER in roles
        # To overwrite takes the right to delete, which goes to what is named by its digest or is one's own.
        own = key.startswith((*COLLECTED, keys.PRIVATE, keys.UNFINISHED))
        assert roles - {VIEWER} == {USER if own else CREATOR}


def test_only_its_heartbeat_is_replaced() -> None:
    assert on(keys.heartbeat("batch-1")) == {VIEWER, USER}
    assert on(keys.heartbeat("batch-2")) == {VIEWER}


@pytest.mark.parametrize("key", NEVER)
def test_what_an_operator_writes_no_replica_writes(key: str) -> None:
    assert on(key) == on(key, rules(slots=["batch-1"], group="batch")) == {VIEWER}


@pytest.mark.parametrize("key", [key.replace("batch-1", "batch-2") for key in OF_A_SLOT])
def test_nothing_of_another_slot_is_written_or_deleted(key: str) -> None:
    # Payloads are collected by whoever comes first.
    assert on(key) == ({VIEWER, USER} if key.startswith(keys.PAYLOADS) else {VIEWER})


@pytest.mark.parametrize(
    "key",
    [
        keys.heartbeat("batch-10"),
        keys.contribution(7, 2, "batch-10"),
        keys.receipt(7, "batch-10"),
        keys.member("batch-10", 1),
        keys.outcome("batch-10", 1),
        keys.checkpoint_manifest(7, keys.private_of("batch-10")),
    ],
)
def test_a_slot_whose_name_begins_with_anothers_is_another(key: str) -> None:
    assert on(key) == {VIEWER}


@pytest.mark.parametrize(
    "key",
    [
        "contributions/00000007-0002/batch-2/batch-1.json",
        "contributions/00000007-0002/batch-1.json.tmp",
        "contributions/batch-1.json",
        "receipts/00000007/x/batch-1.json",
        "receipts/00000007/batch-1.jsonx",
        "heartbeats/batch-1.json/x",
        "members/batch-1",
        "x/members/batch-1/000001.json",
    ],
)
def test_a_key_that_only_looks_like_its_own_is_not(key: str) -> None:
    assert on(key) == {VIEWER}


@pytest.mark.parametrize("slot", ["batch-0", "batch-1023"])
def test_a_groups_account_covers_its_slots_and_no_other_groups(slot: str) -> None:
    found = rules(slots=["batch-0", "batch-1023"], group="batch")
    own = [keys.heartbeat(slot), keys.contribution(7, 2, slot), keys.receipt(7, slot), keys.member(slot, 1)]
    for key in own:
        assert len(on(key, found)) == 2
        assert on(key.replace(slot, f"big{slot}"), found) == {VIEWER}
        assert on(key.replace(slot, "local-0"), found) == {VIEWER}
    assert on("contributions/00000007-0002/local-0/batch-1.json", found) == {VIEWER}


@pytest.mark.parametrize(
    "name",
    [
        f"{OBJECTS}teams/tiny-gpt-2/heartbeats/batch-1.json",
        f"{OBJECTS}x/{OBJECTS}{PREFIX}/contributions/00000007-0002/batch-1.json",
        f"projects/_/buckets/other/objects/{PREFIX}/{keys.heartbeat('batch-1')}",
        f"projects/_/buckets/{BUCKET}",
        f"{OBJECTS}{PREFIX}",
    ],
)
def test_nothing_outside_of_the_run_is_touched(name: str) -> None:
    assert roles_on(rules(), name) == set()
    assert roles_on(rules(slots=["batch-1"], group="batch"), name) == set()


@pytest.mark.parametrize(
    ("prefix", "allowed"),
    [(f"{PREFIX}/", True), (f"{PREFIX}/commits/", True), ("teams/", False), ("", False), (f"{PREFIX}-2/", False)],
)
def test_a_listing_is_of_the_run_alone(prefix: str, allowed: bool) -> None:  # noqa: FBT001
    context = {"resource.name": f"projects/_/buckets/{BUCKET}", "api:storage.googleapis.com/objectListPrefix": prefix}
    given = {rule.role for rule in rules() if cel.holds(expression(BUCKET, rule), context)}
    assert given == ({VIEWER} if allowed else set())


def test_nothing_else_is_allowed() -> None:
    assert [rule.role for rule in rules()] == [VIEWER, CREATOR, USER]
    assert "storage.objects.delete" not in ROLES[CREATOR]
    given = set[str]().union(*(ROLES[rule.role] for rule in rules()))
    assert not [one for one in given if not one.startswith(("storage.objects.", "storage.multipartUploads."))]
    assert not {one for one in given if "setIamPolicy" in one}


@pytest.mark.parametrize("group", [None, "a" * 58])
def test_conditions_of_the_longest_names_fit_iam(group: str | None) -> None:
    slot = f"{'a' * 58}-1023"
    for rule in replica_rules(prefix="p" * 200, slots=[slot], group=group):
        assert operators(expression("b" * 63, rule)) <= MOST_OPERATORS


@pytest.mark.parametrize(
    ("prefix", "slots"),
    [
        ("", ["a"]),
        ("runs/*", ["a"]),
        ('runs/"', ["a"]),
        ("runs/{x}", ["a"]),
        ("runs/'", ["a"]),
        ("runs\\", ["a"]),
        ("runs", []),
        ("runs", ['a"']),
    ],
)
def test_what_would_widen_a_condition_is_refused(prefix: str, slots: list[str]) -> None:
    with pytest.raises(Invalid):
        replica_rules(prefix=prefix, slots=slots, group=None)


def test_several_slots_need_accounts_of_their_own() -> None:
    with pytest.raises(Invalid, match="2 slots are too many for one condition"):
        replica_rules(prefix=PREFIX, slots=["batch-0", "batch-1"], group=None)


def test_the_conditions_are_those_of_the_golden_files() -> None:
    for name, found in (("replica", rules()), ("group", rules(slots=["batch-0", "batch-1"], group="batch"))):
        told = [{"role": rule.role, "condition": expression(BUCKET, rule)} for rule in found]
        check_golden(f"{name}_rules", told)
