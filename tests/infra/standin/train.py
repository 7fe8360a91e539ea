"""A replica without torch: claims its slot, beats, closes rounds, and behaves as its command line says.

usage: train.py [SLOT=BEHAVIOUR ...]; a slot that is not named finishes every round and ends with 0.
    wait         beats until SIGTERM, then ends with 10; ends with 20 once a newer incarnation has its slot
    deaf         ignores SIGTERM
    crash-once   kills itself with SIGKILL in its first incarnation, finishes in the next
    child        starts a child in its group, then waits like `wait`
    session      starts a child in a session of its own, as torchrun does, then waits like `wait`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

# `skerry up` runs a copy of this file; tests.infra.runs puts the repository on the path.
from tests.kit.protocol import heartbeat
from tests.kit.records import commit, outcome, receipt

from skerry.runtime import contract
from skerry.runtime.clock import SystemClock
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import GENESIS, Member, Phase
from skerry.runtime.log.run_record import Run, Settings
from skerry.runtime.store import Store, open_store


def show(text: str) -> None:
    sys.stdout.write(f"{text}\n")


class StandIn:
    def __init__(self) -> None:
        self.place = contract.read(os.environ)
        self.store: Store = open_store(self.place.run_uri)
        self.run = Run.parse(self.store.read(keys.RUN) or b"", keys.RUN)
        self.incarnation = self._claim()
        self.sequence = 0
        self.stopping = threading.Event()

    def _claim(self) -> int:
        clock, slot = SystemClock(), self.place.slot
        incarnation = len(self.store.list(keys.members_prefix(slot)))
        member = Member(
            run=self.run.nonce,
            slot=slot,
            incarnation=incarnation,
            nonce=clock.nonce(),
            host="here",
            process=os.getpid(),
            created=clock.utc_text(),
        )
        assert self.store.create(keys.member(slot, incarnation), member.to_bytes())
        return incarnation

    def beat(self, round_number: int, phase: Phase) -> None:
        slot = self.place.slot
        self.sequence += 1
        beat = heartbeat(
            slot,
            run=self.run.nonce,
            incarnation=self.incarnation,
            sequence=self.sequence,
            round=round_number,
            phase=phase,
            loss=4.0 - round_number * 0.1,
        )
        self.store.replace(keys.heartbeat(slot), beat.to_bytes())

    def finish(self) -> int:
        """Close every round of the run, whichever replica is first, and write receipts and the outcome."""
        slot, run, previous = self.place.slot, self.run.nonce, GENESIS
        rounds = self.run.rounds or 0
        for entry in self.store.list(keys.SETTINGS):  # in order: the last one has all rounds
            rounds = Settings.parse(self.store.read(entry.key) or b"", entry.key).rounds or 0
        for number in range(rounds):
            self.beat(number, "train")
            closed = commit(number, run=run, work=2.0 * (number + 1), previous=previous).to_bytes()
            self.store.create(keys.commit(number), closed)
            previous = digest_of(closed)
            self.store.create(keys.receipt(number, slot), receipt(slot, number, run=run, commit=previous).to_bytes())
            show(f"round {number} closed")
        self.beat(rounds, "finished")
        end = outcome(slot, self.incarnation, run=run, round=rounds)
        self.store.create(keys.outcome(slot, self.incarnation), end.to_bytes())
        return contract.ExitCode.DONE

    def wait(self) -> int:
        signal.signal(signal.SIGTERM, lambda *_: self.stopping.set())
        self.beat(0, "train")
        show("ready")
        while not self.stopping.wait(0.1):
            if len(self.store.list(keys.members_prefix(self.place.slot))) > self.incarnation + 1:
                return contract.ExitCode.PERMANENT
            self.beat(0, "train")
        show("stopping cleanly")
        return contract.ExitCode.RETRY

    def deaf(self) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        show("ready")
        threading.Event().wait()
        return 0

    def act(self, behaviour: str) -> int:
        match behaviour:
            case "wait":
                return self.wait()
            case "deaf":
                return self.deaf()
            case "child" | "session":
                # Its command line does not name the run, but its environment does, as in every process of a run.
                command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
                subprocess.Popen(command, start_new_session=behaviour == "session")
                return self.wait()
            case _:
                if behaviour == "crash-once" and self.incarnation == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return self.finish()


if __name__ == "__main__":
    behaviour = dict(argument.split("=", 1) for argument in sys.argv[1:]).get(os.environ[contract.SLOT], "finish")
    sys.exit(StandIn().act(behaviour))
