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

from skerry.runtime.errors import Corrupt, Diverged, Invalid, Retryable
from skerry.runtime.events import emit
from skerry.runtime.impasse import Guide, Impasse
from skerry.runtime.journal import Journal
from skerry.runtime.private import PrivateState
from skerry.runtime.recording import Recorder, RoundFacts, SharedState, Standing
from skerry.runtime.records import GENESIS, Count, Record, Scope
from skerry.runtime.unfinished import Begun, Unfinished, begun_of, fits, put_on

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch

    from skerry.runtime.bursts import OpenRound
    from skerry.runtime.seat import Seat
    from skerry.runtime.unfinished import Fate

# An empty step takes some 50 us; a hook that has not fired after so many never will.
_EMPTY_STEPS = 100_000
# How long a boundary waits for a store that is away; a retry or two.
_PATIENCE_S = 2.0


class _Seen(Record):
    """Where the log is, and whether somebody wants this replica to stop."""

    head: Count
    stop: bool


class _Judged(Record):
    """What a failed round tells: the others may be stuck, or have gone on where this replica cannot follow."""

    stuck: bool
    barred: bool


class Course:
    """One replica's way through the run. For the thread that trains.

    standing: rounds closed so far, as this replica has applied them. following: it is catching up. idle: inner steps
    are empty, whether it follows or ends a round early. sick: tensors were not finite; fragments that are not exchanged
    yet may hold the same, until the next boundary. guide: helps others.
    """

    def __init__(
        self,
        seat: Seat,
        *,
        init_sync: bool,
        patience_s: float | None = None,
        unfinished_every_s: float | None = None,
    ) -> None:
        """init_sync: the first to come shares its initial weights (checkpoint 0), and everybody starts from them.

        patience_s: how long to wait for a checkpoint that leads past a round that cannot be followed; None: for ever.
        unfinished_every_s: seconds between two saves of the round at hand; None saves nothing within a round.
        """
        self.standing = Standing(round=0, previous=GENESIS, members=(), batches=0, work=0.0)
        self.following = False
        self.idle = False
        self.joined = False
        self.state = SharedState()
        self.private = PrivateState(seat.journal, seat.presence, seat.clock.nonce, seat.group)
        self.unfinished = Unfinished(seat.journal, seat.presence, seat.clock, seat.group, unfinished_every_s)
        self._taken_up = False
        self._own_round = -1
        self._seat = seat
        self._impatient = Journal(seat.store.insisting(_PATIENCE_S, seat.stop), seat.journal.run)
        self._train = seat.group.line("train")
        self._recorder = Recorder(seat.journal, seat.presence, self.state, seat.clock.nonce, seat.collector, seat.group)
        self._init_sync = init_sync
        self._patience_s = patience_s
        self._impasse: Impasse | None = None
        self.guide = Guide(seat, self._recorder, self.state)
        self.sick = False

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
        self._impasse = None
        phase = "joining" if self.following or not self.joined else "train"
        self._seat.presence.enter(phase, round_number=standing.round)

    def is_behind(self) -> bool:
        """The log has rounds that this replica has not applied. One listing."""
        return self._look(self.standing.round).head > self.standing.round

    def failed(self, error: Exception | None) -> bool:
        """A round has failed. True if the others have closed it, and this replica cannot follow: a failure of theirs.

        It waits for a checkpoint then, at the next boundary. Rank 0's error speaks for all ranks.
        """

        def judge() -> _Judged:
            barred = self.following or (isinstance(error, Corrupt) and self._head() > self.standing.round)
            return _Judged(stuck=isinstance(error, TimeoutError), barred=barred)

        judged = self._train.first("judge a failed round", judge, _Judged)
        self.guide.stuck |= judged.stuck
        if judged.barred:
            self._impasse = self._impasse or Impasse(self._seat, self.standing.round, self._patience_s)
            self._impasse.met(error)
        return judged.barred

    def record(self, facts: RoundFacts | None, scope: Scope, checkpoint_every: int) -> None:
        """Receipt, checkpoint and private state of the round just closed, in the background. State is stable now.

        After the last round of the run: stay while others may need this replica to come as far.
        """
        if facts is None:
            return
        every = None if self.following else checkpoint_every
        self._recorder.record(self.standing, facts, scope, every)
        self.private.record(self.standing, every)
        if self._seat.journal.run.is_over(self.standing.round, self.standing.work):
            self.guide.see_off(self.standing)

    def settle(self, *, jump: bool) -> bool:
        """Once per boundary: join if new; heal if this replica differs; with no optimizer to follow with, jump.

        True after healing: what was trained before was trained on a state that was not the others'.
        Raises Diverged if the log or its checkpoints are of another model, Corrupt if no checkpoint can be read.
        """
        healthy = None
        if not self.joined:
            self._join()
            self.joined = True
        # Not in mid-round: the rest of its inner steps would be empty, and be contributed to the round it jumps to.
        elif not self.following and (healthy := self._recorder.heal()) is not None:
            self.stand(healthy)
            self._take_shared_parameters()
        elif jump and not self.following and self.is_behind():
            self._pass_by()
        if self.sick:
            self._take_shared_parameters()
            self.sick = False
        self.guide.help_those_behind(self.standing)
        return healthy is not None

    def _jump(self) -> bool:
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

    def follow(self, inner_optimizer: torch.optim.Optimizer, failures: Callable[[], int]) -> bool:
        """Empty inner steps until the head; gradients are put back. failures: how many rounds have failed.

        False if a stop ended it before. Raises Invalid for an optimizer whose step needs a closure, or if no wrapper's
        hooks are active, RuntimeError where a round cannot be followed and nobody leads past it.
        """
        self.following = True
        try:
            with self._without_gradients(inner_optimizer):
                return self._follow_to_head(inner_optimizer, failures)
        finally:
            self.following = False

    def end_round(self, inner_optimizer: torch.optim.Optimizer, failures: Callable[[], int]) -> None:
        """Empty inner steps until the round at hand is closed or has failed; gradients are put back."""
        with self._without_gradients(inner_optimizer):
            self._follow_one(inner_optimizer, failures)

    def save_unfinished(self, at_hand: OpenRound, *, now: bool = False) -> None:
        """Save what was trained in the round at hand, if it is time; now: at once. Between two inner steps."""
        if not self.state.has_fragments or at_hand.bursts or self.idle:
            return
        if not self.unfinished.is_due(self.standing.round, at_hand.inner_steps, now=now):
            return
        try:
            begun = begun_of(
                self.standing,
                self._fragments(),
                self.private.capture(),
                inner_steps=at_hand.inner_steps,
                tokens=at_hand.tokens,
                seconds=self._seat.clock.now() - at_hand.since,
            )
        except Invalid as error:
            fields = {"round": self.standing.round, "slot": self._seat.presence.slot, "error": str(error)}
            emit("unfinished_failed", fields, level=logging.WARNING, error=error)
            return
        self.unfinished.save(self.standing, begun, wait=now)

    def take_up(self, inner_optimizer: torch.optim.Optimizer) -> tuple[Begun, list[int]] | None:
        """Once, at the head: go on with what the slot's last incarnation had begun.

        Returns it, and the fragments whose part of it is late. It may be of an earlier round than the one at hand.
        """
        if self._taken_up or not self.state.has_fragments:
            return None
        self._taken_up = True
        begun = self.unfinished.load()
        if begun is None:
            return None
        fragments = self._fragments()
        fates = self.unfinished.fates(begun, self.standing.round, len(fragments))
        fields = {"round": begun.round, "slot": self._seat.presence.slot, "steps": begun.inner_steps}
        if (why := self._useless(begun, fragments, fates)) is not None:
            emit("unfinished_dropped", {**fields, "head": self.standing.round, "why": why}, level=logging.WARNING)
            return None
        for fragment, fate, delta in zip(fragments, fates, begun.deltas, strict=True):
            if fate == "goes on":
                put_on(fragment, delta)
        if begun.round >= self._own_round:
            self.private.restore(begun.round, begun.private)
        # In buckets a pseudo-gradient travels in other tensors than its parameters.
        late = [one for one, fate in enumerate(fates) if fate == "late" and not fragments[one].use_bucketization]
        if begun.round < self.standing.round:
            emit("unfinished_resumed", {**fields, "head": self.standing.round})
            return begun, late
        with self._without_gradients(inner_optimizer):  # torchft counts its inner steps by these
            for _ in range(begun.inner_steps):
                inner_optimizer.step()
        emit("unfinished_resumed", fields)
        return begun, late

    def _useless(
        self, begun: Begun, fragments: Sequence[_StreamingDiLoCoFragment], fates: Sequence[Fate]
    ) -> str | None:
        """Why what was begun cannot be gone on with; None if it can."""
        if not fits(fragments, begun):
            return "it is of another model"
        if begun.round > self.standing.round:  # following ended before its time
            return "the log was not followed to it"
        return "the log is past it" if all(fate == "gone" for fate in fates) else None

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

    def _follow_to_head(self, inner_optimizer: torch.optim.Optimizer, failures: Callable[[], int]) -> bool:
        seen = self._look(self.standing.round)
        while self.standing.round < seen.head and not seen.stop:
            before = failures()
            self._follow_one(inner_optimizer, failures)
            # What cannot be followed (a damaged payload) may be passed by a checkpoint, now or a little later.
            if failures() > before:
                self._pass_by()
            seen = self._look(seen.head)
        return not seen.stop

    def _pass_by(self) -> None:
        """Go on by a checkpoint, if there is one beyond. Where there is no other way, wait for it."""
        if self._impasse is None or self._impasse.leads_on(self._impatient.store):
            self._jump()

    def close(self, *, wait: bool) -> None:
        """Stop; wait: until everything submitted is written."""
        self._recorder.close(wait=wait)
        self.private.close(wait=wait)
        self.unfinished.close(wait=wait)

    def _look(self, head: int) -> _Seen:
        """As rank 0 sees it: the head of the log, listed anew once `head` is reached, and whether to stop."""

        def look() -> _Seen:
            listed = head if self.standing.round < head else self._head()
            return _Seen(head=listed, stop=self._seat.stop.is_set())

        return self._train.first("look at the log", look, _Seen)

    def _head(self) -> int:
        """The first round that is not closed. One listing."""
        try:
            return self._impatient.head(self.standing.round)
        except Retryable:  # an outage: training goes on to the sync point, which can wait
            return self.standing.round

    def _join(self) -> None:
        """Shared initial weights, or the newest checkpoint; then the log is followed from there."""
        if self.state:
            if not self._recorder.checkpoints():
                self._recorder.save_now(self.standing)  # checkpoint 0: whoever is first
            if self._recorder.checkpoints()[0] > 0 or self._init_sync:
                self.stand(self._recorder.load_newest())
                self._take_shared_parameters()
        found = self.private.load_newest()
        self._own_round = -1 if found is None else found

    def _take_shared_parameters(self) -> None:
        """Every fragment's parameters become the shared ones.

        What a checkpoint's model holds beyond them is its writer's progress since the last exchange, and the writer's
        to contribute.
        """
        for fragment in self._fragments():
            fragment.restore_parameters()  # pyright: ignore[reportUnknownMemberType]  torchft leaves it open

    def _fragments(self) -> list[_StreamingDiLoCoFragment]:
        """DiLoCo's fragments in order. It registers closures over them: that is where they are found."""
        owners = [inspect.getclosurevars(load).nonlocals.get("self") for load in self.state.loads]
        return [owner for owner in owners if isinstance(owner, _StreamingDiLoCoFragment)]

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
