"""A thousand submissions at once, to a service that takes fifty calls a second from the whole account.

The handler, the SDK and its retries are real; this file answers their requests and simulates the time.
Source of the number: Batch user guide, "AWS Batch service quotas".
"""

from __future__ import annotations

import collections
import heapq
import itertools
import json
import random
from typing import TYPE_CHECKING, Any, Final

import botocore.endpoint
import greenlet
import pytest
from botocore.awsrequest import AWSResponse
from tests.infra.targets.aws_batch.kit import ENVIRONMENT

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.provision.handler import Desired
from skerry.infra.provision.observe_resources import CALLS_AT_ONCE
from skerry.infra.targets.aws_batch.jobs import Jobs
from skerry.infra.targets.aws_batch.resource_types import Job
from skerry.runtime.errors import Retryable

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow
JOBS: Final = 1000
ALLOWED: Final = 50.0


class Hours:
    """A clock for many concurrent waiters, each in its own greenlet; the shortest wait ends first."""

    def __init__(self, seed: int) -> None:
        self.time = 1000.0
        self.pauses: list[float] = []
        self.random = random.Random(seed)
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, greenlet.greenlet]] = []
        self._main = greenlet.getcurrent()

    def now(self) -> float:
        return self.time

    def utc_text(self) -> str:
        return "2026-01-01T00:00:00.000+00:00"

    def fraction(self) -> float:
        return self.random.random()

    def nonce(self) -> str:
        return f"{self.random.getrandbits(128):032x}"

    def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
        del wake
        self.pauses.append(seconds)
        self.sleep(seconds)

    def sleep(self, seconds: float) -> None:
        heapq.heappush(self._waiting, (self.time + seconds, next(self._order), greenlet.getcurrent()))
        self._main.switch()

    def run(self, work: Callable[[], None], workers: int) -> None:
        """Run `work` in this many greenlets until all have ended."""
        for _ in range(workers):
            heapq.heappush(self._waiting, (self.time, next(self._order), greenlet.greenlet(work, self._main)))
        while self._waiting:
            self.time, _, following = heapq.heappop(self._waiting)
            following.switch()


class Service:
    """The submission calls of Batch. rate: calls a second allowed for each operation, saved up for `burst` calls."""

    def __init__(self, clock: Hours, rate: float, burst: float, latency_s: float) -> None:
        self.clock, self.rate, self.burst, self.latency_s = clock, rate, burst, latency_s
        self.submitted: collections.Counter[str] = collections.Counter()
        self.refused = 0
        self._left: dict[str, tuple[float, float]] = {}

    def listen(self, _service: str, client: Any) -> None:
        client.meta.events.register("before-send.batch.*", self._answer)

    def _answer(self, request: Any, event_name: str, **_: object) -> AWSResponse:
        operation = event_name.rpartition(".")[2]
        self.clock.sleep(self.latency_s * self.clock.fraction())
        taken = self._takes(operation)
        self.clock.sleep(self.latency_s * self.clock.fraction())
        if not taken:
            self.refused += 1
            return _response(request, 429, {"message": "Too Many Requests"}, "TooManyRequestsException")
        if operation == "ListJobs":
            return _response(request, 200, {"jobSummaryList": []})
        name = json.loads(request.body)["jobName"]
        self.submitted[name] += 1
        return _response(request, 200, {"jobName": name, "jobId": f"id-of-{name}", "jobArn": f"arn:aws:batch:::{name}"})

    def _takes(self, operation: str) -> bool:
        left, at = self._left.get(operation, (self.burst, self.clock.time))
        left = min(self.burst, left + (self.clock.time - at) * self.rate)
        self._left[operation] = (left - (left >= 1), self.clock.time)
        return left >= 1


def _response(request: Any, status: int, body: dict[str, object], error: str = "") -> AWSResponse:
    response = AWSResponse(request.url, status, {"x-amzn-ErrorType": error} if error else {}, None)
    response._content = json.dumps(body).encode()  # noqa: SLF001  of requests
    return response


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hours]:
    clock = Hours(seed=1)
    random.seed(1)  # the SDK's own jitter
    monkeypatch.setattr(botocore.endpoint.time, "sleep", clock.sleep)
    yield clock
    random.seed()


def submit(clock: Hours, service: Service, count: int, **environment: str) -> tuple[dict[str, str], list[Exception]]:
    """The ids by name, and what failed, when an apply submits so many as fast as it can."""
    jobs = Jobs(Aws(clock, {**ENVIRONMENT, **environment}, client_made=service.listen))
    numbers, ids, failed = iter(range(count)), dict[str, str](), list[Exception]()

    def work() -> None:
        for number in numbers:
            settings = {"definition": "arn:d", "queue": "arn:q", "log_group": "/g"}
            job = Job(key=f"b-{number}", name=f"skerry-b-{number}", region="us-east-1", **settings)
            wanted = Desired(resource=job, generation=0, run="s3://acme/runs/tiny", settings=job.settings())
            try:
                ids[job.name] = jobs.create(wanted)["id"]
            except Retryable as error:
                failed.append(error)

    clock.run(work, CALLS_AT_ONCE)
    return ids, failed


@pytest.mark.parametrize(
    ("rate", "burst", "latency_s"),
    [
        (ALLOWED, ALLOWED, 0.02),
        # Nothing saved up, and so near that a repeat is there at once.
        (ALLOWED, 1, 0.002),
        # Others of the account take the most.
        (ALLOWED / 5, 1, 0.01),
    ],
)
def test_throttled_submissions_are_all_made_once(clock: Hours, rate: float, burst: float, latency_s: float) -> None:
    service, began = Service(clock, rate, burst, latency_s), clock.time
    ids, failed = submit(clock, service, JOBS)
    assert failed == []
    assert ids == {f"skerry-b-{number}": f"id-of-skerry-b-{number}" for number in range(JOBS)}
    assert service.submitted == collections.Counter(dict.fromkeys(ids, 1))
    assert service.refused > 0
    # It takes little longer than the rate allows.
    assert JOBS / rate - 1 <= clock.time - began <= 4 * JOBS / rate


def test_throttled_calls_retry_at_different_times(clock: Hours) -> None:
    submit(clock, Service(clock, rate=0.0, burst=0, latency_s=0.0), CALLS_AT_ONCE)
    firsts = [pause for pause in clock.pauses if pause <= 0.5]
    assert len(firsts) == len(set(firsts)) == CALLS_AT_ONCE
    assert min(firsts) >= 0.25
    assert 5 < max(clock.pauses) <= 10


def test_unavailable_service_is_an_error_after_minutes(clock: Hours) -> None:
    service, began = Service(clock, rate=0.0, burst=0, latency_s=0.01), clock.time
    ids, failed = submit(clock, service, 1)
    assert (ids, len(failed)) == ({}, 1)
    assert "TooManyRequestsException" in str(failed[0])
    assert 300 <= clock.time - began <= 360


def test_configured_number_of_attempts_is_kept(clock: Hours) -> None:
    service = Service(clock, rate=0.0, burst=0, latency_s=0.01)
    _, failed = submit(clock, service, 1, AWS_MAX_ATTEMPTS="2")
    assert (len(failed), service.refused) == (1, 2)
