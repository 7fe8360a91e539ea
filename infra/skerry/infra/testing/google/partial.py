"""Partial responses: what the parameter `fields` leaves of an answer. A pure function.

Source: "Use partial responses" (Cloud Storage JSON API): names with commas between, a/b or a(b,c) further in, *.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

from skerry.infra.testing.google.refusals import invalid

_WORD: Final = re.compile(r"[A-Za-z_][\w.-]*|[*/(),]")


def partial(told: Any, fields: str) -> Any:
    """The answer with nothing else in it. Raises Refusal for fields that cannot be read."""
    words = _WORD.findall(fields)
    if "".join(words) != fields.replace(" ", ""):
        raise invalid(f"Invalid field selection {fields}", "fields")
    tree, rest = _tree(words, fields)
    if rest:
        raise invalid(f"Invalid field selection {fields}", "fields")
    return _kept(told, tree)


_Tree = dict[str, Any]


def _tree(words: list[str], fields: str) -> tuple[_Tree, list[str]]:
    """What is wanted, by name; empty is all of it."""
    tree: _Tree = {}
    while words:
        name, *words = words
        if name in "/(),":
            raise invalid(f"Invalid field selection {fields}", "fields")
        below: _Tree = {}
        at = tree.setdefault(name, below)
        while words[:1] == ["/"]:
            name, *words = words[1:] or [")"]
            if name in "/(),":
                raise invalid(f"Invalid field selection {fields}", "fields")
            at = at.setdefault(name, {})
        if words[:1] == ["("]:
            inner, words = _tree(words[1:], fields)
            if words[:1] != [")"]:
                raise invalid(f"Invalid field selection {fields}", "fields")
            at |= inner
            words = words[1:]
        if words[:1] != [","]:
            break
        words = words[1:]
    return tree, words


def _kept(told: Any, tree: _Tree) -> Any:
    if not tree:
        return told
    if isinstance(told, list):
        return [_kept(one, tree) for one in cast("list[Any]", told)]
    if not isinstance(told, Mapping):
        return told
    every = cast("Mapping[str, Any]", told)
    if "*" in tree:
        return {name: _kept(one, tree["*"]) for name, one in every.items()}
    return {name: _kept(every[name], below) for name, below in tree.items() if name in every}
