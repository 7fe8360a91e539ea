"""connect(): the contract, the training loop, and every way to end; signals also in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kit.managers import decisions
from tests.kit.protocol import run_record
from tests.support.processes import ROOT
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.contract import STOP_BUDGET_S, Contract, ExitCode
from skerry.runtime.errors import Diverged, Invalid, RunFinished, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.records import Heartbeat, Outcome
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.protocol.membership import Presence
from skerry.runtime.replica import Replica, connect
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.store import Store

SCRIPT = Path(__file__).parents[1] / "support" / "script.py"
KILLED_AFTER_CLAIM = """
import logging, os, signal

class Kill(logging.Handler):
    def emit(self, record):
        if getattr(record, "event", "") == "joined":
            os.kill(os.getpid(), signal.SIGKILL)

logging.getLogger("skerry").addHandler(Kill())
logging.getLogger("skerry").setLevel(logging.INFO)
from skerry.runtime.replica import connect
with connect() as replica:
    replica.manager()
"""


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "run").as_uri()


def create_run(uri: str, *, slots: int = 1, rounds: int | None = 3, minimum: int = 1) -> Store:
    store = open_store(uri)
    run = run_record(SystemClock(), slots=tuple(f"r-{i}" for i in range(slots)), rounds=rounds, min_replicas=minimum)
    store.create(keys.RUN, run.to_bytes())
    return store


def variables(uri: str, index: int = 0, replicas: int = 1) -> dict[str, str]:
    return Contract(run_uri=uri, slot=f"r-{index}", index=index, replicas=replicas).environment()


def outcome(store: Store, slot: str = "r-0", incarnation: int = 0) -> Outcome:
    key = keys.outcome(slot, incarnation)
    return Outcome.parse(store.read(key) or b"", key)


def train(replica: Replica, stop_after: int | None = None) -> list[int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    steps: list[int] = []
    with DiLoCo(manager, [model], inner, [outer], sync_every=replica.run.sync_every):
        for step in replica.steps(inner):
            inner.zero_grad()
            loss = model(torch.ones(1, 4)).square().sum()
            loss.backward()
            replica.log(loss=loss.item(), tokens=10)
            inner.step()
            steps.append(step)
            if step == stop_after:
                replica.request_stop("reclaimed")
    return steps


def test_finished_run_has_the_outcome_done(uri: str) -> None:
    store = create_run(uri, rounds=3)
    with connect(variables(uri)) as replica:
        assert train(replica) == list(range(12))
    end = outcome(store)
    assert (end.status, end.exit_code, end.round, end.tokens) == ("done", 0, 3, 120)
    assert end.loss_first is not None
    assert end.loss_last is not None
    assert end.loss_last < end.loss_first
    assert Heartbeat.parse(store.read(keys.heartbeat("r-0")) or b"", "").phase == "finished"


def _log(replica: Replica, loss: object, tokens: object) -> None:
    manager = replica.manager()
    replica.log(loss=loss, tokens=tokens)  # type: ignore[arg-type]
    manager.presence.beat()


@pytest.mark.parametrize("number", [np.int64, np.float32, torch.tensor])
def test_log_accepts_numbers_of_other_libraries(uri: str, number: Callable[[int], object]) -> None:
    store = create_run(uri)
    with connect(variables(uri)) as replica:
        _log(replica, number(2), np.int64(7))
    assert (outcome(store).tokens, outcome(store).loss_last) == (7, 2.0)
    assert Heartbeat.parse(store.read(keys.heartbeat("r-0")) or b"", "").tokens == 7


@pytest.mark.parametrize(("loss", "tokens"), [(1.0, 0.5), ("low", 1), (torch.ones(2), 1), (1.0, "many")])
def test_log_of_other_values_ends_with_permanent(uri: str, loss: object, tokens: object) -> None:
    store = create_run(uri)
    with pytest.raises(SystemExit), connect(variables(uri)) as replica:
        _log(replica, loss, tokens)
    assert outcome(store).exit_code == ExitCode.PERMANENT
    assert "log needs" in outcome(store).reason


def test_replica_resumes_an_unfinished_round_if_configured(uri: str) -> None:
    store = open_store(uri)
    run = run_record(SystemClock(), slots=("r-0",), rounds=3, min_replicas=1)
    store.create(keys.RUN, run.model_copy(update={"keep_unfinished_s": 3600.0}).to_bytes())
    with pytest.raises(SystemExit), connect(variables(uri)) as replica:
        train(replica, stop_after=5)
    with connect(variables(uri)) as replica:
        assert train(replica)[0] == 6
    assert outcome(store, incarnation=1).status == "done"


def test_restart_continues_at_the_step_of_the_run(uri: str) -> None:
    store = create_run(uri, rounds=3)
    with pytest.raises(SystemExit), connect(variables(uri)) as replica:
        _train_until_power_cut(replica)
    assert outcome(store).status == "retry"
    with connect(variables(uri)) as replica:
        assert train(replica) == list(range(4, 12))  # step 3 ended round 0
    assert outcome(store, incarnation=1).status == "done"


def _train_until_power_cut(replica: Replica) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    with DiLoCo(manager, [model], inner, [torch.optim.SGD(model.parameters(), lr=0.7)], sync_every=4):
        for step in replica.steps(inner):
            if step == 6:
                raise OSError("power cut")
            inner.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            inner.step()


def _fail(replica: Replica, error: BaseException) -> None:
    replica.manager()
    raise error


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (OSError("disk full"), ExitCode.RETRY, "retry"),
        (RuntimeError("should_commit failed 4 times"), ExitCode.RETRY, "retry"),
        (TimeoutError("too few replicas"), ExitCode.RETRY, "retry"),
        (Invalid("wrong"), ExitCode.PERMANENT, "failed"),
        (Unauthorized("no"), ExitCode.PERMANENT, "failed"),
        (Diverged("other bits"), ExitCode.PERMANENT, "failed"),
        (KeyboardInterrupt(), ExitCode.STOPPED, "stopped"),
    ],
)
def test_error_determines_exit_code_and_outcome(uri: str, error: BaseException, code: ExitCode, status: str) -> None:
    store = create_run(uri)
    with pytest.raises(SystemExit) as exit_info, connect(variables(uri)) as replica:
        _fail(replica, error)
    assert exit_info.value.code == code
    end = outcome(store)
    assert (end.status, end.exit_code) == (status, code)
    assert str(error) in end.reason or status == "stopped"


def test_replica_with_a_live_successor_ends_with_permanent(uri: str) -> None:
    store = create_run(uri)
    successors: list[Presence] = []

    def replace(replica: Replica) -> None:
        presence = replica.manager().presence
        successors.append(Presence(RunLog(store, replica.run), SystemClock(), "r-0", 0.05))
        successors[0].start()
        presence.raise_if_fenced()

    with pytest.raises(SystemExit) as exit_info, connect(variables(uri)) as replica:
        replace(replica)
    successors[0].stop("left")
    assert exit_info.value.code == ExitCode.PERMANENT
    assert outcome(store).status == "failed"
    assert "the newer one is live; do not restart this one" in outcome(store).reason


@pytest.mark.slow
def test_replica_restarts_after_its_successor_was_killed(uri: str) -> None:
    """Otherwise the slot would stay empty: its launcher would not restart it."""
    store = create_run(uri, rounds=100)
    with run_script(uri, "slow") as old:
        assert old.stdout is not None
        old.stdout.readline()
        with subprocess.Popen([sys.executable, "-c", KILLED_AFTER_CLAIM], env=environment_of(uri)) as newer:
            assert newer.wait(60) == -signal.SIGKILL
        assert len(store.list(keys.members_prefix("r-0"))) == 2
        old.communicate(timeout=60)
    assert old.returncode == ExitCode.RETRY
    end = outcome(store)
    assert (end.status, end.exit_code) == ("retry", 10)
    assert "the newer one has no heartbeat, so the slot is empty; restart this replica" in end.reason
    with run_script(uri, "train") as again:
        again.communicate(timeout=60)
    assert again.returncode == ExitCode.DONE
    assert outcome(store, incarnation=2).status == "done"


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (OSError("model export failed"), ExitCode.RETRY, "retry"),
        (Diverged("other bits"), ExitCode.PERMANENT, "failed"),
        (SystemExit(3), ExitCode.PERMANENT, "failed"),
    ],
)
def test_error_after_the_last_round_counts(uri: str, error: BaseException, code: ExitCode, status: str) -> None:
    store = create_run(uri, rounds=1)
    with pytest.raises(SystemExit) as exit_info, connect(variables(uri)) as replica:
        _train_and_fail(replica, error)
    assert exit_info.value.code == code
    assert outcome(store).status == status


def _train_and_fail(replica: Replica, error: BaseException) -> None:
    train(replica)
    raise error


@pytest.mark.parametrize("code", [0, None])
def test_script_that_exits_with_0_is_done(uri: str, code: int | None) -> None:
    store = create_run(uri, rounds=1)
    with connect(variables(uri)) as replica:
        _train_and_fail(replica, SystemExit(code))
    assert outcome(store).status == "done"


def test_script_that_exits_with_0_after_a_stop_is_stopped(uri: str) -> None:
    store = create_run(uri)
    with pytest.raises(SystemExit) as exit_info, connect(variables(uri)) as replica:
        _stop_and_exit(replica)
    assert exit_info.value.code == ExitCode.STOPPED
    assert outcome(store).status == "stopped"


def _stop_and_exit(replica: Replica) -> None:
    replica.manager()
    replica.request_stop("enough")
    sys.exit(0)


@pytest.mark.parametrize("stop_requested", [False, True])
def test_signal_ends_with_retry_unless_a_stop_was_requested(
    uri: str, monkeypatch: pytest.MonkeyPatch, *, stop_requested: bool
) -> None:
    """A signal ends the replica like a normal stop: it waits for uploads in flight."""
    store, waited = create_run(uri), list[bool]()
    shutdown = ObjectStoreManager.shutdown

    def recording_shutdown(self: ObjectStoreManager, wait: bool = True) -> None:  # noqa: FBT001, FBT002  torchft's signature
        waited.append(wait)
        shutdown(self, wait)

    monkeypatch.setattr(ObjectStoreManager, "shutdown", recording_shutdown)
    with pytest.raises(SystemExit) as exit_info, connect(variables(uri)) as replica:
        _receive_signal(replica, stop_requested=stop_requested)
    end = outcome(store)
    code = ExitCode.STOPPED if stop_requested else ExitCode.RETRY
    assert (exit_info.value.code, end.exit_code, end.status) == (code, code, "stopped")
    assert end.reason == ("stopped on request" if stop_requested else "stopped by a signal")
    assert waited == [True]


def _receive_signal(replica: Replica, *, stop_requested: bool, fails: bool = False) -> None:
    replica.manager()
    if stop_requested:
        replica.request_stop("enough")
    signal.raise_signal(signal.SIGTERM)
    clock = SystemClock()
    wait_until(clock, lambda: replica.stopping or None, clock.now() + 30, Backoff(first=0.001))
    if fails:
        raise OSError("the disk is gone")


def test_error_after_a_signal_is_reported_with_retry(uri: str) -> None:
    store = create_run(uri)
    with pytest.raises(SystemExit) as exit_info, connect(variables(uri)) as replica:
        _receive_signal(replica, stop_requested=False, fails=True)
    end = outcome(store)
    assert (exit_info.value.code, end.status) == (ExitCode.RETRY, "stopped")
    assert end.reason == "stopped by a signal, and then OSError: the disk is gone"


def test_script_may_exit_with_a_documented_code(uri: str) -> None:
    store = create_run(uri)
    with pytest.raises(SystemExit) as exit_info, connect(variables(uri)) as replica:
        _fail(replica, SystemExit(10))
    assert exit_info.value.code == ExitCode.RETRY
    assert outcome(store).status == "retry"


def test_handlers_from_outside_python_become_the_default(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create_run(uri)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    set_handler = signal.signal
    monkeypatch.setattr(signal, "signal", lambda number, handler: set_handler(number, handler) and None)
    try:
        with connect(variables(uri)):
            pass
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        set_handler(signal.SIGTERM, before[0])
        set_handler(signal.SIGINT, before[1])


@pytest.mark.parametrize("setting", [None, "file:///nowhere/at/all"])
def test_invalid_environment_ends_with_permanent_and_a_hint(
    setting: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables(setting or "file:///x").items():
        monkeypatch.setenv(name, value)
    if setting is None:
        monkeypatch.delenv("SKERRY_RUN")
    with pytest.raises(SystemExit) as exit_info:
        connect()
    assert exit_info.value.code == ExitCode.PERMANENT
    assert "skerry up" in capsys.readouterr().err


def test_tokens_are_weights_if_configured(uri: str) -> None:
    store = open_store(uri)
    run = run_record(SystemClock(), slots=("r-0",), rounds=2).model_copy(update={"weighting": "tokens"})
    store.create(keys.RUN, run.to_bytes())
    with connect(variables(uri)) as replica:
        train(replica)
    assert [[share.weight for share in d.members] for d in decisions(store)] == [[40.0], [40.0]]


def test_finished_run_during_a_call_is_done(uri: str) -> None:
    store = create_run(uri)
    with connect(variables(uri)) as replica:
        replica.manager()
        raise RunFinished("all rounds are closed")
    assert outcome(store).status == "done"


def test_prefix_without_a_run_is_invalid_with_a_hint(uri: str) -> None:
    with pytest.raises(Invalid, match="skerry up"):
        connect(variables(uri))


def test_shards_are_disjoint_and_complete(uri: str) -> None:
    create_run(uri)
    shards = [connect(variables(uri, index, 3)).shard(range(10)) for index in range(3)]
    assert sorted(item for shard in shards for item in shard) == list(range(10))


def test_second_manager_is_refused(uri: str) -> None:
    create_run(uri)
    with pytest.raises(SystemExit), connect(variables(uri)) as replica:
        [replica.manager() for _ in range(2)]


def test_signal_handlers_are_restored(uri: str) -> None:
    create_run(uri)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with connect(variables(uri)):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def environment_of(uri: str) -> dict[str, str]:
    return {**os.environ, **variables(uri), "PYTHONPATH": os.pathsep.join([str(ROOT / "runtime"), str(ROOT)])}


def run_script(uri: str, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), mode]
    return subprocess.Popen(command, env=environment_of(uri), stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "code"), [("train", 0), ("crash", 10), ("invalid", 20)])
def test_script_ends_with_the_documented_code(uri: str, mode: str, code: int) -> None:
    create_run(uri, rounds=2)
    with run_script(uri, mode) as process:
        process.communicate(timeout=60)
    assert process.returncode == code


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_after_the_inner_step(uri: str, number: signal.Signals) -> None:
    store = create_run(uri, rounds=None)
    with run_script(uri, "slow") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        process.communicate(timeout=STOP_BUDGET_S)
    assert process.returncode == ExitCode.RETRY
    end = outcome(store)
    assert (end.status, end.exit_code, end.reason) == ("stopped", ExitCode.RETRY, "stopped by a signal")
    heartbeat = Heartbeat.parse(store.read(keys.heartbeat("r-0")) or b"", "")
    assert heartbeat.phase == "left"
    assert heartbeat.notice == f"stopping on {number.name}"


@pytest.mark.slow
def test_signal_ends_the_wait_and_keeps_the_contribution(uri: str) -> None:
    store = create_run(uri, slots=2, minimum=2, rounds=None)
    with run_script(uri, "train") as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        clock = SystemClock()
        key = keys.contribution(0, 0, "r-0")
        wait_until(clock, lambda: store.read(key), clock.now() + 30, Backoff(first=0.001))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_BUDGET_S)
    assert process.returncode == ExitCode.RETRY
    assert outcome(store).status == "stopped"
    assert store.read(keys.contribution(0, 0, "r-0")) is not None


@pytest.mark.slow
def test_stuck_step_is_ended_within_the_budget(uri: str) -> None:
    create_run(uri, rounds=None)
    with run_script(uri, "stuck") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_BUDGET_S)
    assert process.returncode == ExitCode.RETRY
