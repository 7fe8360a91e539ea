"""What a replica has trained in a round that is not over, saved now and then: its next incarnation goes on with it.

Off unless asked for: a save is as large as the model and the private state together. In the format of a checkpoint,
under the slot's own folder, the newest only. A pseudo-gradient is saved, not parameters: it can be put on the shared
parameters again, or be brought late. Never needed for the run to go on: whatever fails is told.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch

from skerry.runtime import checkpoint, keys
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.events import emit
from skerry.runtime.recording import settle
from skerry.runtime.records import GENESIS, Count, Record
from skerry.runtime.sharded import local_of
from skerry.runtime.tally import Amount, Tally

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchft.local_sgd import _StreamingDiLoCoFragment  # pyright: ignore[reportPrivateUsage]  held by test_drift.py

    from skerry.runtime.clock import Clock
    from skerry.runtime.journal import Journal
    from skerry.runtime.membership import Presence
    from skerry.runtime.ranks import Group
    from skerry.runtime.recording import Standing


Fate: TypeAlias = Literal["goes on", "late", "gone"]
"""What becomes of what was begun: trained on from; kept, as what is late is; or of no use any more."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What was trained in round `round`, on the log up to the commit `previous`.

    inner_steps, tokens, seconds: of that round alone. deltas: of each DiLoCo fragment, its pseudo-gradient by the order
    of its parameters. trained: what each of them holds; known once it is saved. private: the private state after the
    last of these inner steps, by key.
    """

    round: int
    previous: str
    inner_steps: int
    tokens: int
    seconds: float
    deltas: tuple[tuple[torch.Tensor, ...], ...]
    private: Mapping[str, object]
    trained: tuple[Amount, ...] = ()

    def next_of(self, fragment: int, fragments: int) -> int:
        """The round that exchanges this one of so many fragments next."""
        return self.round + (fragment - self.round) % fragments


class _Fates(Record):
    """Of each fragment."""

    fates: tuple[Fate, ...]


class _Due(Record):
    """Now is the time to save."""

    value: bool


class _Newest(Record):
    """The number of the newest save that can be read, if there is one; and the highest that is taken."""

    number: Count | None
    highest: Count = 0


class Unfinished:
    """One replica's saves of the round at hand. For the thread that trains; writes in one of its own.

    every_s: seconds between saves; None saves nothing, and takes up nothing. tally: what there is to save; whoever
    conducts the rounds counts it.
    """

    def __init__(self, journal: Journal, presence: Presence, clock: Clock, group: Group, every_s: float | None) -> None:
        self._journal = journal
        self._presence = presence
        self._clock = clock
        self._train = group.line("train")
        self._every_s = every_s
        self.tally = Tally()
        self._folder = keys.unfinished_of(presence.slot, group.rank)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unfinished")
        self._saving: Future[None] | None = None
        self._number = 0
        self._last = (-1, 0)
        self._saved_at = clock.now()

    @property
    def is_on(self) -> bool:
        """Whether this replica saves what it has not finished."""
        return self._every_s is not None

    def is_due(self, round_number: int, inner_steps: int, *, now: bool) -> bool:
        """There is something new to save, and it is time, or it must be `now`. The same on all ranks."""
        every_s = self._every_s
        if every_s is None or inner_steps == 0 or (round_number, inner_steps) == self._last:
            return False
        if now:
            return True
        late = self._clock.now() - self._saved_at >= every_s
        return self._train.first("save the unfinished", lambda: _Due(value=late and self._is_idle()), _Due).value

    def save(self, standing: Standing, begun: Begun, *, wait: bool = False) -> None:
        """Save in the background. Memory is bounded to one save. wait: until it is written.

        What cannot be stored, or is not finite, is told and not saved.
        """
        self._last = (begun.round, begun.inner_steps)
        self._saved_at = self._clock.now()
        state: dict[str, object] = {
            "round": begun.round,
            "inner steps": begun.inner_steps,
            "tokens": begun.tokens,
            "seconds": begun.seconds,
            "deltas": list(begun.deltas),
            "trained": [list(self.tally.since(fragment)) for fragment in range(len(begun.deltas))],
            "private": dict(begun.private),
        }
        self._number += 1  # on all ranks, also on one that has nothing to save
        if not all(bool(one.isfinite().all()) for delta in begun.deltas for one in delta):
            self._failed(begun.round, Invalid("what was trained is not finite"))
            return
        self._saving = self._pool.submit(self._write, self._number, standing, state)
        if wait:
            self._saving.result()

    def load(self) -> Begun | None:
        """What the slot has saved last, if it is of this log. None: nothing; what is damaged is told."""
        if not self.is_on:
            return None
        begun: Begun | None = None
        there = self._train.consult("the unfinished", self._newest, _common, _Newest)
        self._number = there.highest
        newest = there.number
        if newest is None:
            return None

        def read() -> _Newest:
            nonlocal begun
            begun = self._read(newest)
            return _Newest(number=None if begun is None else newest)

        found = self._train.consult("load the unfinished", read, _common, _Newest).number
        if found is None or begun is None:
            return None
        self._last = (begun.round, begun.inner_steps)
        return begun

    def fates(self, begun: Begun, head: int, fragments: int) -> tuple[Fate, ...]:
        """What becomes of each fragment's part, now that the log is at `head`; the same on all ranks."""
        return self._train.first(
            "what was begun",
            lambda: _Fates(fates=tuple(self._fate(begun, head, fragments, one) for one in range(fragments))),
            _Fates,
        ).fates

    def _fate(self, begun: Begun, head: int, fragments: int, fragment: int) -> Fate:
        first = begun.next_of(fragment, fragments)
        passed = range(first, head, fragments)
        if not passed:
            return "goes on"
        if len(passed) > 1 or self._is_counted(first):
            return "gone"
        # What is late is added to the next: once that stands in the log, it may be in it.
        following = self._journal.contribution(first + fragments, 0, self._presence.slot)
        return "late" if following is None else "gone"

    def _is_counted(self, round_number: int) -> bool:
        decision = self._journal.decision(round_number, 0)
        return decision is None or self._presence.slot in [share.slot for share in decision.record.members]

    def close(self, *, wait: bool) -> None:
        """Stop; wait: until what is on its way is written."""
        self._pool.shutdown(wait=wait, cancel_futures=not wait)

    def _is_idle(self) -> bool:
        return self._saving is None or self._saving.done()

    def _newest(self) -> _Newest:
        there = checkpoint.complete(self._journal.store, self._folder)
        return _Newest(number=there[0], highest=there[0]) if there else _Newest(number=None)

    def _read(self, number: int) -> Begun | None:
        try:
            manifest = checkpoint.manifest(self._journal.store, number, self._folder)
            if manifest is None or manifest.run != self._journal.run.nonce:
                return None
            begun = _begun(checkpoint.load(self._journal.store, manifest, self._folder), manifest.commit)
        except Corrupt as error:
            self._failed(number, error)
            return None
        # A log that was begun anew has other commits under the same numbers.
        known = self._journal.commit(begun.round - 1) if begun.round > 0 else None
        return begun if begun.previous == (GENESIS if known is None else known.digest) else None

    def _write(self, number: int, standing: Standing, state: Mapping[str, object]) -> None:
        """Under a number of its own: who saves more than once in a round must not wait for its end."""
        store = self._journal.store
        try:
            checkpoint.save(
                store,
                run=self._journal.run.nonce,
                round_number=number,
                commit=standing.previous,
                members=standing.members,
                batches=standing.batches,
                writer=self._presence.slot,
                nonce=self._clock.nonce(),
                state=state,
                folder=self._folder,
                before_manifest=self._presence.fence,
            )
            emit(
                "unfinished_saved",
                {"round": standing.round, "slot": self._presence.slot, "steps": cast("int", state["inner steps"])},
            )
            end = keys.since(self._folder, number)
            old = [entry.key for entry in store.list(self._folder) if entry.key < end]
            # Manifests first: a save is complete or invisible.
            for key in sorted(old, key=lambda key: not key.endswith(keys.MANIFEST)):
                store.delete(key)
        except Exception as error:  # noqa: BLE001  a thread's entry: training goes on, and the next save may succeed
            self._failed(standing.round, error)

    def _failed(self, round_number: int, error: Exception) -> None:
        fields = {"round": round_number, "slot": self._presence.slot, "error": str(error)}
        emit("unfinished_failed", fields, level=logging.WARNING, error=error)


def begun_of(
    standing: Standing,
    fragments: Sequence[_StreamingDiLoCoFragment],
    private: Mapping[str, object],
    *,
    inner_steps: int,
    tokens: int,
    seconds: float,
) -> Begun:
    """A copy in CPU memory of what was trained since the fragments were last exchanged. private: a copy already."""
    settle()
    return Begun(
        round=standing.round,
        previous=standing.previous,
        inner_steps=inner_steps,
        tokens=tokens,
        seconds=seconds,
        deltas=tuple(_delta(fragment) for fragment in fragments),
        private=private,
    )


def fits(fragments: Sequence[_StreamingDiLoCoFragment], begun: Begun) -> bool:
    """It is of the model that this replica trains."""
    mine = [[(shared.shape, shared.dtype) for shared, _ in _pairs(fragment)] for fragment in fragments]
    return mine == [[(one.shape, one.dtype) for one in delta] for delta in begun.deltas]


def put_on(fragment: _StreamingDiLoCoFragment, delta: Sequence[torch.Tensor]) -> None:
    """Train on from `delta`: parameters become the shared ones without it."""
    with torch.no_grad():
        for (shared, parameter), one in zip(_pairs(fragment), delta, strict=True):
            parameter.copy_(shared.cpu() - one)


def _delta(fragment: _StreamingDiLoCoFragment) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return tuple(shared.cpu() - parameter.cpu() for shared, parameter in _pairs(fragment))


def _pairs(fragment: _StreamingDiLoCoFragment) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The shared and the own parameters of a fragment, of this rank."""
    model = fragment._model_fragment  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    shared = fragment.original_parameters
    return [(shared[name], local_of(parameter.data)) for name, parameter in model.named_parameters()]


def _begun(state: object, previous: str) -> Begun:
    """Raises Corrupt unless `state` is one that `Unfinished.save` made."""
    found = cast("dict[str, Any]", state)
    try:
        deltas = tuple(tuple(delta) for delta in found["deltas"])
        alone = (found["inner steps"], found["tokens"])
        return Begun(
            round=int(found["round"]),
            previous=previous,
            inner_steps=int(found["inner steps"]),
            tokens=int(found["tokens"]),
            seconds=float(found["seconds"]),
            deltas=deltas,
            private=found["private"],
            # Who saved it may have counted the round alone.
            trained=tuple(Amount(*map(int, one)) for one in found.get("trained", [alone] * len(deltas))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"not what a replica has begun: {error!r}") from error


def _common(all_ranks: Sequence[_Newest]) -> _Newest:
    """What every rank has: shards of different moments are no state."""
    numbers = {one.number for one in all_ranks}
    highest = max(one.highest for one in all_ranks)
    return _Newest(number=numbers.pop() if len(numbers) == 1 else None, highest=highest)
