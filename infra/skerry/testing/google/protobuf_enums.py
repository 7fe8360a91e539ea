"""Enums of Vertex AI as numbers and as names: Google's generated clients send numbers, and this sandbox keeps names.

The numbers are those of the client library's own types, which whoever sends numbers has loaded anyway.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# Protobuf's classes have few types.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.infra.testing.google.refusals import invalid

if TYPE_CHECKING:
    from collections.abc import Mapping


def named(method: str, body: Any) -> Any:
    """A body with names for enums. Raises Refusal if it is not one that the library's type can hold."""
    kind = _type(method, answer=False)
    if kind is None:
        return body
    from google.protobuf import json_format  # noqa: PLC0415  comes with the client library

    try:
        read = json_format.ParseDict(body, kind())
    except json_format.ParseError as error:
        raise invalid(str(error)) from error
    return json_format.MessageToDict(read)


def numbered(method: str, told: Mapping[str, Any]) -> Mapping[str, Any]:
    """An answer with numbers for enums."""
    kind = _type(method, answer=True)
    if kind is None:
        return told
    from google.protobuf import json_format  # noqa: PLC0415  comes with the client library

    return json_format.MessageToDict(json_format.ParseDict(dict(told), kind()), use_integers_for_enums=True)


def camel(name: str) -> str:
    """snake_case as JSON of protobuf has it."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _type(method: str, *, answer: bool) -> Any:
    """The protobuf message of a method's body or answer; None where there are no enums in it."""
    from google.cloud.aiplatform_v1 import types  # noqa: PLC0415  a second, and only for its own client

    verb = method.rpartition(".customJobs.")[2]
    if verb == "list" and answer:
        return types.ListCustomJobsResponse.pb()
    if verb == "create" or (verb == "get" and answer):
        return types.CustomJob.pb()
    return None
