"""A model without torch's optimizers: the trainer that simulated replicas have, with the hooks of torchft's wrappers.

Its shared state is, for each fragment, a digest that folds the average of every closed round of that fragment, in
order; what it trains are tensors that record which inner steps are in them. A wrong byte, order, weight, round or
fragment anywhere shows in the state.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import torch
from tests.simulation.operator import outer_step
from tests.simulation.poison import contribute_poison
from tests.simulation.session import EXCHANGES
from tests.simulation.training import SIZES, Model, fold, folded, state_of, steps_in

from skerry.runtime.checkpointing.shared_state import SharedState
from skerry.runtime.protocol.exchange_view import ExchangeId

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Generator, Sequence

    from tests.simulation.invariants import Checker
    from tests.simulation.session import ReplicaSettings
    from tests.simulation.training import Shared
    from tests.simulation.world import Process, SimulatedClock

    from skerry.runtime.training.lifecycle import Lifecycle
    from skerry.runtime.training.open_session import Session
    from skerry.runtime.training.trainer_interface import Delta

TOKENS_PER_STEP: Final = 100


class ToyTrainer:
    """Implements `Trainer`, and makes the calls that torchft's wrapper makes, in its order. Reports to the checker."""

    def __init__(
        self, process: Process, settings: ReplicaSettings, checker: Checker, clock: SimulatedClock, draw: random.Random
    ) -> None:
        self.process = process
        nonce = clock.nonce()
        numbers = ["", *(f" {fragment}" for fragment in range(1, settings.run.fragments))]
        self.shared = tuple(fold(f"weights {nonce}{number}", b"") for number in numbers)
        self.model = Model(parts=settings.parts, fragments=settings.fragments or EXCHANGES[settings.mode], draw=draw)
        self.local = 0
        self._settings = settings
        self._checker = checker
        self._clock = clock
        self._random = draw
        self._trained = 0
        self._counts_tokens = True
        self._ended_early = False
        self._outer = b""

    def begin(self, session: Session, lifecycle: Lifecycle, replica_state: Callable[[], object]) -> None:
        """Train under this lifecycle. replica_state: for an explorer."""
        self.session = session
        self.lifecycle = lifecycle
        self._replica_state = replica_state

    # The loop of a training script.

    def train(self) -> None:
        """To the end of the run, or to a stop request."""
        while not self.process.stop.is_set():
            if self._settings.mode == "ddp":
                self._ddp_step()
                continue
            self._catch_up()
            if self.lifecycle.finished or self.process.stop.is_set():
                return
            self.process.world.report_state(self._replica_state)
            self._evaluate()
            self._forward()
            self._step(trains=True)

    def _evaluate(self) -> None:
        """Evaluate, if it is time."""
        settings, ledger = self._settings, self._checker.ledger
        if not settings.evaluate_s or ledger.steps_of(self.process.slot) % settings.evaluate_every:
            return
        if not settings.measures:
            self._clock.pause(settings.evaluate_s)
            return
        self.process.began = self.process.world.events  # it may contribute: another attempt than the last
        with ledger.evaluation(self.process), self.lifecycle.evaluating():
            self._clock.pause(settings.evaluate_s)
        self._count("evaluations")
        self._count("contributed in an evaluation", self.lifecycle.rounds.round.is_contributed)

    def _check_slots(self) -> None:
        """Report by which slots this round is trained."""
        slots = self.session.log.slots
        self._checker.settings.trains_with(self.process, slots, self.lifecycle.position.round)
        self._count("steps by other slots", slots not in {None, self._settings.run.slots})

    def _forward(self) -> None:
        if self._settings.run.spec is not None:
            self._check_slots()
        step_s = self._settings.train_s / self._settings.run.sync_every
        self._clock.pause(step_s * (1.0 + self._settings.jitter * (self._random.random() - 0.5)))
        if self.local == 0:
            self._counts_tokens = self._random.random() < 0.9
        if self._counts_tokens:
            self.lifecycle.rounds.round.count_tokens(TOKENS_PER_STEP)

    def _train_step(self) -> None:
        tokens = TOKENS_PER_STEP if self._counts_tokens else 0
        self.model.step(self._checker.ledger.step_trained(self.process, self.lifecycle.position.round, tokens))
        self._trained += 1

    def _catch_up(self) -> None:
        within, number, self._ended_early = self.local, self.lifecycle.position.round, False
        self.lifecycle.catch_up()
        if within and self.lifecycle.position.round > number and not self._ended_early:
            self._count("rounds closed by others")
        is_sound = self.lifecycle.log_follower.recorder.is_sound
        if not is_sound and self.process.name not in self._checker.flipped:
            self._checker.broken("agreement", f"{self.process.name} holds what the log says, and takes it for wrong")

    # The hooks of torchft's DiLoCo and LocalSGD, in their order.

    def _step(self, *, trains: bool) -> None:
        """One step of the inner optimizer, and the exchange after the last one of the round."""
        self.lifecycle.before_step()
        if trains:
            self._train_step()
        self.local += 1
        if self.local == self._settings.run.sync_every:
            self._sync()

    def _sync(self) -> None:
        rounds, settings = self.lifecycle.rounds, self._settings
        number = self.lifecycle.position.round
        self.process.began = self.process.world.events
        if rounds.round.share is not None:
            steps = len(steps_in(self.model.copies()[number % settings.fragments].numpy()))
            self._checker.ledger.end_early(self.process, number, steps, rounds.round.share)
            self._count("rounds ended early")
            self._ended_early = True
        self._begin_round()
        trained, self.local = self._trained, 0
        if settings.mode == "diloco":
            flat = self.model.take(number % settings.fragments)
            self._trained = 0
        else:  # LocalSGD averages parameters: what a failed round has trained is still in them
            (flat,) = self.model.copies()
        self._exchange(flat, 0, trained=trained > 0)
        self._close_round(number, [flat], trained=trained > 0)

    def _begin_round(self) -> None:
        if not self.lifecycle.log_follower.recorder.is_sound:
            self._checker.quarantined.add((self.process.slot, self.lifecycle.position.round))
        self.lifecycle.begin_round()

    def _exchange(self, flat: torch.Tensor, number: int, *, trained: bool) -> None:
        """One exchange: all tensors are added, then waited for."""
        position, settings = self.lifecycle.position, self._settings
        place = ExchangeId(position.round, number, position.previous)
        abstains = (self.process.name, self.process.began) in self._checker.abstained
        if trained and not abstains and self._random.random() < settings.poisons:
            contribute_poison(self.process, self.session, self.model.index, place, self._random)
        if trained and self._random.random() < settings.abstains:
            flat[-1] = torch.nan
        exchanges = [self.lifecycle.add(tensor, "avg") for tensor in torch.split(flat, list(SIZES))]
        for exchange in exchanges:
            self.lifecycle.rounds.finish(exchange)
        abstention = self.session.presence.progress.abstains
        if abstention is not None and abstention.round == position.round:
            self._count("abstentions")
            self._checker.abstained.add((self.process.name, self.process.began))

    def _close_round(self, number: int, averages: Sequence[torch.Tensor], *, trained: bool) -> None:
        if not self.lifecycle.close_round():
            self._count("rounds failed")
            return
        self._count("rounds trained" if trained else "rounds followed")
        self._count(f"rounds of {self._settings.mode}")
        self._count("rounds recomputed", self.lifecycle.log_follower.recorder.is_recomputing)
        author = self._checker.authors.get((number, self.process.slot), self.process.incarnation)
        self._count("contributions adopted", trained and author != self.process.incarnation)
        if self._settings.mode == "local_sgd":
            self._forget()
        self._count("rounds with changed settings", self._outer != b"")
        self._apply(folded(self.shared, number, *(flat.numpy().tobytes() for flat in averages), outer=self._outer))

    # The hooks of torchft's OptimizerWrapper and DDP.

    def _ddp_step(self) -> None:
        """A round: `zero_grad`, forward, an exchange for each bucket of gradients, `step`."""
        self.process.world.report_state(self._replica_state)
        self.process.began = self.process.world.events
        self._begin_round()
        number = self.lifecycle.position.round
        self._hold()
        self._forward()
        self._train_step()
        buckets = self.model.copies()
        self._forget()
        for exchange, bucket in enumerate(buckets):
            if exchange and self._random.random() < self._settings.fails:
                self.process.world.fault("backward", self.process.name)
                self.lifecycle.rounds.report_error(RuntimeError("backward failed"))
                break
            self._exchange(bucket, exchange, trained=True)
        self._close_round(number, buckets, trained=True)

    def _forget(self) -> None:
        self.model.forget()
        self._trained = 0

    def _apply(self, shared: Shared) -> None:
        """The outer step."""
        closed = self.lifecycle.position.round - 1
        if self._settings.flips_after == closed + 1 and not self.process.world.faults["bit_flip"]:
            self._checker.flipped.add(self.process.name)
            self.process.world.fault("bit_flip", self.process.name)
            shared = folded(shared, closed, b"flipped")
        self.shared = shared
        self._hold()

    def _hold(self) -> None:
        """Report the shared state, which is that after the last round that it knows."""
        number = self.process.round = self.lifecycle.position.round
        if number:
            self._checker.applied(self.process, number - 1, self.shared)

    # What the lifecycle asks of a trainer.

    @property
    def state(self) -> SharedState:
        """As DiLoCo registers it, one entry for each fragment; else as a script does."""
        state = SharedState()
        for number, key in enumerate(state_of(self.shared, has_fragments=self.fragments > 0)):
            save = partial(self._saved, key)
            state.register(key, partial(self._load, number), save)
        return state

    def _saved(self, key: str) -> object:
        state = cast("dict[str, torch.Tensor]", state_of(self.shared, has_fragments=self.fragments > 0)[key])
        # What a script registers is compared where it is a parameter.
        return {name: torch.nn.Parameter(value, requires_grad=False) for name, value in state.items()}

    def _load(self, fragment: int, state: object) -> None:
        """Load one fragment of a checkpoint. Fragments are loaded in order, so the first begins a checkpoint."""
        if fragment == 0:
            if not self.fragments:  # what is loaded takes the place of all parameters
                self._forget()
            if not self.lifecycle.log_follower.recorder.is_sound:
                self._count("replicas healed")
            self._checker.flipped.discard(self.process.name)
            self._checker.healed(self.process)
            self._count("checkpoints loaded")
        text = cast("dict[str, torch.Tensor]", state)["shared"].numpy().tobytes().decode()
        self.shared = (*self.shared[:fragment], text, *self.shared[fragment + 1 :])

    @property
    def fragments(self) -> int:
        """Of the model."""
        return self._settings.fragments

    def step_facts(self) -> tuple[float | None, float | None]:
        """It has no gradients."""
        return None, None

    def parameters_of(self, fragment: int) -> Sequence[tuple[str, int]]:
        """Its tensors have no names."""
        del fragment
        return ()

    @contextmanager
    def empty_steps(self) -> Generator[Callable[[], object]]:
        """Steps that train nothing."""
        yield lambda: self._step(trains=False)

    def contribution(self, fragment: int) -> Sequence[torch.Tensor]:
        """The tensors of `_exchange`."""
        return torch.split(self.model.copies()[fragment], list(SIZES))

    def take_shared(self) -> None:
        """Drop what was trained since the last exchanges."""
        if self.fragments:
            self.model.forget()
        self._hold()

    def progress(self) -> tuple[Delta, ...]:
        """Of each fragment, one tensor."""
        return tuple((flat,) for flat in self.model.copies())

    def set_outer(self, lr: float, momentum: float) -> None:
        """Take outer steps with these."""
        if self.fragments:
            self._outer = outer_step(lr, momentum)

    def put_back(self, fragment: int, delta: Sequence[torch.Tensor]) -> None:
        """Go on from this progress."""
        steps = steps_in(delta[0].numpy())
        self._checker.ledger.resumed(self.process, steps)
        self._count("fragments resumed")
        self._trained += len(steps) if fragment == self.lifecycle.position.round % self.fragments else 0
        self.model.put_back(fragment, delta[0])

    def fits(self, progress: Sequence[Delta]) -> bool:
        """It is of as many fragments."""
        return len(progress) == self.fragments

    def local_state(self) -> tuple[object, ...]:
        """All that decides what it does from here on."""
        steps = self._checker.ledger.steps_of(self.process.slot)
        mine = (self.shared, self.local, self._trained, self._counts_tokens, self.model.key())
        return (*mine, steps, self._random.getstate())

    def _count(self, fact: str, amount: int = 1) -> None:
        self.process.world.facts[fact] += amount
