"""What a replica may do in the run's bucket, as roles under conditions: who, what, on which keys. Pure.

Equal in effect to `clouds.aws.policies.replica_policy`, with what Google gives: to overwrite an object takes the right
to delete it, so a role that only creates protects what decides. No predefined role deletes without creating, so what
garbage collection may delete a replica may also write: all of it is named by its digest, or its own.
Conditions know no patterns: `extract` gives what stands between two texts, and the part of a key that is a round is
held to one part by comparing it with the shortest there is. A listing is told by its prefix, not by its objects' names.
Sources: IAM, "Attribute reference for IAM Conditions" and "Quotas and limits"; Cloud Storage, "IAM permissions" and
"IAM roles".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.graph import Grant
from skerry.runtime import keys
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
"""Of all bindings of a bucket together, each counted wherever it stands (IAM quotas)."""

ANY: Final = "{part}"
"""One part of a key, whatever it is."""

# Whoever gets there first writes these, all replicas to the same effect; who comes second is refused.
_ANYONES: Final = (keys.EXCHANGES, keys.COMMITS)
# What garbage collection and the start-up check delete, whoever wrote it.
_COLLECTED: Final = (keys.PAYLOADS, keys.CHECKPOINTS, keys.PROBE)
# A prefix is put into expressions as it is: these would mean something else there.
_MEANS_SOMETHING: Final = frozenset("*?$\"'\\{}\n")

_IN_WORDS: Final = {VIEWER: "read and list", CREATOR: "create, never overwrite", USER: "write and delete"}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A role on some keys of a bucket. keys: what they begin with, all of it if it does not end in "/" or "-".

    One part of a key may be ANY. listing: listings of these are allowed, too.
    """

    title: str
    role: str
    keys: tuple[str, ...]
    listing: bool = False


def replica_rules(*, prefix: str, slots: Sequence[str], group: str | None) -> tuple[Rule, ...]:
    """What replicas in these slots may do with their run: read it, write their own, create what all share.

    prefix: the run's, within the bucket. group: the slots are those of a group, and covered by what their names have in
    common; a group whose name goes on with "-" after this one's is then covered too. Raises Invalid for what would mean
    something else in a condition, and for more slots than a condition has room for.
    Never run.json, code, pins or the state of an apply.
    """
    if not prefix or _MEANS_SOMETHING & set(prefix):
        unwanted = " ".join(sorted(_MEANS_SOMETHING - {"\n"}))
        raise Invalid(f"cannot write a condition for the prefix {prefix!r}: it must be there, without {unwanted}")
    for slot in slots:
        keys.check_slot(slot)
    if not slots:
        raise Invalid("cannot write a condition for no slots")
    created = [*_ANYONES, *(pattern for one in _names(slots, group) for pattern in one.created())]
    written = [*_COLLECTED, *(pattern for one in _names(slots, group) for pattern in one.written())]
    rules = (
        Rule(title="read the run", role=VIEWER, keys=(f"{prefix}/",), listing=True),
        Rule(title="create records", role=CREATOR, keys=tuple(f"{prefix}/{one}" for one in created)),
        Rule(title="write and collect", role=USER, keys=tuple(f"{prefix}/{one}" for one in written)),
    )
    for rule in rules:
        if operators(expression("b", rule)) > MOST_OPERATORS:
            raise Invalid(f"{len(slots)} slots are too many for one condition; give each an account, or `role: group`")
    return rules


def expression(bucket: str, rule: Rule) -> str:
    """The condition of a rule, as IAM reads it."""
    objects = f"projects/_/buckets/{bucket}/objects/"
    tests = [_test(objects + pattern) for pattern in rule.keys]
    if rule.listing:
        tests += [
            f'api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith("{pattern}")'
            for pattern in rule.keys
        ]
    return " || ".join(tests)


def operators(condition: str) -> int:
    """How many logical operators IAM counts in it."""
    return condition.count("&&") + condition.count("||")


def told(who: str, bucket: str, rules: Iterable[Rule]) -> list[Grant]:
    """What these rules allow, in words."""
    return [
        Grant(who=who, may=_IN_WORDS.get(rule.role, rule.role), on=f"{bucket}/{_readable(pattern)}")
        for rule in rules
        for pattern in rule.keys
    ]


@dataclass(frozen=True, kw_only=True)
class _Name:
    """A slot, or what the slots of a group begin with."""

    text: str
    is_group: bool

    def created(self) -> tuple[str, ...]:
        """Records that it is the author of."""
        record = self.text if self.is_group else f"{self.text}.json"
        return (
            self._folder(keys.MEMBERS),
            self._folder(keys.OUTCOMES),
            f"{keys.CONTRIBUTIONS}{ANY}/{record}",
            f"{keys.RECEIPTS}{ANY}/{record}",
        )

    def written(self) -> tuple[str, ...]:
        """What it replaces or deletes, and nobody else."""
        beat = f"{keys.HEARTBEATS}{self.text}" + ("" if self.is_group else ".json")
        return (beat, self._folder(keys.PRIVATE), self._folder(keys.UNFINISHED))

    def _folder(self, folder: str) -> str:
        return f"{folder}{self.text}" if self.is_group else f"{folder}{self.text}/"


def _names(slots: Sequence[str], group: str | None) -> list[_Name]:
    if group is not None:
        return [_Name(text=f"{group}-", is_group=True)]
    return [_Name(text=slot, is_group=False) for slot in slots]


def _test(pattern: str) -> str:
    """True for resource names that begin with it, or are it; `pattern` holds ANY at most once."""
    start, any_part, end = pattern.partition(ANY)
    if not any_part:
        return f'resource.name.startsWith("{pattern}")' if _is_start(pattern) else f'resource.name == "{pattern}"'
    # The first keeps the rest from matching later in the name, the second makes the part as short as it can be.
    shortest, whole = f'resource.name.extract("{start}{ANY}/")', f'resource.name.extract("{pattern}")'
    tests = [f'resource.name.startsWith("{start}")', f'{whole} != ""', f"{whole} == {shortest}"]
    if not _is_start(pattern):
        tests.append(f'resource.name.endsWith("{end}")')
    return f"({' && '.join(tests)})"


def _is_start(pattern: str) -> bool:
    return pattern.endswith(("/", "-"))


def _readable(pattern: str) -> str:
    return pattern.replace(ANY, "*") + ("*" if _is_start(pattern) else "")
