"""Writes scalars as an event file of TensorBoard, with tensorboardX, which is imported when a file is written."""
# tensorboardX has no types, and its records are generated when it is imported.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """The figures of one step. time: in seconds since the epoch."""

    step: int
    time: float
    values: Mapping[str, float]


def write_events(path: Path, steps: Iterable[Scalars]) -> None:
    """Write the file; equal figures give equal bytes. Raises ImportError without tensorboardX."""
    from tensorboardX.proto.event_pb2 import Event  # noqa: PLC0415  an extra
    from tensorboardX.record_writer import RecordWriter  # noqa: PLC0415  an extra
    from tensorboardX.summary import scalar  # noqa: PLC0415  an extra

    writer = RecordWriter(str(path))
    try:
        # The version is the first record of a file. It has no time of its own, so that a second export is the same.
        writer.write(Event(file_version="brain.Event:2").SerializeToString())
        for item in steps:
            for name, value in item.values.items():
                event = Event(wall_time=item.time, step=item.step, summary=scalar(name, value))
                writer.write(event.SerializeToString())
    finally:
        writer.close()
