"""Deliberate bugs in how a replica that holds something else is found out, kept apart and healed: alarm, selfcheck."""
# A broken version is made by reaching inside, and by lambdas in the place of methods.
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

from tests.simulation.kit import Patch, mutant
from tests.simulation.shelf import Shelf

from skerry.runtime import alarm
from skerry.runtime.averaging import Averager
from skerry.runtime.selfcheck import SelfCheck


@mutant("alarm", "the fewest are right")
def _(patch: Patch) -> None:
    split = alarm._split

    def reversed_vote(*args: Any) -> Any:
        found = split(*args)
        return (found[1], found[0], found[2]) if found is not None and found[0] else found

    patch.setattr(alarm, "_split", reversed_vote)


@mutant("selfcheck", "what was measured is not concluded from")
def _(patch: Patch) -> None:
    patch.setattr(SelfCheck, "_conclude", lambda *_: None)


@mutant("alarm", "a checkpoint is loaded at its writer's word")
def _(patch: Patch) -> None:
    patch.setattr(alarm.Evidence, "check", lambda *_: None)


@mutant("selfcheck", "who differs heals from whatever is newest")
def _(patch: Patch) -> None:
    load = Shelf.load_newest
    patch.setattr(Shelf, "load_newest", lambda self, beyond=-1, **_: load(self, beyond))


@mutant("selfcheck", "who knows that it differs contributes all the same")
def _(patch: Patch) -> None:
    run = Averager.run
    patch.setattr(Averager, "run", lambda self, *args, **given: run(self, *args, **(given | {"veto": None})))
