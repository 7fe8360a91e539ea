"""API calls as a test wants to see them: which service, which operation, with what, by whom, and how it was answered.

A request is read with botocore's own models, as moto reads it. Bodies of objects are not kept.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's parsers have no types.

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from moto.core.request import Request

# An operation is one that changes nothing if its name begins so.
_READING: Final = (
    "AssumeRole",
    "BatchCheck",
    "BatchGet",
    "Describe",
    "Download",
    "Filter",
    "Get",
    "Head",
    "List",
    "Lookup",
    "Search",
    "Select",
    "Simulate",
    "Validate",
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One API call. status: of the answer; None while there is none, or for ever if it got lost."""

    service: str
    operation: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    caller: str = "nobody"
    status: int | None = None

    @property
    def name(self) -> str:
        """As faults and policies name it: batch:SubmitJob."""
        return f"{self.service}:{self.operation}"

    @property
    def writes(self) -> bool:
        """Whether such a call can change anything."""
        return not self.operation.startswith(_READING)


class Calls:
    """All calls since the start or the last reset, in the order in which they came. Thread-safe."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Call]:
        with self._lock:
            return iter(tuple(self._calls))

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def names(self) -> list[str]:
        """batch:SubmitJob and so on, in order."""
        return [call.name for call in self]

    @property
    def writes(self) -> list[Call]:
        """Those that can have changed something; without those of roles, whose containers write all the time."""
        return [call for call in self if call.writes and not call.caller.startswith("role/")]

    def clear(self) -> None:
        """Forget them; a test does so between its acts."""
        with self._lock:
            self._calls.clear()

    def add(self, call: Call) -> int:
        """Write a call down before it is carried out; the number is for `answered`."""
        with self._lock:
            self._calls.append(call)
            return len(self._calls) - 1

    def answered(self, number: int, call: Call, status: int) -> None:
        """Add what it was answered. Nothing happens if the calls were forgotten meanwhile."""
        with self._lock:
            if number < len(self._calls) and self._calls[number] is call:
                self._calls[number] = replace(call, status=status)


def read(request: Request, service: str, caller: str) -> Call:
    """The call that a request is; an operation that no model knows is named by its method and path."""
    from moto.core.parse import PROTOCOL_PARSERS  # noqa: PLC0415  moto is loaded when a sandbox starts
    from moto.core.request import determine_request_protocol  # noqa: PLC0415
    from moto.core.utils import get_service_model  # noqa: PLC0415

    unknown = Call(service=service, operation=f"{request.method} {request.path}", caller=caller)
    try:
        model = get_service_model(service)
    except Exception:  # noqa: BLE001  botocore's own error for a service that it has never heard of
        return unknown
    operation, in_path = _operation(request, service)
    if operation is None:
        return unknown
    shape = model.operation_model(operation)
    parser = PROTOCOL_PARSERS[determine_request_protocol(model, request.content_type)](shape)
    body = b"" if shape.has_streaming_input else request.data
    try:
        params = parser.parse(
            {
                "method": request.method,
                "values": request.values,
                "headers": request.headers,
                "body": body,
                "url_path": request.path,
                "url_params": in_path,
            }
        )
    except Exception:  # noqa: BLE001  a record of what was asked must not fail what was asked; its name is known
        params = in_path
    return Call(service=service, operation=operation, params={**in_path, **(params or {})}, caller=caller)


def _operation(request: Request, service: str) -> tuple[str | None, dict[str, Any]]:
    """Its name, and what of its parameters stands in the path."""
    from moto.core.routing import get_service_router  # noqa: PLC0415
    from werkzeug.exceptions import NotFound  # noqa: PLC0415

    if target := request.headers.get("X-Amz-Target"):
        return target.rpartition(".")[2], {}
    if action := request.values.get("Action"):
        return str(action), {}
    try:
        found, in_path = get_service_router(service).match(request)
    except (NotFound, NotImplementedError):
        return None, {}
    return str(found.name), dict(in_path)
