"""The mirror of a simulated run: after every put it must be a whole older run, and a restore of it a healthy one.

A process is killed at puts of the mirror, before or after they take effect, drawn for each seed. So every put of every
schedule is a cut, and many are also the last thing that a writer did.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from tests.simulation.faults import FaultyStore, Rates
from tests.support.clocks import FakeClock

from skerry.infra.observe.doctor.examine import examine_store
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.mirrors.checked_cut import CheckedCuts
from skerry.runtime.mirrors.mirror import complete_checkpoints
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.mirrors.run_from_copy import fork
from skerry.runtime.store.interface import buffers_of
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.simulation.faults import Call
    from tests.simulation.invariants import Checker
    from tests.simulation.scenario import Scenario
    from tests.simulation.world import Process, World

    from skerry.runtime.mirrors.restorable import Cut
    from skerry.runtime.store.interface import Data, Entry

# More puts than most mirrors of these short runs have.
PUTS: Final = 80


class MirrorCheck:
    """The store of a mirror, with the checks of it. Takes the place of `Bucket` in a `FaultyStore`."""

    is_whole = False
    """No payload rots here."""

    def __init__(self, world: World, checker: Checker, bucket: MemoryStore, scenario: Scenario) -> None:
        self.engine = MemoryStore("memory://mirror")
        self._world, self._checker, self._bucket = world, checker, bucket
        self._random = random.Random(f"{scenario.seed} kills")
        self._kills = {self._random.randrange(PUTS): self._random.choice(("before", "after")) for _ in range(3)}
        self._rates = Rates(
            calls={kind: self._random.choice((0.0, 0.02)) for kind in ("busy", "timeout", "lost_reply", "late")},
            latency_s=self._random.choice((0.005, 0.1)),
            horizon_s=scenario.rates.horizon_s,
        )
        self._begun = 0
        self._newest = -1
        self._seen: tuple[int, int] | None = None
        self._has_changes, self._has_lost = bool(scenario.changes), bool(scenario.lost)

    def open(self, process: Process, on_pause: Callable[[Process, float], None]) -> FaultyStore:
        """One process's way to the mirror."""
        return FaultyStore(self, process, self._rates, on_pause, self._script)  # type: ignore[arg-type]

    def _script(self, call: Call) -> str | None:
        if call.verb != "create":
            return None
        self._begun += call.moment == "before"
        if self._kills.get(self._begun) != call.moment:
            return None
        del self._kills[self._begun]
        self._world.facts["kills at a put of a mirror"] += 1
        return "crash"

    # Of `Bucket`.

    def create(self, by: Process, began: int, key: str, data: Data) -> bool:
        del began
        is_new = self.engine.create(key, data)
        if is_new:
            self._world.facts["puts of mirrors"] += 1
            self._check(by, key, b"".join(buffers_of(data)))
        return is_new

    def replace(self, by: Process, key: str, data: Data) -> None:
        self._checker.broken("mirror", f"{by.name} replaced {key} of {len(buffers_of(data))} buffers")

    def delete(self, by: Process, key: str) -> None:
        self.engine.delete(key)
        self._check(by, key, None)

    def list(self, prefix: str, after: str | None) -> Sequence[Entry]:
        return self.engine.list(prefix, after)

    # The checks.

    def _check(self, by: Process, key: str, body: bytes | None) -> None:
        """This put, or delete, may be the last of the mirror."""
        cut = self._cut(by, key)
        if cut is None:
            return
        if cut.round < self._newest:
            self._broken(by, key, f"goes back from round {self._newest} to {cut.round}")
        self._newest = cut.round
        commit = None if cut.round == 0 else self._checker.commits.get(cut.round - 1)
        if commit is not None and commit != cut.commit:
            self._broken(by, key, f"has another commit of round {cut.round - 1}")
        if (cut.round, cut.checkpoint) == self._seen and not (body is None or key.startswith(keys.PAYLOADS)):
            return
        self._seen = cut.round, cut.checkpoint
        self._check_state(by, key, self.engine, cut)
        if self._random.random() < 0.05:
            self._restore(by, key, cut)
        if self._random.random() < 0.05:
            self._restore_damaged(by, key, cut)

    def _cut(self, by: Process, key: str) -> Cut | None:
        if not complete_checkpoints(self.engine):
            return None
        try:
            return find_cut(self.engine)
        except Invalid as error:
            self._broken(by, key, f"cannot be restored: {error}")
            return None

    def _check_state(self, by: Process, key: str, store: MemoryStore, cut: Cut) -> None:
        self._checker.watch(store)
        try:
            state = self._checker.rebuilt(cut.round)
        except (KeyError, ValueError, TypeError) as error:
            self._broken(by, key, f"has no state of round {cut.round}: {error!r}")
            return
        finally:
            self._checker.watch(self._bucket)
        if state != self._checker.states.get(cut.round):
            self._broken(by, key, f"gives another state of round {cut.round}")

    def _restore(self, by: Process, key: str, cut: Cut) -> None:
        """Restore as the operator does; the new run must be healthy, and have the same state."""
        self._world.facts["restores"] += 1
        target = MemoryStore("memory://restored")
        fork(self.engine, cut, target, "")
        # Parts of toy payloads are not as `check_payloads` expects, and a hidden member is copied when it is seen.
        findings = () if self._world.faults["hidden"] else examine_store(target).findings
        for problem in findings:
            if problem.severity == "error":
                self._broken(by, key, f"restores a damaged run: {problem.text}")
        if not self._has_changes:  # these have other digests in the new run, by which the checker knows them
            self._check_state(by, key, target, cut)

    def _restore_damaged(self, by: Process, key: str, cut: Cut) -> None:
        """Restore, or fail over, when an object of the newest checkpoint is damaged: as if that were not there."""
        copy, without = MemoryStore("memory://mirror"), MemoryStore("memory://mirror")
        for entry in self.engine.list(""):
            for store in (copy, without):
                store.create(entry.key, self.engine.read(entry.key) or b"")
        damaged = self._random.choice(self.engine.list(f"{keys.CHECKPOINTS}{cut.checkpoint:08d}/")).key
        body = bytes(copy.read(damaged) or b"")
        how = self._random.choice(("flipped", "cut off", "missing"))
        copy.replace(damaged, body[:-1] + bytes([body[-1] ^ 1]) if how == "flipped" else body[:-1])
        if how == "missing":
            copy.delete(damaged)
        without.delete(keys.checkpoint_manifest(cut.checkpoint))
        self._world.facts["restores of a damaged mirror"] += 1
        checked, expected = _cut_or_none(CheckedCuts(FakeClock()).find, copy), _cut_or_none(find_cut, without)
        if _place_of(checked) != _place_of(expected):
            self._broken(by, key, f"with {damaged} {how} goes on from {_place_of(checked)}, not {_place_of(expected)}")
        elif checked is not None and not self._has_changes:
            target = MemoryStore("memory://restored")
            try:
                fork(copy, checked, target, "")
            except Corrupt as error:
                self._broken(by, key, f"with {damaged} {how} makes no run: {error}")
            else:
                self._check_state(by, key, target, checked)

    def check_end(self) -> None:
        """The mirror has all, unless a process that was to copy is not started again, or an object was hidden."""
        last = self._world.current.process
        cut = self._cut(last, "the end")
        if cut is not None:
            self._restore(last, "the end", cut)
        head, closed = self._checker.head, 0 if cut is None else cut.round
        self._world.facts["mirrors complete at the end"] += closed == head
        if closed < head and not self._may_lack:
            self._broken(last, "the end", f"has {closed} of {head} rounds")

    @property
    def _may_lack(self) -> bool:
        return self._has_lost or self._has_changes or self._world.faults["hidden"] > 0

    def _broken(self, by: Process, key: str, what: str) -> None:
        self._checker.broken("mirror", f"after {by.name} wrote {key} the mirror {what}")


def _cut_or_none(find: Callable[[MemoryStore], Cut], store: MemoryStore) -> Cut | None:
    try:
        return find(store)
    except (Corrupt, Invalid):
        return None


def _place_of(cut: Cut | None) -> tuple[int, int] | None:
    return None if cut is None else (cut.round, cut.checkpoint)
