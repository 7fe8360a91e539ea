"""A run without torch: replicas that exchange opaque bytes over any store and clock."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import xxhash

from skerry.runtime.exchange import Exchange, Load, Place
from skerry.runtime.journal import Journal, Sealed, open_run
from skerry.runtime.membership import Presence, Watch
from skerry.runtime.records import GENESIS, Commit, Decision, Part, Run
from skerry.runtime.rounds import Grace, Policy

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

INDEX = "1" * 32


def run_record(clock: Clock, *, slots: tuple[str, ...] = (), rounds: int | None = None, min_replicas: int = 1) -> Run:
    return Run(
        nonce=clock.nonce(),
        name="test",
        spec=None,
        slots=slots,
        rounds=rounds,
        sync_every=4,
        fragments=1,
        outer_lr=0.7,
        outer_momentum=0.9,
        min_replicas=min_replicas,
        grace_s=60.0,
        start_window_s=120.0,
        checkpoint_every=1,
        codec="none",
        weighting="uniform",
        created=clock.utc_text(),
    )


def policy(**changes: object) -> Policy:
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


@dataclass
class Replica:
    """One slot's driver with its place in the log."""

    journal: Journal
    presence: Presence
    watch: Watch
    exchange: Exchange
    stop: threading.Event
    round: int = 0
    base: str = GENESIS
    work: float = 0.0
    commits: list[Sealed[Commit]] = field(default_factory=list)

    def offer(
        self, content: bytes, *, tokens: int = 0, index: str = INDEX, inner_steps: int = 1, discount: float = 1.0
    ) -> None:
        brought = load(content, tokens=tokens, index=index)
        self.exchange.contribute(self.place, replace(brought, inner_steps=inner_steps, discount=discount))

    def decide(self, *, abstaining: bool = False, index: str = INDEX) -> Sealed[Decision]:
        return self.exchange.decide(self.place, index, abstaining=abstaining)

    def close(self, *decisions: Sealed[Decision]) -> Sealed[Commit]:
        self.work += min(len(decision.record.members) for decision in decisions)
        commit = self.exchange.close(self.place, decisions, work=self.work)
        self.commits.append(commit)
        self.round, self.base = self.round + 1, commit.digest
        self.presence.enter("train", round_number=self.round)
        return commit

    def train(self, content: bytes) -> Sealed[Commit]:
        """One whole round."""
        self.offer(content)
        return self.close(self.decide())

    @property
    def place(self) -> Place:
        return Place(self.round, 0, self.base)


def load(content: bytes, *, tokens: int = 0, index: str = INDEX) -> Load:
    part = Part(digest=xxhash.xxh3_128_hexdigest(content), header_bytes=0, total_bytes=len(content))
    return Load(index=index, parts=(part,), data=lambda _: content, tokens=tokens, inner_steps=1)


def start(
    store: Store, clock: Clock, slot: str, terms: Policy | None = None, run: Run | None = None, *, beat: bool = True
) -> Replica:
    """A replica at the head of round 0, in phase train."""
    journal = Journal(store, open_run(store, run or run_record(clock)))
    presence = Presence(journal, clock, slot, interval_s=0.5)
    watch = Watch(journal, clock, slot)
    stop = threading.Event()
    exchange = Exchange(
        journal=journal,
        presence=presence,
        watch=watch,
        clock=clock,
        policy=terms or policy(),
        look_every_s=0.5,
        stop=stop,
        nothing="0" * 32,
    )
    if beat:
        presence.enter("train", round_number=0)
    return Replica(journal, presence, watch, exchange, stop)
