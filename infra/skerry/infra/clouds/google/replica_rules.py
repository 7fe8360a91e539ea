"""The permissions of a replica in the run's bucket, as IAM roles under conditions on keys. Pure.

Equal in effect to `clouds.aws.policies.replica_policy`. Overwriting an object needs the permission to delete it, so a
role that only creates protects decisions, commits and receipts. No predefined role deletes without creating, so a
replica may also write what garbage collection deletes: those objects are named by their digest, or are its own.
Conditions have no patterns: `extract` returns the text between two texts, and a round in a key is limited to one part
by comparing it with the shortest match. A listing is identified by its prefix, not by its objects' names.
Sources: IAM, "Attribute reference for IAM Conditions" and "Quotas and limits"; Cloud Storage, "IAM permissions" and
"IAM roles".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.contract import check_slot
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Sequence

VIEWER: Final = "roles/storage.objectViewer"
"""Reads, and lists."""
CREATOR: Final = "roles/storage.objectCreator"
"""Creates, and never overwrites."""
USER: Final = "roles/storage.objectUser"
"""Reads, creates, overwrites and deletes."""

MOST_OPERATORS: Final = 12
"""&& and || in one condition (IAM quotas)."""
MOST_RULES: Final = 20
"""Bindings of one principal and role that differ in their conditions (IAM quotas)."""
MOST_PRINCIPALS: Final = 1500
"""In all bindings of a bucket together, each occurrence counted (IAM quotas)."""

ANY: Final = "{part}"
"""Any one part of a key."""

# Every replica may create these, all with the same effect; the second create is refused.
_SHARED: Final = (keys.EXCHANGES, keys.COMMITS)
# Garbage collection and the start-up check delete these, also those of other replicas: their keys have no slot.
_COLLECTED: Final = (keys.CHECKPOINTS, keys.PROBE)
# A prefix is put into expressions unchanged: these characters have a meaning there.
_SPECIAL: Final = frozenset("*?$\"'\\{}\n")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A role on some keys of a bucket. keys: prefixes if they end in "/" or "-" or are empty, else whole keys.

    One part of a key may be ANY. listing: listings of the keys are also allowed.
    """

    title: str
    role: str
    keys: tuple[str, ...]
    listing: bool = False


def replica_rules(*, prefix: str, slots: Sequence[str], group: str | None) -> tuple[Rule, ...]:
    """The permissions of replicas in these slots: read the run, write their own objects, create shared ones.

    Never run.json, code, pins or the state of an apply. prefix: the run's, within the bucket. group: all its slots are
    covered by their common prefix; this includes a group with a name that continues after this one's with "-". Raises
    Invalid for characters that have a meaning in a condition, and for more slots than fit into a condition.
    """
    _check_prefix(prefix)
    for slot in slots:
        check_slot(slot)
    if not slots:
        raise Invalid("cannot write a condition for no slots")
    created = [*_SHARED, *(pattern for name in _names(slots, group) for pattern in name.created())]
    kept = [*(name.artifacts() for name in _names(slots, group)), keys.ROLL_UPS]
    written = [*_COLLECTED, *(pattern for name in _names(slots, group) for pattern in name.written())]
    rules = (
        Rule(title="read the run", role=VIEWER, keys=(f"{prefix}/",), listing=True),
        Rule(title="create records", role=CREATOR, keys=tuple(f"{prefix}/{pattern}" for pattern in created)),
        Rule(title="save files and roll-ups", role=CREATOR, keys=tuple(f"{prefix}/{pattern}" for pattern in kept)),
        Rule(title="write and collect", role=USER, keys=tuple(f"{prefix}/{pattern}" for pattern in written)),
    )
    for rule in rules:
        if operators(expression("b", rule)) > MOST_OPERATORS:
            raise Invalid(
                f"{len(slots)} slots are too many for one condition; use an account for each, or set `role: group`"
            )
    return rules


def mirror_rules(prefix: str, *, goes_on: bool = False) -> tuple[Rule, ...]:
    """The permissions of replicas on a mirror, which every one of them keeps: create all, delete what is not needed.

    Equal in effect to `clouds.aws.policies.mirror_policy`. goes_on: as there. Raises Invalid for characters that have
    a meaning in a condition.
    """
    _check_prefix(prefix)
    # With what each slot has copied, which is replaced: see `clouds.aws.policies.MIRROR_SPENT`.
    collected = (keys.PAYLOADS, keys.CHECKPOINTS, keys.PRIVATE, "spent/")
    rules = (
        Rule(title="read the mirror", role=VIEWER, keys=(f"{prefix}/",), listing=True),
        Rule(title="create in the mirror", role=CREATOR, keys=(f"{prefix}/",)),
        Rule(title="collect in the mirror", role=USER, keys=tuple(f"{prefix}/{folder}" for folder in collected)),
    )
    if not goes_on:
        return rules
    run, written = prefix + keys.GOES_ON, (*collected, keys.HEARTBEATS, keys.UNFINISHED, keys.PROBE)
    return (
        *rules,
        Rule(title="read the run that goes on", role=VIEWER, keys=(f"{run}/",), listing=True),
        Rule(title="create the run that goes on", role=CREATOR, keys=(f"{run}/",)),
        Rule(title="write where it goes on", role=USER, keys=tuple(f"{run}/{folder}" for folder in written)),
    )


def expression(bucket: str, rule: Rule) -> str:
    """The condition of a rule as an IAM expression."""
    objects = f"projects/_/buckets/{bucket}/objects/"
    tests = [_test(objects + pattern) for pattern in rule.keys]
    if rule.listing:
        tests += [
            f'api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith("{pattern}")'
            for pattern in rule.keys
        ]
    return " || ".join(tests)


def operators(condition: str) -> int:
    """The number of logical operators that IAM counts in a condition."""
    return condition.count("&&") + condition.count("||")


@dataclass(frozen=True, kw_only=True)
class _Name:
    """A slot, or the common prefix of a group's slots."""

    text: str
    is_group: bool

    def created(self) -> tuple[str, ...]:
        """The records that it creates."""
        record = self.text if self.is_group else f"{self.text}.json"
        return (
            self._folder(keys.MEMBERS),
            self._folder(keys.OUTCOMES),
            f"{keys.CONTRIBUTIONS}{ANY}/{record}",
            f"{keys.RECEIPTS}{ANY}/{record}",
        )

    def artifacts(self) -> str:
        """The files that its script saves. A rule of its own: the condition on records has no room left."""
        return self._folder(keys.ARTIFACTS)

    def written(self) -> tuple[str, ...]:
        """The objects that only it replaces or deletes."""
        beat = f"{keys.HEARTBEATS}{self.text}" + ("" if self.is_group else ".json")
        payloads = self._folder(f"{keys.PAYLOADS}{ANY}/")
        return (beat, payloads, self._folder(keys.PRIVATE), self._folder(keys.UNFINISHED))

    def _folder(self, folder: str) -> str:
        return f"{folder}{self.text}" if self.is_group else f"{folder}{self.text}/"


def _check_prefix(prefix: str) -> None:
    if not prefix or _SPECIAL & set(prefix):
        unwanted = " ".join(sorted(_SPECIAL - {"\n"}))
        raise Invalid(f"cannot write a condition for the prefix {prefix!r}: it must not be empty or contain {unwanted}")


def _names(slots: Sequence[str], group: str | None) -> list[_Name]:
    if group is not None:
        return [_Name(text=f"{group}-", is_group=True)]
    return [_Name(text=slot, is_group=False) for slot in slots]


def _test(pattern: str) -> str:
    """The test for resource names that match `pattern`, which contains ANY at most once."""
    start, any_part, end = pattern.partition(ANY)
    if not any_part:
        return f'resource.name.startsWith("{pattern}")' if _is_start(pattern) else f'resource.name == "{pattern}"'
    # The first keeps the rest from matching later in the name; the second makes the part as short as possible.
    shortest, whole = f'resource.name.extract("{start}{ANY}/")', f'resource.name.extract("{pattern}")'
    tests = [f'resource.name.startsWith("{start}")', f'{whole} != ""', f"{whole} == {shortest}"]
    if not _is_start(pattern):
        tests.append(f'resource.name.endsWith("{end}")')
    return f"({' && '.join(tests)})"


def _is_start(pattern: str) -> bool:
    return not pattern or pattern.endswith(("/", "-"))
