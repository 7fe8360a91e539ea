"""Conditions of Google's rules, beyond what `test_replica_access` proves for both clouds."""

from __future__ import annotations

import pytest
from tests.infra.clouds.test_replica_access import BUCKET, OBJECTS, PREFIX, in_google, permissions, rules

from skerry.infra.clouds.google.replica_rules import CREATOR, USER, VIEWER, expression, replica_rules
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.testing.google import cel
from skerry.testing.google.predefined_roles import ROLES


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
    assert in_google(key) == {"read"}


def test_slot_below_another_groups_folder_is_not_covered() -> None:
    key = "contributions/00000007-0002/local-0/batch-1.json"
    assert in_google(key, slots=["batch-0", "batch-1"], group="batch") == {"read"}


@pytest.mark.parametrize("group", [None, "batch"])
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
def test_objects_outside_of_the_run_are_not_covered(name: str, group: str | None) -> None:
    assert permissions(rules(group=group), name) == set()


@pytest.mark.parametrize(
    ("prefix", "allowed"),
    [(f"{PREFIX}/", True), (f"{PREFIX}/commits/", True), ("teams/", False), ("", False), (f"{PREFIX}-2/", False)],
)
def test_only_the_run_is_listed(prefix: str, allowed: bool) -> None:  # noqa: FBT001
    context = {"resource.name": f"projects/_/buckets/{BUCKET}", "api:storage.googleapis.com/objectListPrefix": prefix}
    given = {rule.role for rule in rules() if cel.holds(expression(BUCKET, rule), context)}
    assert given == ({VIEWER} if allowed else set())


def test_no_other_permission_is_granted() -> None:
    assert [rule.role for rule in rules()] == [VIEWER, CREATOR, CREATOR, USER]
    assert "storage.objects.delete" not in ROLES[CREATOR]
    given = set[str]().union(*(ROLES[rule.role] for rule in rules()))
    assert all(name.startswith(("storage.objects.", "storage.multipartUploads.")) for name in given)
    assert not {name for name in given if "setIamPolicy" in name}


def test_several_slots_need_their_own_accounts() -> None:
    with pytest.raises(Invalid, match="2 slots are too many for one condition"):
        replica_rules(prefix=PREFIX, slots=["batch-0", "batch-1"], group=None)
