"""The kinds of findings of `skerry doctor` and the next step for each. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.observe.participation import Participation

Severity: TypeAlias = Literal["error", "warning", "info"]
Kind: TypeAlias = Literal[
    "unreadable",  # a record that does not parse
    "misplaced",  # a record under the key of another
    "two-runs",  # records of another run
    "gap",  # a round without its commit, before others
    "broken-link",  # a reference whose digest the referenced record does not have
    "missing-record",  # a record that others reference
    "replaced-record",  # a contribution that is not the one that was decided
    "wrong-commit",  # a commit that does not follow from its decisions
    "stray-decision",  # a decision of a closed round that its commit does not reference
    "stray-record",  # of a round that the log has not reached, or that replicas refuse in the open one
    "incarnation-gap",  # a start of a replica without a membership record
    "missing-payload",  # of a contribution that a replica may still need
    "payload-length",
    "orphan",  # payloads that no record references
    "averages-differ",
    "wrong-average",  # a commit names an average that its contributions do not give
    "wrong-unit",  # a reduced unit that the contributions do not give
    "not-recomputed",  # averages, without torch
    "states-differ",
    "foreign-receipt",  # a receipt of another commit than the log's
    "checkpoint-part",  # a part that is missing or has another length
    "incomplete-checkpoint",
    "damaged-payload",  # does not match its digests, or the tensors of its record
    "damaged-checkpoint",
    "damaged-private",
    "wrong-roll-up",  # not what the records of its rounds give
    "damaged-roll-up",
    "missing-in-rounds",  # a replica without a contribution in the average of some rounds
    "often-cut-short",  # a replica whose rounds the others often ended early
    "mixed-versions",  # replicas whose last starts run different programs
    "crashed",  # starts of a replica that ended with an error, or were killed; it missed no round
]

SLOW: Final = (
    "it is slower than the others, or evaluates in its loop: put that within `with replica.evaluating():`, or raise "
    "`faults.grace`"
)
_MEND: Final = "`skerry doctor --repair` restores it from a mirror or another copy"
_UNREADABLE: Final = (
    f"{_MEND}; else make sure that a later checkpoint becomes complete; if no replica can close the open round with "
    "it, end all of them, then `skerry doctor --deep --quarantine`"
)
NEXT: Final[Mapping[Kind, str]] = {
    "unreadable": f"{_MEND}, if a record names its digest; else start a new run from the newest checkpoint",
    "misplaced": "find out what copied objects inside the prefix",
    "two-runs": "stop one of the runs, and give every run its own prefix",
    "gap": f"{_MEND}; check that no lifecycle rule deletes records",
    "broken-link": f"{_MEND}; run `skerry-replica check` to test the store's atomic create",
    "missing-record": f"{_MEND}; check that no lifecycle rule deletes records",
    "replaced-record": "a record was written twice: run `skerry-replica check`, and use another store if it fails",
    "wrong-commit": "a record was written twice or edited: run `skerry-replica check`",
    "stray-decision": "check that all replicas run the same script: one has more exchanges in a round than the others",
    "stray-record": "`skerry doctor --quarantine` moves it away; replace the replica or the credentials that wrote it",
    "incarnation-gap": "two replicas may own one slot: run `skerry-replica check`; check for a lifecycle rule",
    "missing-payload": _UNREADABLE,
    "payload-length": _UNREADABLE,
    "orphan": "nothing; left by an interrupted upload, deleted with old payloads or by `skerry destroy`",
    "averages-differ": "restart this replica, so that it heals from a checkpoint; if it recurs, replace its machine",
    "wrong-average": "replace the machine of the replicas with this average, if others have another one",
    "wrong-unit": "replace the machine of this replica: its processor or memory computes wrongly",
    "not-recomputed": "pip install 'skerry[export]', and run the same command again",
    "states-differ": "look for `rounding_drift` or `diverged` in its log; after a restart it heals from a checkpoint",
    "foreign-receipt": "restart this replica; it followed another log",
    "checkpoint-part": f"nothing if a newer one is complete; else {_MEND}, or raise its frequency (`checkpoint_every`)",
    "incomplete-checkpoint": "nothing; it is being written, or its writer was stopped",
    "damaged-payload": _UNREADABLE,
    "damaged-checkpoint": f"{_MEND}; without a copy, replicas load an older checkpoint",
    "damaged-private": "nothing; its replica continues with an older save, or with fresh inner state",
    "wrong-roll-up": "delete it: `status`, `watch` and reports then read the single records; the run does not need it",
    "damaged-roll-up": "nothing; readers read the single records, which takes longer; delete it to end this warning",
    "missing-in-rounds": "read its log of these rounds (`skerry logs --replica SLOT`); the average lacks its data",
    "often-cut-short": SLOW,
    "mixed-versions": "give all replicas the same packages (`image`) and code, and restart those that differ",
    "crashed": "read its log (`skerry logs --replica SLOT`): each restart repeats training since its last checkpoint",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem of a run, or information about it. slot: the replica concerned. key: the record concerned.

    text: the problem and its facts. next: what to do.
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
        """The identity of the finding across two examinations."""
        return self.kind, self.round, self.slot, self.key


@dataclass(frozen=True, kw_only=True)
class PayloadAmount:
    """A number of payloads and checkpoint parts, and their bytes."""

    objects: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The result of one examination; errors first, each severity in round order. ok: no errors.

    closed: rounds that have a commit. records: how many were read. bodies: the payloads and checkpoint parts that were
    read in full; None if that was not requested. participation: of the replicas in the closed rounds.
    """

    ok: bool
    uri: str
    run: str | None
    closed: int
    records: int
    bodies: PayloadAmount | None = None
    participation: Participation | None = None
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
