"""What SageMaker would give to a training job's container: image, /opt/ml, environment, keys of its role, a log stream.

Decides nothing about the job's way.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's backends have no types.

from __future__ import annotations

import datetime as dt
import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.logs.models import logs_backends

from skerry.infra.engine import Bind
from skerry.infra.testing.boxes import Box
from skerry.infra.testing.hosting import at_home, image_here
from skerry.infra.testing.roles import keys_of
from skerry.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.testing.hosting import Surroundings

LOGS: Final = "/aws/sagemaker/TrainingJobs"
"""Where all training jobs of an account write; nobody's own."""
_SERVICE: Final = "sagemaker.amazonaws.com"
_HOST: Final = "algo-1"
_FOLDERS: Final = ("input/config", "input/data", "model", "output/data", "checkpoints")


class TrainingHost:
    """One job's surroundings; `jobs.Host`. folder: /opt/ml of the last start."""

    def __init__(self, request: Mapping[str, Any], arn: str, region: str, around: Surroundings) -> None:
        self._request = request
        self._arn = arn
        self._region = region
        self._around = around
        self._name = str(request["TrainingJobName"])
        self._began = 0
        self.folder: Path | None = None

    def box(self, number: int) -> Box:
        """The container of start `number`, from 1. Raises Refused."""
        algorithm = self._request["AlgorithmSpecification"]
        entrypoint = algorithm.get("ContainerEntrypoint")
        keys = keys_of(self._request["RoleArn"], f"{self._name}-{number}"[:64], self._region, service=_SERVICE)
        own = {str(name): str(text) for name, text in self._request.get("Environment", {}).items()}
        return Box(
            name=f"skerry-{self._around.mark}-{self._name}-{number}",
            image=image_here(str(algorithm["TrainingImage"]), self._around),
            # The word train is what an image is told that the request says nothing to.
            command=algorithm.get("ContainerArguments") or ([] if entrypoint else ["train"]),
            entrypoint=entrypoint,
            environment={
                **at_home(self._around, self._region),
                **keys,
                **own,
                "TRAINING_JOB_NAME": self._name,
                "TRAINING_JOB_ARN": self._arn,
            },
            binds=(Bind(source=str(self._folders()), target="/opt/ml", writable=True),),
        )

    def open_log(self) -> str:
        """A stream of its own for each start; the first job of an account makes the group."""
        backend = self._logs
        backend.ensure_log_group(LOGS)
        # Named by the second it began; two starts of one job never share it.
        now = int(dt.datetime.fromisoformat(SystemClock().utc_text()).timestamp())
        self._began = max(now, self._began + 1)
        stream = f"{self._name}/{_HOST}-{self._began}"
        backend.ensure_log_stream(LOGS, stream)
        return stream

    def write_log(self, stream: str, at_ms: int, text: str) -> None:
        """One line; lost if the group was deleted meanwhile, as on AWS."""
        backend = self._logs
        if LOGS in backend.groups and stream in backend.groups[LOGS].streams:
            backend.put_log_events(LOGS, stream, [{"timestamp": at_ms, "message": text}])

    def failure(self) -> str:
        """What the last start has written to say why it failed."""
        file = None if self.folder is None else self.folder / "output/failure"
        return file.read_text(errors="replace").strip() if file is not None and file.is_file() else ""

    @property
    def _logs(self) -> Any:
        return logs_backends[DEFAULT_ACCOUNT_ID][self._region]

    def _folders(self) -> Path:
        """/opt/ml of one machine; gone with the job."""
        root = Path(tempfile.mkdtemp(prefix=f"skerry-{self._around.mark}-"))
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        for folder in _FOLDERS:
            (root / folder).mkdir(parents=True)
        machine = self._request["ResourceConfig"].get("InstanceType")
        group = {"instance_group_name": "homogeneousCluster", "instance_type": machine, "hosts": [_HOST]}
        documents: dict[str, object] = {
            "hyperparameters": self._request.get("HyperParameters", {}),
            "inputdataconfig": {},
            "resourceconfig": {
                "current_host": _HOST,
                "current_instance_type": machine,
                "current_group_name": "homogeneousCluster",
                "hosts": [_HOST],
                "instance_groups": [group],
                "network_interface_name": "eth0",
            },
        }
        for name, document in documents.items():
            (root / "input/config" / f"{name}.json").write_text(json.dumps(document))
        self.folder = root
        return root
