"""Votes of replicas, through a mirror, on whether their run leaves a store that they do not reach.

A vote is a promise to add nothing to the run's store until the ballot has a verdict. The verdict is created once:
either the run goes on elsewhere, which needs the votes of a majority of its slots, or it stays, which any slot that
reaches the store again may create. Then all votes of the ballot are void, and the next ballot begins. So the run leaves
its store at most once, and only when too few slots are left there to close a round.

Two processes may have one slot. A start is in the mirror before it looks for a vote of its slot, and trains only after
that; a vote is in the mirror before starts are looked for, and counts only if there is no newer one. Whichever is
later sees the other. Needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime.errors import Corrupt, Diverged, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_record_bytes
from skerry.runtime.log.records import GENESIS
from skerry.runtime.log.run_record import Verdict, Vote, majority

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.mirrors.restorable import Cut
    from skerry.runtime.store import Store


class Ballots:
    """The ballots of a run, as one slot sees them. Its methods raise what the mirror's store raises."""

    def __init__(self, mirror: Store, run: Run, slot: str, clock: Clock, find: Callable[[Store], Cut]) -> None:
        """find: the cut of the mirror from which the run can go on. Raises Invalid for a run without failover."""
        if run.failover is None:
            raise Invalid(f"run {run.name} has no failover")
        self._mirror, self._run, self._slot, self._clock, self._find = mirror, run, slot, clock, find
        self._uri = run.failover.uri
        self._number = 0

    def read(self) -> Verdict | None:
        """The verdict by which the run goes on elsewhere; None while it stays. One request in the newest ballot."""
        verdict, self._number = _newest(self._mirror, self._number, self._run.nonce)
        return verdict

    def has_voted(self) -> bool:
        """True if this slot, in this or in another process, has voted in the newest ballot. After `read`."""
        return read_record_bytes(self._mirror, keys.vote(self._number, self._slot)) is not None

    def withdraw(self) -> Verdict | None:
        """Make the votes of the ballot void if this slot has voted: it reaches the store, and is about to train.

        Returns the verdict by which the run goes on elsewhere, if there is one; then it must not train.
        """
        verdict = self.read()
        return self.stay() if verdict is None and self.has_voted() else verdict

    def vote(self, incarnation: int) -> None:
        """Promise to add nothing to the run's store until the verdict: this process of the slot is not training.

        incarnation: the newest start of the slot that this process knows, which is its own.
        """
        vote = Vote(
            run=self._run.nonce,
            ballot=self._number,
            slot=self._slot,
            created=self._clock.utc_text(),
            incarnation=incarnation,
        )
        self._mirror.create(keys.vote(self._number, self._slot), vote.to_bytes())

    def move(self) -> Verdict | None:
        """End the ballot if a majority has voted; the verdict by which the run goes on elsewhere, if that is it.

        Raises Invalid if nothing in the mirror can be restored.
        """
        stored = {entry.key for entry in self._mirror.list(keys.votes_prefix(self._number))}
        votes = tuple(slot for slot in self._run.slots if keys.vote(self._number, slot) in stored)
        if len(votes) < majority(len(self._run.slots)):
            return None
        votes = tuple(slot for slot in votes if self._counts(slot))
        if len(votes) < majority(len(self._run.slots)):
            return None
        cut = self._find(self._mirror)
        return self._end(self._uri, cut.round, cut.commit, votes)

    def _counts(self, slot: str) -> bool:
        """False if a newer start than that of the vote is in the mirror: it may train, because it saw no vote.

        Or if the vote cannot be read.
        """
        key = keys.vote(self._number, slot)
        data = read_record_bytes(self._mirror, key)
        try:
            incarnation = Vote.parse(data or b"", key).incarnation
        except Corrupt:
            return False
        starts = [entry.key for entry in self._mirror.list(keys.members_prefix(slot))]
        return incarnation is None or keys.newest_incarnation(starts) <= incarnation

    def stay(self) -> Verdict | None:
        """Make all votes of the ballot void; the verdict by which the run goes on elsewhere, if that was first."""
        return self._end(None, 0, GENESIS, ())

    def order(self, uri: str, cut: Cut) -> Verdict | None:
        """End the ballot without a majority, because an operator restores the run at `uri`; the verdict that counts.

        None if a replica that reaches the store was first: the run stays there.
        """
        return self.read() or self._end(uri, cut.round, cut.commit, ())

    def _end(self, uri: str | None, round_number: int, commit: str, votes: tuple[str, ...]) -> Verdict | None:
        verdict = Verdict(
            run=self._run.nonce,
            ballot=self._number,
            uri=uri,
            round=round_number,
            commit=commit,
            votes=votes,
            by=self._slot,
            created=self._clock.utc_text(),
        )
        self._mirror.create(keys.verdict(self._number), verdict.to_bytes())
        return self.read()  # of another slot, if that was first


def read_verdict(mirror: Store, run: str | None = None) -> Verdict | None:
    """The verdict by which the run of a mirror goes on elsewhere; None if there is none. run: its nonce, if known."""
    return _newest(mirror, 0, run)[0]


def has_votes(mirror: Store) -> bool:
    """True if the run of a mirror may be about to go on elsewhere, or does: nothing may be deleted in the mirror."""
    verdict, number = _newest(mirror, 0, None)
    return verdict is not None or bool(mirror.list(keys.votes_prefix(number)))


def _newest(mirror: Store, number: int, run: str | None) -> tuple[Verdict | None, int]:
    """The verdict to go on elsewhere, if there is one, and the number of its ballot or of the open one."""
    while (data := read_record_bytes(mirror, keys.verdict(number))) is not None:
        verdict = Verdict.parse(data, keys.verdict(number))
        if run not in {None, verdict.run}:
            raise Diverged(f"{mirror.uri}/{keys.verdict(number)} belongs to another run: {verdict.run}")
        if verdict.uri is not None:
            return verdict, number
        number += 1
    return None, number
