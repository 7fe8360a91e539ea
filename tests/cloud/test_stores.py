"""The promises of `Store` in a bucket of a real account."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pytest
import requests
from google.auth.transport.requests import Request
from tests.runtime.store.conformance import StoreConformance

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.handler_helpers import Absent
from skerry.runtime.clock import Backoff, wait_until
from skerry.runtime.errors import Retryable
from skerry.runtime.store.obstore_clients import open_cloud_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cloud.place import Place

    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

_NUMBERS = itertools.count()
_BUSY_S: Final = 60.0


@pytest.fixture(scope="module")
def aws(clock: Clock) -> Aws:
    return Aws(clock, os.environ)


@pytest.fixture(scope="module")
def google(clock: Clock) -> Google:
    return Google(clock, os.environ)


class Again:
    """Repeats the calls of a busy store: Cloud Storage takes one write a second of an object."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        if not callable(verb):
            return verb

        def repeated(*what: Any, **more: Any) -> Any:
            def attempt() -> tuple[Any] | None:
                try:
                    return (verb(*what, **more),)
                except Retryable:
                    return None

            return wait_until(self._clock, attempt, self._clock.now() + _BUSY_S, Backoff(first=0.5, cap=4.0))[0]

        return repeated


class InCloud(StoreConformance):
    """Fixtures bring a `place`."""

    @pytest.fixture
    def prefix(self, place: Place) -> str:
        return f"{place.run_uri.partition('://')[2].partition('/')[2]}/stores/{next(_NUMBERS)}/"

    @pytest.fixture
    def store(self, place: Place, prefix: str, clock: Clock) -> Any:
        result = place.deployment
        environment = {**os.environ, **result.home.environment(result.context)}
        scheme, _, rest = place.run_uri.partition("://")
        return Again(open_cloud_store(scheme, rest.partition("/")[0], prefix, environment=environment), clock)


class TestS3(InCloud):
    @pytest.fixture
    def place(self, in_aws: Place) -> Place:
        return in_aws

    @pytest.fixture
    def peek(self, place: Place, prefix: str, aws: Aws) -> Callable[[str], bytes | None]:
        bucket = place.run_uri.removeprefix("s3://").partition("/")[0]

        def look(key: str) -> bytes | None:
            region = place.deployment.bucket().region
            try:
                response: dict[str, Any] = aws.call("s3", region, "get_object", Bucket=bucket, Key=prefix + key)
            except Absent:
                return None
            return bytes(response["Body"].read())

        return look


class TestGoogle(InCloud):
    @pytest.fixture
    def place(self, in_google: Place) -> Place:
        return in_google

    @pytest.fixture
    def peek(self, place: Place, prefix: str, google: Google) -> Callable[[str], bytes | None]:
        bucket = place.run_uri.removeprefix("gs://").partition("/")[0]

        def look(key: str) -> bytes | None:
            # Cloud Storage's other face than that of its JSON tells bytes as they are.
            url = f"{google.endpoint('storage')}/{bucket}/{quote(prefix + key)}"
            credentials = google.login.credentials
            if not credentials.valid:
                credentials.refresh(Request())
            answer = requests.get(url, headers={"Authorization": f"Bearer {credentials.token}"}, timeout=60)
            assert answer.status_code in {200, 404}, answer.text
            return answer.content if answer.status_code == 200 else None

        return look
