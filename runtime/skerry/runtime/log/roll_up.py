"""The stored form of many closed rounds in one object: columns of what readers need of each replica, as packed JSON.

A roll-up follows from the records of its rounds, so any reader can rebuild it. Numbers of telemetry and times of phases
are rounded to six digits. Parsing is strict: columns of unlike lengths, unknown fields or names and numbers that do not
fit are Corrupt, and a small object cannot unpack to a large one. Does no I/O. Decisions 0021 and 0057.
"""

from __future__ import annotations

import gzip
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import Extended, Record
from skerry.runtime.log.records import (
    MAX_METRICS,
    MAX_REASON,
    Count,
    Finite,
    Member,
    MetricName,
    Name,
    Nonce,
    Outcome,
    Seconds,
    Sha256,
    Telemetry,
    Text,
)
from skerry.runtime.log.summarize_round import Part, RecordedRound, ReplicaRound, RoundHistory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ROUNDS: Final = 100
"""Rounds of one roll-up; the last one of a run may have fewer."""
MAX_BYTES: Final = 32 << 20
"""Of a stored roll-up. One of 64 replicas has some 200 kB."""
_MAX_PLAIN_BYTES: Final = 256 << 20
_DIGITS: Final = 6
_MOST_PHASES: Final = 32
# All metrics of 64 replicas, if each has the same names, have 200,000 values.
_MAX_VALUES: Final = 1 << 22

_Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
_Reason: TypeAlias = Annotated[Text, Field(max_length=MAX_REASON)]
_Phase: TypeAlias = Annotated[Text, Field(min_length=1, max_length=64)]


class RoundColumns(Record):
    """One value for each round. replicas: how many rows of `ReplicaColumns` it has."""

    closed_at: tuple[Finite | None, ...]
    averages_equal: tuple[bool | None, ...]
    state_equal: tuple[bool | None, ...]
    replicas: tuple[Count, ...]


class ReplicaColumns(Record):
    """One value for each replica in each round with any record of it, round by round, in slot order.

    slot: index into `RollUp.slots`. contributions, receipt: the records of which the row was made. steps and the other
    fields of Telemetry: None if there is none. seconds, metrics: None where the name has no value.
    """

    slot: tuple[Count, ...]
    part: tuple[Part, ...]
    share: tuple[_Share, ...]
    incarnation: tuple[Count | None, ...]
    contributions: tuple[Count, ...]
    receipt: tuple[bool, ...]
    uploaded_bytes: tuple[Count, ...]
    downloaded_bytes: tuple[Count, ...]
    requests: tuple[Count, ...]
    reason: tuple[_Reason | None, ...]
    loss: tuple[Finite | None, ...]
    steps: tuple[Count | None, ...]
    possible: tuple[Count | None, ...]
    tokens: tuple[Count | None, ...]
    train_s: tuple[Seconds | None, ...]
    evaluate_s: tuple[Seconds | None, ...]
    learning_rate: tuple[Finite | None, ...]
    gradient_norm: tuple[Finite | None, ...]
    seconds: Annotated[dict[_Phase, tuple[Seconds | None, ...]], Field(max_length=_MOST_PHASES)]
    metrics: dict[MetricName, tuple[Finite | None, ...]]


_TELEMETRY: Final = ("loss", "steps", "possible", "tokens", "train_s", "evaluate_s", "learning_rate", "gradient_norm")
_ALL_FIELDS: Final = {*Telemetry.model_fields}
_COUNTED: Final = ("steps", "possible", "tokens")
_PLAIN: Final = ("part", "share", "incarnation", "uploaded_bytes", "downloaded_bytes", "requests", "reason")


class RollUp(Extended):
    """The rounds from `first` to `last`. commit: the digest of the last one's. writer: the slot that stored it.

    starts: the starts of replicas, and their ends, that were recorded since the first round was closed, or before; the
    first roll-up has all. None, and absent from the bytes, in old ones.
    """

    LONGEST: ClassVar[int] = _MAX_PLAIN_BYTES

    format: Literal[1] = 1
    run: Nonce
    first: Count
    last: Count
    commit: Sha256
    writer: Name
    slots: tuple[Name, ...]
    rounds: RoundColumns
    replicas: ReplicaColumns
    starts: tuple[Member | Outcome, ...] | None = None
    ADDED = ("starts",)

    @model_validator(mode="after")
    def _columns_match(self) -> Self:
        _check_columns(self)
        return self

    @classmethod
    def of(
        cls,
        run: str,
        writer: str,
        commit: str,
        rounds: Sequence[RecordedRound],
        starts: Sequence[Member | Outcome] | None = None,
    ) -> RollUp:
        """The roll-up of consecutive rounds, at least one. Raises Invalid if they have too many names of metrics."""
        rows = [(item, replica) for item in rounds for replica in item.history.replicas]
        slots = sorted({replica.slot for _, replica in rows}, key=keys.slot_order)
        index = {slot: number for number, slot in enumerate(slots)}
        replicas = [replica for _, replica in rows]
        plain = {name: tuple(getattr(replica, name) for replica in replicas) for name in _PLAIN}
        telemetry = [replica.telemetry for replica in replicas]
        measured = {
            name: tuple(None if item is None else _rounded(getattr(item, name)) for item in telemetry)
            for name in _TELEMETRY
        }
        histories = [item.history for item in rounds]
        return cls.model_validate(
            {
                "run": run,
                "first": histories[0].round,
                "last": histories[-1].round,
                "commit": commit,
                "writer": writer,
                "slots": tuple(slots),
                "rounds": {
                    "closed_at": tuple(None if at is None else round(at, 3) for at in _closing_times(histories)),
                    "averages_equal": tuple(item.averages_equal for item in histories),
                    "state_equal": tuple(item.state_equal for item in histories),
                    "replicas": tuple(len(item.replicas) for item in histories),
                },
                "replicas": {
                    **plain,
                    **measured,
                    "slot": tuple(index[replica.slot] for replica in replicas),
                    "contributions": tuple(item.contributions.get(replica.slot, 0) for item, replica in rows),
                    "receipt": tuple(replica.slot in item.receipts for item, replica in rows),
                    "seconds": _by_name([replica.seconds for replica in replicas]),
                    "metrics": _by_name([{} if item is None else item.metrics for item in telemetry]),
                },
                "starts": None if starts is None else tuple(starts),
            }
        )

    def to_stored(self) -> bytes:
        """The stored bytes. Equal roll-ups have equal bytes."""
        return gzip.compress(self.to_bytes(), mtime=0)

    @classmethod
    def parse_stored(cls, data: bytes | memoryview, key: str) -> Self:
        """The roll-up in `data`, read from `key`. Raises Corrupt for anything that is not the roll-up of this key."""
        roll_up = cls.parse(_unpacked(data, key), key)
        if keys.roll_up_of(key) != range(roll_up.first, roll_up.last + 1):
            raise Corrupt(f"roll-up of other rounds: key={key} first={roll_up.first} last={roll_up.last}")
        return roll_up

    def recorded(self) -> Iterator[RecordedRound]:
        """The rounds in order, with the records that they were made of."""
        start, columns = 0, self.replicas
        for history in self.histories():
            rows = range(start, start + len(history.replicas))
            start = rows.stop
            yield RecordedRound(
                history=history,
                contributions={
                    self.slots[columns.slot[row]]: count for row in rows if (count := columns.contributions[row])
                },
                receipts=frozenset(self.slots[columns.slot[row]] for row in rows if columns.receipt[row]),
            )

    def histories(self) -> Iterator[RoundHistory]:
        """The rounds in order."""
        rows = _replica_rounds(self)
        columns = self.rounds
        for offset, count in enumerate(columns.replicas):
            yield RoundHistory(
                round=self.first + offset,
                closed_at=columns.closed_at[offset],
                replicas=tuple(next(rows) for _ in range(count)),
                averages_equal=columns.averages_equal[offset],
                state_equal=columns.state_equal[offset],
            )


def _replica_rounds(roll_up: RollUp) -> Iterator[ReplicaRound]:
    columns, slots = roll_up.replicas, roll_up.slots
    measured = zip(*(getattr(columns, name) for name in _TELEMETRY), strict=True)
    plain = zip(*(getattr(columns, name) for name in _PLAIN), strict=True)
    seconds, metrics = _rows(columns.seconds, len(columns.slot)), _rows(columns.metrics, len(columns.slot))
    steps = columns.steps
    for row, (slot, values, numbers) in enumerate(zip(columns.slot, plain, measured, strict=True)):
        telemetry = None
        if steps[row] is not None:
            # Validated with its columns. A set of fields for each would take more memory than all of them.
            fields = dict(zip(_TELEMETRY, numbers, strict=True))
            telemetry = Telemetry.model_construct(_ALL_FIELDS, **fields, metrics=metrics[row])
        plain_fields = dict(zip(_PLAIN, values, strict=True))
        yield ReplicaRound(slot=slots[slot], telemetry=telemetry, seconds=seconds[row], **plain_fields)


def _rows(columns: Mapping[str, Sequence[float | None]], count: int) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = [{} for _ in range(count)]
    for name, column in columns.items():
        for row, value in zip(rows, column, strict=True):
            if value is not None:
                row[name] = value
    return rows


def _by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, tuple[float | None, ...]]:
    names = sorted({name for row in rows for name in row})
    if len(names) * len(rows) > _MAX_VALUES:  # names that change with the round: the columns would be almost empty
        raise Invalid(f"too many names for a roll-up: names={len(names)} replicas={len(rows)} limit={_MAX_VALUES}")
    return {name: tuple(_rounded(row.get(name)) for row in rows) for name in names}


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _closing_times(histories: Iterable[RoundHistory]) -> Iterator[float | None]:
    return (item.closed_at for item in histories)


def _unpacked(data: bytes | memoryview, key: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise Corrupt(f"roll-up too large: key={key} bytes={len(data)} limit={MAX_BYTES}")
    unpacking = zlib.decompressobj(wbits=31)
    try:
        plain = unpacking.decompress(data, _MAX_PLAIN_BYTES + 1)
    except zlib.error as error:
        raise Corrupt(f"roll-up does not unpack: key={key}: {error}") from None
    if len(plain) > _MAX_PLAIN_BYTES or not unpacking.eof or unpacking.unused_data:
        raise Corrupt(f"roll-up does not unpack: key={key}: cut off, too large, or followed by other bytes")
    return plain


def _check_columns(roll_up: RollUp) -> None:
    """Raises ValueError if the columns of a roll-up do not match each other."""
    rounds, replicas = roll_up.rounds, roll_up.replicas
    count, rows = roll_up.last - roll_up.first + 1, sum(rounds.replicas)
    if count < 1 or any(len(getattr(rounds, name)) != count for name in RoundColumns.model_fields):
        raise ValueError(f"columns do not match rounds: first={roll_up.first} last={roll_up.last}")
    single = [getattr(replicas, name) for name in ReplicaColumns.model_fields if name not in {"seconds", "metrics"}]
    if any(len(column) != rows for column in (*single, *replicas.seconds.values(), *replicas.metrics.values())):
        raise ValueError(f"columns do not match the replicas of the rounds: replicas={rows}")
    if any(start.run != roll_up.run for start in roll_up.starts or ()):
        raise ValueError("a start is of another run")
    if list(roll_up.slots) != sorted(set(roll_up.slots), key=keys.slot_order):
        raise ValueError("slots are not in slot order")
    start = 0
    for number in rounds.replicas:
        row = replicas.slot[start : start + number]
        if any(before >= after for before, after in pairwise(row)) or max(row, default=-1) >= len(roll_up.slots):
            raise ValueError(f"replicas of a round are not in slot order: row={start}")
        start += number
    if any(len(row) > MAX_METRICS for row in _rows(replicas.metrics, rows if replicas.metrics else 0)):
        raise ValueError(f"a replica has more than {MAX_METRICS} metrics in a round")
    counted = zip(*(getattr(replicas, name) for name in _COUNTED), replicas.train_s, replicas.evaluate_s, strict=True)
    if any(len({value is None for value in values}) > 1 for values in counted):
        raise ValueError("telemetry has some of its numbers only")
