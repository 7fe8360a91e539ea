"""Injected faults, resets and speed, the same in the sandboxes of both clouds."""

from __future__ import annotations

import http.client
import time
import urllib.error
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ConnectionClosedError
from tests.support.batchplace import refused
from tests.testing.google.kit import good

from skerry.testing.google import GoogleSandbox
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry.testing.faults import How

OUTCOMES = {"": "done", "SlowDown": "throttle", "AccessDenied": "deny", 200: "done", 429: "throttle", 403: "deny"}
BROKEN = (ConnectionClosedError, urllib.error.URLError, http.client.HTTPException, ConnectionError)


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """make: create a bucket of this name, with its outcome. make_call: the name of that call. read: list buckets."""

    sandbox: Any
    make: Callable[[str], str]
    make_call: str
    read: Callable[[], object]


@pytest.fixture(params=["aws", "google"])
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    if request.param == "aws":
        with Sandbox() as sandbox:
            s3 = sandbox.client("s3")
            yield Cloud(
                sandbox=sandbox,
                make=lambda name: OUTCOMES[refused(s3.create_bucket, Bucket=name)],
                make_call="s3:CreateBucket",
                read=s3.list_buckets,
            )
    else:
        path = "/storage/v1/b?project=skerry-sandbox"
        with GoogleSandbox() as google:
            yield Cloud(
                sandbox=google,
                make=lambda name: OUTCOMES[google.call("POST", path, {"name": name})[0]],
                make_call="storage.buckets.insert",
                read=lambda: good(google, "GET", path),
            )


@pytest.mark.parametrize("how", ["throttle", "deny"])
def test_refused_call_has_no_effect(cloud: Cloud, how: How) -> None:
    cloud.sandbox.fail(how=how)
    assert cloud.make("first") == how
    assert cloud.sandbox.inventory() == {}
    assert cloud.make("first") == "done"


@pytest.mark.parametrize(("how", "exists"), [("timeout", False), ("lost_reply", True)])
def test_connection_breaks_before_or_after_the_effect(cloud: Cloud, how: How, exists: bool) -> None:  # noqa: FBT001
    cloud.sandbox.fail(how=how)
    with pytest.raises(BROKEN):
        cloud.make("first")
    assert bool(cloud.sandbox.inventory()) is exists
    assert [call.status for call in cloud.sandbox.calls] == [None]


def test_fault_fails_the_named_writing_calls_and_no_others(cloud: Cloud) -> None:
    fault = cloud.sandbox.fail(how="deny", after=1, on=cloud.make_call, times=2)
    cloud.sandbox.fail(how="deny", on="another.call", times=None)
    outcomes = []
    for number in range(4):
        cloud.read()
        outcomes.append(cloud.make(f"bucket-{number}"))
    assert outcomes == ["done", "deny", "deny", "done"]
    assert fault.fired == 2
    cloud.sandbox.fail(how="deny", times=None)
    assert [cloud.make(f"more-{number}") for number in range(2)] == ["deny", "deny"]
    cloud.sandbox.heal()
    assert cloud.make("more-0") == "done"
    assert cloud.sandbox.inventory() == {"bucket": ("bucket-0", "bucket-3", "more-0")}


def test_reset_removes_resources_calls_and_faults(cloud: Cloud) -> None:
    cloud.make("first")
    cloud.sandbox.fail(how="deny", times=None)
    before = dict(cloud.sandbox.environment)
    cloud.sandbox.reset()
    assert cloud.sandbox.inventory() == {}
    assert len(cloud.sandbox.calls) == 0
    assert cloud.sandbox.environment == before
    assert cloud.make("first") == "done"


@pytest.mark.parametrize("sandbox", [Sandbox, GoogleSandbox])
def test_sandbox_starts_and_closes_in_less_than_a_blink(sandbox: type[Sandbox | GoogleSandbox]) -> None:
    sandbox().close()  # what is loaded once is not counted
    took: list[float] = []
    for _ in range(10):  # of which one is not interrupted by other work
        started = time.perf_counter()
        sandbox().close()
        took.append(time.perf_counter() - started)
    assert min(took) < 0.3, took
