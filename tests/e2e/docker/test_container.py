"""A container of the replica image, without a network, as clouds run it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.kit.protocol import run_record

from skerry.infra.local.docker_engine import Bind, ContainerRequest
from skerry.runtime import contract
from skerry.runtime.clock import SystemClock
from skerry.runtime.contract import STOP_BUDGET_S, ExitCode
from skerry.runtime.log import keys
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.local.docker_engine import Engine

STORE: Final = "/store"
# Orphans a child that ends at once, waits until process 1 has reaped it, then waits to be stopped.
CHILD: Final = """
import os, pathlib, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
reader, writer = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os._exit(0)
    os._exit(0)
os.wait()
def zombies():
    states = [path.read_text().rpartition(")")[2].split()[0] for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
    return states.count("Z")
while zombies():
    time.sleep(0.05)
for folder in ("/opt/ml/output", "/opt/ml/model", os.environ["HOME"], "/tmp"):
    if os.path.isdir(folder):
        pathlib.Path(folder, "written").write_text("x")
print("READY", os.getuid(), os.path.exists(os.environ["SKERRY_ALIVE"]), flush=True)
signal.sigwait([signal.SIGTERM])
print("FLUSHED", flush=True)
sys.exit(30)
"""


class Containers:
    """Containers of the image, with one run in a folder."""

    def __init__(self, engine: Engine, image: str, folder: Path) -> None:
        self._engine, self._image, self._folder = engine, image, folder
        run = folder / "store" / "run"
        run.mkdir(parents=True)
        record = run_record(SystemClock(), slots=("trial-0",), rounds=1)
        open_store(run.as_uri()).create(keys.RUN, record.to_bytes())
        for path in (folder, folder / "store", *(folder / "store").rglob("*")):
            path.chmod(0o777)  # the container has another user

    def request(
        self,
        command: Sequence[str],
        *,
        ml: Path | None = None,
        cap_drop: Sequence[str] = (),
        user: str | None = None,
        read_only: bool = False,
        ranks: int | None = None,
    ) -> ContainerRequest:
        binds = [Bind(source=str(self._folder / "store"), target=STORE), inside()]
        variables = contract.Contract(run_uri=f"file://{STORE}/run", slot="trial-0", index=0, replicas=1)
        return ContainerRequest(
            image=self._image,
            command=command,
            environment=variables.environment() | ({} if ranks is None else {contract.RANKS: str(ranks)}),
            binds=[*binds, *([Bind(source=str(ml), target="/opt/ml")] if ml is not None else [])],
            network="none",
            cap_drop=cap_drop,
            user=user,
            read_only=read_only,
            tmpfs=["/tmp"] if read_only else [],  # noqa: S108  the container's
        )

    def output_of(self, request: ContainerRequest, code: int = 0) -> str:
        result, output = self._engine.containers.run(request)
        assert result == code, output
        return output

    def stopped(self, request: ContainerRequest, uid: int = 10001) -> str:
        """The output of a container that is stopped when it is ready, and ends cleanly within the budget."""
        container = self._engine.containers.create(request)
        try:
            self._engine.containers.start(container)
            output = b""
            for piece in self._engine.containers.output(container, follow=True):
                output += piece
                if b"READY" in output:
                    break
            started = time.monotonic()
            self._engine.containers.signal(container, "SIGTERM")
            ended = self._engine.containers.wait(container)
            seconds = time.monotonic() - started
            text = b"".join(self._engine.containers.output(container)).decode(errors="replace")
        finally:
            self._engine.containers.remove(container)
        assert ended.exit_code == ExitCode.STOPPED, text
        assert "FLUSHED" in text
        assert f"READY {uid} True" in text
        assert seconds < STOP_BUDGET_S
        return text


def inside() -> Bind:
    """The programs that run in the containers."""
    return Bind(source=str(Path(__file__).parent / "inside"), target="/inside", writable=False)


@pytest.fixture
def containers(engine: Engine, image: str, tmp_path: Path) -> Containers:
    return Containers(engine, image, tmp_path)


def test_contents_are_complete_and_work(engine: Engine, image: str) -> None:
    program = ["python", "/inside/contents.py"]
    request = ContainerRequest(image=image, entrypoint=program, user="skerry", binds=[inside()], network="none")
    code, output = engine.containers.run(request)
    assert code == 0, output


def test_two_ranks_start_by_torchrun(containers: Containers) -> None:
    output = containers.output_of(containers.request(["run", "--", "python", "/inside/ranks.py"], ranks=2))
    assert all(f"RANK {rank} of 2" in output for rank in range(2)), output


def test_check_reaches_a_store(containers: Containers) -> None:
    report = json.loads(containers.output_of(containers.request(["check", f"file://{STORE}/run"])).splitlines()[-1])
    assert report["ok"] is True
    assert report["torch"]["version"] is not None
    assert report["machine"]["uid"] != 0


def test_stop_is_forwarded_and_orphans_are_reaped(containers: Containers) -> None:
    containers.stopped(containers.request(["run", "--", "python", "-c", CHILD]))


def test_folders_of_sagemaker_that_root_owns_are_written(containers: Containers, tmp_path: Path) -> None:
    folder = tmp_path / "ml"
    for name in ("output", "model", "input/config"):
        (folder / name).mkdir(parents=True)
    containers.stopped(containers.request(["train", "--", "python", "-c", CHILD], ml=folder))
    failing = containers.request(["train", "--", "python", "-c", "raise SystemExit(20)"], ml=folder)
    containers.output_of(failing, ExitCode.PERMANENT)
    assert (folder / "output/failure").read_text().startswith("skerry: exit code 20")


def test_without_any_capability_it_stays_root_and_works(containers: Containers) -> None:
    request = containers.request(["run", "--", "python", "-c", CHILD], cap_drop=["ALL"])
    assert "stays root" in containers.stopped(request, uid=0)


def test_ordinary_user_needs_no_writable_folder_but_tmp(containers: Containers) -> None:
    program = CHILD.replace('os.environ["HOME"], ', "")
    request = containers.request(["run", "--", "python", "-c", program], user="12345:12345", read_only=True)
    containers.stopped(request, uid=12345)
