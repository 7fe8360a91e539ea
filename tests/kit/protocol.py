"""Builders for the round protocol without torch: records, heartbeats, and replicas that exchange opaque bytes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import xxhash

from skerry.runtime.log.log import RunLog, Stored, open_run
from skerry.runtime.log.records import GENESIS, Abstention, Commit, Contribution, Decision, Heartbeat, Part
from skerry.runtime.log.run_record import Run
from skerry.runtime.protocol.exchange import ContributionDraft, Exchange
from skerry.runtime.protocol.exchange_view import ExchangeId
from skerry.runtime.protocol.quorum import Grace, Policy
from skerry.runtime.protocol.slot_claim_and_heartbeats import HeartbeatMonitor, Presence
from skerry.runtime.store.link_meter import LEAST_BYTES, LinkMeter
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

INDEX = "1" * 32
EMPTY_INDEX = "0" * 32


def run_record(clock: Clock, **changes: object) -> Run:
    """A run without planned slots or an end. changes: other values of any fields."""
    fields: dict[str, object] = {
        "nonce": clock.nonce(),
        "name": "test",
        "spec": None,
        "slots": (),
        "rounds": None,
        "sync_every": 4,
        "fragments": 1,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "min_replicas": 1,
        "grace_s": 60.0,
        "start_window_s": 120.0,
        "checkpoint_every": 1,
        "codec": "none",
        "weighting": "uniform",
        "layout": 2,
        "links": True,
        "created": clock.utc_text(),
    }
    return Run(**(fields | changes))  # type: ignore[arg-type]


def policy(**changes: object) -> Policy:
    """A quorum of two; a grace window of half a round. changes: other values of any fields."""
    settings: dict[str, object] = {
        "min_replicas": 2,
        "expected": frozenset[str](),
        "start_window_s": 0.0,
        "grace": Grace(floor_s=1.0, cap_s=10.0, share=0.5),
        "stale_s": 5.0,
        "deadline_s": 100.0,
        "propose_delay_s": 0.0,
    }
    return Policy(**(settings | changes))  # type: ignore[arg-type]


def contribution(slot: str, **changes: object) -> Contribution:
    """A contribution of no parts to round 3."""
    fields: dict[str, object] = {
        "run": "a" * 32,
        "round": 3,
        "exchange": 0,
        "slot": slot,
        "incarnation": 0,
        "base": GENESIS,
        "index": INDEX,
        "parts": (),
        "tokens": 0,
        "inner_steps": 4,
        "nonce": "b" * 32,
    }
    return Contribution(**(fields | changes))  # type: ignore[arg-type]


def heartbeat(slot: str, *, abstains: int | None = None, **changes: object) -> Heartbeat:
    """The first heartbeat of a slot that trains round 3. abstains: the round that it abstains from."""
    fields: dict[str, object] = {
        "run": "a" * 32,
        "slot": slot,
        "incarnation": 0,
        "sequence": 1,
        "round": 3,
        "inner_step": 0,
        "phase": "train",
        "abstains": None if abstains is None else Abstention(round=abstains, reason="NaN"),
        "loss": None,
        "tokens": 0,
        "tokens_per_s": None,
        "uploaded_bytes": 0,
        "downloaded_bytes": 0,
        "waiting_for": (),
        "notice": None,
    }
    return Heartbeat(**(fields | changes))  # type: ignore[arg-type]


@dataclass
class Replica:
    """One slot's exchange and its position in the log."""

    log: RunLog
    presence: Presence
    watch: HeartbeatMonitor
    exchange: Exchange
    stop: threading.Event
    round: int = 0
    base: str = GENESIS
    work: float = 0.0
    commits: list[Stored[Commit]] = field(default_factory=list)

    def contribute(self, content: bytes, *, tokens: int = 0, index: str = INDEX, inner_steps: int = 1) -> None:
        one_part = draft(content, tokens=tokens, index=index)
        self.exchange.contribute(self.exchange_id, replace(one_part, inner_steps=inner_steps))

    def decide(self, *, abstaining: bool = False, index: str = INDEX) -> Stored[Decision]:
        return self.exchange.decide(self.exchange_id, index, abstaining=abstaining)

    def members(self) -> list[str]:
        """The slots in the decision of the current round."""
        return [share.slot for share in self.decide().record.members]

    def close(self, *decisions: Stored[Decision]) -> Stored[Commit]:
        self.work += min(len(decision.record.members) for decision in decisions)
        commit = self.exchange.close(
            self.exchange_id, decisions, work=self.work, averages=[decision.digest[:32] for decision in decisions]
        )
        self.commits.append(commit)
        self.round, self.base = self.round + 1, commit.digest
        self.presence.enter("train", round_number=self.round)
        return commit

    def train(self, content: bytes) -> Stored[Commit]:
        """Contribute, decide and commit one round."""
        self.contribute(content)
        return self.close(self.decide())

    @property
    def exchange_id(self) -> ExchangeId:
        return ExchangeId(self.round, 0, self.base)


def draft(content: bytes, *, tokens: int = 0, index: str = INDEX) -> ContributionDraft:
    """A contribution of one part."""
    part = Part(digest=xxhash.xxh3_128_hexdigest(content), header_bytes=0, total_bytes=len(content))
    return ContributionDraft(index=index, parts=(part,), data=lambda _: content, tokens=tokens, inner_steps=1)


def start_replica(
    store: Store, clock: Clock, slot: str, terms: Policy | None = None, run: Run | None = None, *, beat: bool = True
) -> Replica:
    """A replica at the head of round 0, in phase train. beat: whether it has written a heartbeat."""
    log = RunLog(store, open_run(store, run or run_record(clock)))
    presence = Presence(log, clock, slot, interval_s=0.5)
    watch = HeartbeatMonitor(log, clock, slot)
    stop = threading.Event()
    exchange = Exchange(
        log=log,
        presence=presence,
        monitor=watch,
        clock=clock,
        policy=terms or policy(),
        heartbeat_poll_s=0.5,
        stop=stop,
        empty_index=EMPTY_INDEX,
    )
    if beat:
        presence.enter("train", round_number=0)
    return Replica(log, presence, watch, exchange, stop)


def measure(replica: Replica, bytes_per_s: float, request_s: float) -> None:
    """Let it have measured this link to its store."""
    assert isinstance(replica.log.store, Retrying)
    meter = replica.log.store.meter = LinkMeter()
    for _ in range(64):
        meter.record(0.0, request_s, 0)
    meter.record(0.0, LEAST_BYTES / bytes_per_s, LEAST_BYTES)
