"""Helpers of the resource handlers of all clouds: ownership, waiting, contents of buckets, run URIs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from skerry.infra.provision.graph import Resource, as_json, in_words
from skerry.infra.provision.handler import Contents, StateRecord
from skerry.runtime.clock import Backoff, wait_until
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from skerry.infra.provision.graph import Value
    from skerry.infra.provision.handler import Desired, Observed
    from skerry.runtime.clock import Clock

T = TypeVar("T")
R = TypeVar("R", bound=Resource)
S = TypeVar("S")

VISIBLE_S: Final = 60.0
"""How long a new resource may stay invisible; IAM takes seconds."""
BUCKET_REMEDY: Final = "if it is yours, set `byo: {bucket: true}`; otherwise name another bucket at `store`"
REPOSITORY_REMEDY: Final = "if it is yours, set `byo: {repository: true}`"

_POLLING: Final = Backoff(first=0.5, cap=10.0)
# IAM answers some 15 requests a second for a whole account before it throttles.
_STREAMS: Final = 8
NO_LIMIT: Final[AbstractContextManager[object]] = nullcontext()
"""Of calls in flight: see `OperatorAccess`."""
# Ten listings, 10,000 objects: enough to report that there are many.
_COUNTED_PAGES: Final = 10


class Absent(Invalid):
    """The requested thing does not exist. Sessions raise it; handlers turn it into None or into success."""


class NotYetVisible(Retryable, TimeoutError):  # noqa: N818  errors are named for the next step
    """A wait timed out; the condition may still become true."""


@dataclass(frozen=True, kw_only=True)
class BucketLook:
    """A bucket at a glance. owner: the run in its tags. uniform: all rights are of the whole bucket; only Google has
    others.
    """

    region: str
    owner: str | None
    uniform: bool = True


class Event(NamedTuple):
    """One log line. at_s: seconds since the epoch. cursor: the position to continue reading after it."""

    at_s: float
    text: str
    cursor: str


def of(kind: type[R], desired: Desired) -> R:
    """The desired resource as its own class. Raises Invalid for another kind."""
    if not isinstance(desired.resource, kind):
        raise Invalid(f"{desired.resource.address} is not a {kind.KIND}")
    return desired.resource


def text(value: Value) -> str:
    """A setting that must be known by now. Raises Invalid if it waits for another resource."""
    if not isinstance(value, str):
        raise Invalid(f"not known yet: {in_words(str(as_json(value)))!r}")
    return value


def owner_conflict(what: str, name: str, owner: str | None, remedy: str) -> Conflict:
    """The error for an existing resource that is not this run's. remedy: the alternative to another name."""
    return Conflict(f"the {what} {name} exists already and {ownership(owner)}: it is not changed; {remedy}")


def check_owner(observed: Observed, desired: Desired, what: str, remedy: str) -> None:
    """Raises Conflict unless the observed resource is this run's."""
    if observed.owner != desired.run:
        raise owner_conflict(what, desired.name, observed.owner, remedy)


def differing(desired: Desired, observed: Observed) -> frozenset[str]:
    """The settings that can be compared and differ."""
    return frozenset(
        name
        for name, value in desired.settings.items()
        if name in observed.settings and as_json(observed.settings[name]) != as_json(value)
    )


def tagged_record(
    kind: type[Resource], *, address: str, name: str, generation: str, region: str, outputs: Mapping[str, str]
) -> StateRecord:
    """The state record of a resource that was found by its tags. generation: as the tag has it."""
    return StateRecord(
        address=address,
        kind=kind.KIND,
        name=name,
        generation=int(generation) if generation.isdigit() else 0,
        region=region,
        life=kind.LIFE,
        brought=False,
        settings={},
        outputs=outputs,
        needs=(),
    )


def each(ask: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """The result of `ask` for every item, in parallel, in order. The first error is raised when all have ended."""
    if len(items) < 2:
        return [ask(item) for item in items]
    with ThreadPoolExecutor(min(_STREAMS, len(items)), thread_name_prefix="clouds") as pool:
        return list(pool.map(ask, items))


def wait_for(clock: Clock, what: str, deadline: float, ask: Callable[[], T | None]) -> T:
    """The first result of `ask` that is not None; pauses between calls grow.

    what: the condition, for the error. deadline: on the scale of `clock.now`. Raises NotYetVisible after it.
    """
    began = clock.now()
    try:
        return wait_until(clock, ask, deadline, _POLLING)
    except TimeoutError as error:
        if isinstance(error, SkerryError):
            raise
        raise NotYetVisible(
            f"timed out after {clock.now() - began:.0f} s, waiting until {what}; run the same command again"
        ) from error


def wait_visible(clock: Clock, what: str, read: Callable[[], T | None]) -> T:
    """The first result of `read` that is not None, within VISIBLE_S. what: the resource, for the error."""
    return wait_for(clock, f"{what} is visible", clock.now() + VISIBLE_S, read)


def wait_deleted(clock: Clock, what: str, read: Callable[[], object | None]) -> None:
    """Waits until `read` returns None, within VISIBLE_S. what: the resource, for the error."""
    wait_for(clock, f"{what} is deleted", clock.now() + VISIBLE_S, lambda: True if read() is None else None)


def bucket_of(run_uri: str, scheme: str) -> str | None:
    """The bucket in a run's URI; None for another scheme."""
    found_scheme, _, rest = run_uri.partition("://")
    return rest.partition("/")[0] or None if found_scheme == scheme else None


def split_run_uri(run_uri: str, scheme: str, cloud: str, store: str) -> tuple[str, str]:
    """Bucket and prefix of a run. Raises Invalid for another scheme. cloud, store: their names, for the error."""
    bucket = bucket_of(run_uri, scheme)
    prefix = run_uri.partition("://")[2].partition("/")[2]
    if not bucket or not prefix:
        raise Invalid(f"a run on {cloud} needs a store in {store}, not {run_uri}")
    return bucket, prefix.rstrip("/")


def count_contents(pages: Iterable[Sequence[Mapping[str, Any]]], size_key: str) -> Contents:
    """The contents of a bucket from its listing, counted up to some 10,000 objects; empty if it does not exist."""
    count, size = 0, 0
    with suppress(Absent):
        for number, page in enumerate(pages):
            if number == _COUNTED_PAGES:
                return Contents(objects=count, size_bytes=size, more=True)
            count += len(page)
            size += _size(page, size_key)
    return Contents(objects=count, size_bytes=size)


def delete_contents(
    first_page: Callable[[], Sequence[dict[str, Any]] | None],
    delete: Callable[[Sequence[dict[str, Any]]], None],
    size_key: str,
    progress: Callable[[Contents], None],
) -> Contents:
    """Deletes page after page, always listed from the start, because listed objects are deleted before the next call.

    Returns what was deleted; a bucket that does not exist is empty. progress: called after every page.
    """
    deleted = Contents(objects=0, size_bytes=0)
    with suppress(Absent):
        while page := first_page():
            delete(page)
            size = (deleted.size_bytes or 0) + _size(page, size_key)
            deleted = Contents(objects=deleted.objects + len(page), size_bytes=size)
            progress(deleted)
    return deleted


def check_empty(what: str, name: str, contents: Contents) -> None:
    """Raises Conflict if a resource that is to be deleted still holds data."""
    if contents.objects:
        raise Conflict(f"the {what} {name} holds {contents} and is not deleted; empty it if no other run needs them")


def ownership(owner: str | None) -> str:
    """The owner in a resource's tags, for people."""
    return "is not tagged as part of a run" if owner is None else f"belongs to the run {owner}"


def _size(page: Sequence[Mapping[str, Any]], size_key: str) -> int:
    return sum(int(entry.get(size_key, 0)) for entry in page)
