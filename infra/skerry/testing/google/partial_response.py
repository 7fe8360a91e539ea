"""Reduces a response to the fields that the parameter `fields` selects. A pure function.

Source: "Use partial responses" (Cloud Storage JSON API): names with commas between, a/b or a(b,c) further in, *.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from skerry.testing.google.refusals import invalid

_WORD: Final = re.compile(r"[A-Za-z_][\w.-]*|[*/(),]")


def partial(response: Any, fields: str) -> Any:
    """Return the response with only these fields. Raises Refusal for an invalid selection."""
    tokens = _WORD.findall(fields)
    if "".join(tokens) != fields.replace(" ", ""):
        raise invalid(f"Invalid field selection {fields}", "fields")
    tree, rest = _parse(tokens, fields)
    if rest:
        raise invalid(f"Invalid field selection {fields}", "fields")
    return _select(response, tree)


_Tree = dict[str, Any]


def _parse(tokens: list[str], fields: str) -> tuple[_Tree, list[str]]:
    """Parse a selection into a tree of names; an empty tree selects everything."""
    tree: _Tree = {}
    while tokens:
        name, *tokens = tokens
        if name in "/(),":
            raise invalid(f"Invalid field selection {fields}", "fields")
        below: _Tree = {}
        subtree = tree.setdefault(name, below)
        while tokens[:1] == ["/"]:
            name, *tokens = tokens[1:] or [")"]
            if name in "/(),":
                raise invalid(f"Invalid field selection {fields}", "fields")
            subtree = subtree.setdefault(name, {})
        if tokens[:1] == ["("]:
            inner, tokens = _parse(tokens[1:], fields)
            if tokens[:1] != [")"]:
                raise invalid(f"Invalid field selection {fields}", "fields")
            subtree |= inner
            tokens = tokens[1:]
        if tokens[:1] != [","]:
            break
        tokens = tokens[1:]
    return tree, tokens


def _select(response: Any, tree: _Tree) -> Any:
    if not tree:
        return response
    if isinstance(response, list):
        return [_select(child, tree) for child in cast("list[Any]", response)]
    if not isinstance(response, Mapping):
        return response
    fields_by_name = cast("Mapping[str, Any]", response)
    if "*" in tree:
        return {name: _select(child, tree["*"]) for name, child in fields_by_name.items()}
    return {name: _select(fields_by_name[name], below) for name, below in tree.items() if name in fields_by_name}
