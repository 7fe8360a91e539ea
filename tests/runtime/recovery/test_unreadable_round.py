"""Bad contributions of every kind do not stop the other replicas: real managers over one memory store.

Round 0 is sound. In round 1 the store changes what slot c writes; c believes that its objects are as it wrote them. The
others close the round without it, c follows, and the next round has all three.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.managers import Island, commits, decisions, manager_of, receipts, together
from tests.kit.protocol import run_record, start_replica
from tests.support.clocks import FakeClock

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Corrupt, Diverged, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import MAX_RECORD_BYTES, Contribution
from skerry.runtime.store import buffers_of
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying
from skerry.runtime.training.contribute_and_average import Averager
from skerry.runtime.training.join_run import SessionOptions, join_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.store import Data, Entry, Span


def same(data: bytes) -> bytes:
    return data


def told(**fields: object) -> Callable[[bytes], bytes]:
    """The record with other fields."""
    return lambda data: json.dumps(json.loads(data) | fields).encode()


def part(**fields: object) -> Callable[[bytes], bytes]:
    """The record with another first part."""

    def change(data: bytes) -> bytes:
        record = json.loads(data)
        record["parts"][0] |= fields
        return json.dumps(record).encode()

    return change


def flipped(position: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


class Poisoned(MemoryStore):
    """Changes one slot's record and payload of one round; None keeps it from being written."""

    def __init__(
        self,
        *,
        record: Callable[[bytes], bytes | None] = same,
        payload: Callable[[bytes], bytes | None] = same,
        round_number: int = 1,
        slots: tuple[str, ...] = ("c",),
    ) -> None:
        super().__init__()
        self._record = record
        self._payload = payload
        self._prefixes = (keys.CONTRIBUTIONS + f"{round_number:08d}", keys.PAYLOADS + f"{round_number:08d}")
        self._slots = slots

    def mend(self) -> None:
        """Change nothing from now on."""
        self._slots = ()

    def create(self, key: str, data: Data) -> bool:
        if not key.startswith(self._prefixes) or keys.slot_of(key) not in self._slots:
            return super().create(key, data)
        change = self._record if key.startswith(keys.CONTRIBUTIONS) else self._payload
        changed = change(b"".join(buffers_of(data)))
        return True if changed is None else super().create(key, changed)


class View:
    """One replica's own way into a store that others share."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.uri, self.profile = store.uri, store.profile

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        return self.store.read(key, span, into)

    def create(self, key: str, data: Data) -> bool:
        return self.store.create(key, data)

    def replace(self, key: str, data: Data) -> None:
        self.store.replace(key, data)

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        return self.store.list(prefix, after)

    def delete(self, key: str) -> None:
        self.store.delete(key)


def begin(store: MemoryStore, slots: str = "abc", minimum: int = 2) -> None:
    store.create(keys.RUN, run_record(SystemClock(), slots=tuple(slots), min_replicas=minimum).to_bytes())


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, object]]:
    return [record.fields for record in caplog.records if getattr(record, "event", "") == name]  # type: ignore[attr-defined]


def refusals(caplog: pytest.LogCaptureFixture) -> set[tuple[object, object, str]]:
    """Round, slot and reason of every refusal."""
    refused = events(caplog, "contribution_refused")
    return {(fields["round"], fields["slot"], str(fields["reason"])) for fields in refused}


def members(store: MemoryStore) -> list[str]:
    return ["".join(share.slot for share in decision.members) for decision in decisions(store)]


# The receivers' side.

OTHER = "f" * 32
KINDS: dict[str, tuple[dict[str, Callable[[bytes], bytes | None]], str]] = {
    "a record that is none": ({"record": lambda _: b'{"run": 1'}, "record does not parse: key=contributions/00000001"),
    "another protocol": ({"record": told(protocol=2)}, "does not parse.*protocol: Extra inputs are not permitted"),
    "a huge record": ({"record": lambda data: data + b" " * MAX_RECORD_BYTES}, "record too large"),
    "another run": ({"record": told(run=OTHER)}, f"two runs share this prefix: .*run={OTHER}"),
    "another slot": ({"record": told(slot="b")}, "names another slot or exchange"),
    "another round": ({"record": told(round=0)}, "names another slot or exchange"),
    "another base": ({"record": told(base="f" * 64)}, "builds on commit ffffffffffff"),
    "other tensors": ({"record": told(index=OTHER)}, f"tensors or codec differ: index={OTHER}"),
    "no parts": ({"record": told(parts=[])}, "wrong number of parts: slot=c parts=0 expected=1"),
    "a huge header": ({"record": part(header_bytes=1 << 50)}, "wrong size of header: slot=c"),
    "a huge part": ({"record": part(total_bytes=1 << 50)}, "wrong size of part: slot=c"),
    "an empty part": ({"record": part(total_bytes=0)}, "wrong size of part: slot=c"),
    "another payload": ({"record": part(digest=OTHER)}, f"payload is absent: .*{OTHER}"),
    "a missing payload": ({"payload": lambda _: None}, "payload is absent: key=payloads/00000001/c/"),
    "a short payload": ({"payload": lambda data: data[:-1]}, "payload is missing or of another length"),
    "a long payload": ({"payload": lambda data: data + b"x"}, "payload is missing or of another length"),
    "half a header": ({"payload": lambda data: data[:100]}, "header is truncated"),
    "a damaged header": ({"payload": flipped(200)}, "header is damaged: key=payloads/00000001/c/"),
    "a damaged length of the header": ({"payload": flipped(16)}, "header is damaged"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_contribution_is_refused_and_the_round_goes_on(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    changes, reason = KINDS[kind]
    store = Poisoned(**changes)  # type: ignore[arg-type]
    begin(store)
    with caplog.at_level(logging.INFO, "skerry"):
        islands = together([lambda i=i, s=s: Island(store, s, seed=i).train(3) for i, s in enumerate("abc")])
    assert members(store) == ["abc", "ab", "abc"]
    refused = refusals(caplog)
    assert {(round_number, slot) for round_number, slot, _ in refused} == {(1, "c")}
    (told_reason,) = {text for _, _, text in refused}
    assert re.search(reason, told_reason), told_reason
    assert all(torch.equal(island.originals["weight"], islands[0].originals["weight"]) for island in islands)
    assert [receipt.contributed for receipt in receipts(store, 1).values()] == [True, True, False]


class Misdelivered(View):
    """The header of c's payload of round 1 arrives damaged at its first reads, which precede the decision."""

    def __init__(self, store: MemoryStore, reads: int) -> None:
        super().__init__(store)
        self.left = reads

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        body = super().read(key, span, into)
        is_header = key.startswith(f"{keys.PAYLOADS}00000001/c/") and span is not None and span.start == 0
        if body is None or not is_header or not self.left:
            return body
        self.left -= 1
        return memoryview(flipped(200)(bytes(body)))


@pytest.mark.parametrize("reads", [1, 2])
def test_header_damaged_by_a_read_is_read_again_and_not_refused(reads: int, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    begin(store, minimum=3)
    views = {slot: Misdelivered(store, reads) for slot in "ab"}
    with caplog.at_level(logging.INFO, "skerry"):
        islands = [
            lambda i=i, s=s: Island(views.get(s, store), s, seed=i, minimum=3).train(3)  # type: ignore[arg-type]
            for i, s in enumerate("abc")
        ]
        together(islands)
    assert members(store) == ["abc", "abc", "abc"]
    assert refusals(caplog) == set()
    assert events(caplog, "round_failed") == []
    assert any(view.left == 0 for view in views.values()), "a replica has read the damage"


class Newer(Poisoned):
    """c's payload says another version and has the right digests, so that only its first bytes tell."""

    def __init__(self) -> None:
        super().__init__(record=lambda data: data.replace(*self._names))
        self._names = (b"", b"")

    def create(self, key: str, data: Data) -> bool:
        folder, _, name = key.rpartition("/")
        if folder != f"{keys.PAYLOADS}00000001/c":
            return super().create(key, data)
        body = b"".join(buffers_of(data))
        newer = body[:8] + (2).to_bytes(8, "little") + body[16:]
        header_bytes = -(-(24 + int.from_bytes(body[16:24], "little")) // 64) * 64
        renamed = xxhash.xxh3_128_hexdigest(newer[:header_bytes])
        self._names = (name.encode(), renamed.encode())
        return MemoryStore.create(self, f"{folder}/{renamed}", newer)


def test_a_sound_payload_of_another_version_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    store = Newer()
    begin(store)
    with caplog.at_level(logging.INFO, "skerry"):
        together([lambda i=i, s=s: Island(store, s, seed=i).train(3) for i, s in enumerate("abc")])
    assert members(store) == ["abc", "ab", "abc"]
    ((_, slot, reason),) = refusals(caplog)
    assert slot == "c"
    assert "payload of another version" in reason


def test_a_decided_payload_that_is_something_else_counts_as_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No replica looked before the decision: no reason to stop. Its author leads the others past it."""
    monkeypatch.setattr(Averager, "_fault_in", lambda *_: None)
    store = Newer()
    begin(store)
    ends: dict[str, BaseException | None] = {}

    def work(slot: str, seed: int) -> None:
        try:
            Island(store, slot, seed=seed, max_retries=3).train(3)
        except RuntimeError as error:
            ends[slot] = error.__cause__

    together([lambda i=i, s=s: work(s, i) for i, s in enumerate("abc")])
    assert members(store)[:2] == ["abc", "abc"]
    assert len(members(store)) == 3
    assert ends == {}


# Where all are needed: a slot contributes once to a round, so what is refused has no substitute.


def test_needed_header_damaged_at_the_source_is_passed_by_its_author() -> None:
    """It does not read back what it has just made, so it proposes; and it alone holds what the others cannot read."""
    store = Poisoned(payload=flipped(200))
    begin(store, minimum=3)
    islands = together([lambda i=i, s=s: Island(store, s, seed=i, minimum=3).train(3) for i, s in enumerate("abc")])
    assert members(store) == ["abc", "abc", "abc"]
    assert all(torch.equal(island.originals["weight"], islands[0].originals["weight"]) for island in islands)
    assert store.read(keys.checkpoint_manifest(2)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a missing payload", "a short payload", "no parts"])
def test_needed_contribution_refused_ends_the_job_until_it_is_deleted(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By a person: the round is not decided, so nothing refers to it. To start the replicas again is not enough."""
    changes, reason = KINDS[kind]
    poisoned = Poisoned(**changes)  # type: ignore[arg-type]
    begin(poisoned, minimum=3)
    terms: dict[str, object] = {"timeout": timedelta(seconds=0.3), "max_retries": 1}

    def fail(slot: str, seed: int) -> None:
        with pytest.raises(RuntimeError, match="exceeding max_retries=1") as ended:
            Island(poisoned, slot, seed=seed, minimum=3, **terms).train(3)  # type: ignore[arg-type]
        assert isinstance(ended.value.__cause__, TimeoutError)
        assert "contributed=a,b min_replica_size=3" in str(ended.value.__cause__)

    with caplog.at_level(logging.INFO, "skerry"):
        for _ in range(2):
            together([lambda i=i, s=s: fail(s, i) for i, s in enumerate("abc")])
    assert members(poisoned) == ["abc"]
    assert any(number == 1 and slot == "c" and re.search(reason, text) for number, slot, text in refusals(caplog))

    poisoned.mend()
    poisoned.delete(keys.contribution(1, 0, "c"))
    islands = together([lambda i=i, s=s: Island(poisoned, s, seed=i, minimum=3).train(3) for i, s in enumerate("abc")])
    assert members(poisoned) == ["abc", "abc", "abc"]
    assert all(torch.equal(island.originals["weight"], islands[0].originals["weight"]) for island in islands)


def test_an_object_that_is_nobodys_is_passed_by(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    begin(store, "ab")
    for key in ("contributions/00000000-0000/README", "heartbeats/notes.txt", "contributions/00000000-0000/.x.json"):
        store.create(key, b"left here by somebody")
    with caplog.at_level(logging.INFO, "skerry"):
        together([lambda i=i, s=s: Island(store, s, seed=i).train(2) for i, s in enumerate("ab")])
    assert members(store) == ["ab", "ab"]
    assert {slot for _, slot, _ in refusals(caplog)} <= {
        "contributions/00000000-0000/README",
        "contributions/00000000-0000/.x.json",
    }


def test_another_run_in_my_own_slot_stops_this_replica_and_no_other() -> None:
    """Two runs claim it: fail closed. For the others it is one slot less."""
    store = MemoryStore()
    begin(store)
    foreign = run_record(SystemClock())

    class Crowded(View):
        def create(self, key: str, data: Data) -> bool:
            if key == keys.contribution(1, 0, "c"):
                record = json.loads(b"".join(buffers_of(data))) | {"run": foreign.nonce}
                self.store.create(key, json.dumps(record).encode())
            return self.store.create(key, data)

    def work(slot: str, seed: int) -> int:
        try:
            return Island(Crowded(store) if slot == "c" else store, slot, seed=seed, grace_s=0.3).train(3).steps
        except Diverged as error:
            assert "two runs share this prefix" in str(error)  # noqa: PT017  the others' results are wanted, too
            return -1

    steps = together([lambda i=i, s=s: work(s, i) for i, s in enumerate("abc")])
    assert [step < 0 for step in steps] == [False, False, True]
    assert members(store)[:3] == ["abc", "ab", "ab"]


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
        ).map(lambda field: told(**{field[0]: field[1]})),
    )
)
@settings(max_examples=150)
def test_no_record_at_all_keeps_the_others_from_closing(change: Callable[[bytes], bytes]) -> None:
    """Accepted or refused: no contribution raises in the replicas that read it."""
    clock = FakeClock()
    store = Retrying(Poisoned(record=change, round_number=0), clock)
    a, b, c = (start_replica(store, clock, slot) for slot in "abc")
    for replica in (c, b, a):
        replica.contribute(replica.presence.slot.encode())
    assert [share.slot for share in a.decide().record.members] in (["a", "b"], ["a", "b", "c"])


# The sender's side.


def test_every_contribution_logs_its_norm(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {"a": [torch.full((3, 3), 2.0), torch.tensor([8.0])], "b": [torch.zeros(3, 3), torch.tensor([0.5])]}

    def work(slot: str) -> None:
        manager = manager_of(store, slot)
        manager.start_quorum()
        for work in [manager.allreduce(tensor) for tensor in tensors[slot]]:
            assert work.wait()
        assert manager.should_commit()
        manager.shutdown()

    store = MemoryStore()
    with caplog.at_level(logging.INFO, "skerry"):
        together([lambda: work("a"), lambda: work("b")])
    assert {fields["slot"]: fields["norm"] for fields in events(caplog, "contributed")} == {"a": 10.0, "b": 0.5}
    assert {slot: receipt.norm for slot, receipt in receipts(store, 0).items()} == {"a": 10.0, "b": 0.5}


def test_what_is_above_the_limit_is_not_offered(caplog: pytest.LogCaptureFixture) -> None:
    """b's step explodes once: it abstains with both numbers, receives the average, and is back in the next round."""
    store = MemoryStore()
    begin(store, "ab", minimum=1)

    def work(slot: str) -> list[float]:
        manager = manager_of(store, slot, minimum=1, max_norm=10.0)
        seen: list[float] = []
        for size in (1.0, 1e6 if slot == "b" else 2.0, 3.0):
            tensor = torch.full((4,), size)
            manager.start_quorum()
            assert manager.allreduce(tensor).wait()
            assert manager.should_commit()
            seen.append(tensor[0].item())
        manager.shutdown()
        return seen

    with caplog.at_level(logging.INFO, "skerry"):
        assert together([lambda: work("a"), lambda: work("b")]) == [[1.0, 2.0, 3.0]] * 2
    assert members(store) == ["ab", "a", "ab"]
    (abstained,) = events(caplog, "abstained")
    assert abstained["reason"] == "norm above the limit: norm=2e+06 max_norm=10"


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_nothing_passes_is_refused(limit: float) -> None:
    with pytest.raises(Invalid, match="max_norm must be above 0"):
        join_run(MemoryStore(), "a", SessionOptions(min_replicas=1, deadline_s=1.0, max_norm=limit), FakeClock())


# Damage after the decision.


def damage(store: MemoryStore, round_number: int, slot: str) -> bytes:
    """Flip the last byte of a stored payload. Returns what it was."""
    (entry,) = store.list(f"{keys.PAYLOADS}{round_number:08d}/{slot}/")
    before = bytes(store.read(entry.key) or b"")
    store.replace(entry.key, flipped(len(before) - 1)(before))
    return before


class Late(View):
    """A replica that reads round 1's payloads only when the others have applied it, and a's is damaged by then.

    mended_after: how many reads find it damaged before it is restored; None: never.
    """

    def __init__(self, store: MemoryStore, *, mended_after: int | None = None) -> None:
        super().__init__(store)
        self.reads = 0
        self._mended_after = mended_after
        self._sound = b""

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        # A read before the decision is a proposer's; a later one is for the average.
        is_late = key.startswith(f"{keys.PAYLOADS}00000001/a/") and self.store.read(keys.decision(1, 0)) is not None
        if is_late and self.reads == 0:
            clock = SystemClock()
            wait_until(clock, self._have_applied, clock.now() + 20, Backoff(first=0.001, cap=0.01))
            self._sound = damage(self.store, 1, "a")
        if is_late and self.reads == self._mended_after:
            self.store.replace(key, self._sound)
        self.reads += is_late
        return self.store.read(key, span, into)

    def _have_applied(self) -> bool | None:
        return True if {"a", "b"} <= receipts(self.store, 1).keys() else None


def islands_of(store: MemoryStore, late: Late, rounds: int) -> list[Island]:
    def work(slot: str, seed: int) -> Island:
        mine = late if slot == "c" else store
        return Island(mine, slot, seed=seed, grace_s=0.2, max_retries=None).train(rounds)

    return together([lambda i=i, s=s: work(s, i) for i, s in enumerate("abc")])


def test_damage_after_two_have_applied_is_passed_by_their_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    begin(store)
    late = Late(store)
    with caplog.at_level(logging.INFO, "skerry"):
        islands = islands_of(store, late, 6)
    failed = events(caplog, "round_failed")
    assert {fields["slot"] for fields in failed} == {"c"}
    for fields in failed:
        assert "payload is damaged: key=payloads/00000001/a/" in str(fields["error"])
        assert "slot=a block=0" in str(fields["error"])
    loaded = [fields["round"] for fields in events(caplog, "checkpoint_loaded") if fields["slot"] == "c"]
    assert any(int(str(number)) > 1 for number in loaded)
    assert "c" not in receipts(store, 1)
    assert all(torch.equal(island.originals["weight"], islands[0].originals["weight"]) for island in islands)
    assert len(commits(store)) == 6


def test_restored_payload_costs_a_few_tries(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    begin(store)
    late = Late(store, mended_after=8)
    with caplog.at_level(logging.INFO, "skerry"):
        islands = islands_of(store, late, 3)
    assert {fields["slot"] for fields in events(caplog, "round_failed")} == {"c"}
    assert len({receipt.averages for receipt in receipts(store, 1).values()}) == 1
    assert all(torch.equal(island.originals["weight"], islands[0].originals["weight"]) for island in islands)


def test_damage_that_everybody_meets_ends_every_replica_with_the_cause() -> None:
    store = Poisoned(payload=lambda data: flipped(len(data) - 1)(data), slots=("a", "b"))
    begin(store, "ab")
    ends: list[BaseException] = []

    def work(slot: str, seed: int) -> None:
        try:
            Island(store, slot, seed=seed, grace_s=0.2, max_retries=2).train(3)
        except RuntimeError as error:
            ends.append(error)

    together([lambda: work("a", 0), lambda: work("b", 1)])
    assert len(ends) == 2
    for end in ends:
        assert "exceeding max_retries=2" in str(end)
        assert isinstance(end.__cause__, Corrupt)
        assert "payload is damaged: key=payloads/00000001/" in str(end.__cause__)
        assert "block=0" in str(end.__cause__)
    assert len(commits(store)) == 1
