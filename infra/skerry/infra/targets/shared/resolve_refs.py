"""Turns trees of request parameters, which may hold references to other resources, into what is sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from skerry.infra.provision.graph import Ref, in_words
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.infra.provision.graph import Value

Tree = dict[str, "Value"]


def ready(tree: Tree) -> dict[str, object]:
    """Return `tree` as it is sent. Raises Invalid if a value in it depends on a resource that does not exist yet."""
    return {name: _ready(value) for name, value in tree.items()}


def environment_list(environment: Value) -> list[Value]:
    """Return environment variables as a list of names and values, sorted by name."""
    if not isinstance(environment, Mapping):
        return []
    return [{"name": name, "value": environment[name]} for name in sorted(environment)]


def _ready(value: Value) -> object:
    match value:
        case Ref():
            raise Invalid(f"cannot send a request before this is known: {in_words(str(value))}")
        case Mapping():
            return {name: _ready(inner) for name, inner in value.items()}
        case str() | None | bool() | int() | float():
            return value
        case _:
            return [_ready(inner) for inner in value]
