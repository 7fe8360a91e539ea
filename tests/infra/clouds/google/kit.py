"""Helpers of the Google tests: desired resources, golden files, validation against the discovery documents."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.infra import kit

from skerry.testing.google.discovery import document

if TYPE_CHECKING:
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired

REGION: Final = "europe-west4"
RUN: Final = "gs://acme-runs/teams/tiny-gpt"
OTHER: Final = "gs://acme-runs/teams/other"
check_golden = partial(kit.check_golden, Path(__file__).parent / "golden", sort_keys=True)


def wanted(resource: Resource, run: str = RUN, generation: int = 0, **extra: str) -> Desired:
    return kit.wanted(resource, run, generation, **extra)


def check_request(service: str, method: str, path: str, body: Any = None, **query: str) -> None:
    """The request is one that Google's own description of the service allows."""
    name, _, version = service.partition(".")
    matched = document(name, version or "v1").match(method, f"/{path}")
    assert matched is not None, f"no method {method} {path}"
    known, names = matched
    tree = None if body is None else kit.plain(body)
    assert list(known.problems(names, {key: [value] for key, value in query.items()}, tree)) == []
