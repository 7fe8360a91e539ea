"""Turns pydantic's validation errors into problems for the user: the place, the rule, the value and an example.

Examples are the `examples` of the models, so that messages and the schema agree. Does no I/O.
"""

from __future__ import annotations

import difflib
import json
import re
import types
import typing
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from pydantic import BaseModel

from skerry.infra.spec.units import SIZE_PATTERN, format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem

# Longer values are truncated, so that a message is one line.
_SHOWN = 60
# The rule behind each type of error; the names in braces are values of its context.
_RULES = {
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text (put it in quotes)",
    "literal_error": "must be {expected}",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "value_error": "{error}",
}


def problems_of(model: type[BaseModel], error: ValidationError, document: Document) -> Iterator[Problem]:
    """Return the problems in `error`, which was raised when `document` was validated as `model`."""
    for details in error.errors():
        # pydantic also reports a list as too short if all of its items are wrong; the items' own errors say more.
        if details["type"] == "too_short" and details["input"]:
            continue
        yield _problem(model, details, document)


def _problem(model: type[BaseModel], error_details: ErrorDetails, document: Document) -> Problem:
    section, field, where = _walk(model, error_details["loc"])
    example = _example(where, field)
    match error_details["type"]:
        case "extra_forbidden":
            return document.problem(where, f"unknown field; {_nearest(str(where[-1]), section)}", key=True)
        case "missing":
            return document.problem(where, f"missing{example or _section_example(where, section)}")
        case "union_tag_not_found" | "union_tag_invalid":
            sections = _sections_in(field.annotation if field else None)
            kinds = [kind for target in sections for kind in _kinds_of(target)]
            text = f"must be {' or '.join(map(repr, kinds))}; write e.g. kind: {kinds[0]}"
            return document.problem((*where, "kind"), text)
        case "target_kind":
            return document.problem((*where, "kind"), error_details["msg"])
        case _:
            if error_details["type"].startswith("model_"):
                example = example or _section_example(where, section)
            # A value where a reference belongs may be the secret itself.
            hidden = {"secrets", "env"} & set(where) and not isinstance(error_details["input"], bool | int | float)
            got = "" if hidden else f"; got {_shown(error_details['input'])}"
            return document.problem(where, f"{rule_of(error_details, section)}{got}{example}")


def rule_of(error_details: ErrorDetails, section: type[BaseModel] | None = None) -> str:
    """Return the rule that a value breaks, in words. section: of the value."""
    if error_details["type"].startswith("model_") and section is not None:
        return f"must be a section with {', '.join(section.model_fields)}"
    rule = _RULES.get(error_details["type"])
    if rule is None:
        return error_details["msg"][:1].lower() + error_details["msg"][1:]
    context = cast("dict[str, object]", error_details.get("ctx", {}))
    return rule.format_map({name: _in_units(value, error_details["input"]) for name, value in context.items()})


def _in_units(limit: object, written: object) -> object:
    """A limit in the unit that the user wrote: 100GiB for a size, 60s for a time."""
    match limit:
        case timedelta():
            return format_duration(limit)
        case float():
            return f"{limit:.15g}"
        case int() if isinstance(written, str) and re.fullmatch(SIZE_PATTERN, written):
            return format_size(limit)
        case _:
            return limit


def _walk(model: type[BaseModel], where: Where) -> tuple[type[BaseModel] | None, FieldInfo | None, Where]:
    """Return the section and the field of a location of pydantic, and the same place as it is written in the document.

    In a union of sections, pydantic adds a step with the kind to the location. A mapping has names of its own. The
    section is that of the field, or the one that the location names.
    """
    section: type[BaseModel] | None = model
    field: FieldInfo | None = None
    kinds: dict[str, type[BaseModel]] = {}
    written: list[str | int] = []
    is_mapping = False
    for depth, step in enumerate(where):
        if isinstance(step, str) and step in kinds:
            section, kinds = kinds[step], {}
            continue
        written.append(step)
        if is_mapping:  # the name of an entry
            is_mapping, field = False, None
            continue
        if isinstance(step, int):
            # An item of a list has the examples of the list, or none.
            field = field if section is not None else None
            continue
        if section is None:
            return None, None, where
        field = section.model_fields.get(step)
        if field is None:
            return section, None, tuple(written)
        is_mapping = typing.get_origin(field.annotation) is dict
        inner = _sections_in(field.annotation)
        if not inner and depth == len(where) - 1:
            return section, field, tuple(written)
        kinds = {kind: part for part in inner for kind in _kinds_of(part)}
        section = next(iter(inner), None)
    return section, field, tuple(written)


def _sections_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Annotated, dict, tuple, typing.Union, types.UnionType):
        return [section for part in typing.get_args(annotation) for section in _sections_in(part)]
    return []


def _kinds_of(section: type[BaseModel]) -> list[str]:
    """The values of `kind:` in a section that is one of several kinds."""
    field = section.model_fields.get("kind")
    return [] if field is None else list(typing.get_args(field.annotation))


def _example(where: Where, field: FieldInfo | None) -> str:
    examples = _examples(field)
    if not examples or isinstance(where[-1], int):
        return ""
    return f"; write e.g. {where[-1]}: {_yaml(examples[0])}"


def _section_example(where: Where, section: type[BaseModel] | None) -> str:
    """An example of a whole section that is missing: the fields that it cannot do without."""
    if section is None or not isinstance(where[-1], str):
        return ""
    needed = {name: _examples(field) for name, field in section.model_fields.items() if field.is_required()}
    fields = {name: examples[0] for name, examples in needed.items() if examples}
    return f"; write e.g. {where[-1]}: {_yaml(fields)}" if fields else ""


def _examples(field: FieldInfo | None) -> list[object]:
    if field is None:
        return []
    if field.examples:
        return cast("list[object]", field.examples)
    # `Annotated[int, Field(examples=...)] | None` keeps its Field inside the union.
    for part in typing.get_args(field.annotation):
        for extra in getattr(part, "__metadata__", ()):
            if given := getattr(extra, "examples", None):
                return cast("list[object]", given)
    return []


def _yaml(value: object) -> str:
    match value:
        case str():
            return value
        case list():
            return f"[{', '.join(map(_yaml, cast('list[object]', value)))}]"
        case dict():
            fields = cast("dict[str, object]", value).items()
            return f"{{{', '.join(f'{name}: {_yaml(inner)}' for name, inner in fields)}}}"
        case _:
            return json.dumps(value)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else f"{value[: _SHOWN - 3]}...")
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, dict):
        return "a mapping"
    return "nothing" if value is None else "a list"


def _nearest(name: str, section: type[BaseModel] | None) -> str:
    known = list(section.model_fields) if section is not None else []
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"the fields here are {', '.join(known)}"
