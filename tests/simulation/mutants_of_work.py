"""Deliberate bugs in what is trained, averaged, kept, brought and saved: averaging, carry, pace, and what the simulated
replica does in the manager's place.
"""
# A broken version is made by reaching inside, and by lambdas in the place of methods.
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulation.kit import Patch, mutant
from tests.simulation.replica import Replica
from tests.simulation.shelf import Shelf

from skerry.runtime import keys
from skerry.runtime.averaging import Averager
from skerry.runtime.carry import Carry
from skerry.runtime.codec.reading import Reader
from skerry.runtime.exchange import Exchange
from skerry.runtime.impasse import Guide
from skerry.runtime.pace import Pace
from skerry.runtime.records import Run

if TYPE_CHECKING:
    from skerry.runtime.recording import Standing

# averaging.py, and the codec below it.


@mutant("averaging", "contributions are reduced in another order than the record's")
def _(patch: Patch) -> None:
    sources = Averager._sources
    patch.setattr(Averager, "_sources", lambda *args: list(reversed(sources(*args))))


@mutant("averaging", "weights of the record are ignored")
def _(patch: Patch) -> None:
    sources = Averager._sources
    patch.setattr(Averager, "_sources", lambda *args: [replace(one, weight=1.0) for one in sources(*args)])


@mutant("averaging", "payloads are used without their digest")
def _(patch: Patch) -> None:
    patch.setattr(Reader, "_repair", lambda *_: None)


@mutant("averaging", "own bytes are taken from memory though others stand in the log")
def _(patch: Patch) -> None:
    offer = Averager._offer

    def proud(self: Averager, place: Any, hosts: Any, index: Any, *rest: Any) -> Any:
        encoded, norm = offer(self, place, hosts, index, *rest)
        if encoded is None and not self._is_abstaining(place):
            encoded = self._offering.encode(hosts, index)
        return encoded, norm

    patch.setattr(Averager, "_offer", proud)


@mutant("averaging", "nobody looks whether a contribution can be averaged")
def _(patch: Patch) -> None:
    patch.setattr(Averager, "_fault_in", lambda *_: None)


@mutant("averaging", "work counts by its weight, and less when it is late")
def _(patch: Patch) -> None:
    run = Averager.run

    def weighed(self: Averager, *args: Any, **more: Any) -> Any:
        average = run(self, *args, **more)
        return replace(average, work=sum(share.weight for share in average.decision.record.members))

    patch.setattr(Averager, "run", weighed)


@mutant("replica", "a run ends with its rounds, whatever was lost")
def _(patch: Patch) -> None:
    patch.setattr(Run, "is_over", lambda self, closed, _: closed >= self.rounds)


# carry.py


@mutant("carry", "what comes late is dropped")
def _(patch: Patch) -> None:
    patch.setattr(Carry, "keep", lambda *_: False)


@mutant("carry", "what was kept is brought, and kept too")
def _(patch: Patch) -> None:
    stake = Carry.stake

    def twice(self: Carry, fragment: int, *where: Any) -> None:
        kept = self._kept[fragment]
        stake(self, fragment, *where)
        self._kept[fragment] = kept

    patch.setattr(Carry, "stake", twice)


@mutant("carry", "what was brought and counted is kept again")
def _(patch: Patch) -> None:
    settle = Carry.settle
    patch.setattr(Carry, "settle", lambda self, fragment, _: settle(self, fragment, None))


@mutant("carry", "what was brought and not counted is forgotten")
def _(patch: Patch) -> None:
    patch.setattr(Carry, "settle", lambda self, fragment, _: self._stakes.pop(fragment, None))


def _contribute_with(patch: Patch, **changes: float) -> None:
    contribute = Exchange.contribute
    patch.setattr(Exchange, "contribute", lambda self, place, load: contribute(self, place, replace(load, **changes)))


@mutant("carry", "late work weighs as much as work in time")
def _(patch: Patch) -> None:
    _contribute_with(patch, discount=1.0)


@mutant("carry", "a round cut short weighs as much as a whole one")
def _(patch: Patch) -> None:
    _contribute_with(patch, share=1.0)


# pace.py


@mutant("pace", "a round is cut short although no quorum waits")
def _(patch: Patch) -> None:
    share = Pace.share

    def hasty(self: Pace, *args: Any) -> float | None:
        policy = self._policy
        self._policy = replace(policy, min_replicas=1)
        try:
            return share(self, *args)
        finally:
            self._policy = policy

    patch.setattr(Pace, "share", hasty)


@mutant("pace", "a slow replica never ends its round early")
def _(patch: Patch) -> None:
    patch.setattr(Pace, "share", lambda *_: None)


# What manager, conduct and course do (the simulated replica's own code).


@mutant("replica", "inner steps of a round that is over count for the one that is followed next")
def _(patch: Patch) -> None:
    forget = Replica._advance

    def keep(self: Replica, *args: Any) -> None:
        steps = self._steps
        forget(self, *args)
        self._steps = steps if self._following else 0

    patch.setattr(Replica, "_advance", keep)


@mutant("impasse", "no checkpoint is written out of turn for those behind")
def _(patch: Patch) -> None:
    patch.setattr(Guide, "_help", lambda *_: None)


@mutant("impasse", "who has finished leaves at once, whoever is behind")
def _(patch: Patch) -> None:
    patch.setattr(Guide, "see_off", lambda *_: None)


@mutant("replica", "following leaves a round out")
def _(patch: Patch) -> None:
    catch_up = Replica._catch_up

    def skip(self: Replica) -> None:
        following, journal = self._standing.round + 1, self._seat.journal
        if journal.head(self._standing.round) > following:
            self._standing = replace(self._standing, round=following, previous=journal.previous(following))
        catch_up(self)

    patch.setattr(Replica, "_catch_up", skip)


@mutant("replica", "a checkpoint is visible before its parts")
def _(patch: Patch) -> None:
    save = Shelf.save

    def reversed_save(self: Shelf, standing: Standing, state: str) -> bool:
        store = self.store
        later: list[tuple[str, Any]] = []

        class Deferring:
            def create(self, key: str, data: Any) -> bool:
                if not key.endswith("/manifest.json"):
                    later.append((key, data))
                    return True
                return store.create(key, data)

        self.store = Deferring()  # type: ignore[assignment]
        try:
            saved = save(self, standing, state)
        finally:
            self.store = store
        for key, data in later:
            store.create(key, data)
        return saved

    patch.setattr(Shelf, "save", reversed_save)


@mutant("replica", "a checkpoint is taken of live state, half a second later")
def _(patch: Patch) -> None:
    save = Replica._save

    def live(self: Replica, standing: Standing, state: str) -> bool:
        del state
        self._clock.pause(0.5)
        return save(self, standing, self._state)

    patch.setattr(Replica, "_save", live)


@mutant("replica", "commits below a checkpoint are deleted")
def _(patch: Patch) -> None:
    save = Shelf.save

    def tidy(self: Shelf, standing: Standing, state: str) -> bool:
        saved = save(self, standing, state)
        if standing.round > 1:
            self.store.delete(keys.commit(standing.round - 2))
        return saved

    patch.setattr(Shelf, "save", tidy)
