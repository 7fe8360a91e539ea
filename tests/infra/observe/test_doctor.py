"""`skerry doctor` on a real log in a folder: healthy, and with each damage."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest
from rich.console import Console
from tests.infra.observe.damaged_log import LAST, OTHER, ROUNDS, SLOTS, Log
from tests.infra.runs import write_spec
from tests.kit.records import outcome
from tests.support.command_line import invoke

from skerry.infra.cli import doctor_text
from skerry.infra.observe.doctor.check_chain import check_gaps, check_links
from skerry.infra.observe.doctor.check_stored_objects import check_contribution_payloads, check_orphans
from skerry.infra.observe.doctor.examine import examine_store
from skerry.infra.observe.doctor.findings import NEXT, Examination, Kind
from skerry.infra.observe.doctor.read_log import read_log
from skerry.runtime.errors import SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import Contribution, Decision, Pin, Share
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from skerry.runtime.store import Entry


class CountedKeys(frozenset[str]):
    scans = 0

    def __iter__(self) -> Iterator[str]:
        self.scans += 1
        return super().__iter__()


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "run")


class Expected(NamedTuple):
    """A finding with the next step of its kind. text: a part of its text. key: None for any."""

    kind: Kind
    round: int | None
    slot: str | None
    text: str = ""
    key: str | None = None
    severity: str = "error"


def assert_findings(examination: Examination, *expected: Expected) -> None:
    findings = examination.findings
    assert [(finding.severity, finding.kind, finding.round, finding.slot) for finding in findings] == [
        (item.severity, item.kind, item.round, item.slot) for item in expected
    ]
    for finding, item in zip(findings, expected, strict=True):
        assert item.key in {None, finding.key}
        assert item.text in finding.text
        assert finding.next == NEXT[finding.kind]
    assert examination.ok == all(finding.severity != "error" for finding in findings)


# Healthy runs.


def test_healthy_run_has_no_findings(log: Log) -> None:
    examination = examine_store(log.store)
    assert_findings(examination)
    assert (examination.run, examination.closed) == ("test", ROUNDS)
    entries = [*log.store.list("")]
    payloads = [entry for entry in entries if entry.key.startswith(keys.PAYLOADS)]
    assert examination.records == len(entries) - len(payloads) - 2  # the parts of two checkpoints


def test_retention_restarts_and_pins_are_healthy(log: Log) -> None:
    log.delete(*(log.payload(number, slot) for number in (0, 1) for slot in SLOTS))
    log.delete(*(entry.key for entry in log.store.list(f"{keys.CHECKPOINTS}00000000/")))
    incarnation = log.start("a-1").presence.incarnation
    log.store.create(keys.outcome("a-1", 1), outcome("a-1", incarnation, run=log.nonce).to_bytes())
    pin = Pin(run=log.nonce, round=2, by="me", reason="keep it", created="now")
    log.store.create(keys.pin(2), pin.to_bytes())
    killed = "start 1 ended without a record: killed"
    assert_findings(examine_store(log.store), Expected("crashed", None, "a-1", killed, severity="info"))


def test_payload_of_the_open_round_without_a_contribution_is_healthy(log: Log) -> None:
    log.replicas[0].contribute(b"for round 5")
    log.store.create(keys.payload(ROUNDS, "a-1", "9" * 32), b"its record comes later")
    assert_findings(examine_store(log.store))


def test_payload_of_an_undecided_contribution_may_be_missing(tmp_path: Path) -> None:
    log = Log(tmp_path / "run", rounds=0, min_replicas=2)
    a, b, late = [log.start(slot, min_replicas=2) for slot in SLOTS]
    late.presence.stop("left")
    for replica in (a, b):
        replica.contribute(replica.presence.slot.encode())
    a.close(a.decide())
    late.contribute(b"too late")
    log.delete(log.payload(0, "a-2"))
    crashed = [Expected("crashed", None, slot, severity="info") for slot in SLOTS[:2]]
    assert_findings(examine_store(log.store), Expected("missing-in-rounds", 0, "a-2", severity="warning"), *crashed)


class ChangingStore(DirectoryStore):
    """The store of a live run: `change` is called after so many listings."""

    def __init__(self, folder: Path, change: Callable[[], None], after: int) -> None:
        super().__init__(folder)
        self.change, self.after = change, after

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        entries = super().list(prefix, after)
        self.after -= 1
        if self.after == 0:
            self.change()
        return entries


@pytest.mark.parametrize("listings", range(1, 13))
def test_live_run_has_no_findings_but_infos(tmp_path: Path, listings: int) -> None:
    log = Log(tmp_path)

    def advance() -> None:
        log.train(ROUNDS)
        log.checkpoint(ROUNDS + 1)
        log.delete(*(log.payload(number, slot) for number in range(ROUNDS + 1) for slot in SLOTS))

    examination = examine_store(ChangingStore(tmp_path, advance, listings))
    assert [finding for finding in examination.findings if finding.severity != "info"] == []


# One damage, one finding.


def damage_open_contribution(log: Log) -> None:
    log.replicas[1].contribute(b"x")
    log.change(keys.contribution(ROUNDS, 0, "a-1"), base=OTHER)


def delete_open_payload(log: Log) -> None:
    log.replicas[1].contribute(b"x")
    log.delete(log.payload(ROUNDS, "a-1"))


def add_stray_decision(log: Log) -> None:
    stray = Decision.parse(log.read(keys.decision(2, 0)), "key")
    shares: list[Share] = []
    for share in stray.members:
        contribution = Contribution.parse(log.read(keys.contribution(2, 0, share.slot)), "key")
        copy = contribution.model_copy(update={"exchange": 1}).to_bytes()
        log.store.create(keys.contribution(2, 1, share.slot), copy)
        shares.append(share.model_copy(update={"contribution": digest_of(copy)}))
    stray = stray.model_copy(update={"exchange": 1, "members": tuple(shares)})
    log.store.create(keys.decision(2, 1), stray.to_bytes())


def misplace_receipt(log: Log) -> None:
    log.store.replace(keys.receipt(3, "a-9"), log.read(keys.receipt(3, "a-1")))
    log.change(keys.receipt(3, "a-9"), state="d" * 32)


def mix_two_runs(log: Log) -> None:
    log.change(keys.commit(3), run="e" * 32)
    log.change(keys.receipt(4, "a-1"), run="e" * 32)


def delete_incarnation(log: Log) -> None:
    for _ in range(2):
        log.start("a-1")
    log.store.create(keys.outcome("a-1", 0), outcome("a-1", run=log.nonce).to_bytes())
    log.delete(keys.member("a-1", 1))


def add_orphans(log: Log) -> None:
    for digest in ("8" * 32, "9" * 32):
        log.store.create(keys.payload(3, "a-1", digest), b"12345")


def drift_from_round_2(log: Log) -> None:
    for number in range(2, ROUNDS):
        log.change(keys.receipt(number, "a-1"), state="d" * 32)


DAMAGES: dict[str, tuple[Callable[[Log], object], Expected]] = {
    "changed commit": (
        lambda log: log.change(keys.commit(2), previous=OTHER),
        # Referenced by the next commit and decision, three contributions and three receipts.
        Expected("broken-link", 2, None, f"8 records ({keys.commit(3)} and others)", keys.commit(2)),
    ),
    "commit on another log": (
        lambda log: log.change_last_commit(previous=OTHER),
        Expected("broken-link", 4, None, f"commit {OTHER}, but {keys.commit(3)} is ", keys.commit(4)),
    ),
    "changed decision": (
        lambda log: log.change(keys.decision(3, 0), proposer="another"),
        Expected("broken-link", 3, None, f"but {keys.commit(3)} references ", keys.decision(3, 0)),
    ),
    "open contribution to another log": (damage_open_contribution, Expected("stray-record", ROUNDS, "a-1")),
    "checkpoint 0 of another log": (
        lambda log: log.change(keys.checkpoint_manifest(0), commit=OTHER),
        Expected("broken-link", 0, "a-2", key=keys.checkpoint_manifest(0)),
    ),
    "checkpoint 2 of another log": (
        lambda log: log.change(keys.checkpoint_manifest(2), commit=OTHER),
        Expected("broken-link", 2, "a-2", key=keys.checkpoint_manifest(2)),
    ),
    "missing commit": (
        lambda log: log.delete(keys.commit(1)),
        Expected("gap", 1, None, "round 1 is decided but not closed, but round 4 is closed", keys.commit(1)),
    ),
    "missing last commit": (
        lambda log: log.delete(keys.commit(LAST)),
        Expected("gap", LAST, None, "references the commit of round 4, which is not closed"),
    ),
    "missing decision": (
        lambda log: log.delete(keys.decision(2, 0)),
        Expected("missing-record", 2, None, key=keys.decision(2, 0)),
    ),
    "replaced contribution": (
        lambda log: log.change(keys.contribution(3, 0, "a-1"), tokens=77),
        Expected("replaced-record", 3, "a-1", "it was replaced: digest=", keys.contribution(3, 0, "a-1")),
    ),
    "commit with wrong participants": (
        lambda log: log.change_last_commit(participants=2),
        Expected("wrong-commit", LAST, None, "it records 2 participants, but its decisions 3"),
    ),
    "commit with wrong work": (
        lambda log: log.change_last_commit(work=16.0),
        Expected("wrong-commit", LAST, None, "16 replica rounds of work so far, but its contributions 15"),
    ),
    "decision without a commit": (add_stray_decision, Expected("stray-decision", 2, None, key=keys.decision(2, 1))),
    "record at another key": (misplace_receipt, Expected("misplaced", 3, "a-9", keys.receipt(3, "a-1"))),
    "records of two runs": (
        mix_two_runs,
        Expected("two-runs", 3, None, f"2 records belong to run {'e' * 32}", keys.commit(3)),
    ),
    "missing run.json": (lambda log: log.delete(keys.RUN), Expected("missing-record", None, None, key=keys.RUN)),
    "gap in incarnations": (delete_incarnation, Expected("incarnation-gap", None, "a-1", key=keys.member("a-1", 1))),
    "missing first incarnation": (
        lambda log: log.delete(keys.member("a-2", 0)),
        Expected("incarnation-gap", None, "a-2", key=keys.member("a-2", 0)),
    ),
    "missing payload": (lambda log: log.delete(log.payload(2, "a-1")), Expected("missing-payload", 2, "a-1")),
    "missing payload of the open round": (
        delete_open_payload,
        Expected("missing-payload", ROUNDS, "a-1", severity="warning"),
    ),
    "short payload": (
        lambda log: log.store.replace(log.payload(2, "a-1"), b"2 a-"),
        Expected("payload-length", 2, "a-1", "it has 4 bytes, but its contribution requires 5 bytes"),
    ),
    "long payload": (
        lambda log: log.store.replace(log.payload(2, "a-1"), b"2 a-1 and more"),
        Expected("payload-length", 2, "a-1", "it has 14 bytes"),
    ),
    "payloads without a contribution": (
        add_orphans,
        Expected("orphan", 3, "a-1", "2 payloads (10 bytes) without a contribution", severity="info"),
    ),
    "part without a manifest": (
        lambda log: log.store.create(keys.checkpoint_part(4, "9" * 32), b"12345"),
        Expected("incomplete-checkpoint", 4, None, severity="info"),
    ),
    "missing part": (lambda log: log.delete(log.part(2)), Expected("checkpoint-part", 2, "a-2")),
    "long part": (
        lambda log: log.store.replace(log.part(2), b"longer than before"),
        Expected("checkpoint-part", 2, "a-2"),
    ),
    "state that differs": (
        drift_from_round_2,
        Expected("states-differ", 2, "a-1", "they are the majority; also in 2 later rounds, last in 4"),
    ),
    "state that agrees again": (
        lambda log: log.change(keys.receipt(2, "a-1"), state="d" * 32),
        Expected("states-differ", 2, "a-1", "; it agrees again in round 4", severity="warning"),
    ),
    "average that differs once": (
        lambda log: log.change(keys.receipt(2, "a-0"), averages=["d" * 32], state="e" * 32),
        Expected("averages-differ", 2, "a-0"),
    ),
    "receipt of another commit": (
        lambda log: log.change(keys.receipt(2, "a-1"), commit=OTHER),
        Expected("foreign-receipt", 2, "a-1", f"commit {OTHER}, but {keys.commit(2)} is "),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_gives_one_finding(log: Log, name: str) -> None:
    damage, expected = DAMAGES[name]
    damage(log)
    assert_findings(log.examine(), expected)


def test_mix_of_versions_is_a_warning_and_names_the_replicas(log: Log) -> None:
    for slot, torch in (("a-0", "2.13.0+cpu"), ("a-1", "2.12.1"), ("a-2", "2.13.0+cpu")):
        log.change(keys.member(slot, 0), software={"torch": torch, "code": "c" * 64})
    text = "replicas run different versions of torch: 2.13.0+cpu in a-0, a-2; 2.12.1 in a-1"
    assert_findings(log.examine(), Expected("mixed-versions", None, "a-1", text, severity="warning"))


@pytest.mark.parametrize(
    "key",
    [
        keys.commit(3),
        keys.decision(3, 0),
        keys.contribution(3, 0, "a-1"),
        keys.receipt(3, "a-1"),
        keys.checkpoint_manifest(2),
        keys.member("a-1", 0),
        keys.heartbeat("a-1"),
        keys.RUN,
    ],
)
def test_unreadable_record_is_the_only_finding(log: Log, key: str) -> None:
    log.read(key)
    log.store.replace(key, b'{"run": 1}')
    severity = "warning" if key.startswith(keys.HEARTBEATS) else "error"
    (finding,) = log.examine().findings
    assert (finding.severity, finding.kind, finding.key) == (severity, "unreadable", key)


def test_missing_contribution_makes_its_payload_an_orphan(log: Log) -> None:
    log.delete(keys.contribution(3, 0, "a-1"))
    assert_findings(log.examine(), Expected("missing-record", 3, "a-1"), Expected("orphan", 3, "a-1", severity="info"))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (lambda _: keys.checkpoint_manifest(2), Expected("incomplete-checkpoint", 2, None, severity="info")),
        (lambda log: log.part(2), Expected("checkpoint-part", 2, "a-2")),
    ],
)
def test_incomplete_checkpoint_covers_no_payload(log: Log, key: Callable[[Log], str], expected: Expected) -> None:
    log.delete(log.payload(1, "a-1"), key(log))
    assert_findings(log.examine(), Expected("missing-payload", 1, "a-1"), expected)


def test_first_slot_is_the_reference_without_a_majority(log: Log) -> None:
    for slot, letter in zip(SLOTS, "bcd", strict=True):
        log.change(keys.receipt(1, slot), state=letter * 32)
    text = "no majority, a-0 is the first"
    assert_findings(
        log.examine(), *(Expected("states-differ", 1, slot, text, severity="warning") for slot in SLOTS[1:])
    )
    for slot, letter in zip(SLOTS, "bcd", strict=True):
        log.change(keys.receipt(3, slot), averages=[letter * 32])
    differing = {finding.slot for finding in log.examine().findings if finding.kind == "averages-differ"}
    assert differing == set(SLOTS[1:])


def test_receipts_of_different_scopes_are_not_compared(log: Log) -> None:
    log.change(keys.receipt(2, "a-1"), state=None, scope="average")
    assert_findings(log.examine())


def test_findings_are_ordered_by_severity_and_round(log: Log) -> None:
    log.store.create(keys.payload(0, "a-1", "9" * 32), b"1")
    log.delete(log.payload(3, "a-2"), log.payload(2, "a-0"))
    order = [(finding.severity, finding.round) for finding in log.examine().findings]
    assert order == [("error", 2), ("error", 3), ("info", 0)]


def test_store_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SkerryError, match="no run at file://"):
        examine_store(DirectoryStore(tmp_path))


# The command.


def test_command_accepts_a_uri_or_a_spec(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    log = Log(tmp_path / "store" / "test-run")
    for name in (log.store.uri, f"{log.store.uri}/", spec):
        result = invoke("doctor", name)
        rounds = "5 rounds; all 3 replicas in 5 of them"
        summary = f"test: healthy; {rounds}; {log.examine().records} records read at {log.store.uri}\n"
        assert (result.exit_code, result.output) == (0, summary)
    result = invoke("doctor", spec, "--set", "run=other")
    assert (result.exit_code, "no run at" in result.output) == (1, True)


def test_command_exits_with_1_and_prints_each_finding(tmp_path: Path) -> None:
    log = Log(tmp_path / "run")
    log.delete(log.payload(2, "a-1"))
    log.change(keys.receipt(1, "a-0"), state="d" * 32)
    result = invoke("doctor", log.store.uri)
    assert result.exit_code == 1
    first, second, last = result.output.splitlines()
    assert first.startswith(f"error: missing-payload round=2 replica=a-1 key={keys.PAYLOADS}00000002/a-1/")
    assert first.endswith(NEXT["missing-payload"])
    assert second.startswith("warning: states-differ round=1 replica=a-0")
    assert last.startswith("test: 1 error, 1 warning; 5 rounds; all 3 replicas")


def test_command_prints_json(tmp_path: Path) -> None:
    log = Log(tmp_path / "run")
    log.delete(keys.commit(1))
    result = invoke("doctor", log.store.uri, "--json")
    document = json.loads(result.output)
    assert (result.exit_code, document["ok"], document["closed"], document["run"]) == (1, False, 5, "test")
    assert document["findings"] == [
        {
            "severity": "error",
            "kind": "gap",
            "round": 1,
            "slot": None,
            "key": keys.commit(1),
            "text": "round 1 is decided but not closed, but round 4 is closed",
            "next": NEXT["gap"],
        }
    ]


@pytest.mark.parametrize("arguments", [("nowhere.yaml",), ("ftp://host/run",), ("file:///x", "--set", "run=y")])
def test_command_rejects_arguments_that_name_no_run(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    name, *rest = arguments
    result = invoke("doctor", tmp_path / name if name.endswith("yaml") else name, *rest)
    assert result.exit_code == 2, result.output


@pytest.mark.parametrize(("width", "is_table"), [(160, True), (100, True), (60, False)])
def test_terminal_shows_a_table_that_fits_its_width(log: Log, width: int, *, is_table: bool) -> None:
    log.delete(log.payload(2, "a-1"))
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(doctor_text.table(log.examine(), width))
    text = captured.get()
    assert ("what, where, and what to do" in text) is is_table
    for part in ("missing-payload", "a-1", "1 error"):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_number_of_scans_does_not_grow_with_the_log(tmp_path: Path) -> None:
    scans: list[int] = []
    for rounds in (2, 6):
        log = read_log(Log(tmp_path / str(rounds), rounds).store)
        listed = CountedKeys(log.listed)
        log = replace(log, listed=listed)
        for check in (check_gaps, check_links, check_contribution_payloads, check_orphans):
            list(check(log))
        scans.append(listed.scans)
    assert scans[0] == scans[1]
