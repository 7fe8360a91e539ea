"""Parses AWS requests into calls, with botocore's own models, as moto parses them. Object bodies are not kept."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's parsers have no types.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moto.core.parse import PROTOCOL_PARSERS
from moto.core.request import determine_request_protocol
from moto.core.routing import get_service_router
from moto.core.utils import get_service_model
from werkzeug.exceptions import NotFound

from skerry.testing.calls import Call

if TYPE_CHECKING:
    from moto.core.request import Request


def parse_request(request: Request, service: str, caller: str) -> Call:
    """Return the call of a request; an operation that no model knows is named by HTTP method and path."""
    unknown = Call(service=service, operation=f"{request.method} {request.path}", caller=caller)
    try:
        model = get_service_model(service)
    except Exception:  # noqa: BLE001  botocore's error for an unknown service
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
    except Exception:  # noqa: BLE001  recording a call must not fail it; its name is known
        params = in_path
    return Call(service=service, operation=operation, params={**in_path, **(params or {})}, caller=caller)


def _operation(request: Request, service: str) -> tuple[str | None, dict[str, Any]]:
    """Return its name and the parameters in the path."""
    if target := request.headers.get("X-Amz-Target"):
        return target.rpartition(".")[2], {}
    if action := request.values.get("Action"):
        return str(action), {}
    try:
        endpoint, in_path = get_service_router(service).match(request)
    except (NotFound, NotImplementedError):
        return None, {}
    return str(endpoint.name), dict(in_path)
