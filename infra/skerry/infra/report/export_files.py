"""Writes the history of a run as files for other programs: CSV, JSON, TensorBoard.

Every file is written whole and replaces the one before, so an export can be repeated. Its step is the round.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.observe.history import last_evaluations
from skerry.infra.report.tensorboard import Scalars, write_events
from skerry.runtime.output_file import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.infra.observe.history import RunHistory
    from skerry.runtime.log.summarize_round import ReplicaRound, RoundHistory

COLUMNS: Final = (
    *("round", "closed_at", "replica", "part", "share", "start"),
    *("loss", "steps", "possible_steps", "tokens", "train_s", "evaluate_s", "learning_rate", "gradient_norm"),
    *("uploaded_bytes", "downloaded_bytes", "requests", "reason"),
)
"""Of the CSV file; `seconds.PHASE` and `metric.NAME` follow."""
MEAN: Final = "mean"
"""The folder of TensorBoard's figures of all replicas."""
EVENTS: Final = "events.out.tfevents.skerry"
"""The name of each file for TensorBoard: always the same, so that a second export replaces it."""
# A spreadsheet takes a text that begins with one of these as a formula.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")


def write_csv(history: RunHistory, path: Path) -> int:
    """Write a row for each replica and round, and for each evaluation after the last. Returns the number of rows."""
    rows = [_row(item, replica) for item in history.rounds for replica in item.replicas]
    rows += _ends(history)
    more = sorted({name for row in rows for name in row} - set(COLUMNS))
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *map(_text, more)], restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({_text(name): _text(value) for name, value in row.items() if value is not None})
    return len(rows)


def write_json(history: RunHistory, path: Path) -> int:
    """Write the run, its starts and its rounds as one document. Returns the number of replicas' rounds."""
    document = {
        "format": 1,
        "uri": history.uri,
        "run": history.run.model_dump(mode="json"),
        "starts": [asdict(start) for start in history.starts],
        "rounds": [asdict(item) for item in history.rounds],
    }
    with replacing(path) as temporary, temporary.open("w") as file:
        json.dump(document, file, default=_plain)
    return sum(len(item.replicas) for item in history.rounds)


def write_tensorboard(history: RunHistory, folder: Path) -> int:
    """Write a folder for each replica, and MEAN for the means of the replicas. Returns the number of replicas' rounds.

    Other files in the folder are not changed. Raises ImportError without tensorboardX.
    """
    by_folder: dict[str, list[Scalars]] = {}
    for item in history.rounds:
        rows = [_row(item, replica) for replica in item.replicas if replica.incarnation is not None]
        for row in rows:
            by_folder.setdefault(_folder(str(row["replica"])), []).append(_scalars(item, row))
        by_folder.setdefault(MEAN, []).append(_means(item, rows))
    count = sum(len(scalars) for name, scalars in by_folder.items() if name != MEAN)
    _add_ends(by_folder, _ends(history))
    for name, scalars in by_folder.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        with replacing(folder / name / EVENTS) as temporary:
            write_events(temporary, scalars)
    return count


def _row(item: RoundHistory, replica: ReplicaRound) -> dict[str, Any]:
    row: dict[str, Any] = {
        "round": item.round,
        "closed_at": item.closed_at,
        "replica": replica.slot,
        "part": replica.part,
        "share": replica.share,
        "start": replica.incarnation,
        "uploaded_bytes": replica.uploaded_bytes,
        "downloaded_bytes": replica.downloaded_bytes,
        "requests": replica.requests,
        "reason": replica.reason,
    }
    row |= {f"seconds.{phase}": seconds for phase, seconds in replica.seconds.items()}
    telemetry = replica.telemetry
    if telemetry is not None:
        row |= {
            "loss": telemetry.loss,
            "steps": telemetry.steps,
            "possible_steps": telemetry.possible,
            "tokens": telemetry.tokens,
            "train_s": telemetry.train_s,
            "evaluate_s": telemetry.evaluate_s,
            "learning_rate": telemetry.learning_rate,
            "gradient_norm": telemetry.gradient_norm,
        }
        row |= {f"metric.{name}": value for name, value in telemetry.metrics.items()}
    return row


def _ends(history: RunHistory) -> list[dict[str, Any]]:
    """The rows of evaluations after the last round, under the number of the round that would follow."""
    closed, ends = last_evaluations(history.rounds, history.starts)
    return [
        {"round": closed, "closed_at": end.ended_at, "replica": end.slot, "part": "end", "start": end.incarnation}
        | {f"metric.{name}": value for name, value in ((end.outcome and end.outcome.metrics) or {}).items()}
        for end in ends
    ]


def _add_ends(by_folder: dict[str, list[Scalars]], rows: list[dict[str, Any]]) -> None:
    """Add the figures of `_ends` to each replica, and their means."""
    metrics = [{name: value for name, value in row.items() if name.startswith("metric.")} for row in rows]
    for row, of_replica in zip(rows, metrics, strict=True):
        by_folder.setdefault(_folder(row["replica"]), []).append(
            _step(row["round"], row["closed_at"], dict(_numbers(of_replica)))
        )
    if rows:
        at = max(row["closed_at"] or 0.0 for row in rows)
        by_folder.setdefault(MEAN, []).append(_step(rows[0]["round"], at, _mean_of(metrics)))


def _step(number: int, at: float | None, values: dict[str, float]) -> Scalars:
    return Scalars(step=number, time=at or 0.0, values=values)


def _scalars(item: RoundHistory, row: dict[str, Any]) -> Scalars:
    return _step(item.round, item.closed_at, dict(_numbers(row)))


def _means(item: RoundHistory, rows: list[dict[str, Any]]) -> Scalars:
    means = _mean_of(rows)
    means["replicas"] = float(sum(replica.in_average for replica in item.replicas))
    return _step(item.round, item.closed_at, means)


def _mean_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in _numbers(row):
            values.setdefault(name, []).append(value)
    return {name: sum(of_name) / len(of_name) for name, of_name in values.items()}


def _numbers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The figures of a row with the names of TensorBoard, which groups by the first part of a path."""
    for name, value in row.items():
        if isinstance(value, int | float) and name not in {"round", "closed_at"}:
            yield name.replace(".", "/", 1), float(value)


def _folder(slot: str) -> str:
    return _UNSAFE.sub("_", slot) or "_"


def _text(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _plain(value: Any) -> object:
    return value.model_dump(mode="json")
