"""Deliberate bugs, one behaviour each, to prove that the invariants notice. Never imported by anything but tests."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.simulation import replica as replicas
from tests.simulation.invariants import fold
from tests.simulation.replica import Replica, SimulatedPresence

from skerry.runtime import exchange, garbage, keys, membership, rounds
from skerry.runtime.errors import Ambiguous, Retryable
from skerry.runtime.exchange import Exchange
from skerry.runtime.journal import Journal, Sealed
from skerry.runtime.records import Contribution, Decision, digest_of
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Patch = Any


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A named bug. where: the module whose behaviour is broken."""

    name: str
    where: str
    apply: Callable[[pytest.MonkeyPatch], None]

    @contextmanager
    def alive(self) -> Iterator[None]:
        """The bug is in the code."""
        with pytest.MonkeyPatch.context() as patch:
            self.apply(patch)
            yield


MUTANTS: Final[list[Mutant]] = []


def _mutant(where: str, name: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def keep(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(name=name, where=where, apply=apply))
        return apply

    return keep


# store/retrying.py


def _create_with(patch: Patch, bug: Callable[[Retrying, str, Any], bool]) -> None:
    """Break `create` for everything but the start-up check, which would refuse the store and be right."""
    create = Retrying._create
    patch.setattr(
        Retrying, "_create", lambda self, key, data: (create if key.startswith(keys.PROBE) else bug)(self, key, data)
    )


@_mutant("retrying", "an answer that the key exists is trusted, without reading back")
def _(patch: Patch) -> None:
    _create_with(patch, lambda self, key, buffers: self._store.create(key, buffers))


@_mutant("retrying", "a create without an answer counts as done")
def _(patch: Patch) -> None:
    def create(self: Retrying, key: str, buffers: Any) -> bool:
        try:
            won = self._store.create(key, buffers)
        except Ambiguous:
            return True
        return won or bool(self._is_mine(key, buffers))

    _create_with(patch, create)


@_mutant("retrying", "whatever stands under the key counts as mine")
def _(patch: Patch) -> None:
    def create(self: Retrying, key: str, buffers: Any) -> bool:
        try:
            self._store.create(key, buffers)
        except Retryable:
            if self._store.read(key) is None:
                raise
        return True

    _create_with(patch, create)


# journal.py


@_mutant("journal", "records are overwritten instead of created")
def _(patch: Patch) -> None:
    def create(self: Journal, key: str, record: Any) -> Any:
        data = record.to_bytes()
        self.store.replace(key, data)
        return Sealed(record, digest_of(data))

    patch.setattr(Journal, "create", create)


@_mutant("journal", "the loser of a create goes on with its own record")
def _(patch: Patch) -> None:
    def create(self: Journal, key: str, record: Any) -> Any:
        data = record.to_bytes()
        self.store.create(key, data)
        return Sealed(record, digest_of(data))

    patch.setattr(Journal, "create", create)


@_mutant("journal", "a restarted replica overwrites its slot's contribution")
def _(patch: Patch) -> None:
    create = Journal.create

    def overwrite(self: Journal, key: str, record: Any) -> Any:
        if not isinstance(record, Contribution):
            return create(self, key, record)
        self.store.replace(key, data := record.to_bytes())
        return Sealed(record, digest_of(data))

    def nothing_found(self: Journal, round_number: int, exchange_number: int, slot: str) -> Any:
        found = self._read(Contribution, keys.contribution(round_number, exchange_number, slot))
        mine = getattr(self.store, "slot_of_mutant", None)
        return None if slot == mine else found

    patch.setattr(Journal, "create", overwrite)
    patch.setattr(Journal, "contribution", nothing_found)
    contribute = Exchange.contribute

    def blind(self: Exchange, place: Any, load: Any) -> Any:
        self._journal.store.slot_of_mutant = self._presence.slot  # type: ignore[attr-defined]
        try:
            return contribute(self, place, load)
        finally:
            self._journal.store.slot_of_mutant = None  # type: ignore[attr-defined]

    patch.setattr(Exchange, "contribute", blind)


@_mutant("journal", "a commit that a listing misses is a gap")
def _(patch: Patch) -> None:
    head = Journal.head

    def hasty(self: Journal, known: int) -> int:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "commit", lambda _: None, raising=False)
            return head(self, known)

    patch.setattr(Journal, "head", hasty)


# membership.py


@_mutant("membership", "a replaced incarnation is not fenced")
def _(patch: Patch) -> None:
    patch.setattr(membership.Presence, "_replaced", lambda _: False)


@_mutant("membership", "the loser of a claim takes the incarnation too")
def _(patch: Patch) -> None:
    claim = membership.Presence._claim

    def trusting(self: SimulatedPresence) -> int:
        create = self._journal.create
        with pytest.MonkeyPatch.context() as inner:

            def mine(key: str, record: Any) -> Any:
                return Sealed(record, create(key, record).digest)

            inner.setattr(self._journal, "create", mine)
            return claim(self)

    patch.setattr(membership.Presence, "_claim", trusting)


# rounds.py


@_mutant("rounds", "the grace window ends without a quorum")
def _(patch: Patch) -> None:
    def hasty(policy: Any, waiting: Any, seen: Any, now: float) -> Any:
        impatient = replace(policy, min_replicas=1) if now - waiting.since > policy.grace.cap_s else policy
        return rounds.step(impatient, waiting, seen, now)

    patch.setattr(exchange, "step", hasty)


@_mutant("rounds", "members stand in the order in which they came")
def _(patch: Patch) -> None:
    def members(_: Any, offers: Any) -> Any:
        came = sorted(offers, key=lambda slot: offers[slot].digest)
        return tuple(rounds.Share(slot=slot, contribution=offers[slot].digest, weight=1.0) for slot in came)

    patch.setattr(rounds, "members", members)


@_mutant("rounds", "dead replicas are waited for")
def _(patch: Patch) -> None:
    def step(policy: Any, waiting: Any, seen: Any, now: float) -> Any:
        waiting, action = rounds.step(policy, waiting, seen, now)
        if isinstance(action, rounds.Propose) and len(action.members) <= len(seen.peers):
            return waiting, rounds.Wait(until=now + 1.0, waiting_for=())
        return waiting, action

    patch.setattr(exchange, "step", step)


# exchange.py


@_mutant("exchange", "the loser of a proposal uses its own decision")
def _(patch: Patch) -> None:
    wait = Exchange._wait_for_decision

    def remember(self: Exchange, place: Any, *args: Any, **kwargs: Any) -> Any:
        proposed: list[Any] = []
        create = self._journal.create

        def keep(key: str, record: Any) -> Any:
            if isinstance(record, Decision):
                proposed.append(Sealed(record, digest_of(record.to_bytes())))
            return create(key, record)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._journal, "create", keep)
            decided = wait(self, place, *args, **kwargs)
        return proposed[0] if proposed else decided

    patch.setattr(Exchange, "_wait_for_decision", remember)


@_mutant("exchange", "a proposal lists payloads that nobody looked for")
def _(patch: Patch) -> None:
    patch.setattr(exchange._Look, "_check_payload", lambda self, slot: self._present.add(slot))


@_mutant("exchange", "the manifest of a contribution goes up before its payload")
def _(patch: Patch) -> None:
    contribute, upload = Exchange.contribute, Exchange.upload

    def late(self: Exchange, place: Any, load: Any) -> Any:
        stands = contribute(self, place, load)
        upload(self, place.round, load)
        return stands

    patch.setattr(Exchange, "upload", lambda *_: None)
    patch.setattr(Exchange, "contribute", late)
    patch.setattr(exchange._Look, "_check_payload", lambda self, slot: self._present.add(slot))


@_mutant("exchange", "a commit says who wrote it")
def _(patch: Patch) -> None:
    commit, written = exchange.Commit, itertools.count()

    def signed(**fields: Any) -> Any:
        return commit(**(fields | {"participants": fields["participants"] + next(written) % 2}))

    patch.setattr(exchange, "Commit", signed)


# What the manager does around an exchange (the simulated replica's own code).


@_mutant("replica", "contributions are reduced in another order than the record's")
def _(patch: Patch) -> None:
    def backwards(state: str, members: Any) -> str:
        return fold(state, list(reversed(members)))

    patch.setattr(replicas, "fold", backwards)


@_mutant("replica", "weights of the record are ignored")
def _(patch: Patch) -> None:
    patch.setattr(
        replicas, "fold", lambda state, members: fold(state, [(slot, 1.0, parts) for slot, _, parts in members])
    )


@_mutant("replica", "payloads are used without their digest")
def _(patch: Patch) -> None:
    def trusting(self: Replica, key: str, part: Any) -> bytes:
        del part
        return bytes(self._store.read(key) or b"")

    patch.setattr(Replica, "_payload", trusting)


@_mutant("replica", "own bytes are taken from memory though others stand in the log")
def _(patch: Patch) -> None:
    contribute = Replica._contribute

    def proud(self: Replica, place: Any, content: bytes) -> Any:
        contribute(self, place, content)
        return replicas.split(content, self._habits.parts)

    patch.setattr(Replica, "_contribute", proud)


@_mutant("replica", "following leaves a round out")
def _(patch: Patch) -> None:
    catch_up = Replica._catch_up

    def skip(self: Replica) -> None:
        head = self._journal.head(self._round)
        if head > self._round + 1:
            self._round += 1
            self._base = self._journal.previous(self._round)
        catch_up(self)

    patch.setattr(Replica, "_catch_up", skip)


@_mutant("replica", "a checkpoint is visible before its parts")
def _(patch: Patch) -> None:
    save = Replica._save

    def reversed_save(self: Replica, *args: Any) -> bool:
        store = self._store
        later: list[tuple[str, Any]] = []

        class Deferring:
            def create(self, key: str, data: Any) -> bool:
                if not key.endswith("/manifest.json"):
                    later.append((key, data))
                    return True
                return store.create(key, data)

        self._store = Deferring()  # type: ignore[assignment]
        try:
            saved = save(self, *args)
        finally:
            self._store = store
        for key, data in later:
            store.create(key, data)
        return saved

    patch.setattr(Replica, "_save", reversed_save)


@_mutant("replica", "a checkpoint is taken of live state, half a second later")
def _(patch: Patch) -> None:
    save = Replica._save

    def live(self: Replica, round_number: int, base: str, members: Any, state: str) -> bool:
        del state
        self._clock.pause(0.5)
        return save(self, round_number, base, members, self._state)

    patch.setattr(Replica, "_save", live)


@_mutant("replica", "commits below a checkpoint are deleted")
def _(patch: Patch) -> None:
    save = Replica._save

    def tidy(self: Replica, round_number: int, *args: Any) -> bool:
        saved = save(self, round_number, *args)
        if round_number > 1:
            self._store.delete(keys.commit(round_number - 2))
        return saved

    patch.setattr(Replica, "_save", tidy)


# garbage.py


@_mutant("garbage", "records of rounds below the kept checkpoints are deleted too")
def _(patch: Patch) -> None:
    patch.setattr(garbage, "_PAYLOADS", (keys.PAYLOADS, keys.CONTRIBUTIONS, keys.COMMITS))


@_mutant("garbage", "payloads go as soon as their round is closed")
def _(patch: Patch) -> None:
    first_needed = garbage.first_needed

    def hasty(complete: Any, live: Any, retention: Any) -> int:
        return first_needed(complete, live, retention) + 1

    patch.setattr(garbage, "first_needed", hasty)


@_mutant("garbage", "parts of a checkpoint go before its manifest")
def _(patch: Patch) -> None:
    removable = garbage.removable

    def reversed_order(seen: Any, retention: Any) -> Any:
        first, then = removable(seen, retention)
        return garbage.Removable(then, first)

    patch.setattr(garbage, "removable", reversed_order)
