"""Bad contributions of every kind do not stop the other replicas: real managers over one memory store.

Round 0 is sound. In round 1 the store changes what slot c writes; to c, its objects are as it wrote them. The others
close the round without it, c follows, and a later round has all three.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.events import logged_events
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    begin_run,
    commits,
    exchange,
    islands_of,
    manager_of,
    members,
    receipts,
    together,
    train_all,
    wait_for,
)
from tests.kit.protocol import start_replica
from tests.kit.stores import View, damage, flip
from tests.support.clocks import FakeClock

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import MAX_RECORD_BYTES
from skerry.runtime.log.records import Contribution
from skerry.runtime.store import buffers_of
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying
from skerry.runtime.training import contribute_and_average
from skerry.runtime.training.open_session import SessionOptions, join_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.store import Data, Entry, Span

ABC = [["a", "b", "c"]]


def fields(**changes: object) -> Callable[[bytes], bytes]:
    """Changes fields of a record."""
    return lambda data: json.dumps(json.loads(data) | changes).encode()


def part(**changes: object) -> Callable[[bytes], bytes]:
    """Changes fields of a record's first part."""

    def change(data: bytes) -> bytes:
        record = json.loads(data)
        record["parts"][0] |= changes
        return json.dumps(record).encode()

    return change


def unchanged(data: bytes) -> bytes:
    return data


class Poisoned(MemoryStore):
    """Changes the record and the payload of some slots in one round; None keeps it from being written."""

    def __init__(
        self,
        *,
        record: Callable[[bytes], bytes | None] = unchanged,
        payload: Callable[[bytes], bytes | None] = unchanged,
        round_number: int = 1,
        slots: str = "c",
    ) -> None:
        super().__init__()
        self._record, self._payload = record, payload
        self._prefixes = (keys.CONTRIBUTIONS + f"{round_number:08d}", keys.PAYLOADS + f"{round_number:08d}")
        self.slots = slots

    def create(self, key: str, data: Data) -> bool:
        if not key.startswith(self._prefixes) or keys.slot_of(key) not in self.slots:
            return super().create(key, data)
        change = self._record if key.startswith(keys.CONTRIBUTIONS) else self._payload
        changed = change(b"".join(buffers_of(data)))
        return True if changed is None else super().create(key, changed)


class Newer(Poisoned):
    """c's payload has another version and the right digests, so that only its first bytes reveal that."""

    def __init__(self) -> None:
        super().__init__(record=lambda data: data.replace(*self._names))
        self._names = (b"", b"")

    def create(self, key: str, data: Data) -> bool:
        folder, _, name = key.rpartition("/")
        if folder != f"{keys.PAYLOADS}00000001/c":
            return super().create(key, data)
        body = b"".join(buffers_of(data))
        newer = body[:8] + (99).to_bytes(8, "little") + body[16:]
        header_bytes = -(-(24 + int.from_bytes(body[16:24], "little")) // 64) * 64
        renamed = xxhash.xxh3_128_hexdigest(newer[:header_bytes])
        self._names = (name.encode(), renamed.encode())
        return MemoryStore.create(self, f"{folder}/{renamed}", newer)


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "skerry")
    return caplog


def refusals(events: pytest.LogCaptureFixture) -> dict[tuple[int, str], set[str]]:
    """The reasons of refusals, by round and slot."""
    reasons: dict[tuple[int, str], set[str]] = {}
    for event in logged_events(events, "contribution_refused"):
        reasons.setdefault((event["round"], event["slot"]), set()).add(str(event["reason"]))
    return reasons


def train(store: MemoryStore, rounds: int = 3, slots: str = "abc", **settings: object) -> list[Island]:
    """All replicas train to the same parameters."""
    islands = islands_of(store, slots, **settings)
    train_all(islands, rounds)
    assert_same_parameters(islands)
    return islands


# The receivers' side.

OTHER = "f" * 32
KINDS: dict[str, tuple[dict[str, Callable[[bytes], bytes | None]], str]] = {
    "no record": ({"record": lambda _: b'{"run": 1'}, "record does not parse: key=contributions/00000001"),
    "another protocol": ({"record": fields(protocol=2)}, "does not parse.*protocol: Extra inputs are not perm"),
    "a huge record": ({"record": lambda data: data + b" " * MAX_RECORD_BYTES}, "record too large"),
    "another run": ({"record": fields(run=OTHER)}, f"two runs share this prefix: .*run={OTHER}"),
    "another slot": ({"record": fields(slot="b")}, "names another slot or exchange"),
    "another round": ({"record": fields(round=0)}, "names another slot or exchange"),
    "another base": ({"record": fields(base="f" * 64)}, "builds on commit ffffffffffff"),
    "other tensors": ({"record": fields(index=OTHER)}, f"tensors or codec differ: index={OTHER}"),
    "no parts": ({"record": fields(parts=[])}, "wrong number of parts: slot=c parts=0 expected=1"),
    "a huge header": ({"record": part(header_bytes=1 << 50)}, "wrong size of header: slot=c"),
    "a huge part": ({"record": part(total_bytes=1 << 50)}, "wrong size of part: slot=c"),
    "an empty part": ({"record": part(total_bytes=0)}, "wrong size of part: slot=c"),
    "another payload": ({"record": part(digest=OTHER)}, f"payload is absent: .*{OTHER}"),
    "a missing payload": ({"payload": lambda _: None}, "payload is absent: key=payloads/00000001/c/"),
    "a short payload": ({"payload": lambda data: data[:-1]}, "payload is missing or of another length"),
    "a long payload": ({"payload": lambda data: data + b"x"}, "payload is missing or of another length"),
    "half a header": ({"payload": lambda data: data[:100]}, "header is truncated"),
    "a damaged header": ({"payload": lambda data: flip(data, 200)}, "header is damaged: key=payloads/00000001/c/"),
    "a damaged length of the header": ({"payload": lambda data: flip(data, 16)}, "header is damaged"),
}


@pytest.mark.parametrize("kind", [*KINDS, "another version"])
def test_bad_contribution_is_refused_and_the_round_continues(kind: str, events: pytest.LogCaptureFixture) -> None:
    changes, reason = KINDS.get(kind, ({}, "payload of another version"))
    store = Poisoned(**changes) if changes else Newer()
    begin_run(store, "abc", minimum=2)
    # The others wait for c on a busy machine, too: none is dead here.
    train(store, 8, heartbeat_interval=timedelta(seconds=2))
    assert members(store)[:2] == [*ABC, ["a", "b"]]
    assert ABC[0] in members(store)[2:], "on a busy machine c's heartbeat lags, and the others go on without it"
    ((place, reasons),) = refusals(events).items()
    assert place == (1, "c")
    assert all(re.search(reason, text) for text in reasons), reasons
    assert [receipt.contributed for receipt in receipts(store, 1).values()] == [True, True, False]


class Misdelivered(View):
    """The header of c's payload of round 1 arrives damaged at its first reads, which precede the decision."""

    def __init__(self, store: MemoryStore, reads: int) -> None:
        super().__init__(store)
        self.left = reads

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        body = self.store.read(key, span, into)
        is_header = key.startswith(f"{keys.PAYLOADS}00000001/c/") and span is not None and span.start == 0
        if body is None or not is_header or not self.left:
            return body
        self.left -= 1
        return memoryview(flip(bytes(body), 200))


def test_header_damaged_by_two_reads_is_read_again(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    begin_run(store, "abc", minimum=3)
    views = [Misdelivered(store, reads=2) for _ in "ab"]

    class LastProposer(View):
        def create(self, key: str, data: Data) -> bool:
            if key == keys.decision(1, 0):
                wait_for(lambda: any(view.left == 0 for view in views))  # a or b has read the damage
            return self.store.create(key, data)

    stores = [*views, LastProposer(store)]
    islands = [Island(view, slot, minimum=3) for view, slot in zip(stores, "abc", strict=True)]  # type: ignore[arg-type]
    train_all(islands, 3)
    assert members(store) == ABC * 3
    assert refusals(events) == {}
    assert logged_events(events, "round_failed") == []


# Where all are needed: a slot contributes once to a round, so what is refused has no substitute.


def test_unreadable_header_that_is_needed_is_passed_by_its_author() -> None:
    """It does not read back what it has just written, so it proposes; and it alone has the next state."""
    store = Poisoned(payload=lambda data: flip(data, 200))
    begin_run(store, "abc", minimum=3)
    train(store, minimum=3, max_retries=None)  # the others may try more than once before its author closes the round
    assert members(store) == ABC * 3
    assert store.read(keys.checkpoint_manifest(2)) is not None


def test_decided_payload_of_another_version_counts_as_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided by a replica that can read it: no reason to stop. Its author helps the others past it."""
    look = contribute_and_average.find_fault

    def overlook_before_decision(*place: Any, **limits: int) -> str | None:
        return None if limits else look(*place)

    monkeypatch.setattr(contribute_and_average, "find_fault", overlook_before_decision)
    store = Newer()
    begin_run(store, "abc", minimum=2)
    train(store, max_retries=None)  # as above
    assert members(store)[:2] == ABC * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a missing payload", "a short payload", "no parts"])
def test_refused_contribution_ends_the_job_if_all_are_needed(kind: str, events: pytest.LogCaptureFixture) -> None:
    """Until it is deleted: the round is not decided, so nothing refers to it. A restart is not enough."""
    changes, reason = KINDS[kind]
    store = Poisoned(**changes)
    begin_run(store, "abc", minimum=3)

    class Patient(View):
        """Lists the contributions to a round that this slot has contributed to once all three have."""

        def __init__(self, slot: str) -> None:
            super().__init__(store)
            self.slot = slot

        def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
            for number in (0, 1):
                records = [keys.contribution(number, 0, slot) for slot in (self.slot, *"abc")]
                if prefix == keys.contributions_prefix(number, 0) and store.read(records[0]):
                    wait_for(lambda records=records: all(store.read(record) for record in records))
            return self.store.list(prefix, after)

    def fail(slot: str) -> None:
        terms: dict[str, object] = {"minimum": 3, "timeout": timedelta(seconds=0.3), "max_retries": 1}
        with pytest.raises(RuntimeError, match="exceeding max_retries=1") as ended:
            Island(Patient(slot), slot, **terms).train(3)  # type: ignore[arg-type]
        assert isinstance(ended.value.__cause__, TimeoutError)
        assert "contributed=a,b min_replica_size=3" in str(ended.value.__cause__)

    for _ in range(2):
        together([lambda s=slot: fail(s) for slot in "abc"])
    assert members(store) == ABC
    assert any(re.search(reason, text) for text in refusals(events)[1, "c"])
    store.slots = ""
    store.delete(keys.contribution(1, 0, "c"))
    train(store, minimum=3)
    assert members(store) == ABC * 3


def test_foreign_object_is_ignored(events: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    begin_run(store, "ab")
    foreign = ["contributions/00000000-0000/README", "contributions/00000000-0000/.x.json", "heartbeats/notes.txt"]
    for key in foreign:
        store.create(key, b"a note")
    train(store, 2, "ab")
    assert members(store) == [["a", "b"]] * 2
    assert {slot for _, slot in refusals(events)} <= set(foreign[:2])


@given(
    st.one_of(
        st.binary(max_size=64).map(lambda noise: lambda _: noise),
        st.tuples(st.integers(0, 600), st.integers(1, 255)).map(
            lambda at: lambda data: bytes(b ^ (at[1] if i == at[0] else 0) for i, b in enumerate(data))
        ),
        st.integers(0, 600).map(lambda cut: lambda data: data[:cut]),
        st.tuples(
            st.sampled_from(sorted(Contribution.model_fields)),
            st.one_of(
                st.none(),
                st.booleans(),
                st.integers(),
                st.floats(),
                st.text(max_size=8),
                st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=2),
            ),
        ).map(lambda field: fields(**{field[0]: field[1]})),
    )
)
@settings(max_examples=150)
def test_no_record_keeps_the_others_from_closing(change: Callable[[bytes], bytes]) -> None:
    """Accepted or refused: no contribution raises in the replicas that read it."""
    clock = FakeClock()
    store = Retrying(Poisoned(record=change, round_number=0), clock)
    a, b, c = (start_replica(store, clock, slot) for slot in "abc")
    for replica in (c, b, a):
        replica.contribute(replica.presence.slot.encode())
    assert a.members() in (["a", "b"], ["a", "b", "c"])


# The sender's side.


def test_contribution_above_max_norm_is_not_sent(events: pytest.LogCaptureFixture) -> None:
    """b's step explodes once: it abstains with both numbers, receives the average, and contributes the next round."""
    store = MemoryStore()
    begin_run(store, "ab")

    def work(slot: str) -> list[float]:
        manager = manager_of(store, slot, minimum=1, max_norm=10.0)
        tensors = [torch.full((4,), size) for size in (1.0, 1e6 if slot == "b" else 2.0, 3.0)]
        assert all(exchange(manager, tensor) for tensor in tensors)
        return [tensor[0].item() for tensor in tensors]

    assert together([lambda: work("a"), lambda: work("b")]) == [[1.0, 2.0, 3.0]] * 2
    assert members(store) == [["a", "b"], ["a"], ["a", "b"]]
    assert [receipt.norm for receipt in receipts(store, 0).values()] == [2.0, 2.0]
    norms = [(event["slot"], event["norm"]) for event in logged_events(events, "contributed")]
    assert sorted(norms) == [("a", 2.0), ("a", 4.0), ("a", 6.0), ("b", 2.0), ("b", 6.0)]
    (abstained,) = logged_events(events, "abstained")
    assert abstained["reason"] == "norm above the limit: norm=2e+06 max_norm=10"


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_max_norm_that_refuses_everything_is_invalid(limit: float) -> None:
    with pytest.raises(Invalid, match="max_norm must be above 0"):
        join_run(MemoryStore(), "a", SessionOptions(min_replicas=1, deadline_s=1.0, max_norm=limit), FakeClock())


# Damage after the decision.


class Late(View):
    """A replica that reads a's payload of round 1 only when the others have applied it, and it is damaged by then.

    repaired_after: how many reads find it damaged before it is restored; None: never.
    """

    def __init__(self, store: MemoryStore, *, repaired_after: int | None) -> None:
        super().__init__(store)
        self._reads = 0
        self._repaired_after = repaired_after
        self._sound = b""

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        # A read before the decision is a proposer's; a later one is for the average.
        is_late = key.startswith(f"{keys.PAYLOADS}00000001/a/") and self.store.read(keys.decision(1, 0)) is not None
        if is_late and self._reads == 0:
            wait_for(lambda: {"a", "b"} <= receipts(self.store, 1).keys())
            self._sound = damage(self.store, key)
        if is_late and self._reads == self._repaired_after:
            self.store.replace(key, self._sound)
        self._reads += is_late
        return self.store.read(key, span, into)


@pytest.mark.parametrize("repaired_after", [None, 8])
def test_damage_after_two_have_applied_is_passed_by_checkpoint_or_repair(
    repaired_after: int | None, events: pytest.LogCaptureFixture
) -> None:
    store, rounds = MemoryStore(), 6 if repaired_after is None else 3
    begin_run(store, "abc", minimum=2)
    views = [store, store, Late(store, repaired_after=repaired_after)]
    islands = [
        Island(view, slot, seed=seed, grace_s=60.0, max_retries=None)  # type: ignore[arg-type]
        for seed, (view, slot) in enumerate(zip(views, "abc", strict=True))
    ]
    train_all(islands, rounds)
    assert_same_parameters(islands)
    assert len(commits(store)) == rounds
    failed = logged_events(events, "round_failed")
    assert {event["slot"] for event in failed} == {"c"}
    assert all("payload is damaged: key=payloads/00000001/a/" in str(event["error"]) for event in failed)
    assert all("slot=a block=0" in str(event["error"]) for event in failed)
    if repaired_after is None:
        loaded = [event["round"] for event in logged_events(events, "checkpoint_loaded") if event["slot"] == "c"]
        assert max(loaded) > 1
        assert "c" not in receipts(store, 1)
    else:
        assert len({receipt.averages for receipt in receipts(store, 1).values()}) == 1


def test_damage_that_all_replicas_read_ends_each_with_the_cause() -> None:
    store = Poisoned(payload=flip, slots="ab")
    begin_run(store, "ab", minimum=2)

    def fail(island: Island) -> None:
        with pytest.raises(RuntimeError, match="exceeding max_retries=2") as ended:
            island.train(3)
        assert isinstance(ended.value.__cause__, Corrupt)
        assert re.search("payload is damaged: key=payloads/00000001/.*block=0", str(ended.value.__cause__))

    together([lambda i=island: fail(i) for island in islands_of(store, "ab", grace_s=0.2)])
    assert len(commits(store)) == 1
