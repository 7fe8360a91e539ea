"""Deliberate bugs in what is trained, averaged, contributed and saved; most of them in the lifecycle."""
# A broken version is made by reaching inside, and by lambdas in the place of methods.
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.simulation.kit import Patch, mutant

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.checkpoint_writer import CheckpointWriter
from skerry.runtime.checkpointing.receipt_and_checkpoint_writer import Recorder
from skerry.runtime.checkpointing.shared_state import FRAGMENT, SharedState
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.run_record import Run
from skerry.runtime.log.setting_changes import RunSettings
from skerry.runtime.protocol.exchange import Exchange
from skerry.runtime.tensors import find_wrong_reduced_units, reduce_scatter, reduced_unit
from skerry.runtime.tensors.payload_reader import Reader
from skerry.runtime.tensors.reduced_unit import UnitName
from skerry.runtime.training.catch_up_with_log import LogFollower
from skerry.runtime.training.contribute_and_average import Averager
from skerry.runtime.training.current_round import CurrentRound
from skerry.runtime.training.early_round_end_policy import EarlyEndPolicy
from skerry.runtime.training.lifecycle import Lifecycle
from skerry.runtime.training.resumable_round import PartialRound
from skerry.runtime.training.round_runner import RoundRunner, RoundSettings
from skerry.runtime.training.unreadable_rounds import RescueCheckpoints
from skerry.runtime.training.work_counter import WorkCounter

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition

# averaging.py, and the codec below it.


@mutant("averager", "contributions are reduced in another order than the record's")
def _(patch: Patch) -> None:
    sources = Averager._sources
    patch.setattr(Averager, "_sources", lambda *args: list(reversed(sources(*args))))


@mutant("averager", "weights of the record are ignored")
def _(patch: Patch) -> None:
    sources = Averager._sources
    patch.setattr(Averager, "_sources", lambda *args: [replace(source, weight=1.0) for source in sources(*args)])


@mutant("averager", "payloads are used without their digest")
def _(patch: Patch) -> None:
    patch.setattr(Reader, "_repair", lambda *_: None)


@mutant("averager", "own bytes are taken from memory though the log has others")
def _(patch: Patch) -> None:
    offer = Averager._contribute

    def proud(self: Averager, place: Any, hosts: Any, index: Any, *rest: Any) -> Any:
        encoded, norm = offer(self, place, hosts, index, *rest)
        if encoded is None and not self._is_abstaining(place):
            encoded = self._writer.encode(hosts, index)
        return encoded, norm

    patch.setattr(Averager, "_contribute", proud)


@mutant("reduce_scatter", "a reduced unit is used without its digest")
def _(patch: Patch) -> None:
    head = len(b"".join(bytes(part) for part in reduced_unit.seal(UnitName(0, 0, "00" * 32, 0, 0, 1), [])))
    patch.setattr(reduce_scatter, "unseal", lambda _name, data, _key: data[head:])


@mutant("reduce_scatter", "units of two makers differ")
def _(patch: Patch) -> None:
    make = reduce_scatter._Work._make

    def own(self: Any, units: Any, *, publish: bool) -> None:
        self._scatter = replace(self._scatter, decision=digest_of(f"{self._scatter.mine}".encode()))
        make(self, units, publish=publish)

    patch.setattr(reduce_scatter._Work, "_make", own)


@mutant("reduce_scatter", "the units of a dead member are made by no other")
def _(patch: Patch) -> None:
    make = reduce_scatter._Work._make

    def only_own(self: Any, units: Any, *, publish: bool) -> None:
        mine = [unit for unit in units if self._scatter.owner(unit) == self._scatter.mine]
        if mine:
            make(self, mine, publish=publish)
        else:
            self._clock.pause(1.0)

    patch.setattr(reduce_scatter._Work, "_make", only_own)


@mutant("reduce_scatter", "units are made across a border although their maker is at work")
def _(patch: Patch) -> None:
    patch.setattr(reduce_scatter._Work, "_waits_for_makers", lambda _: False)


@mutant("reduce_scatter", "a spot check weighs all contributions alike")
def _(patch: Patch) -> None:
    confirmed = find_wrong_reduced_units.is_confirmed

    def alike(store: Any, sources: Any, index: Any, sample: Any) -> bool:
        return confirmed(store, [replace(source, weight=1.0) for source in sources], index, sample)

    patch.setattr(find_wrong_reduced_units, "is_confirmed", alike)


@mutant("averager", "contributions are not checked before a proposal")
def _(patch: Patch) -> None:
    patch.setattr(Averager, "_fault_in", lambda *_: None)


@mutant("averager", "work counts by its weight, and less when it is late")
def _(patch: Patch) -> None:
    run = Averager.run

    def weighed(self: Averager, *args: Any, **more: Any) -> Any:
        average = run(self, *args, **more)
        return replace(average, work=sum(share.weight for share in average.decision.record.members))

    patch.setattr(Averager, "run", weighed)


@mutant("lifecycle", "a run ends with its rounds, whatever was lost")
def _(patch: Patch) -> None:
    patch.setattr(Run, "is_over", lambda self, closed, _: closed >= self.rounds)


# straggler.py, and how its share is contributed.


def _contribute_with(patch: Patch, **changes: float) -> None:
    contribute = Exchange.contribute
    patch.setattr(Exchange, "contribute", lambda self, place, load: contribute(self, place, replace(load, **changes)))


@mutant("early_end", "a round ended early weighs as much as a whole one")
def _(patch: Patch) -> None:
    _contribute_with(patch, share=1.0)


@mutant("early_end", "a round is ended early although no quorum waits")
def _(patch: Patch) -> None:
    share = EarlyEndPolicy.share

    def hasty(self: EarlyEndPolicy, *args: Any, **more: Any) -> float | None:
        policy = self._policy
        self._policy = replace(policy, min_replicas=1)
        try:
            return share(self, *args, **more)
        finally:
            self._policy = policy

    patch.setattr(EarlyEndPolicy, "share", hasty)


@mutant("early_end", "a slow replica never ends its round early")
def _(patch: Patch) -> None:
    patch.setattr(EarlyEndPolicy, "share", lambda *_, **__: None)


# lifecycle.py, catch_up.py, round_runner.py and what they count with.


@mutant("lifecycle", "inner steps of a round that is over count for the one that is followed next")
def _(patch: Patch) -> None:
    patch.setattr(WorkCounter, "exchanged", lambda *_: None)


@mutant("lifecycle", "inner steps of a failed round count for its next attempt")
def _(patch: Patch) -> None:
    patch.setattr(CurrentRound, "throw_away", lambda *_: None)


@mutant("lifecycle", "the state before the outer step is recorded")
def _(patch: Patch) -> None:
    close = Lifecycle.close_round

    def hasty(self: Lifecycle, *args: Any) -> bool:
        closed = close(self, *args)
        self._record(self.log_follower.scope)
        return closed

    patch.setattr(Lifecycle, "close_round", hasty)


@mutant("lifecycle", "what was trained before a checkpoint is loaded is kept")
def _(patch: Patch) -> None:
    heal, jump = LogFollower.enter_boundary, LogFollower._jump

    def keeping(change: Any) -> Any:
        def kept(self: LogFollower, *args: Any, **more: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(self.trainer, "take_shared", lambda: None)
                return change(self, *args, **more)

        return kept

    patch.setattr(LogFollower, "enter_boundary", keeping(heal))
    patch.setattr(LogFollower, "_jump", keeping(jump))


@mutant("lifecycle", "following leaves a round out")
def _(patch: Patch) -> None:
    catch_up = Lifecycle.catch_up

    def skip(self: Lifecycle) -> int:
        following, log = self.position.round + 1, self._session.log
        if log.find_head(self.position.round) > following:
            previous = log.read_previous_digest(following)
            self.log_follower.position = replace(self.position, round=following, previous=previous)
        return catch_up(self)

    patch.setattr(Lifecycle, "catch_up", skip)


@mutant("rescue", "no checkpoint is written out of turn for those behind")
def _(patch: Patch) -> None:
    patch.setattr(RescueCheckpoints, "_help", lambda *_: None)


@mutant("rescue", "a finished replica leaves at once although others are behind")
def _(patch: Patch) -> None:
    patch.setattr(RescueCheckpoints, "wait_for_others", lambda *_: None)


# Rounds of several exchanges, and rounds without fragments.


@mutant("round_runner", "after an error a round is closed with the exchanges that were opened")
def _(patch: Patch) -> None:
    patch.setattr(RoundRunner, "_may_close", lambda *_: True)


@mutant("round_runner", "a veto ends with its exchange")
def _(patch: Patch) -> None:
    run = RoundRunner._run_exchange

    def forgetful(self: RoundRunner, exchange: Any) -> Any:
        try:
            return run(self, exchange)
        finally:
            self.round.veto = None

    patch.setattr(RoundRunner, "_run_exchange", forgetful)


@mutant("round_runner", "the work of a round is that of its first exchange")
def _(patch: Patch) -> None:
    close = RoundRunner._close_log

    def first(self: RoundRunner, averages: Any) -> Any:
        return close(self, [replace(average, work=averages[0].work) for average in averages])

    patch.setattr(RoundRunner, "_close_log", first)


# Unfinished rounds.


def _resume_with(patch: Patch, change: Callable[[pytest.MonkeyPatch, LogFollower], None]) -> None:
    """Break something while a save is resumed."""
    resume = LogFollower.resume

    def broken(self: LogFollower) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            change(inner, self)
            return resume(self)

    patch.setattr(LogFollower, "resume", broken)


@mutant("resumable_round", "a save is resumed at every boundary, on top of what was trained since")
def _(patch: Patch) -> None:
    def again(inner: pytest.MonkeyPatch, follower: LogFollower) -> None:
        put_back, follower._has_resumed = follower.trainer.put_back, False

        def add(fragment: int, delta: Any) -> None:
            pairs = zip(follower.trainer.progress()[fragment], delta, strict=True)
            put_back(fragment, [now + saved for now, saved in pairs])

        inner.setattr(follower.trainer, "put_back", add)

    _resume_with(patch, again)


@mutant("resumable_round", "a save is resumed into the current round, whichever it was made in")
def _(patch: Patch) -> None:
    def load_as_current(inner: pytest.MonkeyPatch, follower: LogFollower) -> None:
        load = follower.unfinished.load

        def moved() -> PartialRound | None:
            partial = load()
            return None if partial is None else replace(partial, round=follower.position.round)

        inner.setattr(follower.unfinished, "load", moved)

    _resume_with(patch, load_as_current)


@mutant("resumable_round", "a save is resumed although the round that counts it is closed")
def _(patch: Patch) -> None:
    is_open = PartialRound.is_open
    patch.setattr(PartialRound, "is_open", lambda self, fragment, head: is_open(self, fragment, head - 1))


@mutant("resumable_round", "resumed steps are counted and not put back")
def _(patch: Patch) -> None:
    _resume_with(patch, lambda inner, follower: inner.setattr(follower.trainer, "put_back", lambda *_: None))


# checkpointing/recorder.py and checkpoint.py


@mutant("recorder", "a checkpoint is visible before its parts")
def _(patch: Patch) -> None:
    save = checkpoint.save

    def reversed_save(store: Any, **more: Any) -> bool:
        later: list[tuple[str, Any]] = []

        class Deferring:
            def create(self, key: str, data: Any) -> bool:
                if not key.endswith("/manifest.json"):
                    later.append((key, data))
                    return True
                return store.create(key, data)

        saved = save(Deferring(), **more)  # type: ignore[arg-type]
        for key, data in later:
            store.create(key, data)
        return saved

    patch.setattr(checkpoint, "save", reversed_save)


@mutant("recorder", "a checkpoint is taken of live state, half a second later")
def _(patch: Patch) -> None:
    write = Recorder._write_checkpoint

    def live(self: Recorder, standing: LogPosition, _: object, **more: Any) -> None:
        self._presence._clock.pause(0.5)
        write(self, standing, checkpoint.snapshot(self._state.capture()), **more)

    patch.setattr(Recorder, "_write_checkpoint", live)


@mutant("recorder", "commits below a checkpoint are deleted")
def _(patch: Patch) -> None:
    write = CheckpointWriter.write

    def tidy(self: CheckpointWriter, standing: LogPosition, *args: Any, **more: Any) -> bool:
        saved = write(self, standing, *args, **more)
        if standing.round > 1:
            self._log.store.delete(keys.commit(standing.round - 2))
        return saved

    patch.setattr(CheckpointWriter, "write", tidy)


@mutant("round_runner", "tokens of gradients that a failed round threw away count for its next attempt")
def _(patch: Patch) -> None:
    patch.setattr(CurrentRound, "throw_away_gradients", lambda _: None)


# Of several fragments. With one fragment, each of these changes no behaviour.

SEVERAL_FRAGMENTS: Final = (
    "only the first fragment of a checkpoint is loaded",
    "each fragment is loaded from the state of the next one",
    "a receipt covers the first fragment only",
    "every exchange resets the work of the first fragment",
)


@mutant("recorder", "only the first fragment of a checkpoint is loaded")
def _(patch: Patch) -> None:
    restore = SharedState.restore

    def partly(self: SharedState, state: Any) -> None:
        live = self.capture()
        restore(self, {key: value if key == f"{FRAGMENT}0" else live[key] for key, value in state.items()})

    patch.setattr(SharedState, "restore", partly)


@mutant("recorder", "each fragment is loaded from the state of the next one")
def _(patch: Patch) -> None:
    restore = SharedState.restore

    def rotated(self: SharedState, state: Any) -> None:
        values = list(state.values())
        restore(self, dict(zip(state, values[1:] + values[:1], strict=True)))

    patch.setattr(SharedState, "restore", rotated)


@mutant("recorder", "a receipt covers the first fragment only")
def _(patch: Patch) -> None:
    digest = checkpoint.state_digest
    # The checker has its own reference to the function.
    patch.setattr(checkpoint, "state_digest", lambda state: digest({f"{FRAGMENT}0": state[f"{FRAGMENT}0"]}))


@mutant("lifecycle", "every exchange resets the work of the first fragment")
def _(patch: Patch) -> None:
    exchanged = WorkCounter.exchanged
    patch.setattr(WorkCounter, "exchanged", lambda self, _: exchanged(self, 0))


# settings.py, and how a round's are applied.


@mutant("round_runner", "a replica that follows keeps the outer step that it has")
def _(patch: Patch) -> None:
    use = RoundSettings.apply

    def deaf(self: RoundSettings, settings: Any) -> None:
        if not self._log_follower.following:
            use(self, settings)

    patch.setattr(RoundSettings, "apply", deaf)


@mutant("round_runner", "a change of the outer step is applied one round late")
def _(patch: Patch) -> None:
    use = RoundSettings.apply

    def late(self: RoundSettings, settings: Any) -> None:
        before = getattr(self, "settings_of_mutant", None)
        self.settings_of_mutant = settings  # type: ignore[attr-defined]
        use(self, settings if before is None else before)

    patch.setattr(RoundSettings, "apply", late)


@mutant("settings", "a change is used as soon as it is read")
def _(patch: Patch) -> None:
    patch.setattr(RunSettings, "of_round", lambda self, _: self._known[-1].digest if self._known else None)


@mutant("lifecycle", "run.json alone says when a run is over")
def _(patch: Patch) -> None:
    patch.setattr(RunLog, "set_end", lambda *_: None)
