"""What handlers of every cloud have in common: whose a resource is, what differs, waiting, asking about many."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from skerry.infra.graph import Resource, as_json
from skerry.runtime.clock import Backoff, wait_until
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.infra.graph import Value
    from skerry.infra.handler import Seen, Wanted
    from skerry.runtime.clock import Clock

T = TypeVar("T")
R = TypeVar("R", bound=Resource)
S = TypeVar("S")

VISIBLE_S: Final = 60.0
"""How long a thing that was just made may stay invisible; IAM takes seconds."""

_POLLING: Final = Backoff(first=0.5, cap=10.0)
# IAM answers some 15 requests a second for a whole account before it throttles.
_STREAMS: Final = 8


class Absent(Invalid):
    """What was asked for is not there. Sessions raise it, handlers answer it with None or with success."""


class Late(Retryable, TimeoutError):  # noqa: N818  errors are named for the next step
    """What was waited for did not come in time; it may still."""


def of(kind: type[R], wanted: Wanted) -> R:
    """The resource itself, whose handler this is."""
    if not isinstance(wanted.resource, kind):
        raise Invalid(f"{wanted.resource.address} is not a {kind.KIND}")
    return wanted.resource


def text(value: Value) -> str:
    """A setting that must be known by now. Raises Invalid if it waits for another resource."""
    if not isinstance(value, str):
        raise Invalid(f"not known yet: {as_json(value)!r}")
    return value


def foreign(what: str, name: str, owner: str | None, remedy: str) -> Conflict:
    """Something of that name is there and is not this run's. remedy: what else to do than to name another."""
    whose = "carries no tag of a run" if owner is None else f"belongs to the run {owner}"
    return Conflict(f"the {what} {name} is there already and {whose}: it is left alone; {remedy}")


def check_owner(seen: Seen, wanted: Wanted, what: str, remedy: str) -> None:
    """Raises Conflict unless it is this run's."""
    if seen.owner != wanted.run:
        raise foreign(what, wanted.name, seen.owner, remedy)


def differing(wanted: Wanted, seen: Seen) -> frozenset[str]:
    """The settings that can be compared and differ."""
    return frozenset(
        name
        for name, value in wanted.settings.items()
        if name in seen.settings and as_json(seen.settings[name]) != as_json(value)
    )


def each(ask: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """`ask` of every item, side by side, in order. The first error is raised when all have ended."""
    if len(items) < 2:
        return [ask(item) for item in items]
    with ThreadPoolExecutor(min(_STREAMS, len(items)), thread_name_prefix="clouds") as pool:
        return list(pool.map(ask, items))


def waited(clock: Clock, what: str, deadline: float, ask: Callable[[], T | None]) -> T:
    """The first answer of `ask` that is not None, asked with growing pauses.

    deadline: on the clock's own `now` scale. Raises Late, which is a TimeoutError, naming `what` and how long it took.
    """
    began = clock.now()
    try:
        return wait_until(clock, ask, deadline, _POLLING)
    except TimeoutError as error:
        if isinstance(error, SkerryError):
            raise
        raise Late(f"waited {clock.now() - began:.0f} s in vain until {what}; run the same command again") from error
