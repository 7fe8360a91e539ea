"""Server-side apply: merges what a manager applies, and refuses fields that another manager owns and has changed.

A field is a path of names; an element of a list with a merge key is named by that key. Other lists are one field.
Source: Kubernetes, "Server-Side Apply", "Merge strategy".
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from skerry.testing.kubernetes.refusals import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# The lists whose elements are merged, and the field that names an element.
_MERGE_KEYS: Final = {
    "containers": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}
# References and selectors are written as a whole, so each is one field.
_ATOMIC: Final = frozenset(
    {"fieldRef", "resourceFieldRef", "secretKeyRef", "configMapKeyRef", "nodeSelector", "selector"}
)
_NOT_FIELDS: Final = {
    (".metadata", ".managedFields"),
    (".apiVersion",),
    (".kind",),
    (".status",),
    (".metadata", ".name"),
    (".metadata", ".namespace"),
}
Path = tuple[str, ...]
Manager = tuple[str, str]
"""The name of a manager, and how it writes: Apply or Update."""


@dataclass
class FieldOwners:
    """The owners of the fields of one object."""

    owners: dict[Path, set[Manager]] = field(default_factory=dict[Path, "set[Manager]"])

    def apply(
        self, live: Mapping[str, Any], applied: Mapping[str, Any], manager: str, version: str, *, force: bool
    ) -> dict[str, Any]:
        """The object after an apply. Refuses it, and changes nothing, if it conflicts with other managers."""
        own: Manager = (manager, "Apply")
        wanted, existing = dict(_leaves(applied)), dict(_leaves(live))
        conflicts = {
            path: sorted(self.owners.get(path, set()) - {own})
            for path, value in wanted.items()
            if path in existing and existing[path] != value and self.owners.get(path, set()) - {own}
        }
        if conflicts and not force:
            raise Refused(409, _conflict_text(conflicts, version))
        result = _merged(live, applied)
        for path in [path for path, owners in self.owners.items() if own in owners and path not in wanted]:
            self.owners[path].discard(own)
            if not self.owners[path]:
                del self.owners[path]
                _remove(result, path)
        for path in wanted:
            others = set[Manager]() if path in conflicts else self.owners.get(path, set())
            self.owners[path] = others | {own}
        return result

    def managed_fields(self, version: str) -> list[dict[str, Any]]:
        """The entries of `metadata.managedFields`, one for each manager. Source: the API's FieldsV1."""
        entries: dict[Manager, dict[str, Any]] = {}
        for path, managers in self.owners.items():
            for manager in managers:
                place = entries.setdefault(manager, {})
                for part in path:
                    place = place.setdefault(_fields_name(part), {})
        return [
            {"manager": name, "operation": how, "apiVersion": version, "fieldsType": "FieldsV1", "fieldsV1": fields}
            for (name, how), fields in sorted(entries.items())
        ]

    def update(self, before: Mapping[str, Any], after: Mapping[str, Any], manager: str) -> None:
        """A manager wrote an object without apply: it owns what it changed."""
        old = dict(_leaves(before))
        for path, value in _leaves(after):
            if old.get(path) != value:
                self.owners[path] = {(manager, "Update")}


def _fields_name(part: str) -> str:
    """A part of a path in FieldsV1: f:NAME, or k:{"KEY":"VALUE"} for an element of a list."""
    if part.startswith("."):
        return f"f:{part[1:]}"
    key, _, text = part[1:-1].partition("=")
    return f'k:{{"{key}":{text}}}'


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if path in _NOT_FIELDS:
        return
    if isinstance(value, dict) and value and not (path and path[-1].removeprefix(".") in _ATOMIC):
        for name, inner in cast("dict[str, Any]", value).items():
            yield from _leaves(inner, (*path, f".{name}"))
    elif isinstance(value, list) and (key := _MERGE_KEYS.get(path[-1].removeprefix("."))) is not None:
        for inner in cast("list[dict[str, Any]]", value):
            yield from _leaves(inner, (*path, f'[{key}="{inner[key]}"]'))
    else:
        yield path, value


def _merged(live: Any, applied: Any, name: str = "") -> Any:
    if isinstance(live, dict) and isinstance(applied, dict) and name not in _ATOMIC:
        result = dict(cast("dict[str, Any]", live))
        for inner, value in cast("dict[str, Any]", applied).items():
            result[inner] = _merged(result.get(inner), value, inner)
        return result
    key = _MERGE_KEYS.get(name)
    if key is not None and isinstance(live, list) and isinstance(applied, list):
        rows = {row[key]: row for row in cast("list[dict[str, Any]]", live)}
        for row in cast("list[dict[str, Any]]", applied):
            rows[row[key]] = _merged(rows.get(row[key]), row)
        return list(rows.values())
    return copy.deepcopy(applied)


def _remove(value: Any, path: Path) -> None:
    """Remove a field; elements of lists that have become empty stay."""
    for part in path[:-1]:
        if part.startswith("."):
            value = value.get(part[1:])
        else:
            key, _, text = part[1:-1].partition("=")
            value = next((row for row in value if str(row.get(key)) == text.strip('"')), None)
        if value is None:
            return
    if isinstance(value, dict):
        cast("dict[str, Any]", value).pop(path[-1][1:], None)


def _conflict_text(conflicts: Mapping[Path, list[Manager]], version: str) -> str:
    """The server's words: one line for one field, a list for several."""
    fields = ["".join(path) for path in conflicts]
    names = sorted({name for managers in conflicts.values() for name, _ in managers})
    who = ", ".join(f'"{name}" using {version}' for name in names)
    if len(fields) == 1:
        return f"Apply failed with 1 conflict: conflict with {who}: {fields[0]}"
    return f"Apply failed with {len(fields)} conflicts: conflicts with {who}:\n- " + "\n- ".join(fields)
