"""Where a replica stands in the log, and how it comes to the head: it joins, heals, jumps by checkpoint, or follows.

State changes only at a boundary, between a closed round and the next inner step, in the thread that trains; the
manager says when that is. Following is torchft's own outer step, driven by inner steps without gradients: parameters
stay, the wrapper's hooks fire.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchft.local_sgd import _StreamingDiLoCoFragment  # pyright: ignore[reportPrivateUsage]  held by test_drift.py

from skerry.runtime import checkpoint
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Corrupt, Diverged, Invalid, Retryable
from skerry.runtime.events import emit
from skerry.runtime.journal import Journal
from skerry.runtime.private import PrivateState
from skerry.runtime.recording import Recorder, RoundFacts, Scope, SharedState, Standing
from skerry.runtime.records import GENESIS, Count, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import torch

    from skerry.runtime.seat import Seat

# An empty step takes some 50 us; a hook that has not fired after so many never will.
_EMPTY_STEPS = 100_000
# How long a boundary waits for a store that is away; a retry or two.
_PATIENCE_S = 2.0
_HERE = frozenset({"joining", "train", "sync"})


class _Seen(Record):
    """Where the log is, and whether somebody wants this replica to stop."""

    head: Count
    stop: bool


class _Wanted(Record):
    """Somebody cannot come to where this replica stands without its checkpoint."""

    value: bool


class Course:
    """One replica's way through the run. For the thread that trains.

    standing: rounds closed so far, as this replica has applied them. following: it is catching up. idle: inner steps
    are empty, whether it follows or ends a round early.
    """

    def __init__(self, seat: Seat, *, init_sync: bool) -> None:
        """init_sync: the first to come shares its initial weights (checkpoint 0), and everybody starts from them."""
        self.standing = Standing(round=0, previous=GENESIS, members=(), batches=0)
        self.following = False
        self.idle = False
        self.joined = False
        self.state = SharedState()
        self.private = PrivateState(seat.journal, seat.presence, seat.clock.nonce, seat.group)
        self._seat = seat
        self._impatient = Journal(seat.store.insisting(_PATIENCE_S, seat.stop), seat.journal.run)
        self._train = seat.group.line("train")
        self._recorder = Recorder(seat.journal, seat.presence, self.state, seat.clock.nonce, seat.collector, seat.group)
        self._init_sync = init_sync
        self._sick = False
        self._stuck = False

    @property
    def scope(self) -> Scope:
        """What replicas share between rounds, when the next inner step is about to begin."""
        return "fragments" if self.state.has_fragments else "average"

    @property
    def quarantine(self) -> str | None:
        """Why this replica must not contribute; None if it may."""
        return self._recorder.quarantine

    def stand(self, standing: Standing) -> None:
        """A round was closed, or a checkpoint loaded: tell everybody."""
        self.standing = standing
        phase = "joining" if self.following or not self.joined else "train"
        self._seat.presence.enter(phase, round_number=standing.round)

    def is_behind(self) -> bool:
        """The log has rounds that this replica has not applied. One listing."""
        return self._look(self.standing.round).head > self.standing.round

    def fell_sick(self) -> None:
        """Tensors were not finite: fragments that are not exchanged yet may hold the same, until the next boundary."""
        self._sick = True

    def got_stuck(self) -> None:
        """A round could not be decided in time: the others may be unable to follow, until the next boundary."""
        self._stuck = True

    def record(self, facts: RoundFacts | None, scope: Scope, checkpoint_every: int) -> None:
        """Receipt, checkpoint and private state of the round just closed, in the background. State is stable now."""
        if facts is None:
            return
        every = None if self.following else checkpoint_every
        self._recorder.record(self.standing, facts, scope, every)
        self.private.record(self.standing, every)

    def settle(self, *, jump: bool) -> bool:
        """Once per boundary: join if new; heal if this replica differs; with no optimizer to follow with, jump.

        True after healing: what was trained before was trained on a state that was not the others'.
        Raises Diverged if the log or its checkpoints are of another model, Corrupt if no checkpoint can be read.
        """
        healthy = None
        if not self.joined:
            self._join()
            self.joined = True
        elif (healthy := self._recorder.heal()) is not None:
            self.stand(healthy)
            self._take_shared_parameters()
        elif jump and not self.following and self.is_behind():
            self.jump()
        if self._sick:
            self._take_shared_parameters()
            self._sick = False
        if self._stuck:
            self._stuck = False
            self._help_those_behind()
        return healthy is not None

    def _help_those_behind(self) -> None:
        """Write a checkpoint out of turn if somebody alive is in an earlier round.

        Where a payload that was decided is damaged, only who had read it before holds the state after it.
        """
        if not self.state.has_fragments or self.standing.round == 0:
            return

        def look() -> _Wanted:
            peers = self._seat.watch.look().values()
            behind = any(peer.heartbeat.round < self.standing.round and peer.heartbeat.phase in _HERE for peer in peers)
            return _Wanted(value=behind and self.standing.round not in checkpoint.complete(self._seat.journal.store))

        try:
            if self._train.first("who is behind", look, _Wanted).value:
                self._recorder.save_now(self.standing)
        except (Retryable, Invalid) as error:  # it is tried again after the next round that fails
            fields = {"round": self.standing.round, "error": str(error)}
            emit("checkpoint_failed", fields, level=logging.WARNING, error=error)

    def jump(self) -> bool:
        """Go to a newer checkpoint, if there is one that can be read."""
        there = self._recorder.checkpoints() if self.state else []
        if not there or there[0] <= self.standing.round:
            return False
        try:
            self.stand(self._recorder.load_newest(beyond=self.standing.round))
        except Corrupt:  # told by the recorder; the log may still be followed
            return False
        self._take_shared_parameters()
        return True

    def follow(self, inner_optimizer: torch.optim.Optimizer, failures: Callable[[], int]) -> None:
        """Empty inner steps until the head; gradients are put back. failures: how often the round at hand has failed.

        Raises Invalid for an optimizer whose step needs a closure, or if no wrapper's hooks are active.
        """
        self.following = True
        try:
            with self._without_gradients(inner_optimizer):
                self._follow_to_head(inner_optimizer, failures)
        finally:
            self.following = False

    def end_round(self, inner_optimizer: torch.optim.Optimizer, failures: Callable[[], int]) -> None:
        """Empty inner steps until the round at hand is closed or has failed; gradients are put back."""
        with self._without_gradients(inner_optimizer):
            self._follow_one(inner_optimizer, failures)

    @contextmanager
    def _without_gradients(self, inner_optimizer: torch.optim.Optimizer) -> Generator[None]:
        check_optimizer(inner_optimizer)
        parameters = [p for group in inner_optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.idle = True
        try:
            yield
        finally:
            self.idle = False
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def _follow_to_head(self, inner_optimizer: torch.optim.Optimizer, failures: Callable[[], int]) -> None:
        seen = self._look(self.standing.round)
        while self.standing.round < seen.head and not seen.stop:
            before = failures()
            self._follow_one(inner_optimizer, failures)
            # What cannot be followed (a damaged payload) may be passed by a checkpoint, now or a little later.
            if failures() > before and not self.jump():
                self._seat.clock.pause(Backoff().delay(failures(), self._seat.clock), self._seat.stop)
            seen = self._look(seen.head)

    def close(self, *, wait: bool) -> None:
        """Stop; wait: until everything submitted is written."""
        self._recorder.close(wait=wait)
        self.private.close(wait=wait)

    def _look(self, head: int) -> _Seen:
        """As rank 0 sees it: the head of the log, listed anew once `head` is reached, and whether to stop."""

        def look() -> _Seen:
            round_number = self.standing.round
            try:
                listed = head if round_number < head else self._impatient.head(round_number)
            except Retryable:  # an outage: training goes on to the sync point, which can wait
                listed = round_number
            return _Seen(head=listed, stop=self._seat.stop.is_set())

        return self._train.first("look at the log", look, _Seen)

    def _join(self) -> None:
        """Shared initial weights, or the newest checkpoint; then the log is followed from there."""
        if self.state:
            if not self._recorder.checkpoints():
                self._recorder.save_now(self.standing)  # checkpoint 0: whoever is first
            if self._recorder.checkpoints()[0] > 0 or self._init_sync:
                self.stand(self._recorder.load_newest())
                self._take_shared_parameters()
        self.private.load_newest()

    def _take_shared_parameters(self) -> None:
        """Every fragment's parameters become the shared ones.

        What a checkpoint's model holds beyond them is its writer's progress since the last exchange, and the writer's
        to contribute. DiLoCo registers closures over its fragments: that is where they are found.
        """
        for load in self.state.loads:
            owner = inspect.getclosurevars(load).nonlocals.get("self")
            if isinstance(owner, _StreamingDiLoCoFragment):
                owner.restore_parameters()  # pyright: ignore[reportUnknownMemberType]  torchft leaves it open

    def _follow_one(self, inner_optimizer: torch.optim.Optimizer, failures: Callable[[], int]) -> None:
        round_number, before = self.standing.round, failures()
        for _ in range(_EMPTY_STEPS):
            inner_optimizer.step()
            if self.standing.round > round_number or failures() > before:
                return
        raise Invalid(
            "empty inner steps do not advance the round: call catch_up inside `with DiLoCo(...)` or "
            "`with LocalSGD(...)`, with the optimizer that was given to it"
        )


def check_optimizer(inner_optimizer: torch.optim.Optimizer) -> None:
    """Raises Invalid for an optimizer that cannot take a step without gradients."""
    closure = inspect.signature(type(inner_optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Invalid(f"{type(inner_optimizer).__name__} needs a closure, so it cannot follow with empty steps")


def check_loaded(standing: Standing, step: int) -> None:
    """Raises Diverged if a user's own checkpoint says another round than the log gave us."""
    if step != standing.round:
        raise Diverged(
            f"loaded state is of round {step}, this replica stands at {standing.round}: "
            "the log is the truth; drop the manager's state from your own checkpoints"
        )
