"""Exports of a small history, read back; a second export is the same."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.report.histories import BEGAN, SmallRun, eventful
from tests.kit.records import outcome

from skerry.infra.report.export_files import EVENTS, write_csv, write_json, write_tensorboard

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.observe.history import RunHistory


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def events(path: Path) -> list[dict[str, Any]]:
    """The scalars of an event file, with TensorBoard's own framing: length, checksum, record, checksum."""
    from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415  generated when it is imported

    data, scalars = path.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        scalars += [
            {"step": event.step, "at": event.wall_time, "tag": value.tag, "value": value.simple_value}
            for value in event.summary.value
        ]
    return scalars


def test_csv_has_a_row_for_each_replica_and_round(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    assert write_csv(eventful().history(), path) == 160
    rows = rows_of(path)
    assert len(rows) == 160
    first = rows[0]
    assert (first["round"], first["replica"], first["part"], first["share"]) == ("0", "east-0", "trained", "1.0")
    assert (first["tokens"], first["seconds.wait"], first["closed_at"]) == ("10000", "2.0", str(BEGAN + 20))
    assert float(first["metric.val_loss"]) == pytest.approx(float(first["loss"]) + 0.1)
    absent = next(row for row in rows if row["part"] == "absent")
    assert (absent["round"], absent["replica"], absent["loss"], absent["start"]) == ("20", "west-1", "", "")


def ended() -> RunHistory:
    """A run of five rounds after which two replicas have evaluated; one has also evaluated before an extension."""
    history = SmallRun(rounds=5, slots=("a-0", "a-1", "a-2")).history()
    rounds = (5, 5, 3)
    starts = tuple(
        replace(start, ended_at=BEGAN + 110, outcome=outcome(start.slot, round=number, metrics={"val_loss": 1.5}))
        for start, number in zip(history.starts, rounds, strict=True)
    )
    return replace(history, starts=starts)


def test_csv_has_the_evaluation_after_the_last_round(tmp_path: Path) -> None:
    assert write_csv(ended(), tmp_path / "run.csv") == 5 * 3 + 2
    last = rows_of(tmp_path / "run.csv")[-2:]
    given = [{name: value for name, value in row.items() if value} for row in last]
    common = {"round": "5", "closed_at": str(BEGAN + 110), "part": "end", "start": "0", "metric.val_loss": "1.5"}
    assert given == [{**common, "replica": "a-0"}, {**common, "replica": "a-1"}]


def test_tensorboard_has_the_evaluation_after_the_last_round(tmp_path: Path) -> None:
    assert write_tensorboard(ended(), tmp_path) == 5 * 3
    end = {"step": 5, "at": BEGAN + 110, "tag": "metric/val_loss", "value": 1.5}
    for folder in ("a-0", "a-1", "mean"):
        assert [item for item in events(tmp_path / folder / EVENTS) if item["step"] == 5] == [end]
    assert max(item["step"] for item in events(tmp_path / "a-2" / EVENTS)) == 4


def test_csv_has_no_formulas(tmp_path: Path) -> None:
    run = SmallRun(reason="=HYPERLINK(1)", parts={("east-0", 3): "abstained"}, metrics=("@sum",))
    write_csv(run.history(), tmp_path / "run.csv")
    rows = rows_of(tmp_path / "run.csv")
    assert rows[12]["reason"] == "'=HYPERLINK(1)"
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "@", "+"))]


def test_json_has_the_run_its_starts_and_rounds(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert write_json(eventful().history(), path) == 160
    document = json.loads(path.read_text())
    assert (document["format"], document["run"]["name"], len(document["rounds"])) == (1, "tiny-gpt", 40)
    assert document["starts"][3]["outcome"]["exit_code"] == 137
    replica = document["rounds"][5]["replicas"][2]
    assert (replica["slot"], replica["part"], replica["telemetry"]["metrics"].keys()) == ("west-0", "cut", {"val_loss"})


def test_tensorboard_has_each_replica_and_the_mean_by_round(tmp_path: Path) -> None:
    history = eventful().history()
    assert write_tensorboard(history, tmp_path) == 157
    assert {path.name for path in tmp_path.iterdir()} == {"east-0", "east-1", "west-0", "west-1", "mean"}
    losses = [item for item in events(tmp_path / "west-1" / EVENTS) if item["tag"] == "loss"]
    assert [item["step"] for item in losses] == [*range(20), *range(23, 40)]
    telemetry = history.rounds[7].replicas[3].telemetry
    assert telemetry is not None
    assert losses[7]["value"] == pytest.approx(telemetry.loss)
    assert losses[7]["at"] == history.rounds[7].closed_at
    mean = events(tmp_path / "mean" / EVENTS)
    assert {"loss", "tokens", "metric/val_loss", "seconds/wait", "replicas"} <= {item["tag"] for item in mean}
    assert [item["value"] for item in mean if item["tag"] == "replicas"][19:24] == [4, 3, 3, 3, 4]


def test_second_export_replaces_the_first_and_extends_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write_tensorboard(SmallRun(rounds=5).history(), tmp_path)
    before = (tmp_path / "mean" / EVENTS).read_bytes()
    write_tensorboard(SmallRun(rounds=5).history(), tmp_path)
    assert (tmp_path / "mean" / EVENTS).read_bytes() == before
    write_tensorboard(SmallRun(rounds=8).history(), tmp_path)
    after = (tmp_path / "mean" / EVENTS).read_bytes()
    assert after.startswith(before), "a TensorBoard that reads it continues at its place"
    assert [path.name for path in (tmp_path / "mean").iterdir()] == [EVENTS]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_slots_of_the_bucket_name_no_folder_outside(tmp_path: Path) -> None:
    write_tensorboard(SmallRun(rounds=2, slots=("../../up", "..", "a/b")).history(), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"______up", "__", "a_b", "mean"}
