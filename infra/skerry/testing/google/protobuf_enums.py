"""Converts enums of Vertex AI between numbers, as Google's generated clients send them, and names.

The numbers are those of the client library's types, which a client that sends numbers has loaded already.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
# Protobuf's classes have few types.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.testing.google.refusals import invalid

if TYPE_CHECKING:
    from collections.abc import Mapping


def named(method: str, body: Any) -> Any:
    """Return a body with names for enums. Raises Refusal if it does not fit the library's type."""
    kind = _type(method, is_response=False)
    if kind is None:
        return body
    from google.protobuf import json_format  # noqa: PLC0415  comes with the client library

    try:
        read = json_format.ParseDict(body, kind())
    except json_format.ParseError as error:
        raise invalid(str(error)) from error
    return json_format.MessageToDict(read)


def numbered(method: str, response: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a response with numbers for enums."""
    kind = _type(method, is_response=True)
    if kind is None:
        return response
    from google.protobuf import json_format  # noqa: PLC0415  comes with the client library

    return json_format.MessageToDict(json_format.ParseDict(dict(response), kind()), use_integers_for_enums=True)


def camel(name: str) -> str:
    """Convert snake_case to the camelCase of protobuf's JSON."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _type(method: str, *, is_response: bool) -> Any:
    """Return the protobuf type of a method's request or response; None if it has no enums."""
    from google.cloud.aiplatform_v1 import types  # noqa: PLC0415  a second, and only for its own client

    verb = method.rpartition(".customJobs.")[2]
    if verb == "list" and is_response:
        return types.ListCustomJobsResponse.pb()
    if verb == "create" or (verb == "get" and is_response):
        return types.CustomJob.pb()
    return None
