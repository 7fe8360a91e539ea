"""A replica without torch: claims its slot, beats, closes rounds, and behaves as its command line says.

usage: train.py [SLOT=BEHAVIOUR ...]; a slot that is not named finishes every round and ends with 0.
    wait         beats until SIGTERM, then ends with 10
    deaf         ignores SIGTERM
    crash        ends with 1, every time
    crash-once   kills itself with SIGKILL in its first incarnation, finishes in the next
    permanent    ends with 20
    child        starts a child in its group, then waits like `wait`
    session      starts a child in a session of its own, as torchrun does, then waits like `wait`
    silent       never connects: prints a line and ends with 0
    broken       ends with 1 before it connects
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from skerry.runtime import contract
from skerry.runtime.clock import SystemClock
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS, Commit, Heartbeat, Member, Outcome, Phase, Receipt, Run, digest_of
from skerry.runtime.store import Store, open_store


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


class StandIn:
    def __init__(self) -> None:
        self.place = contract.read(os.environ)
        self.clock = SystemClock()
        self.store: Store = open_store(self.place.run_uri)
        data = self.store.read(keys.RUN)
        assert data is not None
        self.run = Run.parse(data, keys.RUN)
        self.incarnation = self._claim()
        self.sequence = 0
        self.stopping = threading.Event()

    def _claim(self) -> int:
        incarnation = len(self.store.list(keys.members_prefix(self.place.slot)))
        member = Member(
            run=self.run.nonce,
            slot=self.place.slot,
            incarnation=incarnation,
            nonce=self.clock.nonce(),
            host="here",
            process=os.getpid(),
            created=self.clock.utc_text(),
        )
        assert self.store.create(keys.member(self.place.slot, incarnation), member.to_bytes())
        return incarnation

    def beat(self, round_number: int, phase: Phase) -> None:
        beat = Heartbeat(
            run=self.run.nonce,
            slot=self.place.slot,
            incarnation=self.incarnation,
            sequence=self.sequence,
            round=round_number,
            inner_step=round_number * 10,
            phase=phase,
            abstains=None,
            loss=4.0 - round_number * 0.1,
            tokens=round_number * 1000,
            tokens_per_s=500.0,
            uploaded_bytes=round_number * 1_000_000,
            downloaded_bytes=round_number * 3_000_000,
            waiting_for=(),
            notice=None,
        )
        self.sequence += 1
        self.store.replace(keys.heartbeat(self.place.slot), beat.to_bytes())

    def finish(self) -> int:
        previous = GENESIS
        rounds = self.run.rounds or 0
        for number in range(rounds):
            self.beat(number, "train")
            commit = Commit(
                run=self.run.nonce,
                round=number,
                exchanges=("e" * 64,),
                participants=self.place.replicas,
                work=float(self.place.replicas * (number + 1)),
                previous=previous,
            )
            self.store.create(keys.commit(number), commit.to_bytes())
            previous = digest_of(commit.to_bytes())
            self.store.create(keys.receipt(number, self.place.slot), self._receipt(number, previous).to_bytes())
            say(f"round {number} closed")
        self.beat(rounds, "finished")
        outcome = Outcome(
            run=self.run.nonce,
            slot=self.place.slot,
            incarnation=self.incarnation,
            status="done",
            exit_code=0,
            reason="all rounds are closed",
            round=rounds,
            inner_step=rounds * 10,
            tokens=rounds * 1000,
            loss_first=4.0,
            loss_last=1.5,
            ended=self.clock.utc_text(),
        )
        self.store.create(keys.outcome(self.place.slot, self.incarnation), outcome.to_bytes())
        return contract.ExitCode.DONE

    def _receipt(self, number: int, commit: str) -> Receipt:
        return Receipt(
            run=self.run.nonce,
            round=number,
            slot=self.place.slot,
            incarnation=self.incarnation,
            commit=commit,
            averages=("a" * 32,),
            state="b" * 32,
            scope="fragments",
            contributed=True,
            uploaded_bytes=1,
            downloaded_bytes=3,
            requests=4,
            seconds={},
        )

    def wait(self) -> int:
        signal.signal(signal.SIGTERM, lambda *_: self.stopping.set())
        self.beat(0, "train")
        say("ready")
        while not self.stopping.wait(0.1):
            self.beat(0, "train")
        say("stopping cleanly")
        return contract.ExitCode.RETRY

    def deaf(self) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("ready")
        threading.Event().wait()
        return 0

    def act(self, behaviour: str) -> int:
        match behaviour:
            case "wait":
                return self.wait()
            case "deaf":
                return self.deaf()
            case "crash" | "permanent":
                return {"crash": 1, "permanent": int(contract.ExitCode.PERMANENT)}[behaviour]
            case "child" | "session":
                # Nothing on its command line names the run, but its environment does, like every process of it.
                command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
                subprocess.Popen(command, start_new_session=behaviour == "session")
                return self.wait()
            case _:
                if behaviour == "crash-once" and self.incarnation == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return self.finish()


if __name__ == "__main__":
    behaviour = dict(argument.split("=", 1) for argument in sys.argv[1:]).get(os.environ[contract.SLOT], "finish")
    if behaviour == "silent":
        say("hello")
        sys.exit(0)
    if behaviour == "broken":
        sys.exit("no module named x")
    sys.exit(StandIn().act(behaviour))
