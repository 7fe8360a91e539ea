"""Deliberate bugs, one behaviour each, to prove that the invariants notice. Never imported by anything but tests.

Here those of the log and of the rounds; those of what is trained and contributed are in `mutants_of_work`, those of
replicas that differ in `mutants_of_votes`.
"""
# A broken version is made by reaching inside, and by lambdas in the place of methods.
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.simulation.kit import Patch, mutant

from skerry.runtime.checkpointing import garbage_collector
from skerry.runtime.errors import Ambiguous, Retryable
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog, Stored
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import Contribution, Decision, Link
from skerry.runtime.protocol import exchange, exchange_view, quorum, slot_claim_and_heartbeats
from skerry.runtime.protocol.exchange import Exchange
from skerry.runtime.store.retrying import Retrying, speed_of

if TYPE_CHECKING:
    from collections.abc import Callable


# store/retrying.py


def _create_with(patch: Patch, bug: Callable[[Retrying, str, Any], bool]) -> None:
    """Break `create` for everything but the start-up check, which would refuse the store and be right."""
    create = Retrying._create
    patch.setattr(
        Retrying, "_create", lambda self, key, data: (create if key.startswith(keys.PROBE) else bug)(self, key, data)
    )


@mutant("retrying", "an answer that the key exists is trusted, without reading back")
def _(patch: Patch) -> None:
    _create_with(patch, lambda self, key, buffers: self._store.create(key, buffers))


@mutant("retrying", "a create without an answer counts as done")
def _(patch: Patch) -> None:
    def create(self: Retrying, key: str, buffers: Any) -> bool:
        try:
            won = self._store.create(key, buffers)
        except Ambiguous:
            return True
        return won or bool(self._is_stored(key, buffers))

    _create_with(patch, create)


@mutant("retrying", "whatever stands under the key counts as mine")
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


@mutant("log", "records are overwritten instead of created")
def _(patch: Patch) -> None:
    def create(self: RunLog, key: str, record: Any) -> Any:
        data = record.to_bytes()
        self.store.replace(key, data)
        return Stored(record, digest_of(data))

    patch.setattr(RunLog, "create", create)


@mutant("log", "the loser of a create goes on with its own record")
def _(patch: Patch) -> None:
    def create(self: RunLog, key: str, record: Any) -> Any:
        data = record.to_bytes()
        self.store.create(key, data)
        return Stored(record, digest_of(data))

    patch.setattr(RunLog, "create", create)


@mutant("log", "a restarted replica overwrites its slot's contribution")
def _(patch: Patch) -> None:
    create = RunLog.create

    def overwrite(self: RunLog, key: str, record: Any) -> Any:
        if not isinstance(record, Contribution):
            return create(self, key, record)
        self.store.replace(key, data := record.to_bytes())
        return Stored(record, digest_of(data))

    def nothing_found(self: RunLog, round_number: int, exchange_number: int, slot: str) -> Any:
        existing = self._read(Contribution, keys.contribution(round_number, exchange_number, slot))
        mine = getattr(self.store, "slot_of_mutant", None)
        return None if slot == mine else existing

    patch.setattr(RunLog, "create", overwrite)
    patch.setattr(RunLog, "read_contribution", nothing_found)
    contribute = Exchange.contribute

    def blind(self: Exchange, place: Any, load: Any) -> Any:
        self._log.store.slot_of_mutant = self._presence.slot  # type: ignore[attr-defined]
        try:
            return contribute(self, place, load)
        finally:
            self._log.store.slot_of_mutant = None  # type: ignore[attr-defined]

    patch.setattr(Exchange, "contribute", blind)


@mutant("log", "a commit that a listing misses is a gap")
def _(patch: Patch) -> None:
    head = RunLog.find_head

    def hasty(self: RunLog, known: int) -> int:
        read = self.read_commit
        with pytest.MonkeyPatch.context() as inner:
            absent = lambda number, *, exists=False: None if exists else read(number)  # noqa: E731
            inner.setattr(self, "read_commit", absent, raising=False)
            return head(self, known)

    patch.setattr(RunLog, "find_head", hasty)


# slot_claim_and_heartbeats.py


@mutant("membership", "a replaced incarnation is not fenced")
def _(patch: Patch) -> None:
    patch.setattr(slot_claim_and_heartbeats.Presence, "_replaced", lambda _: False)


@mutant("membership", "the loser of a claim takes the incarnation too")
def _(patch: Patch) -> None:
    claim = slot_claim_and_heartbeats.claim_slot

    def trusting(log: RunLog, *others: Any) -> int:
        create = log.create
        with pytest.MonkeyPatch.context() as inner:

            def mine(key: str, record: Any) -> Any:
                return Stored(record, create(key, record).digest)

            inner.setattr(log, "create", mine)
            return claim(log, *others)

    patch.setattr(slot_claim_and_heartbeats, "claim_slot", trusting)


# rounds.py


@mutant("quorum", "the grace window ends without a quorum")
def _(patch: Patch) -> None:
    def hasty(policy: Any, waiting: Any, seen: Any, now: float) -> Any:
        impatient = replace(policy, min_replicas=1) if now - waiting.since > policy.grace.cap_s else policy
        return quorum.step(impatient, waiting, seen, now)

    patch.setattr(exchange, "step", hasty)


@mutant("quorum", "members are in the order in which they came")
def _(patch: Patch) -> None:
    def members(_: Any, offers: Any) -> Any:
        came = sorted(offers, key=lambda slot: offers[slot].digest)
        return tuple(quorum.Share(slot=slot, contribution=offers[slot].digest, weight=1.0) for slot in came)

    patch.setattr(quorum, "members", members)


@mutant("quorum", "dead replicas are waited for")
def _(patch: Patch) -> None:
    def step(policy: Any, waiting: Any, seen: Any, now: float) -> Any:
        waiting, action = quorum.step(policy, waiting, seen, now)
        if isinstance(action, quorum.Propose) and len(action.members) <= len(seen.heartbeats):
            return waiting, quorum.Wait(until=now + 1.0, waiting_for=())
        return waiting, action

    patch.setattr(exchange, "step", step)


# exchange.py


@mutant("exchange", "the loser of a proposal uses its own decision")
def _(patch: Patch) -> None:
    wait = Exchange._wait_for_decision

    def remember(self: Exchange, place: Any, *args: Any, **kwargs: Any) -> Any:
        proposed: list[Any] = []
        create = self._log.create

        def keep(key: str, record: Any) -> Any:
            if isinstance(record, Decision):
                proposed.append(Stored(record, digest_of(record.to_bytes())))
            return create(key, record)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._log, "create", keep)
            decided = wait(self, place, *args, **kwargs)
        return proposed[0] if proposed else decided

    patch.setattr(Exchange, "_wait_for_decision", remember)


@mutant("exchange", "a proposal lists payloads that were not looked for")
def _(patch: Patch) -> None:
    patch.setattr(
        exchange_view.ExchangeView, "_check_payloads", lambda self, slots: self._payload_checked.update(slots)
    )


@mutant("exchange", "the manifest of a contribution goes up before its payload")
def _(patch: Patch) -> None:
    contribute, put = Exchange.contribute, Exchange.put
    held: list[Any] = []

    def late(self: Exchange, place: Any, load: Any) -> Any:
        stored = contribute(self, place, load)
        for upload in [upload for upload in held if upload[0] is self]:
            held.remove(upload)
            put(*upload)
        return stored

    patch.setattr(Exchange, "put", lambda *upload: held.append(upload))
    patch.setattr(Exchange, "contribute", late)
    patch.setattr(
        exchange_view.ExchangeView, "_check_payloads", lambda self, slots: self._payload_checked.update(slots)
    )


@mutant("exchange", "the reduction is chosen by the proposer's own link")
def _(patch: Patch) -> None:
    propose = Exchange._propose

    def private(self: Exchange, place: Any, index: str, action: Any) -> None:
        choose = self._choose_reduction
        mine = Link.measured(speed_of(self._log.store))
        self._choose_reduction = lambda links: choose([mine] * len(links))
        propose(self, place, index, action)
        self._choose_reduction = choose

    patch.setattr(Exchange, "_propose", private)


@mutant("exchange", "a link is recorded in a run of before links")
def _(patch: Patch) -> None:
    patch.setattr(exchange, "_link_of", lambda log: Link.measured(speed_of(log.store)))


@mutant("exchange", "a commit names its writer")
def _(patch: Patch) -> None:
    commit, written = exchange.Commit, itertools.count()

    def signed(**fields: Any) -> Any:
        return commit(**(fields | {"participants": fields["participants"] + next(written) % 2}))

    patch.setattr(exchange, "Commit", signed)


@mutant("exchange", "a commit names other averages than those of its exchanges")
def _(patch: Patch) -> None:
    close = Exchange.close

    def with_decisions(self: Exchange, place: Any, decisions: Any, *, work: float, averages: Any) -> Any:
        del averages
        return close(self, place, decisions, work=work, averages=[decision.digest[:32] for decision in decisions])

    patch.setattr(Exchange, "close", with_decisions)


# garbage.py


@mutant("garbage_collector", "records of rounds below the kept checkpoints are deleted too")
def _(patch: Patch) -> None:
    patch.setattr(garbage_collector, "_PAYLOADS", (keys.PAYLOADS, keys.CONTRIBUTIONS, keys.COMMITS))


@mutant("garbage_collector", "payloads go as soon as their round is closed")
def _(patch: Patch) -> None:
    first_needed = garbage_collector.first_needed

    def hasty(complete: Any, live: Any, retention: Any) -> int:
        return first_needed(complete, live, retention) + 1

    patch.setattr(garbage_collector, "first_needed", hasty)


@mutant("garbage_collector", "parts of a checkpoint go before its manifest")
def _(patch: Patch) -> None:
    removable = garbage_collector.removable

    def reversed_order(seen: Any, retention: Any) -> Any:
        first, then = removable(seen, retention)
        return garbage_collector.Removable(then, first)

    patch.setattr(garbage_collector, "removable", reversed_order)
