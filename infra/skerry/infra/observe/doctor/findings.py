"""What a doctor's visit can find, and what to do about each. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Severity: TypeAlias = Literal["error", "warning", "info"]
Kind: TypeAlias = Literal[
    "unreadable",  # a record that does not parse
    "misplaced",  # a record under the key of another
    "two-runs",  # records of another run
    "gap",  # a round without its commit, below others
    "broken-link",  # a record that names another one by a digest which that one does not have
    "missing-record",  # a record that others name
    "replaced-record",  # a contribution that is not the one that was decided
    "wrong-commit",  # a commit that does not follow from its decisions
    "stray-decision",  # a decision of a closed round that its commit does not name
    "incarnation-gap",  # a start of a replica whose claim is not there
    "missing-payload",  # bytes of a contribution that somebody may still need
    "payload-length",
    "orphan",  # bytes that no record names
    "averages-differ",
    "states-differ",
    "foreign-receipt",  # a receipt of another commit than the log's
    "checkpoint-part",  # bytes of a complete checkpoint that are missing or of another length
    "incomplete-checkpoint",
    "damaged-payload",  # bytes that are not what their digests say, or not the tensors that their record says
    "damaged-checkpoint",
    "damaged-private",
]

NEXT: Final[Mapping[Kind, str]] = {
    "unreadable": "restore the object from a copy; if there is none, start a new run from the newest checkpoint",
    "misplaced": "find out who copied objects inside the prefix",
    "two-runs": "stop one of them, and give every run its own prefix",
    "gap": "restore the commit from a copy; was a lifecycle rule set on records?",
    "broken-link": "restore the record from a copy; does the store honour create? run `skerry-replica check`",
    "missing-record": "restore the record from a copy; was a lifecycle rule set on records?",
    "replaced-record": "the store let a record be written twice: run `skerry-replica check`, use another store",
    "wrong-commit": "the store let a record be written twice, or it was edited: run `skerry-replica check`",
    "stray-decision": "do all replicas run the same script? one has more exchanges in a round than the others",
    "incarnation-gap": "two replicas may own one slot: run `skerry-replica check`; was a lifecycle rule set?",
    "missing-payload": "whoever must follow this round cannot: see that a later checkpoint becomes complete",
    "payload-length": "whoever must follow this round cannot: see that a later checkpoint becomes complete",
    "orphan": "nothing; of an upload that was cut short, deleted with old payloads or by `skerry destroy`",
    "averages-differ": "restart this replica, it then heals from a checkpoint; if it comes back, replace its machine",
    "states-differ": "look for `drifted` or `diverged` in its log; restarted it heals from a checkpoint",
    "foreign-receipt": "restart this replica; it followed another log",
    "checkpoint-part": "nothing if a newer checkpoint is complete; else restart with more `checkpoint_every`",
    "incomplete-checkpoint": "nothing; it is on its way, or its writer was stopped",
    "damaged-payload": "restore the object from a copy; without one, see that a later checkpoint becomes complete",
    "damaged-checkpoint": "restore the object from a copy; without one, replicas pass it over for an older checkpoint",
    "damaged-private": "nothing; its replica goes on with what it saved before, or with fresh inner state",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a run, or worth knowing. slot: who it is about. key: the record to look at.

    text: what is wrong, with its facts. next: what to do.
    """

    severity: Severity
    kind: Kind
    round: int | None
    slot: str | None
    key: str
    text: str
    next: str

    @property
    def place(self) -> tuple[Kind, int | None, str | None, str]:
        """What makes it the same finding at another look."""
        return self.kind, self.round, self.slot, self.key


@dataclass(frozen=True, kw_only=True)
class Bodies:
    """An amount of payloads and parts of checkpoints."""

    objects: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What one visit found, errors first, each severity in round order. ok: no errors.

    closed: rounds that have a commit. records: how many were read. bodies: of what was every byte read; None if it was
    not asked for.
    """

    ok: bool
    uri: str
    run: str | None
    closed: int
    records: int
    bodies: Bodies | None = None
    findings: tuple[Finding, ...] = field(default=())


def finding(
    kind: Kind,
    key: str,
    text: str,
    *,
    round_number: int | None = None,
    slot: str | None = None,
    severity: Severity = "error",
) -> Finding:
    """A finding with the next step of its kind."""
    return Finding(severity=severity, kind=kind, round=round_number, slot=slot, key=key, text=text, next=NEXT[kind])
