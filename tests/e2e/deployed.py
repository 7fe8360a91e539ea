"""A run in sandboxes from its operator's view: the command line and the objects in the store."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.e2e.conftest import DEADLINE_S, ROOT, until
from tests.infra.deploy import account

from skerry.runtime.log import keys
from skerry.runtime.log.records import Commit, Contribution, Outcome, Receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from skerry.runtime.store import Store

# A model that costs nothing: two cores have up to six replicas to carry.
TRAINING = (
    f"code: {{{{path: {ROOT}/runtime/examples/tiny_gpt, "
    'command: [python, train.py, --width, "32", --layers, "1", --batch, "4"]}}\n'
    "outer: {{rounds: {rounds}, sync_every: 4}}\n"
)
# Where a round needs every replica, it waits for the lost one.
SPEC = (
    """\
run: tried
store: {store}
image: {image}
"""
    + TRAINING
    + """\
faults: {{min_replicas: {needed}, grace: 10s, start_window: 120s}}
limits: {{max_hours: 3}}
replicas:
{groups}"""
)


_PROGRAM = (sys.executable, "-c", "from skerry.infra.cli.app import main; main()")


def skerry(*words: str) -> str:
    """Run the command in this process, which must succeed, and return its output."""
    return account.skerry(*words).stdout


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_PROGRAM, *words],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def check_end_of_up(code: int, text: str) -> None:
    """`up` ends with 3 exactly if its summary says that a replica was missing in half or more of the rounds."""
    missing = re.findall(r"missing in (\d+) of (\d+) rounds", text)
    assert code == (3 if any(2 * int(rounds) >= int(of) for rounds, of in missing) else 0), text[-4000:]


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """A spec in a file. slots: of all its replicas. rounds: that it trains."""

    spec: Path
    slots: Collection[str]
    rounds: int

    @classmethod
    def write(
        cls,
        folder: Path,
        *,
        store: str,
        image: str,
        groups: str,
        slots: Collection[str],
        rounds: int,
        needed: int | None = None,
    ) -> Deployed:
        """groups: the entries of `replicas`, as YAML. needed: so many replicas are enough for a round; None is all."""
        spec = folder / "skerry.yaml"
        response = {"store": store, "image": image, "groups": groups, "rounds": rounds, "needed": needed or len(slots)}
        spec.write_text(SPEC.format(**response))
        return cls(spec=spec, slots=slots, rounds=rounds)

    def plan(self) -> str:
        return skerry("plan", str(self.spec))

    def apply(self) -> str:
        return skerry("apply", str(self.spec), "--auto-approve")

    def deploy(self, script: str) -> str:
        """Build, push, plan and apply by the script that a user starts in a checkout; what it prints."""
        command = [
            str(ROOT / "scripts" / script),
            str(self.spec),
            "--variant",
            "cpu",
            "--offline",
            "--allow-dirty",
            "--yes",
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
        return ended.stdout

    def destroy(self) -> str:
        return skerry("destroy", str(self.spec), "--yes", "--data")

    def jobs(self) -> Mapping[str, Mapping[str, Any]]:
        """By slot, what `status` tells of each."""
        response = json.loads(skerry("status", str(self.spec), "--json"))
        return {str(job["slot"]): job for job in response["jobs"]}

    def watch(self) -> Mapping[str, Any]:
        """Run `up`, which applies first, and return its final report."""
        ended = _run("up", str(self.spec), "--auto-approve", "--json")
        sys.stdout.write(ended.stderr)
        check_end_of_up(ended.returncode, ended.stdout + ended.stderr)
        return json.loads(ended.stdout.splitlines()[-1])

    @contextlib.contextmanager
    def watched(self) -> Iterator[Callable[[], str]]:
        """`up` beside what the test does; gives what it has told so far. It must end well by itself."""
        response = self.spec.with_name("told")
        with response.open("wb") as out:
            command = [*_PROGRAM, "up", str(self.spec), "--auto-approve"]
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
            try:
                yield response.read_text
                check_end_of_up(process.wait(DEADLINE_S), response.read_text())
            finally:
                process.kill()
                process.wait()

    def doctor(self) -> Mapping[str, Any]:
        """Return the report of `doctor` on the clouds and the whole log of the run."""
        return json.loads(skerry("doctor", str(self.spec), "--deep", "--json").splitlines()[-1])

    def speakers(self) -> Counter[str]:
        """Slots by the number of lines that `logs` has of them."""
        return Counter(line.partition("]")[0].removeprefix("[").strip() for line in self.logs())

    def logs(self) -> list[str]:
        return skerry("logs", str(self.spec), "-v").splitlines()


def until_closed(store: Store, rounds: int) -> None:
    """Stay until so many rounds are closed."""
    until(lambda: len(store.list(keys.COMMITS)) >= rounds)


def check_nothing_was_lost(store: Store, run: Deployed, killed: Collection[str] | None) -> None:
    """Every round has a contribution of every replica, those that were killed came back, and all hold the same.

    killed: None if any may have been.
    """
    commits = [Commit.parse(store.read(entry.key) or b"", entry.key) for entry in store.list(keys.COMMITS)]
    assert [commit.participants for commit in commits] == [len(run.slots)] * run.rounds
    last = run.rounds - 1
    lives: dict[str, int] = {}
    for slot in run.slots:
        key = keys.contribution(last, 0, slot)
        lives[slot] = Contribution.parse(store.read(key) or b"", key).incarnation
    if killed is not None:
        assert {slot for slot, incarnation in lives.items() if incarnation} == set(killed)
    held: set[tuple[object, ...]] = set()
    for slot in run.slots:
        key = keys.receipt(last, slot)
        item = Receipt.parse(store.read(key) or b"", key)
        assert item.state is not None
        held.add((item.commit, item.averages, item.state))
    assert len(held) == 1
    check_all_are_done(store, run)


def check_all_are_done(store: Store, run: Deployed) -> None:
    """Every replica came to the end of the run."""
    ended = [Outcome.parse(store.read(entry.key) or b"", entry.key) for entry in store.list(keys.OUTCOMES)]
    assert {item.slot for item in ended if item.status == "done"} == set(run.slots)
