"""The cloud resources of a run as a typed graph: resources, references between them, and their dependency order.

A resource describes the desired state and never acts. A value that another resource has only once it is created is a
`Ref`. Physical names are derived from the run and the address, so that resources are found again without the state.
Does no I/O.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import graphlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

from typing_extensions import TypeAliasType

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_NOT_A_NAME: Final = re.compile(r"[^a-z0-9]+")
# As `Ref` writes one; ${HOME} in a variable of the user's is none.
_REFERENCE: Final = re.compile(r"\$\{([a-z0-9_]+\.[^{}]+)\.([a-z0-9_]+)\}")
# Digits of a name's digest, enough to distinguish the groups of one run.
_DIGEST: Final = 6

if TYPE_CHECKING:
    Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
else:  # pydantic needs a named alias to resolve a recursive type
    Json = TypeAliasType("Json", "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None")


@dataclass(frozen=True, kw_only=True)
class Ref:
    """A reference to an output (an ARN, an id) of another resource. before, after: text around the output."""

    address: str
    output: str
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        return f"{self.before}${{{self.address}.{self.output}}}{self.after}"


Text: TypeAlias = str | Ref
Value: TypeAlias = "bool | int | float | str | Ref | Sequence[Value] | Mapping[str, Value] | None"


class Life(enum.Enum):
    """The life cycle of a resource."""

    OWNED = "owned"
    """Created by apply, deleted by destroy."""
    DATA = "data"
    """As OWNED, but holds data: never replaced, and deleted with its contents only on request."""
    SHARED = "shared"
    """Created if missing, and shared with other runs: never changed, never deleted."""
    JOB = "job"
    """Runs to an end: a finished one is kept, a lost one is created again as the next generation."""


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One cloud resource. Subclasses add its settings: plain values, `Ref`, nested dataclasses, tuples, mappings.

    key: unique within its kind. name: the physical name of its first generation. why: its purpose, in a few words.
    brought: it is the user's own: used and checked, never changed or deleted. region: "" for a global resource.
    after: addresses that must exist first although no setting references them.
    """

    KIND: ClassVar[str]
    """The first part of an address: aws_bucket."""
    LIFE: ClassVar[Life] = Life.OWNED
    FIXED: ClassVar[frozenset[str]] = frozenset()
    """Fields whose change forces replacement; others are updated in place."""
    PROTECTS: ClassVar[frozenset[str]] = frozenset()
    """Settings without which the records of a run are not protected in it; every run that uses it needs them."""
    DEMANDED: ClassVar[frozenset[str]] = frozenset()
    """Settings that the spec demands of it even if it belongs to another run, or is the user's own."""
    ALONE: ClassVar[bool] = False
    """Two generations cannot coexist: the old one is deleted before the new one is created.

    So no resource may reference it.
    """
    SINGLE: ClassVar[bool] = False
    """Others know it by its name alone, which all generations have. So there is one generation in a region at a time:
    an interrupted deletion is taken back, and it is not replaced."""
    OF_KIND: ClassVar[dict[str, type[Resource]]] = {}
    """Every subclass by its kind: a record in the state has only the kind."""

    key: str
    name: str
    region: str
    why: str = ""
    brought: bool = False
    after: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The name in plans, state and references."""
        return f"{self.KIND}.{self.key}"

    def ref(self, output: str, *, before: str = "", after: str = "") -> Ref:
        """A reference to one of its outputs."""
        return Ref(address=self.address, output=output, before=before, after=after)

    def settings(self) -> dict[str, Value]:
        """The desired settings: the fields that a subclass adds, and the region, as plain values and refs."""
        return dict(self._settings)

    def needs(self) -> frozenset[str]:
        """Addresses of the resources that must exist first."""
        return self._needs

    # A plan asks for both several times, and a run may have thousands of resources.
    @functools.cached_property
    def _settings(self) -> Mapping[str, Value]:
        own = {field.name for field in dataclasses.fields(Resource)} - {"region"}
        return {
            field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self) if field.name not in own
        }

    @functools.cached_property
    def _needs(self) -> frozenset[str]:
        return frozenset(self.after) | {ref.address for ref in refs(self._settings)}

    def __init_subclass__(cls) -> None:
        """Register the kind."""
        if "KIND" in cls.__dict__:
            Resource.OF_KIND[cls.KIND] = cls

    @classmethod
    def refusal(cls, setting: str, before: Json, after: Json, /) -> str | None:
        """Returns the reason not to change this setting so, with what to do instead; None if an update may."""
        del setting, before, after
        return None

    @classmethod
    def rights(cls, name: str, settings: Mapping[str, Json], /) -> Mapping[str, Json]:
        """The documents that grant permissions, for plans, by a title that names the principal.

        name: physical. settings: all of a resource, or those that a state recorded; some may be missing.
        """
        del name, settings
        return {}


class Graph:
    """Resources in dependency order.

    Equal resources with one address are one resource. Raises Invalid if two different ones have one address, or if one
    is missing, in a cycle, or references one that is ALONE.
    """

    def __init__(self, resources: Iterable[Resource]) -> None:
        by_address: dict[str, Resource] = {}
        for resource in resources:
            if by_address.setdefault(resource.address, resource) != resource:
                raise Invalid(f"two different resources have the address {resource.address}")
        self.needs = {address: resource.needs() for address, resource in by_address.items()}
        for address, needed in self.needs.items():
            if missing := needed - by_address.keys():
                raise Invalid(f"{address} references missing resources: {', '.join(sorted(missing))}")
            if alone := [target for target in sorted(needed) if by_address[target].ALONE]:
                raise Invalid(
                    f"{address} references {', '.join(alone)}, which is destroyed before it is replaced; "
                    "nothing may reference such a resource"
                )
        try:
            # Sorted, because a set of strings has another order in every process, and plans must be equal in all.
            ordered = {address: sorted(needed) for address, needed in self.needs.items()}
            order = tuple(graphlib.TopologicalSorter(ordered).static_order())
        except graphlib.CycleError as error:
            cycle: Sequence[str] = error.args[1]
            raise Invalid(f"dependency cycle between resources: {' -> '.join(reversed(cycle))}") from error
        self._resources = {address: by_address[address] for address in order}

    def __iter__(self) -> Iterator[Resource]:
        return iter(self._resources.values())

    def __len__(self) -> int:
        return len(self._resources)

    def get(self, address: str) -> Resource | None:
        """The resource at this address."""
        return self._resources.get(address)

    def bringing(self, addresses: Collection[str]) -> Graph:
        """The same graph, in which these resources are not the run's own: they are used, and never changed."""
        return Graph(
            dataclasses.replace(resource, brought=True) if resource.address in addresses else resource
            for resource in self
        )

    def part(self, addresses: Iterable[str]) -> Graph:
        """These resources and the ones that they need. Raises Invalid for an unknown address."""
        added = set(addresses)
        if unknown := sorted(added - self._resources.keys()):
            raise Invalid(f"the spec has no resource {', '.join(unknown)}; run `skerry plan` to list them")
        selected: set[str] = set()
        while added:
            selected |= added
            added = {needed for address in added for needed in self.needs[address]} - selected
        return Graph(resource for resource in self if resource.address in selected)


def generation_name(name: str, generation: int) -> str:
    """The physical name of this generation of a resource."""
    return f"{name}-g{generation}" if generation else name


def short_name(text: str, longest: int) -> str:
    """`text` in at most `longest` characters of a-z, 0-9 and -; different texts give different names.

    Starts with a letter if `text` does.
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
    """`value` with each reference replaced by its output; one for which `look_up` returns None stays."""
    match value:
        case Ref():
            output = look_up(value)
            return value if output is None else f"{value.before}{output}{value.after}"
        case Mapping():
            return {name: resolved(inner, look_up) for name, inner in value.items()}
        case str() | None | bool() | int() | float():
            return value
        case _:
            return [resolved(inner, look_up) for inner in value]


def as_json(value: Value) -> Json:
    """`value` as JSON; a reference is written ${address.output}."""
    match value:
        case Ref():
            return str(value)
        case Mapping():
            return {name: as_json(inner) for name, inner in value.items()}
        case str() | None | bool() | int() | float():
            return value
        case _:
            return [as_json(inner) for inner in value]


def in_words(text: str) -> str:
    """The text, with references to values that do not exist yet in words: "(arn of aws_role.b-0)"."""
    return _REFERENCE.sub(r"(\2 of \1)", text)


def without_references(value: Json, *, unknown: Callable[[str], Json]) -> Json:
    """`value`, with each text that has references replaced by `unknown` of it in words; keys stay texts."""
    match value:
        case str():
            words = in_words(value)
            return value if words == value else unknown(words)
        case None | bool() | int() | float():
            return value
        case Mapping():
            return {in_words(name): without_references(inner, unknown=unknown) for name, inner in value.items()}
        case _:
            return [without_references(inner, unknown=unknown) for inner in value]


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
