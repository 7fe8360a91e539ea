"""What the tests of AWS need besides the code under test: an account, wanted resources, golden files, kills."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from botocore.session import get_session
from botocore.validate import ParamValidator

from skerry.infra.graph import as_json
from skerry.infra.handler import Made, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from skerry.infra.graph import Resource

ACCOUNT: Final = "123456789012"
REGION: Final = "eu-central-1"
RUN: Final = "s3://acme-runs/teams/tiny-gpt"
OTHER: Final = "s3://acme-runs/teams/other"
GOLDEN: Final = Path(__file__).parent / "golden"


@dataclass(frozen=True, kw_only=True)
class Account:
    """endpoint: where it listens. enforce: from now on every call needs the right to it."""

    endpoint: str
    enforce: Callable[[], None]

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.endpoint)


class Killed(BaseException):
    """The process ends here."""


def environment(endpoint: str, **keys: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_MAX_ATTEMPTS": "1",
        **keys,
    }


class Listener:
    """What an `Aws` asked, and the end of its process at a chosen call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._event = ""
        self._left = 0

    def client_made(self, service: str, client: Any) -> None:
        def before(model: Any, **_: object) -> None:
            self.calls.append(f"{service}:{model.name}")
            self._count("before-call")

        client.meta.events.register("before-call.*.*", before)
        client.meta.events.register("after-call.*.*", lambda **_: self._count("after-call"))

    @contextmanager
    def killing(self, number: int, event: str) -> Iterator[None]:
        """The process ends at its call of this number: before-call, or after-call, when it was answered."""
        self._event, self._left = event, number
        try:
            yield
        finally:
            self._left = 0

    def _count(self, event: str) -> None:
        if event == self._event and self._left:
            self._left -= 1
            if not self._left:
                raise Killed


def wanted(resource: Resource, run: str = RUN, generation: int = 0) -> Wanted:
    return Wanted(resource=resource, generation=generation, run=run, settings=resource.settings())


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


def check_golden(name: str, value: Any) -> None:
    """`value` is what the file says. SKERRY_TEST_GOLDEN=1 writes it instead, for a reader to look at the difference."""
    path = GOLDEN / f"{name}.json"
    if os.environ.get("SKERRY_TEST_GOLDEN"):
        path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    assert plain(value) == json.loads(path.read_text())


def check_model(service: str, operation: str, request: Mapping[str, Any]) -> None:
    """The request is one that botocore's own model of the service allows."""
    model = get_session().get_service_model(service).operation_model(operation)
    report = ParamValidator().validate(dict(request), model.input_shape)
    assert not report.has_errors(), report.generate_report()
