"""A real log in a folder, which tests of `skerry doctor` damage."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.kit.protocol import Replica, policy, run_record, start_replica
from tests.kit.records import receipt, write_checkpoint
from tests.support.clocks import FakeClock

from skerry.infra.observe.doctor.examine import examine
from skerry.infra.observe.doctor.read_log import read_log
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import GENESIS
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.observe.doctor.findings import Examination

SLOTS = ("a-0", "a-1", "a-2")
ROUNDS = 5
LAST = ROUNDS - 1
OTHER = "f" * 64


class Log:
    """Three replicas and five closed rounds, with receipts, and checkpoints of rounds 0 and 2."""

    def __init__(self, folder: Path, rounds: int = ROUNDS, min_replicas: int = 3) -> None:
        self.store = DirectoryStore(folder)
        self.clock = FakeClock()
        run = run_record(self.clock, slots=SLOTS, rounds=rounds, min_replicas=min_replicas)
        self.replicas = [self.start(slot, min_replicas=min_replicas, run=run) for slot in SLOTS]
        self.nonce = self.replicas[0].log.run.nonce
        self.checkpoint(0)
        for number in range(rounds):
            self.train(number)
            if number == 1:
                self.checkpoint(2)

    def start(self, slot: str, **changes: object) -> Replica:
        run = changes.pop("run", None)
        return start_replica(self.store, self.clock, slot, policy(**changes), run)  # type: ignore[arg-type]

    def train(self, number: int) -> None:
        for replica in self.replicas:
            replica.contribute(f"{number} {replica.presence.slot}".encode())
        for replica in self.replicas:
            replica.close(replica.decide())
            slot = replica.presence.slot
            record = receipt(slot, number, run=self.nonce, commit=replica.base)
            assert self.store.create(keys.receipt(number, slot), record.to_bytes())

    def checkpoint(self, number: int) -> None:
        commit = self.digest(keys.commit(number - 1)) if number else GENESIS
        write_checkpoint(self.store, number, run=self.nonce, commit=commit, members=SLOTS, writer="a-2")

    def read(self, key: str) -> memoryview:
        data = self.store.read(key)
        assert data is not None
        return data

    def digest(self, key: str) -> str:
        return digest_of(self.read(key))

    def change(self, key: str, **fields: object) -> None:
        """Overwrite fields of a record."""
        document = json.loads(bytes(self.read(key))) | fields
        self.store.replace(key, json.dumps(document, separators=(",", ":")).encode())

    def change_last_commit(self, **fields: object) -> None:
        """Overwrite fields of the last commit, and its digest in the receipts, its only references."""
        self.change(keys.commit(LAST), **fields)
        for slot in SLOTS:
            self.change(keys.receipt(LAST, slot), commit=self.digest(keys.commit(LAST)))

    def delete(self, *stored: str) -> None:
        for key in stored:
            self.read(key)
            self.store.delete(key)

    def payload(self, number: int, slot: str) -> str:
        (entry,) = self.store.list(f"{keys.PAYLOADS}{number:08d}/{slot}/")
        return entry.key

    def part(self, number: int) -> str:
        entries = self.store.list(f"{keys.CHECKPOINTS}{number:08d}/")
        (key,) = [entry.key for entry in entries if "manifest" not in entry.key]
        return key

    def examine(self) -> Examination:
        return examine(read_log(self.store))
