"""The interface to copies of a replica's state on its own machines; `local_and_peer_checkpoints` implements it.

A copy is used in the place of an object of the bucket only if it is of the same commit, and what is shared between
replicas only if receipts confirm it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from skerry.runtime.log.records import Part

Kind: TypeAlias = Literal["checkpoints", "private", "unfinished"]
"""Shared state and private state by their round, the current round by the number of its save."""


@dataclass(frozen=True)
class NearCopy:
    """A save of this rank. commit: of the log, when it was saved. parts: its content, by digests."""

    commit: str
    parts: tuple[Part, ...]
    state: object


class NearCopies(Protocol):
    """Saves of one rank outside of the bucket. Every rank of a replica makes the same calls in the same order."""

    @property
    def every_s(self) -> float:
        """Seconds between two saves of the current round."""
        ...

    def is_saving(self, kind: Kind) -> bool:
        """True while a save of this kind is being written."""
        ...

    def save(self, kind: Kind, number: int, commit: str, state: object) -> None:
        """Save in the background; failures are logged. state: not changed afterwards; None where there is nothing."""
        ...

    def newest(self, kind: Kind) -> tuple[int, int]:
        """The newest number that can be loaded on every rank, or -1; and the highest that any rank has, or 0."""
        ...

    def load(self, kind: Kind, number: int) -> NearCopy | None:
        """This rank's save, verified; None if no good copy is left. Also makes lost copies of peers again."""
        ...

    def close(self, *, wait: bool) -> None:
        """Stop the background thread. wait: until everything submitted is written."""
        ...
