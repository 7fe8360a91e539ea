"""The address of AWS STS and the parsing of its XML responses."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from skerry.runtime.errors import Retryable
from skerry.runtime.store.credentials.http import host_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def sts_endpoint(environment: Mapping[str, str], region: str) -> str:
    """The configured endpoint, otherwise the region's own; ends in `/`."""
    names = ("AWS_ENDPOINT_URL_STS", "AWS_ENDPOINT_URL")
    configured = next((environment[name] for name in names if environment.get(name)), None)
    if configured:
        return f"{configured.rstrip('/')}/"
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"https://sts.{region}.{suffix}/"


def parse_sts_response(body: bytes, url: str) -> dict[str, str]:
    """The text of each element by its name; names are unique in STS responses. Raises Retryable if it is not XML.

    STS sends no XML declarations of entities, so a body with a declaration is not a response of STS.
    """
    try:
        root = None if b"<!" in body else ET.fromstring(body)  # noqa: S314  no declaration, no entity
    except ET.ParseError:
        root = None
    if root is None:
        raise Retryable(f"the response of {host_of(url)} is not XML of STS")
    return {element.tag.rpartition("}")[2]: (element.text or "").strip() for element in root.iter()}
