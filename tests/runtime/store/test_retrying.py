"""The wrapper: against a scripted engine and a clock of ours, then over real clients and a server that misbehaves."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock
from tests.support.s3server import Faults, Rule, S3Server

from skerry.runtime.clock import Backoff, SystemClock
from skerry.runtime.errors import Ambiguous, Invalid, Retryable, Unauthorized
from skerry.runtime.store import Span
from skerry.runtime.store.clients import cloud_store
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import END_BYTES, WHOLE_BYTES, Retrying, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.s3server import Kind

    from skerry.runtime.store import Data, Entry

LARGE = WHOLE_BYTES + 12_345


class Scripted(MemoryStore):
    """A memory store that first plays its script, one line per call of any verb.

    An error is raised, after the write where it is "committed"; "lie" is a create's False with nothing written; None
    is an ordinary call.
    """

    def __init__(self, *script: Exception | str | None) -> None:
        super().__init__()
        self.script = list(script)
        self.calls: Counter[str] = Counter()

    def create(self, key: str, data: Data) -> bool:
        match self._line("create"):
            case "lie":
                return False
            case "committed":
                super().create(key, data)
                raise Ambiguous("reset after commit")
            case _:
                return super().create(key, data)

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self._line("read")
        return super().read(key, span, into)

    def replace(self, key: str, data: Data) -> None:
        self._line("replace")
        super().replace(key, data)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        self._line("list")
        return super().list(prefix, after)

    def delete(self, key: str) -> None:
        self._line("delete")
        super().delete(key)

    def _line(self, verb: str) -> str | None:
        self.calls[verb] += 1
        line = self.script.pop(0) if self.script else None
        if isinstance(line, Exception):
            raise line
        return line


CALLS: dict[str, Callable[[Retrying], object]] = {
    "read": lambda store: store.read("a"),
    "create": lambda store: store.create("a", b"body"),
    "replace": lambda store: store.replace("a", b"body"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete("a"),
}


@pytest.mark.parametrize("verb", CALLS)
def test_a_failure_that_passes_is_retried_after_a_pause(verb: str) -> None:
    # A create's failure is followed by a look, which fails here too.
    lines = [Retryable("503")] * (4 if verb == "create" else 2)
    engine, clock = Scripted(*lines), FakeClock()
    CALLS[verb](Retrying(engine, clock))
    assert engine.calls[verb] == 3
    assert len(clock.pauses) == 2
    assert 0 < clock.pauses[0] < clock.pauses[1]


@pytest.mark.parametrize("error", [Unauthorized("403"), Invalid("no such bucket")])
@pytest.mark.parametrize("verb", CALLS)
def test_what_a_repeat_cannot_help_passes_at_once(verb: str, error: Exception) -> None:
    engine, clock = Scripted(error), FakeClock()
    with pytest.raises(type(error)):
        CALLS[verb](Retrying(engine, clock))
    assert clock.pauses == []
    assert engine.calls.total() == 1


@pytest.mark.parametrize("verb", CALLS)
def test_a_call_gives_up_at_its_deadline_with_the_last_error_as_the_cause(verb: str) -> None:
    engine, clock = Scripted(*(Retryable(f"503 number {number}") for number in range(10_000))), FakeClock()
    began = clock.now()
    with pytest.raises(
        Ambiguous if verb == "create" else Retryable, match=f"for 30 s: {verb} key=.*503 number"
    ) as raised:
        CALLS[verb](Retrying(engine, clock, deadline_s=30.0))
    assert isinstance(raised.value.__cause__, Retryable)
    # The last pause is cut, so that the last attempt begins at the deadline and not a back-off later.
    assert clock.now() - began == pytest.approx(30.0)


def test_a_create_whose_reply_was_lost_is_ours_without_a_second_write() -> None:
    engine, clock = Scripted("committed"), FakeClock()
    assert Retrying(engine, clock).create("a", b"body") is True
    assert engine.calls == {"create": 1, "read": 1}
    assert clock.pauses == []


def test_a_create_that_was_refused_with_nothing_written_is_tried_again() -> None:
    engine = Scripted("lie")
    assert Retrying(engine, FakeClock()).create("a", b"body") is True
    assert engine.read("a") == b"body"


def test_a_create_that_met_its_own_earlier_success_is_ours() -> None:
    # The first attempt timed out and lands only after the look that found nothing.
    engine, clock = Scripted(Ambiguous("time-out")), FakeClock()
    clock.on_pause = lambda: engine.replace("a", b"body")
    assert Retrying(engine, clock).create("a", b"body") is True


def test_a_create_that_somebody_else_won_is_lost_whatever_the_reply_was() -> None:
    for line in (None, "lie", Ambiguous("time-out"), Retryable("503")):
        engine = Scripted(None, line)
        engine.replace("a", b"theirs")
        assert Retrying(engine, FakeClock()).create("a", b"mine..") is False
        assert engine.read("a") == b"theirs"


def test_a_look_that_fails_does_not_decide() -> None:
    engine = Scripted("committed", Retryable("503"), None, None)
    assert Retrying(engine, FakeClock()).create("a", b"body") is True
    assert engine.calls["create"] == 2


@pytest.mark.parametrize("size", [0, 1, 1000, WHOLE_BYTES, WHOLE_BYTES + 1, LARGE])
def test_ours_is_told_from_theirs_at_any_size(size: int) -> None:
    mine = bytearray(random.Random(size).randbytes(size))
    cut = size // 3
    parts = [mine[:cut], b"", mine[cut:]]
    theirs = [mine + b"x"] + ([mine[:-1], b"x" + mine[1:] if mine[0] != 120 else b"y" + mine[1:]] if size else [])
    if size:
        theirs.append(mine[:-1] + bytes([mine[-1] ^ 1]))
    for body in theirs:
        engine = Scripted()
        engine.replace("a", body)
        assert Retrying(engine, FakeClock()).create("a", parts) is False
    engine = Scripted("committed")
    assert Retrying(engine, FakeClock()).create("a", parts) is True


def test_a_look_at_a_large_object_reads_only_its_ends() -> None:
    engine = Scripted("committed")
    store = Retrying(engine, FakeClock())
    assert store.create("a", bytes(LARGE)) is True
    assert store.usage.downloaded_bytes == 2 * END_BYTES


def test_an_outage_is_told_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    engine, clock = Scripted(*[Retryable("503")] * 5), FakeClock()
    store = Retrying(engine, clock)
    with caplog.at_level(logging.INFO, "skerry"):
        store.read("a")
        store.read("a")
    assert [(record.levelname, record.message.split()[0]) for record in caplog.records] == [
        ("WARNING", "store_retry"),
        ("INFO", "store_recovered"),
    ]
    assert "verb=read key=a error=503" in caplog.text
    assert f"waited_s={sum(clock.pauses):.4g}" in caplog.text


def test_an_outage_that_several_calls_see_is_one_outage(caplog: pytest.LogCaptureFixture) -> None:
    engine, clock = Scripted(*[Retryable("503")] * 3), FakeClock()
    store = Retrying(engine, clock)
    others = ["b"]

    def another_call_fails_too() -> None:
        if others:
            store.read(others.pop())

    clock.on_pause = another_call_fails_too
    with caplog.at_level(logging.INFO, "skerry"):
        store.read("a")
    assert [record.message.split()[0] for record in caplog.records] == ["store_retry", "store_recovered"]


def test_an_outage_that_outlasts_a_call_has_not_recovered(caplog: pytest.LogCaptureFixture) -> None:
    engine = Scripted(*[Retryable("503")] * 1000)
    with caplog.at_level(logging.INFO, "skerry"), pytest.raises(Retryable):
        Retrying(engine, FakeClock(), deadline_s=5.0).read("a")
    assert [record.message.split()[0] for record in caplog.records] == ["store_retry"]


def test_usage_counts_requests_and_bytes_with_repeats() -> None:
    store = Retrying(Scripted(Retryable("503"), Retryable("503")), FakeClock())
    store.create("a", [b"12345", b"678"])
    before = store.usage
    store.read("a")
    store.read("a", Span(0, 3))
    store.read("absent")
    store.replace("b", b"123")
    store.list("")
    store.delete("a")
    assert before == Usage(creates=2, reads=1, retries=1, uploaded_bytes=16)
    assert store.usage - before == Usage(reads=3, replaces=1, lists=1, deletes=1, uploaded_bytes=3, downloaded_bytes=11)
    assert store.usage.requests == 9


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server(seed=20) as running:
        yield running


@pytest.fixture
def real(server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Retrying]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    yield _real(server, request.node.name.partition("[")[0])
    server.faults.set()


def _real(server: S3Server, folder: str) -> Retrying:
    told = {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": "nobody"}
    engine = cloud_store("s3", "bucket", f"{folder}/", environment=told, stall_s=0.1, bulk_s=1.0)
    return Retrying(engine, SystemClock(), deadline_s=30.0, backoff=Backoff(first=0.001, cap=0.01))


@pytest.mark.parametrize("kind", ["403", "409", "429", "500", "503", "reset", "reset_after_commit", "stall", "latency"])
@pytest.mark.parametrize("size", [100, LARGE])
def test_every_fault_of_a_create_ends_in_what_happened(real: Retrying, server: S3Server, kind: Kind, size: int) -> None:
    key = f"{kind}/{size}"
    server.faults.set(Rule(kind, "PUT", times=1, seconds=0.05 if kind == "latency" else 60.0))
    if kind == "403":
        with pytest.raises(Unauthorized):
            real.create(key, b"mine" * size)
        assert real.read(key) is None
        return
    assert real.create(key, b"mine" * size) is True
    assert real.create(key, b"other" * size) is False
    assert real.read(key) == b"mine" * size


@pytest.mark.parametrize("kind", ["429", "500", "503", "reset", "truncate", "stall"])
def test_every_fault_of_a_read_ends_in_the_whole_body(real: Retrying, server: S3Server, kind: Kind) -> None:
    body = random.Random(kind).randbytes(LARGE)
    real.create(kind, body)
    buffer = memoryview(bytearray(LARGE))
    server.faults.set(Rule(kind, "GET", times=2))
    assert real.read(kind) == body
    server.faults.set(Rule(kind, "GET", times=2))
    assert real.read(kind, Span(7, LARGE), buffer) == body[7:]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.usefixtures("real")
def test_under_random_faults_of_racing_writers_one_believes_that_it_won(
    server: S3Server, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[Kind] = ["409", "500", "503", "reset", "reset_after_commit"]
    faults = Faults(seed)
    monkeypatch.setattr(server, "faults", faults)
    faults.set(*(Rule(kind, times=1_000_000, chance=0.12) for kind in kinds))
    stores = [_real(server, f"race-{seed}") for _ in range(4)]
    for number in range(25):
        key = f"decisions/{number:08d}.json"
        bodies = [f"writer {writer}, nonce {seed}-{number}".encode() for writer in range(len(stores))]
        won = _race(stores, key, bodies)
        stored = server.peek("bucket", f"race-{seed}/{key}")
        assert [bodies[writer] for writer in won] == [stored], f"seed {seed}, key {key}"
    assert sum(store.usage.retries for store in stores) > 50


def _race(stores: Sequence[Retrying], key: str, bodies: Sequence[bytes]) -> list[int]:
    start = threading.Barrier(len(stores))
    won: list[int] = []

    def write(number: int) -> None:
        start.wait()
        if stores[number].create(key, bodies[number]):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won
