"""`skerry watch` of a run in a folder."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from tests.infra.observe.fleet import SLOTS, Fleet
from tests.infra.runs import environment, write_spec
from tests.kit.protocol import heartbeat
from tests.kit.records import receipt
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke

from skerry.infra.cli.compute_cost_so_far import spending
from skerry.infra.cli.watch_command import Watching, is_over
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.infra.observe.run_view import ReplicaView, RunView
from skerry.runtime.errors import Retryable
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.runtime.store import Entry


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A run of eight rounds, of which four are closed; a-1 is missing from the last of them on."""
    fleet = Fleet(tmp_path / "run")
    for number in range(3):
        fleet.train(number, *SLOTS)
    fleet.train(3, "a-0")
    return fleet


def finish(fleet: Fleet) -> None:
    for number in range(4, 8):
        fleet.train(number, "a-0")
    for slot in SLOTS:
        fleet.end(slot)


def test_once_prints_the_run_as_lines_or_json(fleet: Fleet) -> None:
    finish(fleet)
    plain = invoke("watch", fleet.store.uri, "--once")
    assert plain.exit_code == 0, plain.output
    assert plain.output.splitlines()[0].startswith("test: 8 of 8 rounds done, 1 of 2 replicas in the last")
    result = invoke("watch", fleet.store.uri, "--once", "--json")
    view = json.loads(result.stdout)
    assert (result.exit_code, view["closed"], len(result.stdout.splitlines())) == (0, 8, 1)
    assert [replica["marks"] for replica in view["replicas"]] == [
        ["trained"] * 8,
        ["trained"] * 3 + ["absent"] * 5,
    ]


def test_watch_of_a_finished_run_ends_with_its_summary(fleet: Fleet) -> None:
    finish(fleet)
    result = invoke("watch", fleet.store.uri)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("skerry: 8 of 8 rounds done")
    assert lines[1].startswith("test: 8 of 8 rounds done")
    assert "8 of 8 rounds; all 2 replicas in 3 of them" in lines
    assert any(line.startswith("warning: a-1: missing in 5 of 8 rounds (3-7)") for line in lines)
    looks = invoke("watch", fleet.store.uri, "--json").stdout.splitlines()
    assert [json.loads(line)["closed"] for line in looks] == [8]


def test_watch_and_status_end_with_the_same_warnings(fleet: Fleet) -> None:
    for number in range(4, 8):
        fleet.train(number, "a-0")
    fleet.end("a-0")
    left = heartbeat("a-1", run=fleet.nonce, round=3, phase="left", notice="the machine is taken away")
    fleet.store.replace(keys.heartbeat("a-1"), left.to_bytes())
    watched, status = (
        [line for line in invoke(command, fleet.store.uri).output.splitlines() if line.startswith("warning: ")]
        for command in ("watch", "status")
    )
    assert watched == status
    assert watched == ["warning: a-1: missing in 5 of 8 rounds (3-7): the machine is taken away"]


def test_missing_run_and_spec_are_named(tmp_path: Path) -> None:
    result = invoke("watch", write_spec(tmp_path))
    assert (result.exit_code, "no run at file://" in result.output) == (1, True), result.output
    assert invoke("watch", tmp_path / "no.yaml").exit_code == 2


def test_run_is_over_when_no_replica_will_change_it() -> None:
    run = RunView(run="r", uri="u", rounds=3, closed=3, work=0.0, due=None, participants=1, replicas=(), agreement=None)
    train, silent = ReplicaView(slot="a", phase="train"), ReplicaView(slot="a", phase="train", silent=True)
    done, retry = ReplicaView(slot="a", outcome="done"), ReplicaView(slot="a", outcome="retry")
    assert not is_over(replace(run, replicas=(done, train)))
    assert is_over(replace(run, replicas=(done, silent)))
    assert is_over(replace(run, replicas=(done, ReplicaView(slot="b")))), "a replica that never came ends no watch"
    assert not is_over(replace(run, closed=2, replicas=(done, retry)))
    assert not is_over(replace(run, closed=2, replicas=(done, silent)))
    assert is_over(replace(run, closed=2, replicas=(done, ReplicaView(slot="b", outcome="failed"))))


class Unsteady(MemoryStore):
    """A store whose listings fail as often as asked."""

    failures = 2

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        if prefix == keys.COMMITS and self.failures:
            self.failures -= 1
            raise Retryable("503 slow down")
        return super().list(prefix, after)


def test_unreadable_store_is_reported_once_and_read_again(fleet: Fleet) -> None:
    finish(fleet)
    store, clock = Unsteady(), FakeClock()
    for entry in fleet.store.list(""):
        data = fleet.store.read(entry.key)
        assert data is not None
        store.create(entry.key, bytes(data))
    console = Console(file=io.StringIO(), width=120, force_terminal=False)
    watching = Watching(
        Observer(store, RunSettings(first=fleet.replicas["a-0"].log.run), clock),
        clock,
        lambda view: spending(view, lambda _: None),
        2.0,
    )
    watching.until_over(console, as_json=False)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "skerry: cannot read the store: 503 slow down; trying again"
    assert lines[1].startswith("skerry: 8 of 8 rounds done")
    assert clock.pauses == [2.0, 2.0]


def test_lines_of_a_watch_name_a_replica_that_becomes_late(fleet: Fleet) -> None:
    clock, console = FakeClock(), Console(file=io.StringIO(), width=120, force_terminal=False)
    rounds = iter(range(4, 8))

    def train() -> None:
        if (number := next(rounds, None)) is None:
            return
        fleet.train(number, "a-0")
        fleet.store.create(
            keys.receipt(number, "a-1"), receipt("a-1", number, run=fleet.nonce, contributed=False).to_bytes()
        )
        fleet.replicas["a-0"].presence.enter("train", round_number=number + 1)
        if number == 7:
            for slot in SLOTS:
                fleet.end(slot)
                fleet.replicas[slot].presence.stop("finished")

    clock.on_pause = train
    observer = Observer(fleet.store, RunSettings(first=fleet.replicas["a-0"].log.run), clock, sparing=True)
    Watching(observer, clock, lambda view: spending(view, lambda _: None), 2.0).until_over(console, as_json=False)
    assert isinstance(console.file, io.StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if "warning" in line]
    assert lines == ["skerry: warning: a-1 is missing since round 4: it came too late for round 4"]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_ctrl_c_ends_the_screen_with_exit_code_0(fleet: Fleet, width: int, height: int) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", "from skerry.infra.cli.app import main; main()", "watch", fleet.store.uri],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**environment(), "TERM": "xterm-256color", "COLUMNS": str(width), "LINES": str(height)},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509  Ctrl-C goes to the terminal's process
    )
    os.close(follower)
    screen = read_until(leader, "Ctrl-C ends the watching")
    os.write(leader, b"\x03")
    end = read_until(leader, None)
    os.close(leader)
    assert process.wait(300) == 0
    for text in ("\x1b[?1049h", "round 4 of 8", "a-0", "absent: a-1"):
        assert text in screen
    assert "\x1b[?1049l" in end, "the normal screen is shown again"
    assert "the run goes on without this screen" in end[end.index("\x1b[?1049l") :]


def read_until(leader: int, text: str | None) -> str:
    """The output of the process until this text, or until its end."""
    output = b""
    while text is None or text.encode() not in output:
        try:
            output += os.read(leader, 65536)
        except OSError:  # the process has ended
            break
    return output.decode(errors="replace")
