"""A run of real replicas on this machine that becomes larger and smaller while it is up: no other is started again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.runs import Skerry, write_spec
from tests.kit.managers import decisions

from skerry.runtime.log import keys
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SCRIPT = """
import time

import torch
from skerry.runtime.log import keys
from skerry.runtime.replica import connect

with connect() as replica:
    weight, before = torch.zeros(2), None
    state = lambda: {"weight": weight}
    manager = replica.manager(state_dict=state, load_state_dict=lambda saved: weight.copy_(saved["weight"]))
    print("begins in round", manager.current_step(), flush=True)
    while not replica.stopping and not manager.finished:
        manager.start_quorum()
        if (numbers := (replica.index, replica.replicas)) != before:
            print(f"round {manager.current_step()}: number {numbers[0]} of {numbers[1]}", flush=True)
        before = numbers
        time.sleep(0.3)  # the inner steps of a round
        read, coming = manager.session.store.read, keys.contribution(manager.current_step(), 0, "a-4")
        # A slow machine may need longer for the first contribution of a new replica than the others wait.
        while replica.replicas == 5 and replica.slot != "a-4" and not replica.stopping:
            if read(coming) is not None or read(keys.outcome("a-4", 0)) is not None:
                break
            time.sleep(0.01)
        manager.allreduce(torch.ones(2)).wait()
        if manager.should_commit() and manager.is_participating():
            print("in the average of round", manager.current_step() - 1, flush=True)
"""


def test_run_grows_and_shrinks_while_it_is_up(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    spec = str(write_spec(tmp_path, code=code, count=4))
    options = ("--set", "outer.rounds=100000", "--set", "faults.min_replicas=4", "--set", "faults.start_window=120s")
    with Skerry("up", spec, *options) as running:
        running.until("[a-3] in the average")
        with Skerry("up", spec, *options, "--set", "replicas[0].count=5") as change:
            assert change.end() == 0, change.output
            assert "expects a-0, a-1, a-2, a-3, a-4 now" in change.output
        running.until("[a-4] in the average")
        with Skerry("up", spec, *options) as change:
            assert change.end() == 0, change.output
        running.until("a-4: stopped on request")
        running.until("[a-0] in the average", times=2)
        failed = [line for line in running.output.splitlines() if "round_failed" in line]
        assert all("slot=a-4" in line for line in failed), "it was stopped in a round; no other lost one"
        running.interrupt()
        running.end()
    assert "restarting" not in running.output
    for slot in range(4):
        numbers = [line for line in running.output.splitlines() if f"[a-{slot}] round" in line]
        assert [line.partition("number ")[2] for line in numbers] == [f"{slot} of {count}" for count in (4, 5, 4)]
    store = open_store((tmp_path / "store" / "test-run").as_uri())
    assert [entry.key for entry in store.list(keys.MEMBERS)] == [keys.member(f"a-{number}", 0) for number in range(5)]
    members = [{share.slot for share in decision.members} for decision in decisions(store)]
    first = next(number for number, slots in enumerate(members) if "a-4" in slots)
    assert all(slots == {"a-0", "a-1", "a-2", "a-3"} for slots in members[:first])
    new = next(line for line in running.output.splitlines() if "[a-4] round" in line)
    began = int(new.split("round ")[1].split(":")[0])
    assert first - began < 2
