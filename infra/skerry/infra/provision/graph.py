"""What a run needs of a cloud, as typed resources that name each other, and the order that follows from it.

A resource says what shall be; it never acts. A value that another resource will only have once it is made is a `Ref`.
Physical names follow from the run and the address, so that whoever lost its state finds its own again. Does no I/O.
"""

from __future__ import annotations

import dataclasses
import enum
import graphlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

from typing_extensions import TypeAliasType

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterable

_NOT_A_NAME: Final = re.compile(r"[^a-z0-9]+")
# Digits of a name's digest, enough to tell the groups of one run apart.
_DIGEST: Final = 6

if TYPE_CHECKING:
    Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
else:  # what reads documents by annotations follows a type into itself by its name
    Json = TypeAliasType("Json", "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None")


@dataclass(frozen=True, kw_only=True)
class Ref:
    """A value that another resource has once it exists: an ARN, an id. before, after: text around it."""

    address: str
    output: str
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        return f"{self.before}${{{self.address}.{self.output}}}{self.after}"


Text: TypeAlias = str | Ref
Value: TypeAlias = "bool | int | float | str | Ref | Sequence[Value] | Mapping[str, Value] | None"


class Life(enum.Enum):
    """How a resource begins and ends."""

    OWNED = "owned"
    """Made by apply, deleted by destroy."""
    DATA = "data"
    """As OWNED, but it holds what cannot be made again: never replaced, deleted with its contents only on request."""
    SHARED = "shared"
    """Made if it is missing, and left for others to use: never changed, never deleted."""
    JOB = "job"
    """Runs to an end: finished is as wanted, lost is made again as the next generation."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """A permission that a resource gives, as a reader of a plan wants it told."""

    who: str
    may: str
    on: str


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One thing in a cloud. Subclasses add its settings: plain values, `Ref`, nested dataclasses, tuples, mappings.

    key: unique within its kind. name: what the cloud calls its first generation. why: what it is for, in a few words.
    brought: the user's own: it is used and checked, never changed or deleted. region: where it lives; "" is everywhere.
    after: addresses that must exist first although no field names them.
    """

    KIND: ClassVar[str]
    """The first part of an address: aws_bucket."""
    LIFE: ClassVar[Life] = Life.OWNED
    FIXED: ClassVar[frozenset[str]] = frozenset()
    """Fields whose change needs a new one in its place; others are updated where it stands."""
    ALONE: ClassVar[bool] = False
    """Two generations cannot live side by side: the old one is deleted before the new one is made.

    So nothing may refer to it: it would be left without.
    """

    key: str
    name: str
    region: str
    why: str = ""
    brought: bool = False
    after: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """Its name in plans, state and references."""
        return f"{self.KIND}.{self.key}"

    def ref(self, output: str, *, before: str = "", after: str = "") -> Ref:
        """A value of it that is known once it exists."""
        return Ref(address=self.address, output=output, before=before, after=after)

    def settings(self) -> dict[str, Value]:
        """What shall hold of it: the fields that a subclass adds, and the region, as plain values and refs."""
        own = {field.name for field in dataclasses.fields(Resource)} - {"region"}
        return {
            field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self) if field.name not in own
        }

    def needs(self) -> frozenset[str]:
        """Addresses of what must exist before it."""
        return frozenset(self.after) | {ref.address for ref in refs(self.settings())}

    def grants(self) -> tuple[Grant, ...]:
        """The permissions it gives, for people."""
        return ()


class Graph:
    """Resources in an order in which they can be made.

    What several have a share in is given by each of them, and is one thing. Raises Invalid if two have one address, or
    if one is missing, in a cycle, or refers to what is ALONE.
    """

    def __init__(self, resources: Iterable[Resource]) -> None:
        found: dict[str, Resource] = {}
        for resource in resources:
            if found.setdefault(resource.address, resource) != resource:
                raise Invalid(f"two resources have the address {resource.address}")
        self.needs = {address: resource.needs() for address, resource in found.items()}
        for address, needed in self.needs.items():
            if missing := needed - found.keys():
                raise Invalid(f"{address} refers to what is not there: {', '.join(sorted(missing))}")
            if alone := [one for one in sorted(needed) if found[one].ALONE]:
                raise Invalid(f"{address} refers to {', '.join(alone)}, which goes before another is made of it")
        try:
            # Sorted: a set of strings has another order in every process, and a plan is to be the same in all.
            ordered = {address: sorted(needed) for address, needed in self.needs.items()}
            order = tuple(graphlib.TopologicalSorter(ordered).static_order())
        except graphlib.CycleError as error:
            circle: Sequence[str] = error.args[1]
            raise Invalid(f"resources wait for each other: {' -> '.join(reversed(circle))}") from error
        self._resources = {address: found[address] for address in order}

    def __iter__(self) -> Iterator[Resource]:
        return iter(self._resources.values())

    def __len__(self) -> int:
        return len(self._resources)

    def get(self, address: str) -> Resource | None:
        """The resource at this address."""
        return self._resources.get(address)

    def part(self, addresses: Iterable[str]) -> Graph:
        """These resources and what they need. Raises Invalid for one that is not there."""
        more = set(addresses)
        if unknown := sorted(more - self._resources.keys()):
            raise Invalid(f"the spec has no resource {', '.join(unknown)}; `skerry plan` names them all")
        taken: set[str] = set()
        while more:
            taken |= more
            more = {needed for address in more for needed in self.needs[address]} - taken
        return Graph(resource for resource in self if resource.address in taken)


def generation_name(name: str, generation: int) -> str:
    """What the cloud calls this generation of a resource."""
    return f"{name}-g{generation}" if generation else name


def short_name(text: str, longest: int) -> str:
    """At most `longest` of a-z, 0-9 and - for what people call `text`; two texts never have the same.

    It begins with a letter if `text` does.
    """
    plain = _NOT_A_NAME.sub("-", text.lower()).strip("-")
    if plain == text and len(text) <= longest:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]
    return f"{plain[: longest - _DIGEST - 1].strip('-')}-{digest}".strip("-")


def refs(value: Value) -> Iterator[Ref]:
    """Every reference in `value`."""
    match value:
        case Ref():
            yield value
        case Mapping():
            for inner in value.values():
                yield from refs(inner)
        case str() | None | bool() | int() | float():
            return
        case _:
            for inner in value:
                yield from refs(inner)


def resolved(value: Value, look_up: Callable[[Ref], str | None]) -> Value:
    """`value` with every reference replaced by what `look_up` gives for it; by itself if that is None."""
    match value:
        case Ref():
            known = look_up(value)
            return value if known is None else f"{value.before}{known}{value.after}"
        case Mapping():
            return {name: resolved(inner, look_up) for name, inner in value.items()}
        case str() | None | bool() | int() | float():
            return value
        case _:
            return [resolved(inner, look_up) for inner in value]


def as_json(value: Value) -> Json:
    """`value` for a document; a reference is told as ${address.output}."""
    match value:
        case Ref():
            return str(value)
        case Mapping():
            return {name: as_json(inner) for name, inner in value.items()}
        case str() | None | bool() | int() | float():
            return value
        case _:
            return [as_json(inner) for inner in value]


def _plain(value: object) -> Value:
    if isinstance(value, Ref | str | None | bool | int | float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, frozenset):
        return sorted(str(inner) for inner in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    raise TypeError(f"not a setting: {type(value).__name__}")
