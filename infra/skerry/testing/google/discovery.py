"""Matches requests with the methods of Google's discovery documents and checks their parameters and bodies.

The documents are those of google-api-python-client; nothing here is specific to a service. Everything that they do not
list is a problem: an unknown method, parameter, field or enum value, a value of another type, an output-only field.
Google ignores some of these; a test must not, because Google does not do what it ignores.
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
# Parameters that gapic clients add to every request.
_COMMON_PARAMETERS: Final = {"$alt": {"type": "string"}, "$prettyPrint": {"type": "string"}}


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of a service. id: as in the document, `iam.projects.serviceAccounts.create`.

    flat_path: the path with a {name} for each segment. named_path: with {name} and {+name} for the parameters.
    """

    id: str
    document: Document
    http: str
    flat_path: str
    named_path: str
    definition: Mapping[str, Any]

    @property
    def service(self) -> str:
        """The service, such as `iam`."""
        return self.document.name

    def named(self, path: str) -> dict[str, str] | None:
        """Return the parameters in a raw path; None if it is not a path of this method."""
        if "{+" not in self.flat_path and path.count("/") != self.flat_path.count("/"):
            return None
        if self._shape.fullmatch(path) is None or (match := self._names.fullmatch(path)) is None:
            return None
        return {name: unquote(value) for name, value in match.groupdict().items()}

    # Compiled when they are used: a service has a thousand methods, and a test calls a few.
    @functools.cached_property
    def _shape(self) -> re.Pattern[str]:
        return _pattern(self.flat_path, named=False)

    @functools.cached_property
    def _names(self) -> re.Pattern[str]:
        return _pattern(self.named_path, named=True)

    def problems(self, names: Mapping[str, str], query: Mapping[str, Sequence[str]], body: object) -> Iterator[str]:
        """Yield the problems of a request of this method. body: None without a body."""
        known: Mapping[str, Any] = self.definition.get("parameters", {})
        for name, value in names.items():
            pattern = known[name].get("pattern")
            if pattern is not None and re.search(pattern, value) is None:
                yield f"{name}={value} does not match {pattern}"
        allowed = {**self.document.parameters, **_COMMON_PARAMETERS}
        allowed |= {name: parameter for name, parameter in known.items() if parameter["location"] == "query"}
        for name, values in query.items():
            if name not in allowed:
                yield f"unknown parameter {name}"
                continue
            if len(values) > 1 and not allowed[name].get("repeated"):
                yield f"parameter {name} is given {len(values)} times"
            for value in values:
                yield from _parameter_problems(f"parameter {name}", value, allowed[name])
        for name, parameter in known.items():
            if parameter.get("required") and parameter["location"] == "query" and name not in query:
                yield f"missing parameter {name}"
        yield from self._body_problems(body, ints_for_enums="enum-encoding=int" in "".join(query.get("$alt", ())))

    def _body_problems(self, body: object, *, ints_for_enums: bool) -> Iterator[str]:
        request = self.definition.get("request")
        if request is None:
            if body not in (None, {}):
                yield "the method has no body"
            return
        check = _BodyCheck(self.document.schemas, ints_for_enums=ints_for_enums, is_whole=self.http == "POST")
        yield from check.problems({} if body is None else body, request, "")


class Document:
    """The parsed discovery document of one service."""

    def __init__(self, service: str, version: str) -> None:
        """Raises FileNotFoundError for a service without a document."""
        import googleapiclient  # noqa: PLC0415  only for its documents

        folder = Path(str(googleapiclient.__path__[0])) / "discovery_cache" / "documents"
        read: dict[str, Any] = json.loads((folder / f"{service}.{version}.json").read_text())
        self.name: Final = service
        self.parameters: Final[Mapping[str, Any]] = read["parameters"]
        self.schemas: Final[Mapping[str, Any]] = read["schemas"]
        self._root: Final = "/" + read.get("servicePath", "")
        self.methods: Final = tuple(self._all(read))

    def match(self, http: str, path: str) -> tuple[Method, dict[str, str]] | None:
        """Return the method of a request with the parameters of its path."""
        for method in self.methods:
            if method.http == http and (names := method.named(path)) is not None:
                return method, names
        return None

    def knows(self, path: str) -> bool:
        """Return True if any method has this path."""
        return any(method.named(path) is not None for method in self.methods)

    def _all(self, part: Mapping[str, Any]) -> Iterator[Method]:
        for definition in part.get("methods", {}).values():
            yield Method(
                id=definition["id"],
                document=self,
                http=definition["httpMethod"],
                flat_path=self._root + definition.get("flatPath", definition["path"]),
                named_path=self._root + definition["path"],
                definition=definition,
            )
        for below in part.get("resources", {}).values():
            yield from self._all(below)


@functools.cache
def document(service: str, version: str) -> Document:
    """Return the document of a service, parsed once per process."""
    return Document(service, version)


def _pattern(path: str, *, named: bool) -> re.Pattern[str]:
    """Compile a path with {name}, one segment, and {+name}, any number of segments.

    A colon begins a verb, except in names of objects and in digests of images.
    """
    text, at = "", 0
    default_segment = "[^/]+" if "/b/{" in path else "[^/:]+(?:@sha256:[0-9a-f]+)?"
    for parameter in _PLACE.finditer(path):
        text += re.escape(path[at : parameter.start()])
        segment = ".+" if parameter[1] else default_segment
        text += f"(?P<{parameter[2]}>{segment})" if named else segment
        at = parameter.end()
    return re.compile(text + re.escape(path[at:]))


class _BodyCheck:
    """Checks a body with its schema. is_whole: required fields must be present."""

    def __init__(self, schemas: Mapping[str, Any], *, ints_for_enums: bool, is_whole: bool) -> None:
        self._schemas = schemas
        self._ints_for_enums = ints_for_enums
        self._is_whole = is_whole

    def problems(self, value: object, schema: Mapping[str, Any], where: str) -> Iterator[str]:
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"]]
        match schema.get("type", "any"):
            case "object":
                yield from self._object_problems(value, schema, where)
            case "array":
                if not isinstance(value, list):
                    yield f"{where or 'the body'} is no list"
                    return
                for number, item in enumerate(value):
                    yield from self.problems(item, schema["items"], f"{where}[{number}]")
            case "any":
                pass
            case _:
                if self._ints_for_enums and "enum" in schema and isinstance(value, int):
                    return
                if (fault := _value_problem(value, schema)) is not None:
                    yield f"{where}: {fault}"

    def _field_problems(self, value: object, schema: Mapping[str, Any], where: str) -> Iterator[str]:
        if value is not None:  # null removes a field
            yield from self.problems(value, schema, where)

    def _object_problems(self, value: object, schema: Mapping[str, Any], where: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{where or 'the body'} is no object"
            return
        known: Mapping[str, Any] = schema.get("properties", {})
        others = schema.get("additionalProperties")
        for name, child in value.items():
            at = f"{where}.{name}" if where else str(name)
            if name in known:
                if _is_output(known[name]):
                    yield f"{at} is only output"
                else:
                    yield from self._field_problems(child, known[name], at)
            elif others is not None:
                yield from self._field_problems(child, others, at)
            else:
                yield f"unknown field {at}"
        if self._is_whole and not where:  # further in, a default may stand elsewhere, as that of a log entry's resource
            for name, child in known.items():
                if name not in value and child.get("description", "").startswith("Required."):
                    yield f"missing field {name}"


def _is_output(schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("readOnly")) or _OUTPUT_ONLY.match(schema.get("description", "")) is not None


def _parameter_problems(what: str, value: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """A parameter, which is always text."""
    match schema.get("type"):
        case "boolean":
            good = value in {"true", "false"}
        case "integer" | "number":
            good = _INTEGER.fullmatch(value) is not None
        case _:
            if (fault := _value_problem(value, schema)) is not None:
                yield f"{what}: {fault}"
            return
    if not good:
        yield f"{what}: {value!r} is no {schema['type']}"


def _value_problem(value: object, schema: Mapping[str, Any]) -> str | None:
    """Return the problem of a value that is neither a list nor an object; None if it is valid."""
    match schema.get("type"):
        case "boolean":
            return None if isinstance(value, bool) else f"{value!r} is no boolean"
        case "integer":
            return None if isinstance(value, int) and not isinstance(value, bool) else f"{value!r} is no integer"
        case "number":
            return None if isinstance(value, int | float) and not isinstance(value, bool) else f"{value!r} is no number"
        case _:
            return _string_problem(value, schema)


def _string_problem(value: object, schema: Mapping[str, Any]) -> str | None:
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
