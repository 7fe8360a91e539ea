"""What all handlers here have in common: tags, whose a resource is, what differs, and asking about many at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from skerry.infra.graph import Resource, as_json
from skerry.infra.handler import ADDRESS_TAG, GENERATION_TAG, RUN_TAG, Made, Seen, Wanted
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from skerry.infra.graph import Value

T = TypeVar("T")
R = TypeVar("R", bound=Resource)
S = TypeVar("S")

PATH: Final = "/skerry/"
"""The path of all roles and profiles that are made: whoever may list it finds them without looking at all others."""

VISIBLE_S: Final = 60.0
"""How long a thing that was just made may stay invisible; IAM takes seconds."""

# IAM answers some 15 requests a second for a whole account before it throttles.
_STREAMS: Final = 8


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags as most services take them."""
    return [{"Key": key, "Value": tags[key]} for key in sorted(tags)]


def tags_in(listed: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The reverse of `tag_list`."""
    return {str(tag["Key"]): str(tag["Value"]) for tag in listed}


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
    with ThreadPoolExecutor(min(_STREAMS, len(items)), thread_name_prefix="aws") as pool:
        return list(pool.map(ask, items))


def found(kind: type[Resource], *, name: str, region: str, tags: Mapping[str, str], outputs: Mapping[str, str]) -> Made:
    """What is known of a resource that was found by its tags."""
    generation = tags.get(GENERATION_TAG, "0")
    return Made(
        address=tags.get(ADDRESS_TAG, f"{kind.KIND}.{name}"),
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


def owner_of(tags: Mapping[str, str]) -> str | None:
    """The run that these tags name."""
    return tags.get(RUN_TAG)
