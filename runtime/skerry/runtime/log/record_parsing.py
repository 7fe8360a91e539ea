"""Parses and writes any record: strict JSON of bounded size, whose errors name the key and the fields. Does no I/O."""

from __future__ import annotations

import hashlib
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from skerry.runtime.errors import Corrupt
from skerry.runtime.failure_text import without_commands

# A record has about 1 KB; a decision with 4,000 members about 600 KB. Anything larger is no record of skerry.
MAX_RECORD_BYTES = 4 << 20
# A damaged record of 4 MB may have a million wrong fields with names of any length, which take seconds to list.
_LISTED_FIELDS = 1000
_NAMED_FIELDS = 5
_QUOTED_CHARACTERS = 120


class Record(BaseModel):
    """A frozen document of the log with strict parsing."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="null")
    LONGEST: ClassVar[int] = MAX_RECORD_BYTES
    """The most bytes that are parsed."""

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        return self.model_dump_json().encode()

    @classmethod
    def parse(cls, data: bytes | memoryview, key: str) -> Self:
        """The record in `data`, read from `key`. Raises Corrupt naming the key and the first few wrong fields."""
        if len(data) > cls.LONGEST:
            raise Corrupt(f"record too large: key={key} bytes={len(data)} limit={cls.LONGEST}")
        try:
            return cls.model_validate_json(bytes(data))
        except ValidationError as error:
            text = f"record does not parse: key={key} kind={cls.__name__} {wrong_fields(error)}"
        # Not chained: pydantic's error quotes all that was read, and would be part of every traceback.
        raise Corrupt(text)


def digest_of(data: bytes | memoryview) -> str:
    """The sha256 of a record's stored bytes, in hex, by which other records refer to it."""
    return hashlib.sha256(data).hexdigest()


class Extended(Record):
    """A kind of record to which the optional fields ADDED were added later: absent from the bytes while None."""

    ADDED: ClassVar[tuple[str, ...]]

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = serialize(self)
        return {name: field for name, field in fields.items() if field is not None or name not in self.ADDED}


def wrong_fields(error: ValidationError) -> str:
    """The first few wrong fields and why, for the text of an error."""
    if error.error_count() > _LISTED_FIELDS:
        return f"{error.error_count()} wrong fields"
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    named = [
        f"{'.'.join(map(str, item['loc']))[:_QUOTED_CHARACTERS] or 'document'}: {item['msg'][:_QUOTED_CHARACTERS]}"
        for item in wrong[:_NAMED_FIELDS]
    ]
    rest = [f"and {len(wrong) - _NAMED_FIELDS} more"] if len(wrong) > _NAMED_FIELDS else []
    return without_commands("; ".join(named + rest))
