"""Starts `skerry-replica run` in a process, with the folder and the variables that a cloud gives its jobs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from tests.kit.protocol import run_record

from skerry.infra.run import code_archive
from skerry.runtime.clock import SystemClock
from skerry.runtime.container.hardware import Hardware
from skerry.runtime.container.run import LEASH
from skerry.runtime.log import keys
from skerry.runtime.log.records import Outcome
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).parents[2]
# As `skerry-replica run`, except for the platform's folder.
_DRIVER: Final = """
import os, signal, sys
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
from skerry.runtime.clock import SystemClock
from skerry.runtime.container.run import run
sys.exit(int(run(sys.argv[2:], dict(os.environ), SystemClock(), Path(sys.argv[1]))))
"""
DEADLINE_S: Final = 300.0


@dataclass
class Cloud:
    """The variables and files that one cloud gives its jobs. files: below its own folder; None is a folder."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, object] = field(default_factory=dict)


def sagemaker(index: int = 1, hosts: int = 3) -> Cloud:
    """A training job; skerry's jobs have one host each, a user's may have several."""
    names = [f"algo-{number + 1}" for number in range(hosts)]
    return Cloud(
        name="sagemaker",
        environment={
            "TRAINING_JOB_NAME": "tiny-gpt-sm-1-g4",
            "TRAINING_JOB_ARN": "arn:aws:sagemaker:us-east-1:123456789012:training-job/tiny-gpt-sm-1-g4",
            "AWS_REGION": "us-east-1",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/proxy-secret",
        },
        files={
            "input/config/resourceconfig.json": {
                "current_host": names[index],
                "hosts": names,
                "network_interface_name": "eth0",
            },
            "input/config/hyperparameters.json": {"learning_rate": "0.1"},
            "input/config/inputdataconfig.json": {},
            "output": None,
            "model": None,
        },
    )


def vertex(index: int = 1) -> Cloud:
    """A custom job with two worker pools, the first of one machine."""
    spec = {
        "cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222", "c:2222"]},
        "environment": "cloud",
        "task": {"type": f"workerpool{min(index, 1)}", "index": max(0, index - 1)},
    }
    return Cloud(
        name="vertex",
        environment={
            "CLUSTER_SPEC": json.dumps(spec),
            "CLOUD_ML_JOB_ID": "5551234567890",
            "CLOUD_ML_PROJECT_ID": "acme",
            "AIP_MODEL_DIR": "gs://acme/out/model",
            "AIP_CHECKPOINT_DIR": "gs://acme/out/checkpoints",
            "AIP_TENSORBOARD_LOG_DIR": "gs://acme/out/logs",
        },
    )


def batch(index: int | None = 1) -> Cloud:
    """A job on EC2. index: in its array; None for a job without an array."""
    array = {} if index is None else {"AWS_BATCH_JOB_ARRAY_INDEX": str(index), "AWS_BATCH_JOB_ARRAY_SIZE": "3"}
    job = "9f3c1d2e-0000-4000-8000-000000000000"
    return Cloud(
        name="aws_batch",
        environment={
            "AWS_BATCH_JOB_ID": job if index is None else f"{job}:{index}",
            "AWS_BATCH_JOB_ATTEMPT": "1",
            "AWS_BATCH_JQ_NAME": "skerry-queue",
            "AWS_BATCH_CE_NAME": "skerry-environment",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/proxy-secret",
            **array,
        },
    )


class ContainerStarts:
    """Starts the entry point for a run of three slots in a folder. Kills all processes on exit."""

    def __init__(self, folder: Path, *, slots: tuple[str, ...] = ("r-0", "r-1", "r-2"), **changes: object) -> None:
        """changes: to run.json."""
        self.folder = folder
        self.ml = folder / "ml"
        self.uri = (folder / "run").as_uri()
        self.store = open_store(self.uri)
        run = run_record(SystemClock(), slots=slots, rounds=2)
        self.store.create(keys.RUN, run.model_copy(update=changes).to_bytes())
        self._started: list[subprocess.Popen[bytes]] = []

    def pack(self, script: str, name: str = "train.py") -> str:
        """Upload a code folder with this script. Returns its digest."""
        code = self.folder / f"code-{len(list(self.folder.glob('code-*')))}"
        code.mkdir()
        (code / name).write_text(script)
        packed = code_archive.pack(code)
        self.store.create(keys.code(packed.digest), packed.data)
        return packed.digest

    def start(
        self, *command: str, cloud: Cloud | None = None, without: tuple[str, ...] = (), **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start the entry point. without: variables of the contract that are not set."""
        cloud = cloud or Cloud(name="none")
        for name, content in cloud.files.items():
            path = self.ml / name
            if content is None:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(content))
        contract = {"SKERRY_RUN": self.uri, "SKERRY_SLOT": "r-1", "SKERRY_INDEX": "1", "SKERRY_REPLICAS": "3"}
        contract = {name: text for name, text in contract.items() if name not in without} | {LEASH: "stdin"}
        log = (self.folder / f"{len(self._started)}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, str(self.ml), *command],
            env=clean_environment() | cloud.environment | contract | variables,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            start_new_session=True,
        )
        log.close()
        self._started.append(process)
        return process

    def output(self, process: subprocess.Popen[bytes]) -> str:
        """Everything that the process and its command have written."""
        return (self.folder / f"{self._started.index(process)}.log").read_text()

    def finish(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        """Wait for the process. Returns its exit code and output."""
        return process.wait(DEADLINE_S), self.output(process)

    def run(
        self, *command: str, cloud: Cloud | None = None, without: tuple[str, ...] = (), **variables: str
    ) -> tuple[int, str]:
        """Start the entry point and wait for its end. Returns its exit code and output."""
        return self.finish(self.start(*command, cloud=cloud, without=without, **variables))

    def outcome(self, slot: str = "r-1", incarnation: int = 0) -> Outcome:
        """The outcome record in the bucket."""
        key = keys.outcome(slot, incarnation)
        data = self.store.read(key)
        assert data is not None
        return Outcome.parse(data, key)

    @property
    def failure(self) -> Path:
        return self.ml / "output" / "failure"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            assert process.stdin is not None
            process.stdin.close()  # the leash: it kills its command, which a kill of the process itself would orphan
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(DEADLINE_S)
            process.kill()
            process.wait()


class Signpost:
    """A pipe on which a script reports its progress: `open(os.environ['REACHED'], 'w').write('x')`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "reached"
        os.mkfifo(self.path)
        self._file = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)

    def wait(self) -> bytes:
        """Wait for a message and return it."""
        ready, _, _ = select.select([self._file], [], [], DEADLINE_S)
        assert ready, "no message in time"
        return os.read(self._file, 4096)

    def close(self) -> None:
        os.close(self._file)


def clean_environment() -> Mapping[str, str]:
    """This process's environment without variables of clouds or GPUs, and with skerry's sources."""
    clouds = ("AWS_", "CLOUD_ML_", "AIP_", "CLUSTER_SPEC", "TRAINING_JOB_", "SKERRY_", "GOOGLE_", "CUDA_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(clouds)}
    paths = os.pathsep.join([str(ROOT / "runtime"), str(ROOT / "infra"), str(ROOT)])
    return kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def hardware(**changes: object) -> Hardware:
    """A machine with sufficient resources and no GPU."""
    sizes: dict[str, object] = {"memory_bytes": 1 << 34, "shm_bytes": 1 << 33, "disk_free_bytes": 1 << 36}
    return Hardware(**({"cores": 4.0, "gpus": (), "n_gpus": 0, "uid": 10001} | sizes | changes))  # type: ignore[arg-type]
