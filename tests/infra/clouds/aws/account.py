"""Helpers of the AWS tests: desired resources, golden files, validation against botocore's models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import boto3
from botocore.session import get_session
from botocore.validate import ParamValidator
from tests.infra import kit

from skerry.infra.clouds.aws.session import Aws

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pytest
    from botocore.config import Config

    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired

ACCOUNT: Final = "123456789012"
REGION: Final = "eu-central-1"
RUN: Final = "s3://acme-runs/teams/tiny-gpt"
OTHER: Final = "s3://acme-runs/teams/other"
check_golden = partial(kit.check_golden, Path(__file__).parent / "golden", sort_keys=True)


def environment(endpoint: str, **keys: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_MAX_ATTEMPTS": "1",
        **keys,
    }


class Listener(kit.Listener):
    """Records the calls of an `Aws`, and can end the process at one of them."""

    def client_made(self, service: str, client: Any) -> None:
        def hear(when: str, model: Any, **_: object) -> None:
            self.heard(when, f"{service}:{model.name}")

        for when in ("before", "after"):
            client.meta.events.register(f"{when}-call.*.*", partial(hear, when))


def share_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share clients between commands: they are slow to create and hold no state of ours."""
    create = boto3.Session.client

    def shared(session: boto3.Session, service: str, *, config: Config, **place: Any) -> Any:
        keys = session.get_credentials()
        if keys is None or keys.method != "explicit":  # of a login, which is of this command
            return create(session, service, config=config, **place)
        options = (service, keys.access_key, keys.secret_key, keys.token, str(config.retries), *sorted(place.items()))
        if options not in _CLIENTS:
            _CLIENTS[options] = create(session, service, config=config, **place)
        return _CLIENTS[options]

    monkeypatch.setattr(boto3.Session, "client", shared)


_CLIENTS: Final[dict[object, Any]] = {}


def wanted(resource: Resource, run: str = RUN, generation: int = 0, **extra: str) -> Desired:
    return kit.wanted(resource, run, generation, **extra)


def check_requests(service: str, golden: str, requests: Mapping[str, Mapping[str, Any]]) -> None:
    """Asserts that botocore's model of the service allows each request, and that they equal the golden file.

    requests: parameters by operation.
    """
    for operation, request in requests.items():
        check_model(service, operation, request)
    check_golden(golden, requests)


def answer(monkeypatch: pytest.MonkeyPatch, operation: str, reply: Callable[..., Mapping[str, Any]]) -> None:
    """Answer an operation by this function of a call that forwards to the account, and of its parameters."""
    call = Aws.call

    def answered(aws: Aws, service: str, region: str, called: str, /, **parameters: Any) -> Mapping[str, Any]:
        forward = partial(call, aws, service, region, called)
        return reply(forward, **parameters) if called == operation else forward(**parameters)

    monkeypatch.setattr(Aws, "call", answered)


def check_model(service: str, operation: str, request: Mapping[str, Any]) -> None:
    """Asserts that botocore's model of the service allows the request."""
    model = get_session().get_service_model(service).operation_model(operation)
    report = ParamValidator().validate(dict(request), model.input_shape)
    assert not report.has_errors(), report.generate_report()
