"""A deliberate bug: a name, the module whose behaviour is broken, and a patch that breaks it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

Patch: TypeAlias = pytest.MonkeyPatch
Break: TypeAlias = "Callable[[Patch], None]"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A named bug. where: the module whose behaviour is broken."""

    name: str
    where: str
    apply: Break

    @contextmanager
    def alive(self) -> Generator[None]:
        """The bug is in the code."""
        with pytest.MonkeyPatch.context() as patch:
            self.apply(patch)
            yield


KEPT: Final[list[Mutant]] = []


def mutant(where: str, name: str) -> Callable[[Break], Break]:
    """Keep what is decorated as a mutant."""

    def keep(apply: Break) -> Break:
        KEPT.append(Mutant(name=name, where=where, apply=apply))
        return apply

    return keep
