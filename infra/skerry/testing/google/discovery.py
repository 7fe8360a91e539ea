"""What Google's discovery documents allow: which method a request is, and whether it may hold what it holds.

The documents are those that google-api-python-client ships; nothing here knows a service. What they do not list is
wrong: an unknown method, parameter, field or enum value, a value of another type, a field that is only output.
Google ignores some of that; a test must not, because what is ignored is not done.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The documents are JSON.

from __future__ import annotations

import base64
import binascii
import datetime as dt
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PLACE: Final = re.compile(r"\{(\+?)(\w+)\}")
_DURATION: Final = re.compile(r"-?\d+(\.\d{1,9})?s")
_INTEGER: Final = re.compile(r"-?\d+")
_MASK: Final = re.compile(r"[A-Za-z_][\w.*]*(,[A-Za-z_][\w.*]*)*")
_OUTPUT_ONLY: Final = re.compile(r"^(\[)?Output[ -]only", re.IGNORECASE)
# What gapic clients add to every request.
_EVERYWHERE: Final = {"$alt": {"type": "string"}, "$prettyPrint": {"type": "string"}}


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of a service. id: as the document names it, `iam.projects.serviceAccounts.create`."""

    id: str
    document: Document
    http: str
    shape: re.Pattern[str]
    names: re.Pattern[str]
    told: Mapping[str, Any]

    @property
    def service(self) -> str:
        """`iam` and so on."""
        return self.document.name

    def named(self, path: str) -> dict[str, str] | None:
        """The parameters in a raw path; None if it is no path of this method."""
        if self.shape.fullmatch(path) is None or (found := self.names.fullmatch(path)) is None:
            return None
        return {name: unquote(value) for name, value in found.groupdict().items()}

    def wrong(self, names: Mapping[str, str], query: Mapping[str, Sequence[str]], body: object) -> Iterator[str]:
        """What a request of this method must not be, in words; nothing if it is good. body: None if there is none."""
        known: Mapping[str, Any] = self.told.get("parameters", {})
        for name, value in names.items():
            pattern = known[name].get("pattern")
            if pattern is not None and re.search(pattern, value) is None:
                yield f"{name}={value} is not of the form {pattern}"
        allowed = {**self.document.parameters, **_EVERYWHERE}
        allowed |= {name: one for name, one in known.items() if one["location"] == "query"}
        for name, values in query.items():
            if name not in allowed:
                yield f"unknown parameter {name}"
                continue
            if len(values) > 1 and not allowed[name].get("repeated"):
                yield f"parameter {name} is given {len(values)} times"
            for value in values:
                yield from _text_wrong(f"parameter {name}", value, allowed[name])
        for name, one in known.items():
            if one.get("required") and one["location"] == "query" and name not in query:
                yield f"missing parameter {name}"
        yield from self._body_wrong(body, ints_for_enums="enum-encoding=int" in "".join(query.get("$alt", ())))

    def _body_wrong(self, body: object, *, ints_for_enums: bool) -> Iterator[str]:
        request = self.told.get("request")
        if request is None:
            if body not in (None, {}):
                yield "this method takes no body"
            return
        check = _Check(self.document.schemas, ints_for_enums=ints_for_enums, is_whole=self.http == "POST")
        yield from check.wrong({} if body is None else body, request, "")


class Document:
    """One service's document, read once."""

    def __init__(self, service: str, version: str) -> None:
        """Raises FileNotFoundError if Google publishes none of this name."""
        import googleapiclient  # noqa: PLC0415  for its documents only; its code is not run

        folder = Path(str(googleapiclient.__path__[0])) / "discovery_cache" / "documents"
        read: dict[str, Any] = json.loads((folder / f"{service}.{version}.json").read_text())
        self.name: Final = service
        self.parameters: Final[Mapping[str, Any]] = read["parameters"]
        self.schemas: Final[Mapping[str, Any]] = read["schemas"]
        self._root: Final = "/" + read.get("servicePath", "")
        self.methods: Final = tuple(self._all(read))

    def match(self, http: str, path: str) -> tuple[Method, dict[str, str]] | None:
        """The method that a request is, with the parameters of its path."""
        for method in self.methods:
            if method.http == http and (names := method.named(path)) is not None:
                return method, names
        return None

    def knows(self, path: str) -> bool:
        """Whether any method has this path."""
        return any(method.named(path) is not None for method in self.methods)

    def _all(self, part: Mapping[str, Any]) -> Iterator[Method]:
        for told in part.get("methods", {}).values():
            yield Method(
                id=told["id"],
                document=self,
                http=told["httpMethod"],
                shape=_pattern(self._root + told.get("flatPath", told["path"]), named=False),
                names=_pattern(self._root + told["path"], named=True),
                told=told,
            )
        for below in part.get("resources", {}).values():
            yield from self._all(below)


@functools.cache
def document(service: str, version: str) -> Document:
    """Read once in a process."""
    return Document(service, version)


def _pattern(path: str, *, named: bool) -> re.Pattern[str]:
    """A path with {name}, one part, and {+name}, any number of parts.

    A colon begins a verb, but for those in the names of objects and in digests of images.
    """
    text, at = "", 0
    part = "[^/]+" if "/b/{" in path else "[^/:]+(?:@sha256:[0-9a-f]+)?"
    for place in _PLACE.finditer(path):
        text += re.escape(path[at : place.start()])
        one = ".+" if place[1] else part
        text += f"(?P<{place[2]}>{one})" if named else one
        at = place.end()
    return re.compile(text + re.escape(path[at:]))


class _Check:
    """One body against its schema. is_whole: what the document calls required has to be there."""

    def __init__(self, schemas: Mapping[str, Any], *, ints_for_enums: bool, is_whole: bool) -> None:
        self._schemas = schemas
        self._ints_for_enums = ints_for_enums
        self._is_whole = is_whole

    def wrong(self, value: object, schema: Mapping[str, Any], where: str) -> Iterator[str]:
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"]]
        match schema.get("type", "any"):
            case "object":
                yield from self._object_wrong(value, schema, where)
            case "array":
                if not isinstance(value, list):
                    yield f"{where or 'the body'} is no list"
                    return
                for number, one in enumerate(value):
                    yield from self.wrong(one, schema["items"], f"{where}[{number}]")
            case "any":
                pass
            case _:
                if self._ints_for_enums and "enum" in schema and isinstance(value, int):
                    return
                if (fault := _value_wrong(value, schema)) is not None:
                    yield f"{where}: {fault}"

    def _inner_wrong(self, value: object, schema: Mapping[str, Any], where: str) -> Iterator[str]:
        if value is not None:  # null removes a field
            yield from self.wrong(value, schema, where)

    def _object_wrong(self, value: object, schema: Mapping[str, Any], where: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where or 'the body'} is no object"
            return
        known: Mapping[str, Any] = schema.get("properties", {})
        others = schema.get("additionalProperties")
        for name, one in value.items():
            at = f"{where}.{name}" if where else str(name)
            if name in known:
                if _is_output(known[name]):
                    yield f"{at} is only output"
                else:
                    yield from self._inner_wrong(one, known[name], at)
            elif others is not None:
                yield from self._inner_wrong(one, others, at)
            else:
                yield f"unknown field {at}"
        if self._is_whole and not where:  # further in, a default may stand elsewhere, as that of a log entry's resource
            for name, one in known.items():
                if name not in value and one.get("description", "").startswith("Required."):
                    yield f"missing field {name}"


def _is_output(schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("readOnly")) or _OUTPUT_ONLY.match(schema.get("description", "")) is not None


def _text_wrong(what: str, value: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """A parameter, which is always text."""
    match schema.get("type"):
        case "boolean":
            good = value in {"true", "false"}
        case "integer" | "number":
            good = _INTEGER.fullmatch(value) is not None
        case _:
            if (fault := _value_wrong(value, schema)) is not None:
                yield f"{what}: {fault}"
            return
    if not good:
        yield f"{what}: {value!r} is no {schema['type']}"


def _value_wrong(value: object, schema: Mapping[str, Any]) -> str | None:
    """What is wrong with one value that is neither a list nor an object; None if nothing is."""
    match schema.get("type"):
        case "boolean":
            return None if isinstance(value, bool) else f"{value!r} is no boolean"
        case "integer":
            return None if isinstance(value, int) and not isinstance(value, bool) else f"{value!r} is no integer"
        case "number":
            return None if isinstance(value, int | float) and not isinstance(value, bool) else f"{value!r} is no number"
        case _:
            return _string_wrong(value, schema)


def _string_wrong(value: object, schema: Mapping[str, Any]) -> str | None:
    form = schema.get("format")
    if form in {"int64", "uint64"} and isinstance(value, int) and not isinstance(value, bool):
        return None  # JSON of protobuf takes both
    if not isinstance(value, str):
        return f"{value!r} is no string"
    if "enum" in schema and value not in schema["enum"]:
        return f"{value!r} is none of {', '.join(schema['enum'])}"
    good = True
    match form:
        case "int64" | "uint64":
            good = _INTEGER.fullmatch(value) is not None
        case "google-duration":
            good = _DURATION.fullmatch(value) is not None
        case "google-fieldmask":
            good = _MASK.fullmatch(value) is not None
        case "byte":
            good = _is_base64(value)
        case "date-time" | "google-datetime":
            good = _is_time(value)
        case _:
            pass
    return None if good else f"{value!r} is no {form}"


def _is_base64(value: str) -> bool:
    try:
        base64.b64decode(value.replace("-", "+").replace("_", "/") + "=" * (-len(value) % 4), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _is_time(value: str) -> bool:
    try:
        return dt.datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False
