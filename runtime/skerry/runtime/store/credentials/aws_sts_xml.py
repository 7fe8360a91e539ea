"""The parsing of AWS STS's XML responses."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from skerry.runtime.errors import Retryable
from skerry.runtime.store.credentials.http import host_of


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
