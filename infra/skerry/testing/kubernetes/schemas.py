"""Checks the fields of a Job and of a service account as the API server's strict decoding does.

The schemas are the models of lightkube, which are generated from the API's OpenAPI document of 1.37.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import functools
import re
import types
import typing
from typing import TYPE_CHECKING, Any, Final, cast

from skerry.testing.kubernetes.refusals import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_QUANTITY: Final = re.compile(r"([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)")
_QUANTITY_RULE: Final = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
_SCALARS: Final = (str, int, float, bool)


def check_schema(kind: str, body: Mapping[str, Any]) -> None:
    """Refuse a body with an unknown field, a wrong type or a quantity that is none."""
    model = _models().get(kind)
    if model is None:
        return
    version = str(body.get("apiVersion", "")).rpartition("/")[2]
    for problem in _problems(model, body, ""):
        raise Refused(400, f'{kind} in version "{version}" cannot be handled as a {kind}: {problem}')


@functools.cache
def _models() -> dict[str, Any]:
    from lightkube.models import batch_v1, core_v1  # noqa: PLC0415  only with a sandbox

    return {"Job": batch_v1.Job, "ServiceAccount": core_v1.ServiceAccount}


@functools.cache
def _fields(model: Any) -> dict[str, Any]:
    return typing.get_type_hints(model)


def _problems(model: Any, value: Any, path: str) -> Iterator[str]:
    """The problems of a value, wrong types and quantities after unknown fields."""
    if typing.get_origin(model) in {typing.Union, types.UnionType}:
        if value is None:
            return
        (model,) = (part for part in typing.get_args(model) if part is not type(None))
    if typing.get_origin(model) is list:
        yield from _list_problems(typing.get_args(model)[0], value, path)
    elif model is dict:
        yield from _map_problems(value, path)
    elif model in _SCALARS:
        if not isinstance(value, model) or (model is int and isinstance(value, bool)):
            yield f"json: cannot unmarshal {type(value).__name__} into field {path} of type {model.__name__}"
    elif hasattr(model, "__struct_fields__"):
        yield from _struct_problems(model, value, path)


def _struct_problems(model: Any, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"json: cannot unmarshal {type(value).__name__} into field {path} of type {model.__name__}"
        return
    fields = _fields(model)
    for name, inner in cast("dict[str, Any]", value).items():
        where = f"{path}.{name}" if path else name
        if name not in fields:
            yield f'strict decoding error: unknown field "{where}"'
        else:
            yield from _problems(fields[name], inner, where)


def _list_problems(model: Any, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"json: cannot unmarshal {type(value).__name__} into field {path} of type list"
        return
    for number, inner in enumerate(cast("list[Any]", value)):
        yield from _problems(model, inner, f"{path}[{number}]")


def _map_problems(value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"json: cannot unmarshal {type(value).__name__} into field {path} of type map"
        return
    for name, inner in cast("dict[str, Any]", value).items():
        if path.endswith((".limits", ".requests")):
            if not _QUANTITY.fullmatch(str(inner)):
                yield _QUANTITY_RULE
        elif not isinstance(inner, str):
            yield f"json: cannot unmarshal {type(inner).__name__} into field {path}.{name} of type string"
