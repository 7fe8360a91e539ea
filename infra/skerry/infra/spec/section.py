"""The base of every section of a spec, and the types of fields that sections share. Does no I/O."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from skerry.infra.spec import units


class Section(BaseModel):
    """One mapping of the spec: frozen, strict, closed to unknown fields. The docstring below a field is its help."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


Duration = Annotated[
    timedelta,
    BeforeValidator(units.parse_duration),
    PlainSerializer(units.format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": units.DURATION_PATTERN}),
]
Size = Annotated[
    int,
    BeforeValidator(units.parse_size),
    PlainSerializer(units.format_size, return_type=str),
    WithJsonSchema({"type": "string", "pattern": units.SIZE_PATTERN}),
]
Id = Annotated[str, Field(min_length=1, max_length=2048)]


def or_default(value: object) -> object:
    """Read a section without fields, such as `faults:` above comments only, as the default section."""
    return {} if value is None else value


def shaped(pattern: str, expected: str) -> AfterValidator:
    """Validate that a text matches `pattern` as a whole. expected: names such a text in the error."""

    def check(text: str) -> str:
        if units.matches(pattern, text):
            return text
        raise ValueError(f"must be {expected}")

    return AfterValidator(check)


def between(least: timedelta, most: timedelta) -> AfterValidator:
    """Validate that a duration is within these bounds, both included."""

    def check(value: timedelta) -> timedelta:
        if not least <= value <= most:
            raise ValueError(f"must be {units.format_duration(least)} to {units.format_duration(most)}")
        return value

    return AfterValidator(check)
