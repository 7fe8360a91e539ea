"""connect(): the contract, the training loop, and every way to end; signals also in real processes."""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kit.managers import begin_run, contributions, members, wait_for, weights
from tests.support.forked import ForkedProcess
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.clock import SystemClock
from skerry.runtime.contract import STOP_BUDGET_S, Contract, ExitCode
from skerry.runtime.errors import Diverged, Invalid, Moved, RunFinished, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog
from skerry.runtime.log.records import Heartbeat, Member, Outcome, Place
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence
from skerry.runtime.replica import Replica, connect
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.store import Store

SCRIPT = Path(__file__).parents[1] / "support" / "script.py"


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "run").as_uri()


def create_run(uri: str, *, slots: int = 1, rounds: int | None = 3, **changes: object) -> Store:
    store = open_store(uri)
    begin_run(store, [f"r-{i}" for i in range(slots)], rounds=rounds, **changes)
    return store


def variables(uri: str, index: int = 0, replicas: int = 1) -> dict[str, str]:
    return Contract(run_uri=uri, slot=f"r-{index}", index=index, replicas=replicas).environment()


def outcome(store: Store, incarnation: int = 0) -> Outcome:
    key = keys.outcome("r-0", incarnation)
    return Outcome.parse(store.read(key) or b"", key)


def heartbeat(store: Store) -> Heartbeat:
    key = keys.heartbeat("r-0")
    return Heartbeat.parse(store.read(key) or b"", key)


def end_of(uri: str, script: Callable[[Replica], object], incarnation: int = 0) -> Outcome:
    """Run a script in this process until it ends. Returns its outcome, which has the exit code of the process."""
    code: object = 0
    try:
        with connect(variables(uri)) as replica:
            script(replica)
    except SystemExit as end:
        code = end.code
    recorded = outcome(open_store(uri), incarnation)
    assert recorded.exit_code == code
    return recorded


def train(replica: Replica, stop_after: int | None = None, fail_at: int | None = None) -> list[int]:
    """Train to the end of the run, and return the steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    steps: list[int] = []
    with DiLoCo(manager, [model], inner, [outer], sync_every=replica.run.sync_every):
        for step in replica.steps(inner):
            if step == fail_at:
                raise OSError("power cut")
            inner.zero_grad()
            loss = model(torch.ones(1, 4)).square().sum()
            loss.backward()
            replica.log(loss=loss.item(), tokens=10)
            inner.step()
            steps.append(step)
            if step == stop_after:
                replica.request_stop("reclaimed")
    return steps


# The training loop.


def test_finished_run_has_the_outcome_done(uri: str) -> None:
    store, steps = create_run(uri), list[int]()
    end = end_of(uri, lambda replica: steps.extend(train(replica)))
    assert steps == list(range(12))
    assert (end.status, end.exit_code, end.round, end.tokens) == ("done", 0, 3, 120)
    assert end.loss_first is not None
    assert end.loss_last is not None
    assert end.loss_last < end.loss_first
    assert heartbeat(store).phase == "finished"
    assert members(store) == [["r-0"]] * 3


def test_metrics_that_are_logged_after_the_loop_are_in_the_outcome(uri: str) -> None:
    create_run(uri)

    def script(replica: Replica) -> None:
        train(replica)
        replica.log(test_loss=2.5)

    assert end_of(uri, script).metrics == {"test_loss": 2.5}


def test_saved_files_stay_with_the_round_in_which_they_were_saved(uri: str, tmp_path: Path) -> None:
    store = create_run(uri, rounds=4)
    (tmp_path / "plot.png").write_bytes(b"a plot")

    def script(replica: Replica) -> None:
        with pytest.raises(Invalid, match=r"call replica\.manager"):
            replica.save("early.txt", b"")
        train(replica, stop_after=9)
        replica.save("sample.txt", b"once")
        replica.save("plot.png", tmp_path / "plot.png")

    assert end_of(uri, script).status == "stopped"
    end_of(uri, train, incarnation=1)
    assert [entry.key for entry in store.list(keys.ARTIFACTS)] == [
        "artifacts/r-0/00000002-0000/sample.txt",
        "artifacts/r-0/00000002-0001/plot.png",
    ]


def test_tokens_are_weights_if_configured(uri: str) -> None:
    store = create_run(uri, rounds=2, weighting="tokens")
    end_of(uri, train)
    assert weights(store) == [{"r-0": 40.0}] * 2


@pytest.mark.parametrize(
    ("keep_unfinished_s", "script", "status", "resumed_at"),
    [
        (None, lambda replica: train(replica, fail_at=6), "retry", 4),  # step 3 ended round 0
        (3600.0, lambda replica: train(replica, stop_after=5), "stopped", 6),
    ],
)
def test_restart_continues_at_the_step_of_the_run(
    uri: str, keep_unfinished_s: float | None, script: Callable[[Replica], object], status: str, resumed_at: int
) -> None:
    create_run(uri, keep_unfinished_s=keep_unfinished_s)
    assert end_of(uri, script).status == status
    steps: list[int] = []
    assert end_of(uri, lambda replica: steps.extend(train(replica)), incarnation=1).status == "done"
    assert steps == list(range(resumed_at, 12))


def log_once(replica: Replica, loss: object, tokens: object) -> None:
    presence = replica.manager().presence
    replica.log(loss=loss, tokens=tokens)  # type: ignore[arg-type]
    presence.beat()


@pytest.mark.parametrize("number", [np.int64, np.float32, torch.tensor])
def test_log_accepts_numbers_of_other_libraries(uri: str, number: Callable[[int], object]) -> None:
    store = create_run(uri)
    end = end_of(uri, lambda replica: log_once(replica, number(2), np.int64(7)))
    assert (end.tokens, end.loss_last, heartbeat(store).tokens) == (7, 2.0, 7)


@pytest.mark.parametrize(("loss", "tokens"), [(1.0, 0.5), ("low", 1), (torch.ones(2), 1), (1.0, "many")])
def test_log_of_other_values_ends_with_permanent(uri: str, loss: object, tokens: object) -> None:
    create_run(uri)
    end = end_of(uri, lambda replica: log_once(replica, loss, tokens))
    assert end.exit_code == ExitCode.PERMANENT
    assert "log needs" in end.reason


def test_shards_are_disjoint_and_complete(uri: str) -> None:
    create_run(uri)
    shards = [connect(variables(uri, index, 3)).shard(range(10)) for index in range(3)]
    assert sorted(item for shard in shards for item in shard) == list(range(10))


# How a script ends.


def raises(error: BaseException, *, first: Callable[[Replica], object] = Replica.manager) -> Callable[[Replica], None]:
    """A script that fails. first: what it does before."""

    def script(replica: Replica) -> None:
        first(replica)
        raise error

    return script


def stop_and_exit(replica: Replica) -> None:
    replica.manager()
    replica.request_stop("enough")
    sys.exit(0)


def second_manager(replica: Replica) -> None:
    for _ in range(2):
        replica.manager()


@pytest.mark.parametrize(
    ("script", "code", "status", "reason"),
    [
        (raises(OSError("disk full")), ExitCode.RETRY, "retry", "disk full"),
        (raises(RuntimeError("should_commit failed 4 times")), ExitCode.RETRY, "retry", "failed 4 times"),
        (raises(TimeoutError("too few replicas")), ExitCode.RETRY, "retry", "too few replicas"),
        (raises(Invalid("wrong")), ExitCode.PERMANENT, "failed", "wrong"),
        (raises(Unauthorized("no")), ExitCode.PERMANENT, "failed", "no"),
        (raises(Diverged("other bits")), ExitCode.PERMANENT, "failed", "other bits"),
        (raises(Moved("goes on at s3://west/run")), ExitCode.STOPPED, "stopped", "goes on at s3://west/run"),
        (second_manager, ExitCode.PERMANENT, "failed", "Invalid"),
        (raises(KeyboardInterrupt()), ExitCode.STOPPED, "stopped", ""),
        (stop_and_exit, ExitCode.STOPPED, "stopped", ""),
        (raises(SystemExit(10)), ExitCode.RETRY, "retry", ""),  # a documented code
        (raises(RunFinished("all rounds are closed")), ExitCode.DONE, "done", ""),
        (raises(OSError("export failed"), first=train), ExitCode.RETRY, "retry", "export failed"),
        (raises(Diverged("other bits"), first=train), ExitCode.PERMANENT, "failed", "other bits"),
        (raises(SystemExit(3), first=train), ExitCode.PERMANENT, "failed", ""),
        (raises(SystemExit(0), first=train), ExitCode.DONE, "done", ""),
        (raises(SystemExit(None), first=train), ExitCode.DONE, "done", ""),
    ],
)
def test_end_of_a_script_determines_exit_code_and_outcome(
    uri: str, script: Callable[[Replica], object], code: ExitCode, status: str, reason: str
) -> None:
    create_run(uri, rounds=1)
    end = end_of(uri, script)
    assert (end.exit_code, end.status) == (code, status)
    assert reason in end.reason


def test_replica_with_a_live_successor_ends_with_permanent(uri: str) -> None:
    store = create_run(uri)
    successors: list[Presence] = []

    def replace(replica: Replica) -> None:
        presence = replica.manager().presence
        successors.append(Presence(RunLog(store, replica.run), SystemClock(), "r-0", 0.05))
        successors[0].start()
        presence.raise_if_fenced()

    end = end_of(uri, replace)
    successors[0].stop("left")
    assert (end.exit_code, end.status) == (ExitCode.PERMANENT, "failed")
    assert "the newer one is live; do not restart this one" in end.reason


def receive_signal(replica: Replica) -> None:
    replica.manager()
    signal.raise_signal(signal.SIGTERM)
    wait_for(lambda: replica.stopping)


def stop_and_receive_signal(replica: Replica) -> None:
    replica.request_stop("enough")
    receive_signal(replica)


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        (receive_signal, ExitCode.RETRY, "stopped by a signal"),
        (stop_and_receive_signal, ExitCode.STOPPED, "stopped on request"),
        (
            raises(OSError("the disk is gone"), first=receive_signal),
            ExitCode.RETRY,
            "stopped by a signal, and then OSError: the disk is gone",
        ),
    ],
)
def test_signal_ends_with_retry_unless_a_stop_was_requested(
    uri: str, monkeypatch: pytest.MonkeyPatch, script: Callable[[Replica], object], code: ExitCode, reason: str
) -> None:
    """A signal ends the replica like a normal stop: it waits for uploads in flight."""
    create_run(uri)
    waited: list[bool] = []
    shutdown = ObjectStoreManager.shutdown

    def recording_shutdown(self: ObjectStoreManager, wait: bool = True) -> None:  # noqa: FBT001, FBT002  torchft's signature
        waited.append(wait)
        shutdown(self, wait)

    monkeypatch.setattr(ObjectStoreManager, "shutdown", recording_shutdown)
    end = end_of(uri, script)
    assert (end.exit_code, end.status, end.reason.partition(" (")[0]) == (code, "stopped", reason)
    assert waited == [True] or "disk" in reason


def test_signal_handlers_are_restored(uri: str) -> None:
    create_run(uri)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with connect(variables(uri)):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


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


def test_place_of_the_launcher_is_stored_with_the_start(uri: str) -> None:
    store = create_run(uri)
    with connect(variables(uri) | {"SKERRY_PLACE": '{"cloud": "aws", "machine": "g6e.xlarge"}'}) as replica:
        replica.manager()
    key = keys.member("r-0", 0)
    assert Member.parse(store.read(key) or b"", key).place == Place(cloud="aws", machine="g6e.xlarge")


def test_start_names_its_programs_and_its_code(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = create_run(uri)
    monkeypatch.setenv("SKERRY_CODE", "c" * 64)
    with connect(variables(uri)) as replica:
        replica.manager()
    key = keys.member("r-0", 0)
    software = Member.parse(store.read(key) or b"", key).software
    assert software is not None
    assert (software.python, software.code) == (platform.python_version(), "c" * 64)
    assert (software.torch, software.skerry) == (metadata.version("torch"), metadata.version("skerry"))


def test_prefix_without_a_run_is_invalid_with_a_hint(uri: str) -> None:
    with pytest.raises(Invalid, match="skerry up"):
        connect(variables(uri))


# Real processes.


class Script(ForkedProcess):
    """`script.py` in a process of its own, whose output is read line by line."""

    def __init__(self, uri: str, mode: str) -> None:
        pipe = Path(uri.removeprefix("file://")).with_name(mode)
        os.mkfifo(pipe)
        environment = {**os.environ, **variables(uri)}
        super().__init__([str(SCRIPT), mode], environment, pipe, errors=pipe.with_suffix(".err"))
        self._lines = pipe.open()

    def read_lines(self, number: int = 1) -> None:
        """Wait until the script has printed so many lines."""
        for _ in range(number):
            self._lines.readline()

    def end(self, timeout: float) -> int:
        """Read what it still prints until it ends. Returns its exit code."""
        rest = threading.Thread(target=self._lines.read)
        rest.start()
        code = self.wait(timeout)
        rest.join()
        return code

    def kill(self) -> None:
        super().kill()
        self._lines.close()


@pytest.mark.slow
def test_replica_restarts_after_its_successor_was_killed(uri: str) -> None:
    """Otherwise the slot would stay empty: its launcher would not restart it."""
    store = create_run(uri, rounds=100)
    with Script(uri, "slow") as old:
        old.read_lines()
        with Script(uri, "claim") as newer:
            assert newer.wait(300) == -signal.SIGKILL
        assert len(store.list(keys.members_prefix("r-0"))) == 2
        code = old.end(300)
    end = outcome(store)
    assert (code, end.exit_code, end.status) == (ExitCode.RETRY, ExitCode.RETRY, "retry")
    assert "the newer one has no heartbeat, so the slot is empty; restart this replica" in end.reason
    with Script(uri, "train") as again:
        assert again.end(300) == ExitCode.DONE
    assert outcome(store, incarnation=2).status == "done"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "code"), [("train", 0), ("crash", 10), ("invalid", 20)])
def test_script_ends_with_the_documented_code(uri: str, mode: str, code: int) -> None:
    create_run(uri, rounds=2)
    with Script(uri, mode) as process:
        assert process.end(300) == code


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_after_the_inner_step(uri: str, number: signal.Signals) -> None:
    store = create_run(uri, rounds=None)
    with Script(uri, "slow") as process:
        process.read_lines()
        process.send_signal(number)
        assert process.end(STOP_BUDGET_S) == ExitCode.RETRY
    end, beat = outcome(store), heartbeat(store)
    assert (end.status, end.exit_code, end.reason) == ("stopped", ExitCode.RETRY, "stopped by a signal")
    assert (beat.phase, beat.notice) == ("left", f"stopping on {number.name}")


@pytest.mark.slow
def test_signal_ends_the_wait_and_keeps_the_contribution(uri: str) -> None:
    store = create_run(uri, slots=2, minimum=2, rounds=None)
    with Script(uri, "train") as process:
        process.read_lines(3)
        wait_for(lambda: contributions(store))
        process.send_signal(signal.SIGTERM)
        assert process.end(STOP_BUDGET_S) == ExitCode.RETRY
    assert outcome(store).status == "stopped"
    assert [contribution.slot for contribution in contributions(store)] == ["r-0"]


@pytest.mark.slow
def test_stuck_step_is_ended_within_the_budget(uri: str) -> None:
    create_run(uri, rounds=None)
    with Script(uri, "stuck") as process:
        process.read_lines(2)
        process.send_signal(signal.SIGTERM)
        assert process.end(300) == ExitCode.RETRY
    (limit,) = re.findall(r"not done (\d+) s after SIGTERM", process.errors.read_text())
    assert float(limit) < STOP_BUDGET_S
