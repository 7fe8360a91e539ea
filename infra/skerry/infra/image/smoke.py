"""Tests the replica image: runs it on an engine, without a network, as clouds run it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.infra.image.source import RECIPE
from skerry.infra.local.docker_engine import Bind, ContainerRequest
from skerry.runtime import contract
from skerry.runtime.contract import STOP_BUDGET_S, ExitCode
from skerry.runtime.errors import SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.records import Run
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.infra.local.docker_engine import Engine
    from skerry.runtime.clock import Clock

_STORE: Final = "/store"
# Orphans a child that ends at once, waits until process 1 has reaped it, then waits to be stopped.
_CHILD: Final = """
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


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of one trial. problem: None if it passed."""

    name: str
    seconds: float
    problem: str | None


def smoke(
    engine: Engine, root: Path, reference: str, clock: Clock, on_line: Callable[[str], None]
) -> list[TrialResult]:
    """Run all trials in order, also after a failure."""
    results: list[TrialResult] = []
    with tempfile.TemporaryDirectory() as folder:
        trials = _Trials(engine, root, reference, clock, Path(folder))
        for name, trial in (
            ("contents work and are complete", trials.parts),
            ("two ranks start by torchrun", trials.ranks),
            ("check reaches a store", trials.check),
            ("stop is forwarded, orphans are reaped", trials.stop),
            ("SageMaker's folders, owned by root, are written", trials.sagemaker),
            ("without any capability", trials.powerless),
            ("on a read-only disk, as an ordinary user", trials.read_only),
        ):
            started = clock.now()
            try:
                trial()
                problem = None
            except (AssertionError, SkerryError, OSError) as error:
                problem = str(error) or type(error).__name__
            results.append(TrialResult(name=name, seconds=round(clock.now() - started, 1), problem=problem))
            on_line(
                f"{'FAILED' if problem else 'ok'}  {name} ({results[-1].seconds} s){f': {problem}' if problem else ''}"
            )
    return results


class _Trials:
    """The trials, with one run in a folder."""

    def __init__(self, engine: Engine, root: Path, reference: str, clock: Clock, folder: Path) -> None:
        self._engine = engine
        self._root = root
        self._reference = reference
        self._clock = clock
        self._folder = folder
        run = folder / "store" / "run"
        run.mkdir(parents=True)
        open_store(run.as_uri()).create(keys.RUN, _run_record(clock).to_bytes())
        for path in (folder, folder / "store", *(folder / "store").rglob("*")):
            path.chmod(0o777)  # the container has another user

    def parts(self) -> None:
        """Run images/replica/smoke.py inside."""
        self._run(ContainerRequest(
            image=self._reference,
            entrypoint=["python", "/recipe/smoke.py"],
            user="skerry",
            binds=[self._recipe()],
            network="none",
        ))  # fmt: skip

    def ranks(self) -> None:
        """Run images/replica/ranks.py as a replica of two processes."""
        output_text = self._run(self._request(["run", "--", "python", "/recipe/ranks.py"], ranks=2))
        _check(all(f"RANK {rank} of 2" in output_text for rank in range(2)), output_text)

    def check(self) -> None:
        """Check the last line of `skerry-replica check`."""
        output_text = self._run(self._request(["check", f"file://{_STORE}/run"]))
        report = json.loads(output_text.splitlines()[-1])
        _check(report["ok"] is True, output_text)
        _check(report["torch"]["version"] is not None, output_text)
        _check(report["machine"]["uid"] != 0, output_text)

    def stop(self) -> None:
        """Send SIGTERM to process 1."""
        self._run_and_stop(self._request(["run", "--", "python", "-c", _CHILD]))

    def sagemaker(self) -> None:
        """Mount /opt/ml as the platform does: owned by root and writable for root only."""
        folder = self._folder / "ml"
        for name in ("output", "model", "input/config"):
            (folder / name).mkdir(parents=True)
        self._run_and_stop(self._request(["train", "--", "python", "-c", _CHILD], ml=folder))
        failing = self._request(["train", "--", "python", "-c", "raise SystemExit(20)"], ml=folder)
        code, output_text = self._engine.containers.run(failing)
        _check(code == ExitCode.PERMANENT, output_text)
        _check((folder / "output/failure").read_text().startswith("skerry: exit code 20"), "no failure file")

    def powerless(self) -> None:
        """Run as root without the right to change users: it logs that and works."""
        output_text = self._run_and_stop(self._request(["run", "--", "python", "-c", _CHILD], cap_drop=["ALL"]), uid=0)
        _check("stays root" in output_text, output_text)

    def read_only(self) -> None:
        """Run as another user with no writable folder but /tmp."""
        request = self._request(
            ["run", "--", "python", "-c", _CHILD.replace('os.environ["HOME"], ', "")],
            user="12345:12345",
            read_only=True,
            tmpfs=["/tmp"],  # noqa: S108  the container's
        )
        self._run_and_stop(request, uid=12345)

    def _request(
        self,
        command: Sequence[str],
        *,
        ml: Path | None = None,
        cap_drop: Sequence[str] = (),
        user: str | None = None,
        read_only: bool = False,
        tmpfs: Sequence[str] = (),
        ranks: int | None = None,
    ) -> ContainerRequest:
        binds = [Bind(source=str(self._folder / "store"), target=_STORE), self._recipe()]
        variables = contract.Contract(run_uri=f"file://{_STORE}/run", slot="smoke-0", index=0, replicas=1)
        return ContainerRequest(
            image=self._reference,
            command=command,
            environment=variables.environment() | ({} if ranks is None else {contract.RANKS: str(ranks)}),
            binds=[*binds, *([Bind(source=str(ml), target="/opt/ml")] if ml is not None else [])],
            network="none",
            cap_drop=cap_drop,
            user=user,
            read_only=read_only,
            tmpfs=tmpfs,
        )

    def _recipe(self) -> Bind:
        return Bind(source=str(self._root / RECIPE), target="/recipe", writable=False)

    def _run(self, request: ContainerRequest) -> str:
        code, output_text = self._engine.containers.run(request)
        _check(code == 0, f"exit code {code}: {output_text.strip()[-2000:]}")
        return output_text

    def _run_and_stop(self, request: ContainerRequest, uid: int = 10001) -> str:
        """Run until it is ready, stop it, and check that it ends cleanly within the budget."""
        container = self._engine.containers.create(request)
        try:
            self._engine.containers.start(container)
            output = b""
            for piece in self._engine.containers.output(container, follow=True):
                output += piece
                if b"READY" in output:
                    break
            started = self._clock.now()
            self._engine.containers.signal(container, "SIGTERM")
            ended = self._engine.containers.wait(container)
            seconds = self._clock.now() - started
            output_text = b"".join(self._engine.containers.output(container)).decode(errors="replace")
            _check(ended.exit_code == ExitCode.STOPPED, f"exit code {ended.exit_code}: {output_text[-2000:]}")
            _check("FLUSHED" in output_text, output_text)
            _check(f"READY {uid} True" in output_text, output_text)
            _check(seconds < STOP_BUDGET_S, f"{seconds:.1f} s from SIGTERM to the end")
            return output_text
        finally:
            self._engine.containers.remove(container)


def _check(holds: object, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _run_record(clock: Clock) -> Run:
    return Run(
        nonce=clock.nonce(),
        name="smoke",
        spec=None,
        slots=("smoke-0",),
        rounds=1,
        sync_every=1,
        fragments=1,
        outer_lr=0.7,
        outer_momentum=0.9,
        min_replicas=1,
        grace_s=1.0,
        start_window_s=1.0,
        checkpoint_every=1,
        codec="none",
        weighting="uniform",
        created=clock.utc_text(),
    )
