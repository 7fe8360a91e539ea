"""A replica without a model: the real protocol below, and around it what manager, conduct and course do with torch.

Its state is a digest that folds the average of every closed round, in order; what it trains are tensors that tell
which inner steps are in them. A wrong byte, order, weight or round anywhere shows in the state.
"""
# Looks into the real Carry, to hold it to account.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.simulation.incarnation import Failed, Incarnation
from tests.simulation.poison import contribute_poison
from tests.simulation.training import fold, steps_in

from skerry.runtime.carry import Trained
from skerry.runtime.errors import Corrupt, Retryable, SkerryError
from skerry.runtime.exchange import Interrupted, Place
from skerry.runtime.impasse import Impasse
from skerry.runtime.keys import PAYLOADS
from skerry.runtime.recording import Standing
from skerry.runtime.rounds import Unreachable

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.simulation.training import Bundle

    from skerry.runtime.averaging import Average
    from skerry.runtime.journal import Sealed
    from skerry.runtime.records import Commit

_HERE: Final = frozenset({"joining", "train", "sync"})
TOKENS_PER_STEP: Final = 100
# Of `skerry.runtime.manager`: in exchange timeouts, and how often a look is put off twice as long.
PATIENCE: Final = 2.0
SICK_LOOKS: Final = 6


class Replica(Incarnation):
    """One incarnation of a replica that trains as torchft's DiLoCo does."""

    # The loop of a training script.

    def _work(self) -> None:
        self._join()
        while not self._finished and not self.process.stop.is_set():
            self._catch_up()
            if self._finished or self.process.stop.is_set():
                break
            self._train()
        self._record()
        if self._finished:
            self._guide.see_off(self._standing)

    def _train(self) -> None:
        """One inner step, and the exchange after the last one of the round."""
        run = self._habits.run
        self.process.world.settled(self._local)
        step_s = self._habits.train_s / run.sync_every
        self._clock.pause(step_s * (1.0 + self._habits.jitter * (self._random.random() - 0.5)))
        self._checker.ledger.trained(self.process, self._model.step(), self._standing.round)
        self._steps += 1
        if self._steps == run.sync_every:
            self._sync()

    def _local(self) -> tuple[object, ...]:
        """All that decides what this replica does from here on, but for the bucket."""
        peers = tuple((slot, p.heartbeat.sequence, p.changed_at, p.fresh) for slot, p in self._seat.watch.peers.items())
        mine = (self._standing, self._state, self._steps, self._share, self._failures, self._model.key())
        flags = (self._at_boundary, self._following, self._sick, self._guide.stuck, self._unrecorded, self._sick_looks)
        times = (self._since, self._look_again, self._round_seconds)
        kept = tuple(tuple(sorted(self._kept(fragment))) for fragment in range(self._habits.run.fragments))
        held = () if self._carry is None else tuple(one.held for one in self._carry._kept.values())
        return (*mine, *flags, *times, *kept, *held, self._seat.presence.progress, self._random.getstate(), peers)

    # Where it stands: what manager and course do.

    def _join(self) -> None:
        if not self._shelf.rounds():
            self._save(self._standing, self._state)
        if not self._load_newest():
            raise Retryable("no checkpoint can be read")

    def _load_newest(self, beyond: int = -1, writers: Collection[str] | None = None) -> bool:
        evidence = self._selfcheck.evidence if self._habits.compares else None
        loaded = self._shelf.load_newest(beyond, writers=writers, evidence=evidence)
        if loaded is None:
            return False
        self._checker.flipped.discard(self.process.name)
        self._standing, self._state = loaded
        self.process.round = self._standing.round
        self._impasse = None
        self._model.forget()
        self._count("checkpoints loaded")
        if self._standing.round:
            self._checker.applied(self.process, self._standing.round - 1, self._state)
        self._enter_round()
        return True

    def _enter_round(self) -> None:
        phase = "joining" if self._following else "train"
        self._seat.presence.enter(phase, round_number=self._standing.round)

    def _catch_up(self) -> None:
        """At the top of every inner step."""
        if not self._at_boundary and not self._ends_early():
            return
        self._boundary()
        while self._head(self._standing.round) > self._standing.round and not self.process.stop.is_set():
            self._seat.presence.enter("joining", round_number=self._standing.round)
            self._follow()
            self._boundary()
        self._seat.presence.enter("train", round_number=self._standing.round)

    def _boundary(self) -> None:
        """Between a closed round, or one that failed, and the next inner step."""
        if not self._at_boundary:
            return
        self._record()
        self._heal()
        if self._sick:
            self._model.forget()
            self._sick = False
        self._guide.help_those_behind(self._standing)
        self._at_boundary = False
        if not self._following:
            self._enter_round()
            self._bring_kept()

    def _heal(self) -> None:
        """Where it holds something else than the others: take what those who are right have saved."""
        diagnosis = self._selfcheck.diagnosis
        if diagnosis is None or self._following:
            return
        if self.process.name not in self._checker.flipped:
            self._checker.broken("agreement", f"{self.process.name} holds what the log says, and finds: {diagnosis}")
        if self._load_newest(writers=diagnosis.right):
            self._selfcheck.healed(self._recorded)
            self._checker.healed(self.process)
            self._count("replicas healed")
            if self._carry is not None:
                self._carry.clear()

    def _head(self, known: int) -> int:
        """An outage is no reason to stop training: the sync point can wait."""
        try:
            return self._seat.impatient.head(known)
        except Retryable:
            return known

    def _follow(self) -> None:
        """To the head of the log, without training."""
        self._following = True
        head = self._head(self._standing.round)
        while self._standing.round < head and not self.process.stop.is_set():
            self._boundary()
            if not self._sync():
                self._pass_by()
            if self._standing.round >= head:
                head = self._head(self._standing.round)
        self._following = False

    def _pass_by(self) -> None:
        """Go on by a checkpoint, if there is one beyond. Where there is no other way, wait for it."""
        if self._impasse is None or self._impasse.leads_on(self._seat.impatient.store):
            there = self._shelf.rounds()
            if there and there[0] > self._standing.round:
                self._load_newest(self._standing.round)

    def _ends_early(self) -> bool:
        """The others have closed the round, or wait, and would not wait long enough. At most a look per heartbeat."""
        now, number = self._clock.now(), self._standing.round
        if self._carry is None or now < self._look_again:
            return False
        self._look_again = now + self._habits.heartbeat_s
        try:
            if self._seat.one_try.head(number) > number:
                self._count("rounds closed by others")
                return True
            share = self._seat.pace.share(
                number, self._standing.previous, self._steps, self._since, self._round_seconds
            )
        except Retryable:  # training goes on to the sync point, which can wait; it looks ever more rarely
            self._sick_looks += 1
            self._look_again = now + 2 ** min(self._sick_looks, SICK_LOOKS) * self._habits.heartbeat_s
            return False
        self._sick_looks = 0
        if share is None:
            return False
        self._checker.ledger.cut_short(self.process, number, share)
        self._count("rounds cut short")
        self._share = share
        self._sync()
        return self._at_boundary

    # A round: what conduct does.

    def _sync(self) -> bool:
        """One attempt at the round: offer what was trained, and take part in what is decided. False: it failed."""
        try:
            if self._bringing is not None:
                self._bringing.join()
            self._attempt()
        except (Unreachable, TimeoutError, Retryable, Corrupt, Interrupted) as error:
            if isinstance(error, Corrupt) and PAYLOADS not in str(error):
                raise
            self._round_failed(error)
            return False
        finally:
            self._at_boundary = True
        self._failures = 0
        return True

    def _round_failed(self, error: Exception) -> None:
        """What was trained is thrown away, as DiLoCo does."""
        self._model.take(self._standing.round % self._habits.run.fragments)
        self._steps, self._share = 0, 1.0
        self._count("rounds failed")
        number = self._standing.round
        self._guide.stuck |= isinstance(error, TimeoutError)
        if self._following or (isinstance(error, Corrupt) and self._head(number) > number):
            patience_s = PATIENCE * self._habits.policy.deadline_s
            self._impasse = self._impasse or Impasse(self._seat, number, patience_s)
            self._impasse.met(error)
            return
        self._failures += 1
        if self._failures > self._habits.max_retries:
            raise Failed("max_retries") from error

    def _attempt(self) -> None:
        place = Place(self._standing.round, 0, self._standing.previous)
        self.process.began = self.process.world.events
        self._seat.presence.withdraw_abstention()
        if self._steps and self._random.random() < self._habits.poisons:
            contribute_poison(self.process, self._seat, place, self._random)
        fragment = place.round % self._habits.run.fragments
        bundle = self._model.take(fragment)
        if self._steps and self._random.random() < self._habits.abstains:
            bundle.spoil()
        tokens = self._steps * TOKENS_PER_STEP if self._random.random() < 0.9 else 0
        trained = Trained(tokens=tokens, inner_steps=self._steps, fragment=fragment, share=self._share)
        average = self._average(place, bundle, trained)
        state = fold(self._state, bundle.to_bytes())
        commit = self._seat.exchange.close(place, [average.decision], work=self._standing.work + average.work)
        self._advance(average, commit, state)

    def _average(self, place: Place, bundle: Bundle, trained: Trained) -> Average:
        """The exchange itself; then every inner step must be accounted for."""
        fragment, had, kept = trained.fragment, bundle.steps, self._kept(trained.fragment)
        veto = self._quarantine(place)
        # It follows, and drops what it trained of this fragment before; or that was trained on another state.
        if not trained.inner_steps or veto is not None:
            had = frozenset[int]()
        try:
            average = self._exchange(place, bundle, trained, veto)
        except (SkerryError, TimeoutError):
            # What was trained goes with the round; what was kept does not.
            self._checker.ledger.exchanged(self.process, place.round, kept, self._kept(fragment), settled=False)
            raise
        abstention = self._seat.presence.progress.abstains
        if abstention is not None and abstention.round == place.round:
            self._sick = True
            self._count("abstentions")
        if self._carry is not None:
            keeps = self._kept(fragment)
            repeats = self._checker.ledger.repeats(self.process, place.round)
            self._checker.ledger.exchanged(self.process, place.round, kept if repeats else had | kept, keeps)
            self._count("deltas kept", bool(keeps - kept))
            self._count("late deltas added", bool(kept - keeps))
        return average

    def _exchange(self, place: Place, bundle: Bundle, trained: Trained, veto: str | None) -> Average:
        """In a thread of its own; meanwhile the one that trains looks who asks for help."""
        done: list[Average] = []
        errors: list[SkerryError | TimeoutError] = []

        def work() -> None:
            try:
                done.append(
                    self._seat.averager.run(
                        place,
                        bundle,
                        trained=trained,
                        veto=veto,
                        round_seconds=self._round_seconds,
                        carry=self._carry,
                    )
                )
            except (SkerryError, TimeoutError) as error:
                errors.append(error)

        fiber = self._beside(work)
        while fiber is not None and not fiber.join(self._habits.heartbeat_s):
            self._guide.help_who_asks(self._standing)
        self._guide.help_who_asks(self._standing)
        if errors:
            raise errors[0]
        return done[0]

    def _quarantine(self, place: Place) -> str | None:
        """Why it must not contribute."""
        diagnosis = self._selfcheck.diagnosis
        if diagnosis is None:
            return None
        self._checker.quarantined.add((self.process.slot, place.round))
        return str(diagnosis)

    def _kept(self, fragment: int) -> frozenset[int]:
        """Inner steps that are held back, or were brought and not decided about."""
        if self._carry is None:
            return frozenset()
        kept, stake = self._carry._kept.get(fragment), self._carry.at_stake(fragment)
        return frozenset[int]().union(
            *(steps_in(one.tensors) for one in (kept, None if stake is None else stake.kept) if one is not None)
        )

    def _advance(self, average: Average, commit: Sealed[Commit], state: str) -> None:
        """The round is closed."""
        closed = self._standing.round
        if self._habits.flips_after == closed + 1 and not self._flipped:
            self._flipped = True
            self._checker.flipped.add(self.process.name)
            self.process.world.fault("bit_flip", self.process.name)
            state = fold(state, b"flipped")
        self._checker.applied(self.process, closed, state)
        self._state = state
        self._standing = Standing(
            round=closed + 1,
            previous=commit.digest,
            members=tuple(share.slot for share in average.decision.record.members),
            batches=self._standing.batches + len(average.decision.record.members),
            work=commit.record.work,
        )
        self.process.round = self._standing.round
        self._count("rounds trained" if self._steps else "rounds followed")
        now = self._clock.now()
        if not self._following:
            self._round_seconds = now - self._since
        self._since, self._steps, self._share = now, 0, 1.0
        self._unrecorded, self._impasse = True, None
        self._enter_round()

    # What goes on beside training.

    def _bring_kept(self) -> None:
        """Before the round is trained for, in the thread of the exchange."""
        carry, standing = self._carry, self._standing
        fragment = standing.round % self._habits.run.fragments
        if carry is None or not carry.keeps(fragment) or self._finished or self._selfcheck.diagnosis is not None:
            return

        def bring() -> None:
            self.process.began = self.process.world.events
            place = Place(standing.round, 0, standing.previous)
            try:
                self._count("late deltas offered", self._seat.averager.bring(place, carry, fragment))
            except SkerryError:  # it stays kept, and what is fatal comes up in the exchange
                self._count("late deltas not offered")

        self._bringing = self._beside(bring)
