"""Does the image do what it promises? Runs it on an engine, without a network, as platforms run it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.infra.engine import Bind, Wanted
from skerry.infra.image.source import RECIPE
from skerry.runtime import contract, keys
from skerry.runtime.contract import STOP_BUDGET_S, ExitCode
from skerry.runtime.errors import SkerryError
from skerry.runtime.records import Run
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.infra.engine import Engine
    from skerry.runtime.clock import Clock

_STORE: Final = "/store"
# Orphans a child that ends at once, and tells how many zombies process 1 has left lying; then waits to be stopped.
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
class Tried:
    """One thing that was tried. problem: what went wrong."""

    name: str
    seconds: float
    problem: str | None


def smoke(engine: Engine, root: Path, reference: str, clock: Clock, tell: Callable[[str], None]) -> list[Tried]:
    """Try everything; one after the other, and on after a failure."""
    found: list[Tried] = []
    with tempfile.TemporaryDirectory() as folder:
        trials = _Trials(engine, root, reference, clock, Path(folder))
        for name, trial in (
            ("what is in it works, and nothing else is in it", trials.parts),
            ("two ranks meet by torchrun", trials.ranks),
            ("check finds a store", trials.check),
            ("a stop is forwarded, orphans are reaped", trials.stop),
            ("SageMaker's folders, made for root, are written", trials.sagemaker),
            ("without any capability", trials.powerless),
            ("on a read-only disk, as an ordinary user", trials.read_only),
        ):
            began = clock.now()
            try:
                trial()
                problem = None
            except (AssertionError, SkerryError, OSError) as error:
                problem = str(error) or type(error).__name__
            found.append(Tried(name=name, seconds=round(clock.now() - began, 1), problem=problem))
            tell(f"{'FAILED' if problem else 'ok'}  {name} ({found[-1].seconds} s){f': {problem}' if problem else ''}")
    return found


class _Trials:
    """One run in a folder, and containers that take part in it."""

    def __init__(self, engine: Engine, root: Path, reference: str, clock: Clock, folder: Path) -> None:
        self._engine = engine
        self._root = root
        self._reference = reference
        self._clock = clock
        self._folder = folder
        run = folder / "store" / "run"
        run.mkdir(parents=True)
        open_store(run.as_uri()).create(keys.RUN, _run(clock).to_bytes())
        for path in (folder, folder / "store", *(folder / "store").rglob("*")):
            path.chmod(0o777)  # the container's user is nobody here

    def parts(self) -> None:
        """images/replica/smoke.py, inside."""
        self._ends(Wanted(
            image=self._reference,
            entrypoint=["python", "/recipe/smoke.py"],
            user="skerry",
            binds=[self._recipe()],
            network="none",
        ))  # fmt: skip

    def ranks(self) -> None:
        """images/replica/ranks.py, as a replica of two processes."""
        said = self._ends(self._wanted(["run", "--", "python", "/recipe/ranks.py"], ranks=2))
        _must(all(f"RANK {rank} of 2" in said for rank in range(2)), said)

    def check(self) -> None:
        """`skerry-replica check`, its last line."""
        said = self._ends(self._wanted(["check", f"file://{_STORE}/run"]))
        report = json.loads(said.splitlines()[-1])
        _must(report["ok"] is True, said)
        _must(report["torch"]["version"] is not None, said)
        _must(report["machine"]["uid"] != 0, said)

    def stop(self) -> None:
        """SIGTERM to process 1."""
        self._stops(self._wanted(["run", "--", "python", "-c", _CHILD]))

    def sagemaker(self) -> None:
        """/opt/ml as the platform mounts it: root's, and writable for root alone."""
        folder = self._folder / "ml"
        for name in ("output", "model", "input/config"):
            (folder / name).mkdir(parents=True)
        self._stops(self._wanted(["train", "--", "python", "-c", _CHILD], ml=folder))
        failing = self._wanted(["train", "--", "python", "-c", "raise SystemExit(20)"], ml=folder)
        code, said = self._engine.containers.run(failing)
        _must(code == ExitCode.PERMANENT, said)
        _must((folder / "output/failure").read_text().startswith("skerry: exit code 20"), "no failure file")

    def powerless(self) -> None:
        """It cannot become anybody else, says so, and works."""
        said = self._stops(self._wanted(["run", "--", "python", "-c", _CHILD], cap_drop=["ALL"]), uid=0)
        _must("stays root" in said, said)

    def read_only(self) -> None:
        """A derived image's own user, and no disk but /tmp."""
        wanted = self._wanted(
            ["run", "--", "python", "-c", _CHILD.replace('os.environ["HOME"], ', "")],
            user="12345:12345",
            read_only=True,
            tmpfs=["/tmp"],  # noqa: S108  the container's
        )
        self._stops(wanted, uid=12345)

    def _wanted(
        self,
        command: Sequence[str],
        *,
        ml: Path | None = None,
        cap_drop: Sequence[str] = (),
        user: str | None = None,
        read_only: bool = False,
        tmpfs: Sequence[str] = (),
        ranks: int | None = None,
    ) -> Wanted:
        binds = [Bind(source=str(self._folder / "store"), target=_STORE), self._recipe()]
        place = contract.Contract(run_uri=f"file://{_STORE}/run", slot="smoke-0", index=0, replicas=1)
        return Wanted(
            image=self._reference,
            command=command,
            environment=place.environment() | ({} if ranks is None else {contract.RANKS: str(ranks)}),
            binds=[*binds, *([Bind(source=str(ml), target="/opt/ml")] if ml is not None else [])],
            network="none",
            cap_drop=cap_drop,
            user=user,
            read_only=read_only,
            tmpfs=tmpfs,
        )

    def _recipe(self) -> Bind:
        return Bind(source=str(self._root / RECIPE), target="/recipe", writable=False)

    def _ends(self, wanted: Wanted) -> str:
        code, said = self._engine.containers.run(wanted)
        _must(code == 0, f"exit code {code}: {said.strip()[-2000:]}")
        return said

    def _stops(self, wanted: Wanted, uid: int = 10001) -> str:
        """Run until it is ready, stop it, and see it end cleanly within the budget."""
        container = self._engine.containers.create(wanted)
        try:
            self._engine.containers.start(container)
            heard = b""
            for piece in self._engine.containers.output(container, follow=True):
                heard += piece
                if b"READY" in heard:
                    break
            began = self._clock.now()
            self._engine.containers.signal(container, "SIGTERM")
            ended = self._engine.containers.wait(container)
            seconds = self._clock.now() - began
            said = b"".join(self._engine.containers.output(container)).decode(errors="replace")
            _must(ended.exit_code == ExitCode.STOPPED, f"exit code {ended.exit_code}: {said[-2000:]}")
            _must("FLUSHED" in said, said)
            _must(f"READY {uid} True" in said, said)
            _must(seconds < STOP_BUDGET_S, f"{seconds:.1f} s from SIGTERM to the end")
            return said
        finally:
            self._engine.containers.remove(container)


def _must(holds: object, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _run(clock: Clock) -> Run:
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
