"""`skerry doctor --deep` recomputes averages: wrong units, wrong commits, and machines without torch."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING

import pytest
from tests.kit.managers import Island, begin_run, together

from skerry.infra.observe.doctor.examine import examine_store
from skerry.runtime.log import keys
from skerry.runtime.log.records import Commit, Decision, Receipt
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.tensors.reduced_unit import UnitName, seal, unseal

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.observe.doctor.findings import Examination

ROUNDS = 2
SLOTS = ("r-0", "r-1", "r-2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three replicas, two rounds by reduce-scatter, payloads of layout 2: several units."""
    folder = tmp_path_factory.mktemp("scattered") / "run"
    store = DirectoryStore(folder)
    begin_run(store, SLOTS, minimum=3, codec="int8", reduction="reduce_scatter", name="run")
    islands = [
        Island(store, slot, minimum=3, features=900_000, reduction="reduce_scatter", codec="int8") for slot in SLOTS
    ]
    together([lambda island=island: island.train(ROUNDS) for island in islands])
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def deep(folder: Path) -> Examination:
    return examine_store(DirectoryStore(folder), lambda _done, _whole: None)


def places(examination: Examination) -> list[tuple[str, str, int | None, str | None]]:
    return [(finding.severity, finding.kind, finding.round, finding.slot) for finding in examination.findings]


def units(run: Path, number: int) -> dict[int, Path]:
    """The reduced units of a round, as their owners have made them; on a busy machine others may have, too."""
    stored = {path.name for path in (run / keys.payloads_prefix(number)).rglob("reduced/*")}
    owners = [(unit, SLOTS[unit % len(SLOTS)]) for unit in range(len(stored))]
    paths = {unit: run / keys.reduced_unit(number, 0, slot, 0, unit) for unit, slot in owners}
    return {unit: path for unit, path in paths.items() if path.exists()}


def test_averages_of_a_healthy_run_are_recomputed(run: Path) -> None:
    assert deep(run).findings == ()
    assert len(units(run, 1)) >= len(SLOTS)
    commit = Commit.parse((run / keys.commit(1)).read_bytes(), "commit")
    receipts = [Receipt.parse((run / keys.receipt(1, slot)).read_bytes(), slot) for slot in SLOTS]
    assert {receipt.averages for receipt in receipts} == {commit.averages}


def test_damaged_unit_is_found_with_its_maker(run: Path) -> None:
    path = units(run, 1)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    examination = deep(run)
    assert places(examination) == [("error", "wrong-unit", 1, "r-0")]
    assert "reduced unit is damaged" in examination.findings[0].text


def test_unit_that_is_sound_and_wrong_is_found_with_its_maker(run: Path) -> None:
    path, count = units(run, 1)[1], len(units(run, 1))
    decision = (run / keys.decision(1, 0)).read_bytes()
    digest = Commit.parse((run / keys.commit(1)).read_bytes(), "commit").exchanges[0]
    assert Decision.parse(decision, "decision").reduction == "reduce_scatter"
    name = UnitName(1, 0, digest, 0, 1, count)
    body = bytearray(unseal(name, memoryview(path.read_bytes()), str(path)))
    body[5] ^= 1
    path.write_bytes(b"".join(seal(name, [body])))
    examination = deep(run)
    assert places(examination) == [("error", "wrong-unit", 1, "r-1")]
    assert "unit=1 first_byte=5" in examination.findings[0].text
    assert not examination.ok


def test_commit_that_names_another_average_is_found(run: Path) -> None:
    path = run / keys.commit(ROUNDS - 1)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"averages": ["7" * 32]}))
    examination = deep(run)
    assert ("error", "wrong-average", ROUNDS - 1, None) in places(examination)
    (finding,) = [item for item in examination.findings if item.kind == "wrong-average"]
    assert finding.key == keys.commit(ROUNDS - 1)


def test_dispute_in_a_receipt_is_reported_without_reading_bodies(run: Path) -> None:
    path = run / keys.receipt(1, "r-2")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"disputed": "unit 0 of rank 0, which r-0 made"}))
    examination = examine_store(DirectoryStore(run))
    assert places(examination) == [("error", "wrong-unit", 1, None)]
    assert examination.findings[0].text == "r-2 reports: unit 0 of rank 0, which r-0 made"


def test_without_torch_a_finding_reports_what_was_skipped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skerry.runtime.recompute_round_average", None)
    examination = deep(run)
    assert places(examination) == [("info", "not-recomputed", None, None)]
    assert examination.ok


def test_rounds_with_collected_payloads_are_left_out(run: Path) -> None:
    for number in range(ROUNDS):
        shutil.rmtree(run / keys.payloads_prefix(number))
    assert "wrong-average" not in {kind for _, kind, _, _ in places(deep(run))}


def test_damaged_contribution_is_reported_once(run: Path) -> None:
    store = DirectoryStore(run)
    path = next(path for path in (run / keys.payloads_prefix(1) / "r-1").iterdir() if path.is_file())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [kind for _, kind, _, _ in places(examine_store(store, lambda _done, _whole: None))] == ["damaged-payload"]
