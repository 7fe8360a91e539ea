"""What the tests of Google need besides the code under test: wanted resources, golden files, good requests."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.infra import ground

from skerry.infra.testing.google.documents import document

if TYPE_CHECKING:
    from skerry.infra.graph import Resource
    from skerry.infra.handler import Wanted

REGION: Final = "europe-west4"
RUN: Final = "gs://acme-runs/teams/tiny-gpt"
OTHER: Final = "gs://acme-runs/teams/other"
check_golden = partial(ground.check_golden, Path(__file__).parent / "golden", sort_keys=True)


def wanted(resource: Resource, run: str = RUN, generation: int = 0, **extra: str) -> Wanted:
    return ground.wanted(resource, run, generation, **extra)


def check_request(service: str, method: str, path: str, body: Any = None, **query: str) -> None:
    """The request is one that Google's own description of the service allows."""
    name, _, version = service.partition(".")
    found = document(name, version or "v1").match(method, f"/{path}")
    assert found is not None, f"no method {method} {path}"
    known, names = found
    told = None if body is None else ground.plain(body)
    assert list(known.wrong(names, {key: [value] for key, value in query.items()}, told)) == []
