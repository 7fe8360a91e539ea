"""The API server limits calls, and its work for one job does not grow with the number of the others."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.clocks import FakeClock
from tests.testing.kubernetes.kit import NAMESPACE, Api, job

from skerry.testing.kubernetes import KubernetesSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def api() -> Iterator[Api]:
    with KubernetesSandbox(clock=FakeClock()) as sandbox:
        yield Api(sandbox)


def test_calls_beyond_the_limit_are_answered_429_until_the_next_second(api: Api) -> None:
    clock = api.sandbox.objects.clock
    assert isinstance(clock, FakeClock)
    api.sandbox.limit(2)
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    assert [api.call("GET", path)[0] for _ in range(3)] == [200, 200, 429]
    clock.advance(0.5)
    assert [api.call("GET", path)[0] for _ in range(2)] == [200, 429]
    # A pause of any length saves the calls of one second.
    clock.advance(60)
    assert [api.call("GET", path)[0] for _ in range(3)] == [200, 200, 429]
    refused = api.send("GET", path)
    assert (refused.headers["Retry-After"], refused.json()["reason"]) == ("1", "TooManyRequests")
    api.sandbox.reset()
    assert [api.call("GET", path)[0] for _ in range(3)] == [200] * 3


def test_request_for_one_job_looks_at_no_other(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, looked = api.sandbox.controller, list[str]()
    pods_of = controller.pods_of

    def recorded(row: Any) -> Any:
        looked.append(row["metadata"]["name"])
        return pods_of(row)

    monkeypatch.setattr(controller, "pods_of", recorded)
    names = [f"skerry-x-{number}" for number in range(20)]
    for name in names:
        assert api.apply(job(name))[0] == 201
        assert api.jobs("GET", name)[0] == 200
    assert [name for name, _ in groupby(looked)] == names
    # A list has the pods of all of them, and events that name them.
    assert {len(api.pods(name)) for name in names} == {1}
    looked.clear()
    api.jobs("GET")
    assert [name for name, _ in groupby(looked)] == names
