"""Conditions of rules: each permission on each key, and the limits of IAM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.clouds.aws.test_policies import NEVER, OF_A_SLOT, SHARED
from tests.infra.clouds.google.kit import check_golden

from skerry.infra.clouds.google.replica_rules import (
    CREATOR,
    MOST_OPERATORS,
    USER,
    VIEWER,
    Rule,
    expression,
    operators,
    replica_rules,
)
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.testing.google import cel
from skerry.testing.google.predefined_roles import ROLES

if TYPE_CHECKING:
    from collections.abc import Sequence

BUCKET = "acme-runs"
PREFIX = "teams/tiny-gpt"
OBJECTS = f"projects/_/buckets/{BUCKET}/objects/"
COLLECTED = (keys.PAYLOADS, keys.CHECKPOINTS, keys.PROBE)


def rules(*, slots: Sequence[str] = ("batch-1",), group: str | None = None) -> tuple[Rule, ...]:
    return replica_rules(prefix=PREFIX, slots=slots, group=group)


def roles_on(granted: Sequence[Rule], name: str) -> set[str]:
    """The roles that these rules grant on a resource."""
    context = {"resource.name": name}
    return {rule.role for rule in granted if cel.holds(expression(BUCKET, rule), context)}


def on(key: str, granted: Sequence[Rule] | None = None) -> set[str]:
    return roles_on(rules() if granted is None else granted, f"{OBJECTS}{PREFIX}/{key}")


@pytest.mark.parametrize("key", [*OF_A_SLOT, *SHARED])
def test_replica_creates_own_and_shared_objects(key: str) -> None:
    for granted in (rules(), rules(slots=["batch-0", "batch-1"], group="batch")):
        roles = on(key, granted)
        assert VIEWER in roles
        # To overwrite takes the right to delete, which goes to what is named by its digest or is one's own.
        own = key.startswith((*COLLECTED, keys.PRIVATE, keys.UNFINISHED))
        assert roles - {VIEWER} == {USER if own else CREATOR}


def test_only_the_own_heartbeat_is_replaced() -> None:
    assert on(keys.heartbeat("batch-1")) == {VIEWER, USER}
    assert on(keys.heartbeat("batch-2")) == {VIEWER}


@pytest.mark.parametrize("key", NEVER)
def test_replica_cannot_write_operator_objects(key: str) -> None:
    assert on(key) == on(key, rules(slots=["batch-1"], group="batch")) == {VIEWER}


@pytest.mark.parametrize("key", [key.replace("batch-1", "batch-2") for key in OF_A_SLOT])
def test_replica_cannot_write_or_delete_objects_of_another_slot(key: str) -> None:
    # Any replica may collect payloads.
    assert on(key) == ({VIEWER, USER} if key.startswith(keys.PAYLOADS) else {VIEWER})


@pytest.mark.parametrize(
    "key",
    [
        keys.heartbeat("batch-10"),
        keys.contribution(7, 2, "batch-10"),
        keys.receipt(7, "batch-10"),
        keys.member("batch-10", 1),
        keys.outcome("batch-10", 1),
        keys.checkpoint_manifest(7, keys.private_prefix("batch-10")),
    ],
)
def test_slot_name_with_the_same_prefix_is_another_slot(key: str) -> None:
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
def test_similar_keys_are_not_covered(key: str) -> None:
    assert on(key) == {VIEWER}


@pytest.mark.parametrize("slot", ["batch-0", "batch-1023"])
def test_group_account_covers_only_its_own_slots(slot: str) -> None:
    granted = rules(slots=["batch-0", "batch-1023"], group="batch")
    own = [keys.heartbeat(slot), keys.contribution(7, 2, slot), keys.receipt(7, slot), keys.member(slot, 1)]
    for key in own:
        assert len(on(key, granted)) == 2
        assert on(key.replace(slot, f"big{slot}"), granted) == {VIEWER}
        assert on(key.replace(slot, "local-0"), granted) == {VIEWER}
    assert on("contributions/00000007-0002/local-0/batch-1.json", granted) == {VIEWER}


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
def test_objects_outside_of_the_run_are_not_covered(name: str) -> None:
    assert roles_on(rules(), name) == set()
    assert roles_on(rules(slots=["batch-1"], group="batch"), name) == set()


@pytest.mark.parametrize(
    ("prefix", "allowed"),
    [(f"{PREFIX}/", True), (f"{PREFIX}/commits/", True), ("teams/", False), ("", False), (f"{PREFIX}-2/", False)],
)
def test_only_the_run_is_listed(prefix: str, allowed: bool) -> None:  # noqa: FBT001
    context = {"resource.name": f"projects/_/buckets/{BUCKET}", "api:storage.googleapis.com/objectListPrefix": prefix}
    given = {rule.role for rule in rules() if cel.holds(expression(BUCKET, rule), context)}
    assert given == ({VIEWER} if allowed else set())


def test_no_other_permission_is_granted() -> None:
    assert [rule.role for rule in rules()] == [VIEWER, CREATOR, USER]
    assert "storage.objects.delete" not in ROLES[CREATOR]
    given = set[str]().union(*(ROLES[rule.role] for rule in rules()))
    assert not [
        permission
        for permission in given
        if not permission.startswith(("storage.objects.", "storage.multipartUploads."))
    ]
    assert not {permission for permission in given if "setIamPolicy" in permission}


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
def test_special_characters_in_prefix_or_slot_are_refused(prefix: str, slots: list[str]) -> None:
    with pytest.raises(Invalid):
        replica_rules(prefix=prefix, slots=slots, group=None)


def test_several_slots_need_their_own_accounts() -> None:
    with pytest.raises(Invalid, match="2 slots are too many for one condition"):
        replica_rules(prefix=PREFIX, slots=["batch-0", "batch-1"], group=None)


def test_conditions_equal_the_golden_files() -> None:
    for name, granted in (("replica", rules()), ("group", rules(slots=["batch-0", "batch-1"], group="batch"))):
        rows = [{"role": rule.role, "condition": expression(BUCKET, rule)} for rule in granted]
        check_golden(f"{name}_rules", rows)
