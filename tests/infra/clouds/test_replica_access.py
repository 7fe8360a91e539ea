"""The permissions of a replica on each key of a run, in AWS's policies and in Google's conditions.

Only their texts are judged here; `test_replica_calls` has a store judged by each cloud in memory.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.clouds.aws.account import check_golden as check_aws_golden
from tests.infra.clouds.google.kit import check_golden as check_google_golden

from skerry.infra.clouds.aws.policies import INLINE_LIMIT, Statement, document, replica_policy, text_of
from skerry.infra.clouds.google.replica_rules import MOST_OPERATORS, Rule, expression, operators, replica_rules
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.testing.google import cel
from skerry.testing.google.predefined_roles import ROLES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BUCKET: Final = "acme-runs"
ARN: Final = f"arn:aws:s3:::{BUCKET}"
PREFIX: Final = "teams/tiny-gpt"
OBJECTS: Final = f"projects/_/buckets/{BUCKET}/objects/"
DIGEST: Final = "0" * 32

OF_A_SLOT: Final = [
    keys.member("batch-1", 3),
    keys.payload(7, "batch-1", DIGEST),
    keys.contribution(7, 2, "batch-1"),
    keys.receipt(7, "batch-1"),
    keys.outcome("batch-1", 3),
    keys.artifact("batch-1", 7, 0, "sample.txt"),
    keys.checkpoint_part(7, DIGEST, keys.private_prefix("batch-1")),
    keys.checkpoint_manifest(7, keys.private_prefix("batch-1", 3)),
    keys.checkpoint_part(7, DIGEST, keys.unfinished_prefix("batch-1")),
]
SHARED: Final = [
    keys.decision(7, 2),
    keys.commit(7),
    keys.checkpoint_part(7, DIGEST),
    keys.checkpoint_manifest(7),
    f"{keys.PROBE}{DIGEST}",
]
NEVER: Final = [keys.RUN, keys.code("0" * 64), keys.pin(7), "state/00000001.json", "state/00000001/000001.json"]
COLLECTED: Final = (keys.PAYLOADS, keys.CHECKPOINTS, keys.PRIVATE, keys.UNFINISHED)
LARGE: Final = (*COLLECTED, keys.ARTIFACTS)


def policy(*, slots: Sequence[str] = ("batch-1",), group: str | None = None) -> tuple[Statement, ...]:
    return replica_policy(bucket_arn=ARN, prefix=PREFIX, slots=slots, group=group)


def rules(*, slots: Sequence[str] = ("batch-1",), group: str | None = None) -> tuple[Rule, ...]:
    return replica_rules(prefix=PREFIX, slots=slots, group=group)


def permissions(granted: Sequence[Rule], name: str) -> set[str]:
    """The permissions of Google that these rules grant on a resource."""
    roles = [rule.role for rule in granted if cel.holds(expression(BUCKET, rule), {"resource.name": name})]
    return set[str]().union(*(ROLES[role] for role in roles))


def in_aws(key: str, *, slots: Sequence[str] = ("batch-1",), group: str | None = None) -> set[str]:
    """The permissions that AWS's policies give on a key, by their patterns alone."""
    allowed = set[str]()
    for statement in policy(slots=slots, group=group):
        if not any(fnmatch.fnmatchcase(f"{ARN}/{PREFIX}/{key}", str(pattern)) for pattern in statement.resources):
            continue
        for action in statement.actions:
            allowed.add(action)
            if action == "s3:PutObject" and not statement.conditions:
                allowed.add("replace")
            assert action != "s3:PutObject" or statement.conditions in ({}, {"Null": {"s3:if-none-match": ("false",)}})
    names = {"GetObject": "read", "PutObject": "create", "DeleteObject": "delete", "AbortMultipartUpload": "abort"}
    return {names.get(action.removeprefix("s3:"), action) for action in allowed}


def in_google(key: str, *, slots: Sequence[str] = ("batch-1",), group: str | None = None) -> set[str]:
    """The permissions that Google's conditions give on a key. To overwrite takes those to create and delete."""
    granted = permissions(rules(slots=slots, group=group), f"{OBJECTS}{PREFIX}/{key}")
    names = {"get": "read", "create": "create", "delete": "delete"}
    allowed = {verb for name, verb in names.items() if f"storage.objects.{name}" in granted}
    return allowed | ({"replace"} if {"create", "delete"} <= allowed else set())


clouds = pytest.mark.parametrize("rights", [in_aws, in_google])
if TYPE_CHECKING:
    Rights = Callable[..., set[str]]


@clouds
@pytest.mark.parametrize("key", [*OF_A_SLOT, *SHARED])
@pytest.mark.parametrize("group", [None, "batch"])
def test_replica_reads_and_creates_own_and_shared_objects(rights: Rights, key: str, group: str | None) -> None:
    allowed = rights(key, slots=["batch-1"], group=group)
    assert {"read", "create"} <= allowed
    # Google's right to delete is also one to overwrite: it covers what is named by its digest or is the replica's own.
    assert ("replace" in allowed) is (rights is in_google and key.startswith((*COLLECTED, keys.PROBE)))


@clouds
def test_only_the_own_heartbeat_is_replaced(rights: Rights) -> None:
    assert "replace" in rights(keys.heartbeat("batch-1"))
    assert rights(keys.heartbeat("batch-2")) == {"read"}


@clouds
@pytest.mark.parametrize("group", [None, "batch"])
@pytest.mark.parametrize("key", NEVER)
def test_replica_cannot_write_operator_objects(rights: Rights, key: str, group: str | None) -> None:
    assert rights(key, slots=["batch-1"], group=group) == {"read"}


@clouds
@pytest.mark.parametrize("key", [key.replace("batch-1", "batch-2") for key in OF_A_SLOT])
def test_replica_only_reads_the_objects_of_another_slot(rights: Rights, key: str) -> None:
    assert rights(key) == {"read"}


@clouds
@pytest.mark.parametrize("group", [None, "batch"])
def test_replica_deletes_only_its_own_payloads(rights: Rights, group: str | None) -> None:
    unit = keys.reduced_unit(7, 2, "batch-1", 0, 5)
    for key in (keys.payload(7, "batch-1", DIGEST), unit):
        assert "delete" in rights(key, group=group)
        assert rights(key.replace("batch-1", "local-1"), group=group) == {"read"}
        assert rights(key.replace("batch-1", "x-batch-1"), group=group) == {"read"}


@clouds
@pytest.mark.parametrize("key", [keys.heartbeat("batch-1"), *OF_A_SLOT])
def test_slot_name_with_the_same_prefix_is_another_slot(rights: Rights, key: str) -> None:
    assert rights(key.replace("batch-1", "batch-10")) == {"read"}


@clouds
@pytest.mark.parametrize("slot", ["batch-0", "batch-1023"])
def test_group_covers_only_its_own_slots(rights: Rights, slot: str) -> None:
    for key in (keys.heartbeat(slot), keys.contribution(7, 2, slot), keys.receipt(7, slot), keys.member(slot, 1)):
        for other in (f"big{slot}", "local-0"):
            assert rights(key.replace(slot, other), slots=["batch-0", "batch-1023"], group="batch") == {"read"}
        assert "create" in rights(key, slots=["batch-0", "batch-1023"], group="batch")


@clouds
def test_garbage_collection_cannot_delete_records(rights: Rights) -> None:
    deleted = {key for key in (*OF_A_SLOT, *SHARED, *NEVER) if "delete" in rights(key)}
    assert {key.partition("/")[0] for key in deleted} == {
        "payloads", "checkpoints", "probe", "private", "unfinished",
    }  # fmt: skip


@pytest.mark.parametrize("key", [*OF_A_SLOT, *SHARED])
def test_only_uploads_of_large_objects_are_aborted(key: str) -> None:
    assert ("abort" in in_aws(key)) is key.startswith(LARGE)


@pytest.mark.parametrize("group", [None, "a" * 58])
def test_longest_names_fit_the_limits(group: str | None) -> None:
    names = {"prefix": "p" * 200, "slots": [f"{'a' * 58}-1023"], "group": group}
    longest = replica_policy(bucket_arn=f"arn:aws-us-gov:s3:::{'b' * 63}", **names)
    assert len(text_of(document(longest))) < INLINE_LIMIT
    for rule in replica_rules(**names):
        assert operators(expression("b" * 63, rule)) <= MOST_OPERATORS


@pytest.mark.parametrize("write", [policy, rules])
@pytest.mark.parametrize("slots", [[], ["*"], ['a"']])
def test_special_characters_in_a_slot_are_refused(write: Callable[..., object], slots: list[str]) -> None:
    with pytest.raises(Invalid):
        write(slots=slots)


@pytest.mark.parametrize("prefix", ["", "runs/*", "runs/${x}", 'runs/"', "runs/{x}", "runs/'", "runs\\"])
def test_special_characters_in_a_prefix_are_refused(prefix: str) -> None:
    with pytest.raises(Invalid):
        replica_rules(prefix=prefix, slots=["a"], group=None)
    if not prefix or "*" in prefix or "$" in prefix:
        with pytest.raises(Invalid):
            replica_policy(bucket_arn=ARN, prefix=prefix, slots=["a"], group=None)


@pytest.mark.parametrize(
    ("name", "group"), [("replica", {}), ("group", {"slots": ["batch-0", "batch-1"], "group": "batch"})]
)
def test_policies_equal_the_golden_files(name: str, group: dict[str, object]) -> None:
    check_aws_golden(f"{name}_policy", document(policy(**group)))
    rows = [{"role": rule.role, "condition": expression(BUCKET, rule)} for rule in rules(**group)]
    check_google_golden(f"{name}_rules", rows)
