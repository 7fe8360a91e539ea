"""A replaced incarnation decides by heartbeats, on its own clock, if the one that replaced it lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock

from skerry.runtime.errors import Fenced, Retryable
from skerry.runtime.log import keys
from skerry.runtime.protocol.exchange import Interrupted
from skerry.runtime.protocol.membership import Presence
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.training.join_run import Session, SessionOptions, join_run, successor_lives

if TYPE_CHECKING:
    from skerry.runtime.store import Span

BEAT_S = 1.0


class Flaky(MemoryStore):
    """Does not answer while it is away."""

    away = False

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        if self.away:
            raise Retryable("503")
        return super().read(key, span, into)


class Replaced:
    """An incarnation of slot `a` that another one has replaced; nothing beats by itself."""

    def __init__(self) -> None:
        self.clock, self.store = FakeClock(), Flaky()
        self.old = self.seat()
        self.old.presence.beat()
        self.new = self.seat().presence
        with pytest.raises(Fenced):
            self.old.presence.raise_if_fenced()
        self.began = self.clock.now()

    def seat(self) -> Session:
        return join_run(
            self.store, "a", SessionOptions(min_replicas=1, deadline_s=100.0, heartbeat_s=BEAT_S), self.clock
        )

    @property
    def waited_s(self) -> float:
        return self.clock.now() - self.began


def test_successor_with_two_beats_lives_at_once() -> None:
    replaced = Replaced()
    replaced.clock.on_pause = replaced.new.beat
    assert successor_lives(replaced.old)
    assert replaced.waited_s <= 2 * BEAT_S


@pytest.mark.parametrize("beats", [0, 1])
def test_successor_that_died_right_after_its_claim_does_not_live(beats: int) -> None:
    replaced = Replaced()
    for _ in range(beats):
        replaced.new.beat()
    assert not successor_lives(replaced.old)
    assert replaced.waited_s == replaced.old.policy.stale_s


def test_my_own_beats_prove_nothing() -> None:
    replaced = Replaced()
    replaced.clock.on_pause = replaced.old.presence.beat
    assert not successor_lives(replaced.old)


def test_two_successors_with_one_beat_each_do_not_live() -> None:
    replaced = Replaced()
    third = replaced.seat().presence
    left = [replaced.new, third]
    replaced.clock.on_pause = lambda: left.pop(0).beat() if left else None
    assert not successor_lives(replaced.old)


def test_successor_that_begins_to_beat_a_little_later_lives() -> None:
    replaced = Replaced()

    def late() -> None:
        if replaced.waited_s >= 3 * BEAT_S:
            replaced.new.beat()

    replaced.clock.on_pause = late
    assert successor_lives(replaced.old)


@pytest.mark.parametrize("what", ["away", "damaged"])
def test_what_cannot_be_read_is_silence_and_no_error(what: str) -> None:
    replaced = Replaced()
    if what == "away":
        replaced.store.away = True
    else:
        replaced.store.replace(keys.heartbeat("a"), b"{")
    assert not successor_lives(replaced.old)
    assert replaced.waited_s == pytest.approx(replaced.old.policy.stale_s)


def test_a_stop_ends_the_watch() -> None:
    replaced = Replaced()
    replaced.clock.on_pause = replaced.old.stop.set
    with pytest.raises(Interrupted, match="stopped while watching for a newer incarnation: slot=a"):
        successor_lives(replaced.old)
    assert replaced.waited_s <= BEAT_S


def test_a_claim_alone_is_not_a_beat() -> None:
    replaced = Replaced()
    assert Presence(replaced.old.log, replaced.clock, "a", BEAT_S).incarnation == 2
    assert not successor_lives(replaced.old)
