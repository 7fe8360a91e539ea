"""A watch of a deployed run warns when a replica does not take part; its log is in a bucket of the sandbox."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from tests.infra.deploy.account import Operator, write_run
from tests.infra.observe.fleet import SLOTS, Fleet
from tests.kit.records import receipt
from tests.support.clocks import FakeClock

from skerry.infra.cli.deployed_watch import Watch
from skerry.infra.cli.live_run_table import open_screen
from skerry.infra.deploy.restart_lost import StopRequest
from skerry.infra.run.run_record import load_run
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

GROUPS = """\
  - {name: a, count: 2, target: {kind: aws_batch, region: us-east-1, instance_types: [c7i.2xlarge]}}
"""
ROUNDS = 8
NAN = "NaN in parameter 'w'"
MISSING = f"a-1 is missing since round 3: {NAN} (round 3)"
RETURNS = "a-1 takes part again in round 5, after 2 missed rounds"


class Watched:
    """An applied run of which a round closes between two looks; a-1 abstains from rounds 3 and 4."""

    def __init__(self, folder: Path, sandbox: Sandbox) -> None:
        operator = Operator(
            write_run(folder, GROUPS, outer=f"{{rounds: {ROUNDS}}}", more="faults: {min_replicas: 1}\n"),
            sandbox.environment,
        )
        assert operator.apply().ok
        self.deployment = operator.deployment()
        assert isinstance(self.deployment.clock, FakeClock)
        self.fleet = Fleet(self.deployment.open_store(), load_run(self.deployment.open_store()))
        self.deployment.clock.on_pause = self.train
        self.closed = 0

    def train(self) -> None:
        number, self.closed = self.closed, self.closed + 1
        abstains = number in {3, 4}
        self.fleet.train(number, *(SLOTS[:1] if abstains else SLOTS))
        ahead, behind = (self.fleet.replicas[slot] for slot in SLOTS)
        behind.round, behind.base, behind.work = ahead.round, ahead.base, ahead.work
        if abstains:
            record = receipt("a-1", number, run=self.fleet.nonce, contributed=False, abstained=NAN)
            self.fleet.store.create(keys.receipt(number, "a-1"), record.to_bytes())
        for slot in SLOTS:
            presence = self.fleet.replicas[slot].presence
            # Of another size each time: the sandbox has times of whole seconds, and these looks follow in less.
            presence.report(inner_step=10**self.closed, loss=None, tokens=0, tokens_per_s=None)
            presence.enter("train", round_number=self.closed)

    def output(self, *, terminal: bool) -> str:
        """The output of the watch until the run is finished."""
        console = Console(file=io.StringIO(), width=110, height=30, force_terminal=terminal, color_system=None)
        with open_screen(console, self.deployment.clock) as screen:
            assert Watch(self.deployment).until_over(console, screen, StopRequest())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


@pytest.fixture
def watched(tmp_path: Path, skerry_sandbox: Sandbox) -> Watched:
    return Watched(tmp_path, skerry_sandbox)


def test_replica_that_abstains_is_a_line_of_the_watch_when_it_happens(watched: Watched) -> None:
    lines = watched.output(terminal=False).splitlines()
    warnings = [line for line in lines if "warning" in line]
    assert warnings == [f"skerry: warning: {MISSING}", f"skerry: warning: {RETURNS}"]
    finished = next(line for line in lines if f"{ROUNDS} of {ROUNDS} rounds" in line)
    assert lines.index(warnings[1]) < lines.index(finished)


def test_replica_that_abstains_is_shown_by_the_screen_of_the_watch(watched: Watched) -> None:
    text = watched.output(terminal=True)
    assert f"skerry: warning: {MISSING}" in text
    last = text[text.rindex(f"round {ROUNDS} of {ROUNDS}") :]
    assert f"abstained: a-1 ({NAN})" in last
