"""Every deliberate bug that the invariants must notice. Never imported by anything but tests and the long search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.simulation import mutants_of_rounds, mutants_of_work
from tests.simulation.kit import KEPT, Mutant

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCES: Final = (mutants_of_rounds, mutants_of_work)
MUTANTS: Final[Sequence[Mutant]] = tuple(KEPT)


def named(name: str) -> Mutant:
    """The mutant of this name."""
    (found,) = [one for one in MUTANTS if one.name == name]
    return found
