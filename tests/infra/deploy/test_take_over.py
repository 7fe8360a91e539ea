"""`apply` of a run that is live, or whose state another process changes: refused, or taken over on request."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.infra.deploy.account import Operator, delete_state, skerry
from tests.kit.protocol import heartbeat

from skerry.infra.deploy.lock_owner_identity import this_process
from skerry.infra.deploy.read_clouds import read_state
from skerry.infra.run.run_record import load_run
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.testing.sandbox import Sandbox

LIVE = "run tiny is live, and the state of this spec does not know it: b-0, in round 3, last heartbeat "
REFUSED = "Take it over? The replicas there will end. There is no terminal to ask on: add --take-over"


def deployment_of(tmp_path: Path, sandbox: Sandbox) -> Deployment:
    return Operator(tmp_path / "skerry.yaml", sandbox.environment).deployment()


@contextmanager
def beating(deployment: Deployment, slot: str) -> Generator[None]:
    """A replica that sends heartbeats all the time."""
    store = deployment.open_store()
    run = load_run(store)
    assert run is not None
    nonce, ended = run.nonce, threading.Event()

    def beat(number: int) -> None:
        store.replace(keys.heartbeat(slot), heartbeat(slot, run=nonce, sequence=number).to_bytes())

    def beat_on() -> None:
        for number in itertools.count(2):
            if ended.wait(0.05):
                return
            beat(number)

    beat(1)
    thread = threading.Thread(target=beat_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_live_run_is_taken_over_by_a_lost_state_on_request_only(
    spec: str, tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    skerry("apply", spec, "--auto-approve")
    before = skerry_sandbox.inventory()
    with beating(deployment_of(tmp_path, skerry_sandbox), "b-0"):
        # The state knows the job: the same operator, or another one with the same state.
        skerry("apply", spec, "--auto-approve")
        delete_state(skerry_sandbox)
        skerry_sandbox.calls.clear()
        error = skerry("apply", spec, "--auto-approve", code=2).stderr
        assert LIVE in error
        assert REFUSED in error
        written = {call.params.get("Key") for call in skerry_sandbox.calls.writes}
        assert written == {"runs/tiny/heartbeats/b-0.json"}, "only the replica's own"
        assert read_state(deployment_of(tmp_path, skerry_sandbox)) is None
        skerry("apply", spec, "--auto-approve", "--take-over")
    assert skerry_sandbox.inventory() == before


def test_job_that_would_take_a_live_slot_is_not_created(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    more = ("--set", "replicas[0].count=2")
    with beating(deployment_of(tmp_path, skerry_sandbox), "b-1"):
        assert LIVE.replace("b-0", "b-1") in skerry("apply", spec, "--auto-approve", *more, code=2).stderr
        assert len(skerry_sandbox.inventory()["job"]) == 1
        # A live replica in a slot that the spec does not have is left alone.
        skerry("apply", spec, "--auto-approve")
        skerry("apply", spec, "--auto-approve", "--take-over", *more)
    assert len(skerry_sandbox.inventory()["job"]) == 2


def test_lock_of_another_machine_is_taken_over_on_request_only(
    spec: str, tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    skerry("apply", spec, "--auto-approve")
    other = deployment_of(tmp_path, skerry_sandbox)
    holder = dataclasses.replace(this_process("apply", other.clock), host="elsewhere", who="ann@elsewhere")
    other.open_state().hold(holder, read_state(other), other.run)
    more = ("--set", "replicas[0].count=2")
    refused = skerry("apply", spec, "--auto-approve", *more, code=1).stderr
    assert "the state is locked: apply by ann@elsewhere" in refused
    skerry("apply", spec, "--auto-approve", "--take-over", *more)
    assert len(skerry_sandbox.inventory()["job"]) == 2
    state = read_state(deployment_of(tmp_path, skerry_sandbox))
    assert state is not None
    assert state.holder is None
