"""`skerry` as a user runs it: real processes, a real folder as the bucket, real signals."""

from __future__ import annotations

import json
import os
import select
import signal
from typing import TYPE_CHECKING

import pytest
from tests.infra.runs import Skerry, processes_in, write_spec

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def run(*arguments: str) -> tuple[int, str]:
    with Skerry(*arguments) as skerry:
        return skerry.end(), skerry.output


def test_up_status_and_destroy_of_a_run(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "a-1=crash-once")
    code, output = run("up", str(spec), "--json")
    assert code == 0, output
    last = json.loads(output.splitlines()[-1])
    assert last["ok"] is True
    assert last["view"]["closed"] == 3
    assert last["view"]["agreement"] == {"round": 2, "slots": ["a-0", "a-1"], "average": True, "state": True}
    assert [(result["slot"], result["fate"], result["restarts"]) for result in last["results"]] == [
        ("a-0", "done", 0),
        ("a-1", "done", 1),
    ]
    assert "[a-0] round 2 closed" in output
    assert "a-1: killed (signal SIGKILL)" in output
    assert "; restarting it in" in output
    assert f"the trained model as a file: skerry export {spec} -o model.safetensors" in output.splitlines()

    code, output = run("up", str(spec))
    assert code == 0
    assert "the run is already finished, so nothing was started" in output

    code, output = run("status", str(spec), "--json")
    assert code == 0
    assert [replica["outcome"] for replica in json.loads(output)["replicas"]] == ["done", "done"]

    code, output = run("logs", str(spec), "--replica", "a-1")
    assert code == 0
    assert output.splitlines() == ["[a-1] --- start 2 ---", *(f"[a-1] round {number} closed" for number in range(3))]

    for arguments, code, text in (((), 2, "add --yes"), (("--yes",), 0, "removed")):
        actual, output = run("destroy", str(spec), *arguments)
        assert (actual, text in output) == (code, True), output
    assert not (tmp_path / ".skerry").exists()
    assert not (tmp_path / "store" / "test-run").exists()


def test_ctrl_c_stops_replicas_and_up_continues_the_run(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "a-0=wait", "a-1=session")
    with Skerry("up", str(spec)) as skerry:
        skerry.until("] ready", times=2)
        skerry.interrupt()
        code = skerry.end()
    assert code == 1
    assert skerry.output.count("] stopping cleanly") == 2
    assert skerry.output.count(": stopped on request") == 2
    assert processes_in(tmp_path) == []

    with Skerry("up", str(spec)) as skerry:
        skerry.until("run test-run continues")
        skerry.until("] ready", times=2)
        skerry.interrupt()
        assert skerry.end() == 1


def test_second_ctrl_c_kills_replicas(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "a-0=deaf", "a-1=deaf")
    with Skerry("up", str(spec)) as skerry:
        skerry.until("] ready", times=2)
        skerry.interrupt()
        skerry.until("Ctrl-C again kills")
        skerry.interrupt()
        code = skerry.end()
    assert code == 1
    assert "killing the replicas that are left: asked again" in skerry.output
    assert processes_in(tmp_path) == []


def test_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "a-0=child", "a-1=deaf", "a-2=session", count=3)
    with Skerry("up", str(spec)) as skerry:
        skerry.until("] ready", times=3)
        # A leash, a replica each, and two children; the supervisor itself runs elsewhere.
        replicas = processes_in(tmp_path)
        assert len(replicas) == 8
        ends = {pid: os.pidfd_open(pid) for pid in replicas}
        skerry.process.send_signal(signal.SIGKILL)
        poll = select.poll()
        for end in ends.values():
            poll.register(end, select.POLLIN)
        while ends:
            gone = {descriptor for descriptor, _ in poll.poll(10_000)}
            assert gone, f"still alive: {sorted(ends)}"
            for pid in [pid for pid, end in ends.items() if end in gone]:
                poll.unregister(ends[pid])
                os.close(ends.pop(pid))


def test_second_up_of_a_run_is_a_conflict(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "a-0=wait", "a-1=wait")
    with Skerry("up", str(spec)) as first:
        first.until("] ready", times=2)
        code, output = run("up", str(spec))
        assert code == 1
        assert f"already up on this machine: pid={first.process.pid}" in output
        code, output = run("destroy", str(spec), "--yes")
        assert (code, f"pid={first.process.pid}" in output) == (1, True)
        with Skerry("logs", str(spec), "-f", "--replica", "a-0") as follower:
            follower.until("[a-0] ready")
            first.interrupt()
            assert first.end() == 1
            assert follower.end() == 0
        assert follower.output.endswith("[a-0] stopping cleanly\n")


@pytest.mark.parametrize("hang_up", [False, True])
def test_closed_terminal_stops_replicas_cleanly(tmp_path: Path, *, hang_up: bool) -> None:
    spec = write_spec(tmp_path, "a-0=wait", "a-1=wait")
    with Skerry("up", str(spec)) as skerry:
        skerry.until("] ready", times=2)
        if hang_up:
            skerry.process.send_signal(signal.SIGHUP)
            assert skerry.end() == 1
        else:
            skerry.close_output()
            # A line to print to the closed pipe: one, because the replicas may write their last lines after it.
            with (tmp_path / ".skerry" / "test-run" / "logs" / "a-0.0.log").open("a") as log:
                log.write("more\n")
            assert skerry.process.wait(300) == 1
    for log in (tmp_path / ".skerry" / "test-run" / "logs").iterdir():
        assert log.read_text().endswith("stopping cleanly\n")
    assert processes_in(tmp_path) == []
