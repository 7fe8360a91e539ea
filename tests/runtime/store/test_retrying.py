"""The retrying wrapper: over a scripted store and a fake clock, then over real clients and a faulty server."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter

import pytest
from tests.kit.events import logged_levels
from tests.kit.stores import VERBS, ForgetfulStore, HookedStore, race
from tests.support.clocks import FakeClock
from tests.support.s3server import Faults, Kind, Rule, S3Server

from skerry.runtime.clock import Backoff, SystemClock
from skerry.runtime.errors import Ambiguous, Invalid, Retryable, Unauthorized
from skerry.runtime.store import Data, Span
from skerry.runtime.store.obstore_clients import open_cloud_store
from skerry.runtime.store.retrying import END_BYTES, REFUSAL_PATIENCE_S, WHOLE_BYTES, Retrying, Usage

LARGE = WHOLE_BYTES + 12_345
COMMITTED, LIE = Ambiguous("reset after commit"), Ambiguous("a 409 that wrote nothing")


class ScriptedStore(HookedStore):
    """A memory store that follows a script, one line per call of any verb, and then behaves.

    An error is raised, COMMITTED after the write; LIE is a create's False with nothing written; None is an ordinary
    call.
    """

    def __init__(self, *script: Exception | None) -> None:
        super().__init__(self._next_line)
        self.script = list(script)
        self.calls: Counter[str] = Counter()
        self.line: Exception | None = None

    def create(self, key: str, data: Data) -> bool:
        created = super().create(key, data) if self.script[:1] != [LIE] else self.hook("create", key)
        if self.line is COMMITTED:
            raise COMMITTED
        return bool(created)

    def _next_line(self, verb: str, _: str) -> None:
        self.calls[verb] += 1
        self.line = self.script.pop(0) if self.script else None
        if self.line not in {None, COMMITTED, LIE}:
            raise self.line


def retrying(*script: Exception | None, deadline_s: float = 120.0) -> tuple[Retrying, ScriptedStore, FakeClock]:
    store, clock = ScriptedStore(*script), FakeClock()
    return Retrying(store, clock, deadline_s=deadline_s), store, clock


@pytest.mark.parametrize("verb", VERBS)
def test_retryable_failure_is_retried_after_growing_pauses(verb: str) -> None:
    # A create's failure is followed by a read, which fails in this script, too.
    wrapper, store, clock = retrying(*[Retryable("503")] * (4 if verb == "create" else 2))
    VERBS[verb](wrapper)
    assert store.calls[verb] == 3
    assert len(clock.pauses) == 2
    assert 0 < clock.pauses[0] < clock.pauses[1]


@pytest.mark.parametrize("error", [Unauthorized("403"), Invalid("no such bucket")])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("in_a_run", [False, True])
def test_permanent_error_is_raised_at_once(
    verb: str, error: Exception, caplog: pytest.LogCaptureFixture, *, in_a_run: bool
) -> None:
    """In a run a refusal is permanent only before the first success."""
    wrapper, store, clock = retrying(error) if in_a_run else retrying(None, error)
    if in_a_run:
        wrapper = wrapper.with_deadline(60.0, threading.Event())
    else:
        wrapper.list("")
    with caplog.at_level(logging.INFO, "skerry"), pytest.raises(type(error)):
        VERBS[verb](wrapper)
    assert (clock.pauses, store.calls.total()) == ([], 1 if in_a_run else 2)
    assert logged_levels(caplog) == [], "it is no outage"


@pytest.mark.parametrize("verb", VERBS)
def test_refusal_after_a_success_is_an_outage(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    wrapper, _, clock = retrying(None, *[Unauthorized("403")] * 3)
    wrapper = wrapper.with_deadline(60.0, threading.Event())
    with caplog.at_level(logging.INFO, "skerry"):
        wrapper.list("")
        VERBS[verb](wrapper)
    assert len(clock.pauses) == 3
    assert logged_levels(caplog) == [("WARNING", "store_retry"), ("INFO", "store_recovered")]


@pytest.mark.parametrize("verb", VERBS)
def test_refusal_is_final_after_some_minutes_even_if_other_verbs_succeed(verb: str) -> None:
    wrapper, store, clock = retrying(None, *[Unauthorized("403")] * 10_000)
    wrapper = wrapper.with_deadline(3600.0, threading.Event())
    other = "delete" if verb == "list" else "list"
    VERBS[other](wrapper)
    began = clock.now()
    clock.on_pause = lambda: store.script.insert(0, None) or VERBS[other](wrapper)
    with pytest.raises(Unauthorized):
        VERBS[verb](wrapper)
    assert clock.now() - began == pytest.approx(REFUSAL_PATIENCE_S, rel=0.2)


@pytest.mark.parametrize("verb", VERBS)
def test_refusal_of_a_slow_request_is_final_after_some_minutes(verb: str) -> None:
    """A large upload is refused at its end, each time after more than a minute."""
    clock = FakeClock()

    def refuse(name: str, key: str) -> None:
        if (name, key) == (verb, "slow/x") or (name, key) == (verb, "slow/"):
            clock.advance(70.0)
            raise Unauthorized("403")

    wrapper = Retrying(HookedStore(refuse), clock, deadline_s=3600.0, stop=threading.Event())
    wrapper.list("other/")
    calls = {
        "read": lambda: wrapper.read("slow/x"),
        "create": lambda: wrapper.create("slow/x", b""),
        "replace": lambda: wrapper.replace("slow/x", b""),
        "list": lambda: wrapper.list("slow/"),
        "delete": lambda: wrapper.delete("slow/x"),
    }
    began = clock.now()
    with pytest.raises(Unauthorized):
        calls[verb]()
    assert clock.now() - began < REFUSAL_PATIENCE_S + 2 * 70.0


@pytest.mark.parametrize("verb", VERBS)
def test_refusals_with_a_long_time_between_are_separate_outages(verb: str) -> None:
    wrapper, _, clock = retrying(None, Unauthorized("403"), *[Retryable("503")] * 3, Unauthorized("403"))
    wrapper = wrapper.with_deadline(3600.0, threading.Event())
    wrapper.list("")
    clock.on_pause = lambda: clock.advance(REFUSAL_PATIENCE_S)
    began = clock.now()
    VERBS[verb](wrapper)
    assert clock.now() - began > 2 * REFUSAL_PATIENCE_S, "the two refusals are further apart than one outage may last"


@pytest.mark.parametrize("verb", VERBS)
def test_call_ends_at_its_deadline_with_the_last_error_as_cause(verb: str) -> None:
    wrapper, _, clock = retrying(*(Retryable(f"503 number {number}") for number in range(10_000)), deadline_s=30.0)
    began = clock.now()
    kind = Ambiguous if verb == "create" else Retryable
    with pytest.raises(kind, match=f"timed out after 30 s: {verb} key=.*503 number") as raised:
        VERBS[verb](wrapper)
    assert isinstance(raised.value.__cause__, Retryable)
    # The last pause is shortened, so that the last attempt begins at the deadline.
    assert clock.now() - began == pytest.approx(30.0)


def test_create_with_a_lost_reply_succeeds_without_a_second_write() -> None:
    wrapper, store, clock = retrying(COMMITTED)
    assert wrapper.create("a", b"body") is True
    assert store.calls == {"create": 1, "read": 1}
    assert clock.pauses == []


def test_create_is_repeated_after_a_conflict_that_wrote_nothing() -> None:
    wrapper, store, _ = retrying(LIE)
    assert wrapper.create("a", b"body") is True
    assert store.read("a") == b"body"


def test_create_recognises_its_own_late_success() -> None:
    # The first attempt timed out, and arrives only after the read that found nothing.
    wrapper, store, clock = retrying(Ambiguous("time-out"))
    clock.on_pause = lambda: store.replace("a", b"body")
    assert wrapper.create("a", b"body") is True


@pytest.mark.parametrize("line", [None, LIE, Ambiguous("time-out"), Retryable("503")], ids=repr)
def test_create_loses_to_other_bytes_whatever_the_reply(line: Exception | None) -> None:
    wrapper, store, _ = retrying(None, line)
    store.replace("a", b"theirs")
    assert wrapper.create("a", b"mine..") is False
    assert store.read("a") == b"theirs"


def test_failed_comparison_does_not_decide_a_create() -> None:
    wrapper, store, _ = retrying(COMMITTED, Retryable("503"), None, None)
    assert wrapper.create("a", b"body") is True
    assert store.calls["create"] == 2


@pytest.mark.parametrize("size", [0, 1, 1000, WHOLE_BYTES, WHOLE_BYTES + 1, LARGE])
def test_own_bytes_are_distinguished_from_others_at_any_size(size: int) -> None:
    mine = bytearray(random.Random(size).randbytes(size))
    parts = [mine[: size // 3], b"", mine[size // 3 :]]
    others = [mine + b"x"]
    if size:
        others += [mine[:-1], bytes([mine[0] ^ 1]) + mine[1:], mine[:-1] + bytes([mine[-1] ^ 1])]
    for body in others:
        wrapper, store, _ = retrying()
        store.replace("a", body)
        assert wrapper.create("a", parts) is False
    wrapper, _, _ = retrying(COMMITTED)
    assert wrapper.create("a", parts) is True
    # Of a large object only the ends are read.
    assert wrapper.usage.downloaded_bytes == (size if size <= WHOLE_BYTES else 2 * END_BYTES)


def test_usage_counts_requests_and_bytes_with_retries() -> None:
    wrapper, _, _ = retrying(Retryable("503"), Retryable("503"))
    wrapper.create("a", [b"12345", b"678"])
    before = wrapper.usage
    wrapper.read("a")
    wrapper.read("a", Span(0, 3))
    wrapper.read("absent")
    wrapper.replace("b", b"123")
    wrapper.list("")
    wrapper.delete("a")
    assert before == Usage(creates=2, reads=1, retries=1, uploaded_bytes=16)
    during = Usage(reads=3, replaces=1, lists=1, deletes=1, uploaded_bytes=3, downloaded_bytes=11)
    assert wrapper.usage - before == during
    assert wrapper.usage.requests == 9


# Real clients and a faulty server.


def connect(server: S3Server, prefix: str) -> Retrying:
    environment = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": "test-key"}
    store = open_cloud_store("s3", "bucket", prefix, environment=environment, stall_s=0.1, bulk_s=1.0)
    return Retrying(store, SystemClock(), deadline_s=30.0, backoff=Backoff(first=0.001, cap=0.01))


@pytest.fixture
def real(s3: S3Server, prefix: str, aws_keys: None) -> Retrying:
    del aws_keys
    return connect(s3, prefix)


@pytest.mark.parametrize("kind", ["409", "429", "500", "503", "reset", "reset_after_commit", "stall", "latency"])
@pytest.mark.parametrize("size", [100, LARGE])
def test_create_succeeds_once_after_any_fault(real: Retrying, s3: S3Server, kind: Kind, size: int) -> None:
    s3.faults.set(Rule(kind, "PUT", times=1, seconds=0.05 if kind == "latency" else 60.0))
    assert real.create("a", b"mine" * size) is True
    assert real.create("a", b"other" * size) is False
    assert real.read("a") == b"mine" * size


@pytest.mark.parametrize("kind", ["429", "500", "503", "reset", "truncate", "stall"])
def test_read_returns_the_whole_body_after_any_fault(real: Retrying, s3: S3Server, kind: Kind) -> None:
    body = random.Random(kind).randbytes(LARGE)
    real.create("a", body)
    s3.faults.set(Rule(kind, "GET", times=2))
    assert real.read("a") == body
    s3.faults.set(Rule(kind, "GET", times=2))
    assert real.read("a", Span(7, LARGE), memoryview(bytearray(LARGE))) == body[7:]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.usefixtures("real")
def test_one_of_racing_creates_wins_under_random_faults(
    s3: S3Server, prefix: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[Kind] = ["409", "500", "503", "reset", "reset_after_commit"]
    monkeypatch.setattr(s3, "faults", Faults(seed))
    s3.faults.set(*(Rule(kind, times=1_000_000, chance=0.12) for kind in kinds))
    stores = [connect(s3, prefix) for _ in range(4)]
    for number in range(25):
        key = f"decisions/{number:08d}.json"
        bodies = [f"writer {writer}, nonce {seed}-{number}".encode() for writer in range(len(stores))]
        winners = race(stores, key, bodies)
        assert [bodies[winner] for winner in winners] == [s3.peek("bucket", prefix + key)], f"seed {seed}, key {key}"
    assert sum(store.usage.retries for store in stores) > 25


@pytest.mark.parametrize(("seconds", "body"), [(8.0, b"body"), (12.0, None)])
def test_object_that_must_exist_is_read_again_for_some_seconds(seconds: float, body: bytes | None) -> None:
    clock = FakeClock()
    began = clock.now()
    wrapper = Retrying(ForgetfulStore(clock, seconds), clock)
    wrapper.create("a", b"body")
    assert wrapper.read("a") is None
    assert wrapper.read_existing("a") == body
    assert clock.now() - began <= 10.0


def test_stop_ends_the_wait_for_an_object_that_must_exist() -> None:
    clock = FakeClock()
    stop = threading.Event()
    wrapper = Retrying(ForgetfulStore(clock, 60.0), clock).with_deadline(60.0, stop)
    stop.set()
    assert wrapper.read_existing("a") is None
    assert clock.pauses == []
