"""A replaced incarnation decides by heartbeats, on its own clock, if the one that replaced it lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kit.stores import HookedStore
from tests.support.clocks import FakeClock

from skerry.runtime.errors import Fenced, Invalid, Retryable
from skerry.runtime.log import keys
from skerry.runtime.protocol.exchange import Interrupted
from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence
from skerry.runtime.training.open_session import Session, SessionOptions, join_run, successor_lives

if TYPE_CHECKING:
    from collections.abc import Callable

BEAT_S = 1.0


class Replaced:
    """An incarnation of slot `a` that another one has replaced; no heartbeat is sent by itself."""

    def __init__(self) -> None:
        self.is_away = False
        self.clock, self.store = FakeClock(), HookedStore(self._answer)
        self.old = self.join()
        self.old.presence.beat()
        self.new = self.join().presence
        with pytest.raises(Fenced):
            self.old.presence.raise_if_fenced()
        self.began = self.clock.now()

    def _answer(self, verb: str, _key: str) -> None:
        if self.is_away and verb == "read":
            raise Retryable("503")

    def join(self) -> Session:
        options = SessionOptions(min_replicas=1, deadline_s=100.0, heartbeat_s=BEAT_S)
        return join_run(self.store, "a", options, self.clock)

    @property
    def waited_s(self) -> float:
        return self.clock.now() - self.began


def test_reduction_that_the_codec_does_not_have_is_refused_first() -> None:
    with pytest.raises(Invalid, match=r"sparse cannot be averaged by reduce_scatter; set reduction to auto"):
        SessionOptions(min_replicas=1, deadline_s=1.0, codec="sparse", reduction="reduce_scatter")


@pytest.mark.parametrize("first_beat_s", [0.0, 3 * BEAT_S])
def test_successor_with_two_beats_lives(first_beat_s: float) -> None:
    replaced = Replaced()
    replaced.clock.on_pause = lambda: replaced.new.beat() if replaced.waited_s >= first_beat_s else None
    assert successor_lives(replaced.old)
    assert replaced.waited_s <= first_beat_s + 2 * BEAT_S


def each_beats_once(replaced: Replaced) -> None:
    """Two successors, each of which sends one heartbeat."""
    left = [replaced.new, replaced.join().presence]
    replaced.clock.on_pause = lambda: left.pop(0).beat() if left else None


NOT_ALIVE: dict[str, Callable[[Replaced], object]] = {
    "only claimed": lambda _: None,
    "claimed again": lambda replaced: Presence(replaced.old.log, replaced.clock, "a", BEAT_S),
    "one beat": lambda replaced: replaced.new.beat(),
    "one beat each of two": each_beats_once,
    "own beats": lambda replaced: setattr(replaced.clock, "on_pause", replaced.old.presence.beat),
    "store is away": lambda replaced: setattr(replaced, "is_away", True),
    "damaged heartbeat": lambda replaced: replaced.store.replace(keys.heartbeat("a"), b"{"),
}


@pytest.mark.parametrize("evidence", NOT_ALIVE)
def test_successor_without_two_beats_does_not_live(evidence: str) -> None:
    replaced = Replaced()
    NOT_ALIVE[evidence](replaced)
    assert not successor_lives(replaced.old)
    assert replaced.waited_s >= replaced.old.policy.stale_s


def test_stop_ends_the_watch() -> None:
    replaced = Replaced()
    replaced.clock.on_pause = replaced.old.stop.set
    with pytest.raises(Interrupted, match="stopped while watching for a newer incarnation: slot=a"):
        successor_lives(replaced.old)
    assert replaced.waited_s <= BEAT_S
