"""`skerry doctor` on a real log in a folder, healthy and with each damage made by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import xxhash
from rich.console import Console
from tests.infra.runs import write_spec
from tests.infra.test_cli import skerry
from tests.support.clocks import FakeClock
from tests.support.logs import Replica, policy, run_record, start

from skerry.infra.observe import showing
from skerry.infra.observe.doctor import examine, visit
from skerry.infra.observe.evidence import gather
from skerry.infra.observe.findings import NEXT, Examination, Finding, Kind
from skerry.runtime import keys
from skerry.runtime.errors import SkerryError
from skerry.runtime.records import (
    GENESIS,
    CheckpointManifest,
    Contribution,
    Decision,
    Outcome,
    Part,
    Pin,
    Receipt,
    Share,
    digest_of,
)
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from skerry.runtime.store import Entry

SLOTS = ("a-0", "a-1", "a-2")
ROUNDS = 5
OTHER = "f" * 64


class Log:
    """Three replicas and five closed rounds, with receipts, and checkpoints of rounds 0 and 2."""

    def __init__(self, folder: Path, rounds: int = ROUNDS) -> None:
        self.store = DirectoryStore(folder)
        self.clock = FakeClock()
        run = run_record(self.clock, slots=SLOTS, rounds=rounds, min_replicas=3)
        self.replicas = [start(self.store, self.clock, slot, policy(min_replicas=3), run) for slot in SLOTS]
        self.nonce = self.replicas[0].journal.run.nonce
        self.checkpoint(0, SLOTS[0])
        for number in range(rounds):
            self.round(number)
            if number == 1:
                self.checkpoint(2, SLOTS[2])

    def round(self, number: int, members: Sequence[Replica] | None = None) -> None:
        for replica in members or self.replicas:
            replica.offer(f"{number} {replica.presence.slot}".encode())
        for replica in self.replicas:
            replica.close(replica.decide())
            self.receipt(replica)

    def receipt(self, replica: Replica) -> None:
        number = replica.round - 1
        record = Receipt(
            run=self.nonce,
            round=number,
            slot=replica.presence.slot,
            incarnation=0,
            commit=replica.base,
            averages=("a" * 32,),
            state="b" * 32,
            scope="fragments",
            contributed=True,
            uploaded_bytes=1,
            downloaded_bytes=1,
            requests=1,
            seconds={},
        )
        assert self.store.create(keys.receipt(number, record.slot), record.to_bytes())

    def checkpoint(self, number: int, writer: str) -> None:
        body = f"state {number}".encode()
        part = Part(digest=xxhash.xxh3_128_hexdigest(body), header_bytes=0, total_bytes=len(body))
        manifest = CheckpointManifest(
            run=self.nonce,
            round=number,
            commit=self.commit_digest(number - 1) if number else GENESIS,
            members=SLOTS,
            batches=0,
            index="1" * 32,
            parts=(part,),
            tree="{}",
            writer=writer,
            nonce="2" * 32,
        )
        assert self.store.create(keys.checkpoint_part(number, part.digest), body)
        assert self.store.create(keys.checkpoint_manifest(number), manifest.to_bytes())

    def commit_digest(self, number: int) -> str:
        return digest_of(self.read(keys.commit(number)))

    def read(self, key: str) -> memoryview:
        data = self.store.read(key)
        assert data is not None
        return data

    def change(self, key: str, **fields: object) -> None:
        """Write a record again, with other fields."""
        document = json.loads(bytes(self.read(key))) | fields
        self.store.replace(key, json.dumps(document, separators=(",", ":")).encode())

    def delete(self, *found: str) -> None:
        for key in found:
            self.read(key)
            self.store.delete(key)

    def payload(self, number: int, slot: str) -> str:
        (entry,) = self.store.list(f"{keys.PAYLOADS}{number:08d}/{slot}/")
        return entry.key

    def examined(self) -> Examination:
        return examine(gather(self.store))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "run")


def only(found: Examination) -> Finding:
    assert len(found.findings) == 1, found.findings
    return found.findings[0]


def places(found: Examination) -> list[tuple[Kind, int | None, str | None]]:
    return [(one.kind, one.round, one.slot) for one in found.findings]


# Healthy.


def test_a_healthy_run_has_no_findings(log: Log) -> None:
    found = visit(log.store)
    assert found.findings == ()
    assert (found.ok, found.run, found.closed) == (True, "test", ROUNDS)
    entries = [*log.store.list("")]
    payloads = [one for one in entries if one.key.startswith(keys.PAYLOADS)]
    assert found.records == len(entries) - len(payloads) - 2  # the parts of two checkpoints


def test_what_retention_deletes_and_a_restart_leaves_is_healthy(log: Log) -> None:
    log.delete(*(log.payload(number, slot) for number in (0, 1) for slot in SLOTS))
    log.delete(*(entry.key for entry in log.store.list(f"{keys.CHECKPOINTS}00000000/")))
    again = start(log.store, log.clock, "a-1", policy(min_replicas=3))
    outcome = Outcome(
        run=log.nonce,
        slot="a-1",
        incarnation=again.presence.incarnation,
        status="retry",
        exit_code=10,
        reason="it was away",
        round=5,
        inner_step=0,
        tokens=0,
        loss_first=None,
        loss_last=None,
        ended="now",
    )
    log.store.create(keys.outcome("a-1", 1), outcome.to_bytes())
    pin = Pin(run=log.nonce, round=2, by="me", reason="keep it", created="now")
    log.store.create(keys.pin(2), pin.to_bytes())
    assert visit(log.store).findings == ()


def test_a_contribution_and_payload_of_the_open_round_are_healthy(log: Log) -> None:
    log.replicas[0].offer(b"for round 5")
    log.store.create(keys.payload(ROUNDS, "a-1", "9" * 32), b"its record comes later")
    assert visit(log.store).findings == ()


def test_a_contribution_that_no_decision_lists_may_lose_its_payload(tmp_path: Path) -> None:
    log = Log(tmp_path / "run", rounds=0)
    a, b, late = [start(log.store, log.clock, slot, policy(min_replicas=2)) for slot in SLOTS]
    late.presence.stop("left")
    for replica in (a, b):
        replica.offer(replica.presence.slot.encode())
    a.close(a.decide())
    late.offer(b"too late")
    log.delete(log.payload(0, "a-2"))
    assert visit(log.store).findings == ()


# The chain.


def test_a_commit_that_has_changed_is_named_once(log: Log) -> None:
    before = log.commit_digest(2)
    log.change(keys.commit(2), previous=OTHER)
    found = only(log.examined())
    assert (found.severity, found.kind, found.round, found.key) == ("error", "broken-link", 2, keys.commit(2))
    # The next commit and decision, three contributions and three receipts.
    names = f"it has changed: 8 records ({keys.commit(3)} and others) name it {before}"
    assert found.text == f"{names}, it is {log.commit_digest(2)}"


def test_a_commit_that_builds_on_another_is_a_broken_link(log: Log) -> None:
    # The last one: only its own receipts name it, so they are made to fit.
    log.change(keys.commit(ROUNDS - 1), previous=OTHER)
    for slot in SLOTS:
        log.change(keys.receipt(ROUNDS - 1, slot), commit=log.commit_digest(ROUNDS - 1))
    found = only(log.examined())
    assert (found.severity, found.kind, found.round, found.key) == ("error", "broken-link", 4, keys.commit(4))
    assert found.text == (f"it builds on commit {OTHER}, {keys.commit(3)} is {log.commit_digest(3)}")


def test_a_decision_that_has_changed_is_a_broken_link(log: Log) -> None:
    before = digest_of(log.read(keys.decision(3, 0)))
    log.change(keys.decision(3, 0), proposer="somebody")
    found = only(log.examined())
    assert (found.kind, found.round, found.key) == ("broken-link", 3, keys.decision(3, 0))
    assert found.text == f"it has changed: {keys.commit(3)} names it {before}, it is " + digest_of(log.read(found.key))


def test_a_contribution_of_the_open_round_on_another_log_is_a_broken_link(log: Log) -> None:
    log.replicas[1].offer(b"x")
    log.change(keys.contribution(ROUNDS, 0, "a-1"), base=OTHER)
    found = only(log.examined())
    assert (found.kind, found.round, found.slot) == ("broken-link", ROUNDS, "a-1")


@pytest.mark.parametrize("number", [0, 2])
def test_a_checkpoint_of_another_log_is_a_broken_link(log: Log, number: int) -> None:
    key = keys.checkpoint_manifest(number)
    log.change(key, commit=OTHER)
    found = only(log.examined())
    assert (found.kind, found.round, found.key) == ("broken-link", number, key)


def test_a_gap_in_the_commits_is_named(log: Log) -> None:
    log.delete(keys.commit(1))
    found = only(log.examined())
    assert (found.kind, found.round, found.key) == ("gap", 1, keys.commit(1))
    assert found.text == "round 1 is decided and not closed, and round 4 is"
    assert "lifecycle rule" in found.next


def test_a_round_that_others_build_on_and_that_was_never_closed_is_a_gap(log: Log) -> None:
    log.delete(keys.commit(ROUNDS - 1))
    found = only(log.examined())
    assert (found.kind, found.round) == ("gap", ROUNDS - 1)
    assert "builds on the commit of round 4, which is not closed" in found.text


def test_a_decision_that_is_gone_is_named(log: Log) -> None:
    log.delete(keys.decision(2, 0))
    found = only(log.examined())
    assert (found.kind, found.round, found.key) == ("missing-record", 2, keys.decision(2, 0))


def test_a_decided_contribution_that_is_gone_is_named(log: Log) -> None:
    log.delete(keys.contribution(3, 0, "a-1"))
    found = log.examined()
    assert places(found) == [("missing-record", 3, "a-1"), ("orphan", 3, "a-1")]


def test_a_contribution_that_is_not_the_decided_one_means_the_store_ignores_conditions(log: Log) -> None:
    key = keys.contribution(3, 0, "a-1")
    before = digest_of(log.read(key))
    log.change(key, tokens=77)
    found = only(log.examined())
    assert (found.kind, found.round, found.slot, found.key) == ("replaced-record", 3, "a-1", key)
    assert before in found.text
    assert digest_of(log.read(key)) in found.text
    assert "skerry-replica check" in found.next


def test_a_commit_that_does_not_follow_from_its_decisions_is_named(log: Log) -> None:
    last = keys.commit(ROUNDS - 1)
    log.change(last, participants=2)
    for slot in SLOTS:
        log.change(keys.receipt(ROUNDS - 1, slot), commit=log.commit_digest(ROUNDS - 1))
    found = only(log.examined())
    assert (found.kind, found.round) == ("wrong-commit", ROUNDS - 1)
    assert found.text == "it says 2 participants, its decisions have 3"


def test_a_commit_that_tells_of_other_work_than_was_contributed_is_named(log: Log) -> None:
    last = keys.commit(ROUNDS - 1)
    log.change(last, work=ROUNDS * 3.0 + 1.0)
    for slot in SLOTS:
        log.change(keys.receipt(ROUNDS - 1, slot), commit=log.commit_digest(ROUNDS - 1))
    found = only(log.examined())
    assert (found.kind, found.round) == ("wrong-commit", ROUNDS - 1)
    told = f"it says that {ROUNDS * 3 + 1} rounds of one replica were trained so far"
    assert found.text == f"{told}, its contributions say {ROUNDS * 3}"


def test_a_decision_that_its_rounds_commit_does_not_name_is_stray(log: Log) -> None:
    stray = Decision.parse(log.read(keys.decision(2, 0)), "key")
    shares: list[Share] = []
    for share in stray.members:
        offer = Contribution.parse(log.read(keys.contribution(2, 0, share.slot)), "key")
        again = offer.model_copy(update={"exchange": 1}).to_bytes()
        log.store.create(keys.contribution(2, 1, share.slot), again)
        shares.append(share.model_copy(update={"contribution": digest_of(again)}))
    stray = stray.model_copy(update={"exchange": 1, "members": tuple(shares)})
    log.store.create(keys.decision(2, 1), stray.to_bytes())
    found = only(log.examined())
    assert (found.kind, found.round, found.key) == ("stray-decision", 2, keys.decision(2, 1))


# Who wrote what.


@pytest.mark.parametrize(
    ("key", "severity"),
    [
        (keys.commit(3), "error"),
        (keys.decision(3, 0), "error"),
        (keys.contribution(3, 0, "a-1"), "error"),
        (keys.receipt(3, "a-1"), "error"),
        (keys.checkpoint_manifest(2), "error"),
        (keys.member("a-1", 0), "error"),
        (keys.heartbeat("a-1"), "warning"),
        (keys.RUN, "error"),
    ],
)
def test_a_record_that_does_not_parse_is_the_only_finding(log: Log, key: str, severity: str) -> None:
    log.read(key)
    log.store.replace(key, b'{"run": 1}')
    found = log.examined()
    assert [(one.severity, one.kind, one.key) for one in found.findings] == [(severity, "unreadable", key)]


def test_a_record_under_another_key_is_misplaced(log: Log) -> None:
    log.store.replace(keys.receipt(3, "a-9"), log.read(keys.receipt(3, "a-1")))
    log.change(keys.receipt(3, "a-9"), state="d" * 32)
    found = only(log.examined())
    assert (found.kind, found.round, found.slot) == ("misplaced", 3, "a-9")
    assert keys.receipt(3, "a-1") in found.text


def test_two_runs_on_a_prefix_are_both_named(log: Log) -> None:
    other = "e" * 32
    log.change(keys.commit(3), run=other)
    log.change(keys.receipt(4, "a-1"), run=other)
    found = only(log.examined())
    assert (found.severity, found.kind, found.key) == ("error", "two-runs", keys.commit(3))
    assert found.text == f"2 records are of run {other}, this prefix is of run {log.nonce}"


def test_without_run_json_the_run_of_most_records_is_examined(log: Log) -> None:
    log.delete(keys.RUN)
    found = log.examined()
    assert [(one.kind, one.key) for one in found.findings] == [("missing-record", keys.RUN)]
    assert found.run is None


def test_a_gap_in_the_incarnations_of_a_slot_is_named(log: Log) -> None:
    for _ in range(2):
        start(log.store, log.clock, "a-1", policy(min_replicas=3))
    log.delete(keys.member("a-1", 1))
    found = only(log.examined())
    assert (found.kind, found.slot, found.key) == ("incarnation-gap", "a-1", keys.member("a-1", 1))


def test_an_incarnation_that_wrote_and_never_claimed_its_slot_is_named(log: Log) -> None:
    log.delete(keys.member("a-2", 0))
    found = only(log.examined())
    assert (found.kind, found.slot, found.key) == ("incarnation-gap", "a-2", keys.member("a-2", 0))


# Payloads and checkpoints.


def test_a_payload_that_may_be_needed_and_is_gone_is_an_error(log: Log) -> None:
    key = log.payload(2, "a-1")
    log.delete(key)
    found = only(log.examined())
    assert (found.severity, found.kind, found.round, found.slot, found.key) == (
        "error",
        "missing-payload",
        2,
        "a-1",
        key,
    )


def test_a_payload_that_only_an_incomplete_checkpoint_covers_is_still_needed(log: Log) -> None:
    log.delete(log.payload(1, "a-1"), keys.checkpoint_manifest(2))
    assert places(log.examined()) == [("missing-payload", 1, "a-1"), ("incomplete-checkpoint", 2, None)]


def test_a_payload_that_only_a_broken_checkpoint_covers_is_still_needed(log: Log) -> None:
    (part,) = [one.key for one in log.store.list(f"{keys.CHECKPOINTS}00000002/") if "manifest" not in one.key]
    log.delete(log.payload(1, "a-1"), part)
    assert places(log.examined()) == [("missing-payload", 1, "a-1"), ("checkpoint-part", 2, "a-2")]


def test_a_payload_of_the_open_round_that_is_gone_is_a_warning(log: Log) -> None:
    log.replicas[1].offer(b"x")
    log.delete(log.payload(ROUNDS, "a-1"))
    found = log.examined()
    assert (only(found).severity, only(found).kind, found.ok) == ("warning", "missing-payload", True)


@pytest.mark.parametrize("body", [b"2 a-", b"2 a-1 and more"])
def test_a_payload_of_another_length_is_an_error(log: Log, body: bytes) -> None:
    key = log.payload(2, "a-1")
    log.store.replace(key, body)
    found = only(log.examined())
    assert (found.kind, found.round, found.slot, found.key) == ("payload-length", 2, "a-1", key)
    assert found.text == f"it must have 5 bytes, it has {len(body)}"


def test_payloads_that_no_contribution_names_are_told_together(log: Log) -> None:
    for digest in ("8" * 32, "9" * 32):
        log.store.create(keys.payload(3, "a-1", digest), b"12345")
    found = log.examined()
    assert found.ok
    assert only(found).severity == "info"
    assert (only(found).kind, only(found).round, only(found).slot) == ("orphan", 3, "a-1")
    assert only(found).text == "2 payloads (10 bytes) that no contribution names"


def test_a_checkpoint_without_its_manifest_is_told(log: Log) -> None:
    log.store.create(keys.checkpoint_part(4, "9" * 32), b"12345")
    found = log.examined()
    assert (only(found).severity, only(found).kind, only(found).round) == ("info", "incomplete-checkpoint", 4)
    assert found.ok


@pytest.mark.parametrize("body", [None, b"longer than before"])
def test_a_part_of_a_complete_checkpoint_that_is_not_as_named_is_an_error(log: Log, body: bytes | None) -> None:
    (part,) = [one.key for one in log.store.list(f"{keys.CHECKPOINTS}00000002/") if "manifest" not in one.key]
    log.store.delete(part) if body is None else log.store.replace(part, body)
    found = only(log.examined())
    assert (found.kind, found.round, found.slot, found.key) == ("checkpoint-part", 2, "a-2", part)


# Receipts.


def test_the_first_round_and_replica_whose_state_differs_are_named(log: Log) -> None:
    for number in range(2, ROUNDS):
        log.change(keys.receipt(number, "a-1"), state="d" * 32)
    found = only(log.examined())
    assert (found.severity, found.kind, found.round, found.slot) == ("error", "states-differ", 2, "a-1")
    assert found.text == (
        "its state differs from that of 2 of 3 replicas, which count as right: they are the majority; "
        "so in 2 later rounds, last in 4"
    )


def test_a_state_that_agrees_again_is_a_warning(log: Log) -> None:
    log.change(keys.receipt(2, "a-1"), state="d" * 32)
    found = log.examined()
    assert (only(found).severity, found.ok) == ("warning", True)
    assert only(found).text.endswith("; it agrees in round 4")


def test_an_average_that_differs_is_an_error_for_good(log: Log) -> None:
    log.change(keys.receipt(2, "a-0"), averages=["d" * 32], state="e" * 32)
    found = log.examined()
    assert places(found) == [("averages-differ", 2, "a-0")]
    assert not found.ok


def test_without_a_majority_the_first_counts_as_right(log: Log) -> None:
    for slot, letter in zip(SLOTS, "bcd", strict=True):
        log.change(keys.receipt(1, slot), state=letter * 32)
    found = log.examined()
    assert places(found) == [("states-differ", 1, "a-1"), ("states-differ", 1, "a-2")]
    assert "no majority, a-0 is the first" in found.findings[0].text
    for slot, letter in zip(SLOTS, "bcd", strict=True):
        log.change(keys.receipt(3, slot), averages=[letter * 32])
    assert ("averages-differ", 3, "a-0") not in places(log.examined())


def test_receipts_that_speak_of_other_things_are_not_compared(log: Log) -> None:
    log.change(keys.receipt(2, "a-1"), state=None, scope="average")
    assert log.examined().findings == ()


def test_a_receipt_of_another_commit_is_named(log: Log) -> None:
    log.change(keys.receipt(2, "a-1"), commit=OTHER)
    found = only(log.examined())
    assert (found.kind, found.round, found.slot) == ("foreign-receipt", 2, "a-1")
    assert found.text == f"it builds on commit {OTHER}, {keys.commit(2)} is {log.commit_digest(2)}"


# The visit.


class Moving:
    """A store that goes on while it is read: something is done after so many listings."""

    def __init__(self, store: DirectoryStore, then: Callable[[], None], after: int) -> None:
        self.store, self.then, self.after = store, then, after
        self.uri, self.profile, self.read = store.uri, store.profile, store.read
        self.create, self.replace, self.delete = store.create, store.replace, store.delete

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        found = self.store.list(prefix, after)
        self.after -= 1
        if self.after == 0:
            self.then()
        return found


@pytest.mark.parametrize("listings", range(1, 13))
def test_a_run_that_goes_on_meanwhile_is_healthy(tmp_path: Path, listings: int) -> None:
    log = Log(tmp_path / "run")

    def go_on() -> None:
        log.round(ROUNDS)
        log.checkpoint(ROUNDS + 1, "a-0")
        log.delete(*(log.payload(number, slot) for number in range(ROUNDS + 1) for slot in SLOTS))

    found = visit(Moving(log.store, go_on, listings))
    assert [one for one in found.findings if one.severity != "info"] == []


def test_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SkerryError, match="no run at file://"):
        visit(DirectoryStore(tmp_path))


def test_every_kind_of_finding_has_a_next_step() -> None:
    assert set(NEXT) == set(Kind.__args__)  # type: ignore[attr-defined]


def test_errors_come_first_and_earlier_rounds_before_later(log: Log) -> None:
    log.store.create(keys.payload(0, "a-1", "9" * 32), b"1")
    log.delete(log.payload(3, "a-2"), log.payload(2, "a-0"))
    assert [(one.severity, one.round) for one in log.examined().findings] == [("error", 2), ("error", 3), ("info", 0)]


# The command.


def test_the_command_takes_a_uri_or_a_spec(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    log = Log(tmp_path / "store" / "test-run")
    for name in (log.store.uri, f"{log.store.uri}/", spec):
        ran = skerry("doctor", name)
        assert (ran.exit_code, ran.output) == (
            0,
            f"test: healthy; 5 rounds closed, {log.examined().records} records read at {log.store.uri}\n",
        )
    ran = skerry("doctor", spec, "--set", "run=other")
    assert (ran.exit_code, "no run at" in ran.output) == (1, True)


def test_the_command_ends_with_1_and_a_line_for_each_finding(tmp_path: Path) -> None:
    log = Log(tmp_path / "run")
    log.delete(log.payload(2, "a-1"))
    log.change(keys.receipt(1, "a-0"), state="d" * 32)
    ran = skerry("doctor", log.store.uri)
    assert ran.exit_code == 1
    first, second, last = ran.output.splitlines()
    assert first.startswith(f"error: missing-payload round=2 replica=a-1 key={keys.PAYLOADS}00000002/a-1/")
    assert first.endswith(NEXT["missing-payload"])
    assert second.startswith("warning: states-differ round=1 replica=a-0")
    assert last.startswith("test: 1 error, 1 warning; 5 rounds closed")


def test_the_command_as_json(tmp_path: Path) -> None:
    log = Log(tmp_path / "run")
    log.delete(keys.commit(1))
    ran = skerry("doctor", log.store.uri, "--json")
    said = json.loads(ran.output)
    assert (ran.exit_code, said["ok"], said["closed"], said["run"]) == (1, False, 5, "test")
    assert said["findings"] == [
        {
            "severity": "error",
            "kind": "gap",
            "round": 1,
            "slot": None,
            "key": keys.commit(1),
            "text": "round 1 is decided and not closed, and round 4 is",
            "next": NEXT["gap"],
        }
    ]


@pytest.mark.parametrize(
    "arguments", [("nowhere.yaml",), ("ftp://host/run",), ("file://relative",), ("file:///x", "--set", "run=y")]
)
def test_what_names_no_run_is_bad_usage(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    name, *rest = arguments
    ran = skerry("doctor", tmp_path / name if name.endswith("yaml") else name, *rest)
    assert ran.exit_code == 2, ran.output


@pytest.mark.parametrize(("width", "is_table"), [(160, True), (100, True), (60, False)])
def test_a_terminal_gets_a_table_with_everything_in_it(log: Log, width: int, *, is_table: bool) -> None:
    log.delete(log.payload(2, "a-1"))
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(showing.table(log.examined(), width))
    text = captured.get()
    assert ("what, where, and what to do" in text) is is_table
    assert "missing-payload" in text
    assert "a-1" in text
    assert "1 error" in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_a_healthy_run_is_one_line_on_a_terminal_too(log: Log) -> None:
    assert "\n" not in str(showing.table(log.examined(), 120))
