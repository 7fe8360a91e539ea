"""The log of a run in three clouds: 128 rounds with a lost, a cut, a late and an abstaining replica."""

from __future__ import annotations

import datetime as dt
import math
from typing import TYPE_CHECKING

from tests.kit.protocol import contribution, heartbeat, run_record
from tests.kit.records import commit, decision, receipt
from tests.support.clocks import FakeClock

from skerry.runtime.log import keys
from skerry.runtime.log.records import Member, Place, Telemetry
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.log.record_parsing import Record

NONCE = "a" * 32
SLOTS = ("batch-0", "batch-1", "batch-2", "sagemaker-0", "vertex-0", "vertex-1")
CREATED = dt.datetime(2026, 3, 5, 1, 30, tzinfo=dt.UTC)
PLACES = {
    "batch": Place(cloud="aws", region="us-east-1", machine="g6e.xlarge", accelerators=1, spot=True),
    "sagemaker": Place(cloud="aws", region="us-east-1", machine="ml.g6e.xlarge", spot=False),
    "vertex": Place(
        cloud="google",
        region="us-central1",
        machine="g2-standard-8",
        accelerator="nvidia-l4",
        accelerators=1,
        spot=False,
    ),
}
ROUNDS = 128
# vertex-1 is lost in this round.
LOST = 124


class DatedClock(FakeClock):
    """A fake clock whose scale is the wall clock's."""

    def __init__(self) -> None:
        super().__init__()
        self.time = CREATED.timestamp()

    def utc_text(self) -> str:
        return dt.datetime.fromtimestamp(self.time, dt.UTC).isoformat(timespec="milliseconds")


class ExampleRun:
    """The store of the run, its clock and its run.json."""

    def __init__(self) -> None:
        self.clock = DatedClock()
        self.store = MemoryStore("s3://acme-diloco/runs/tiny-gpt", self.clock)
        self.run = run_record(
            self.clock, nonce=NONCE, name="tiny-gpt", slots=SLOTS, rounds=200, sync_every=20, checkpoint_every=2
        )
        self.put(keys.RUN, self.run)
        self.clock.advance(75)
        for slot in SLOTS:
            if slot != "sagemaker-0":
                self.start(slot)
        for number in range(ROUNDS):
            self.clock.advance(43 if number == LOST else 19 + number % 3 * 0.5)
            self.close(number)
            if number == LOST + 1:
                self.start("vertex-1", 1)
        self.clock.advance(13)
        self.beat()

    def put(self, key: str, record: Record) -> None:
        self.store.replace(key, record.to_bytes())

    def start(self, slot: str, incarnation: int = 0) -> None:
        member = Member(
            run=NONCE,
            slot=slot,
            incarnation=incarnation,
            nonce="b" * 32,
            host=f"host-of-{slot}",
            process=7,
            created=self.clock.utc_text(),
            place=PLACES[slot.partition("-")[0]],
        )
        self.put(keys.member(slot, incarnation), member)

    def beat(self) -> None:
        for index, slot in enumerate(SLOTS):
            values: dict[str, object] = {
                "run": NONCE,
                "round": ROUNDS,
                "inner_step": ROUNDS * 20 + 14 - index,
                "loss": 2.16 + index / 100,
                "tokens": 1000,
                "tokens_per_s": 10400.0 - 60 * index,
                "uploaded_bytes": 115_000_000,
                "downloaded_bytes": 97_000_000,
            }
            if slot == "vertex-1":
                values |= {"incarnation": 1, "phase": "joining", "tokens_per_s": None, "loss": None, "inner_step": 0}
            if slot == "batch-1":
                values |= {"phase": "sync", "waiting_for": ("batch-2", "vertex-0")}
            if slot == "batch-2":
                values["notice"] = "the machine will be taken away in 2 minutes (spot notice)"
            if slot != "sagemaker-0":
                self.put(keys.heartbeat(slot), heartbeat(slot, **values))

    def close(self, number: int) -> None:
        """One round: its contributions, decision, commit and receipts."""
        late = {"batch-1"} if number == 100 else set[str]()
        abstaining = {"vertex-0"} if number in {80, 81} else set[str]()
        away = {"sagemaker-0"} | ({"vertex-1"} if number >= LOST else set[str]())
        members = [slot for slot in SLOTS if slot not in late | abstaining | away]
        for slot in members:
            share = 0.6 if slot == "batch-2" and number in {105, 106} else 1.0
            record = contribution(slot, run=NONCE, round=number, share=share, telemetry=telemetry(slot, number, share))
            self.put(keys.contribution(number, 0, slot), record)
        self.put(keys.decision(number, 0), decision(number, members, run=NONCE))
        self.put(keys.commit(number), commit(number, participants=len(members), work=float(number)))
        for slot in [*members, *late, *abstaining]:
            record = receipt(
                slot,
                number,
                contributed=slot in members,
                seconds={"encode": 0.05, "upload": 0.2, "wait": 0.4, "download": 0.3, "reduce": 0.05},
                telemetry=None if slot in members else telemetry(slot, number, 1.0),
                abstained="NaN in parameter 'blocks.1.mlp.weight'" if slot in abstaining else None,
            )
            self.put(keys.receipt(number, slot), record)


def telemetry(slot: str, number: int, share: float) -> Telemetry:
    """The telemetry of one replica in a round."""
    index = SLOTS.index(slot)
    loss = 2.0 + 3.9 * math.exp(-number / 22) + 0.01 * math.sin(number + index)
    train_s = 17.6 + 0.15 * index
    return Telemetry(loss=loss, steps=round(20 * share), possible=20, tokens=200_000, train_s=train_s)
