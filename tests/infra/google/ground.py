"""What the tests of Google need besides the code under test: wanted resources, golden files, kills, good requests."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.graph import as_json
from skerry.infra.handler import Made, Wanted
from skerry.infra.testing.google.documents import document

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.graph import Resource

REGION: Final = "europe-west4"
RUN: Final = "gs://acme-runs/teams/tiny-gpt"
OTHER: Final = "gs://acme-runs/teams/other"
GOLDEN: Final = Path(__file__).parent / "golden"


class Killed(BaseException):
    """The process ends here."""


class Listener:
    """What a `Google` asked, and the end of its process at a chosen request."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._event = ""
        self._left = 0

    def heard(self, when: str, what: str) -> None:
        if when == "before":
            self.calls.append(what)
        if when == self._event and self._left:
            self._left -= 1
            if not self._left:
                raise Killed

    @contextmanager
    def killing(self, number: int, event: str) -> Iterator[None]:
        """The process ends at its request of this number: before it, or after it, when it was answered."""
        self._event, self._left = event, number
        try:
            yield
        finally:
            self._left = 0


def wanted(resource: Resource, run: str = RUN, generation: int = 0, **extra: str) -> Wanted:
    return Wanted(resource=resource, generation=generation, run=run, settings=resource.settings(), extra=extra)


def made(one: Wanted, outputs: Mapping[str, str]) -> Made:
    return Made(
        address=one.resource.address,
        kind=one.resource.KIND,
        name=one.name,
        generation=one.generation,
        region=one.resource.region,
        life=one.resource.LIFE,
        brought=one.resource.brought,
        settings={name: as_json(value) for name, value in one.settings.items()},
        outputs=outputs,
        needs=(),
    )


def plain(value: Any) -> Any:
    """A tree as JSON has it: tuples are lists."""
    return json.loads(json.dumps(value))


def check_golden(name: str, value: Any, folder: Path = GOLDEN) -> None:
    """`value` is what the file says. SKERRY_TEST_GOLDEN=1 writes it instead, for a reader to look at the difference."""
    path = folder / f"{name}.json"
    if os.environ.get("SKERRY_TEST_GOLDEN"):
        path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    assert plain(value) == json.loads(path.read_text())


def check_request(service: str, method: str, path: str, body: Any = None, **query: str) -> None:
    """The request is one that Google's own description of the service allows."""
    name, _, version = service.partition(".")
    found = document(name, version or "v1").match(method, f"/{path}")
    assert found is not None, f"no method {method} {path}"
    known, names = found
    told = None if body is None else plain(body)
    assert list(known.wrong(names, {key: [value] for key, value in query.items()}, told)) == []
