"""Provides the containers of SageMaker training jobs: image, /opt/ml, environment, keys of the role, log stream.

`jobs` runs the job.
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

from skerry.infra.local.docker_engine import Bind
from skerry.runtime.clock import SystemClock
from skerry.testing.aws.batch_container_setup import append_line, ecr_image, endpoint_variables
from skerry.testing.aws.container_role_keys import role_keys
from skerry.testing.docker_containers import JobContainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.container_environment import JobDefaults

LOGS: Final = "/aws/sagemaker/TrainingJobs"
"""The log group of all training jobs of an account."""
_SERVICE: Final = "sagemaker.amazonaws.com"
_HOST: Final = "algo-1"
_FOLDERS: Final = ("input/config", "input/data", "model", "output/data", "checkpoints")


class TrainingJobHost:
    """A `jobs.JobHost` for one training job. folder: /opt/ml of the last start."""

    def __init__(self, request: Mapping[str, Any], arn: str, region: str, defaults: JobDefaults) -> None:
        self._request = request
        self._arn = arn
        self._region = region
        self._defaults = defaults
        self._name = str(request["TrainingJobName"])
        self._started_s = 0
        self.folder: Path | None = None

    def container_for(self, number: int) -> JobContainer:
        """Return the container of start `number`, from 1. Raises StartRefused."""
        algorithm = self._request["AlgorithmSpecification"]
        entrypoint = algorithm.get("ContainerEntrypoint")
        keys = role_keys(self._request["RoleArn"], f"{self._name}-{number}"[:64], self._region, service=_SERVICE)
        own = {str(name): str(text) for name, text in self._request.get("Environment", {}).items()}
        return JobContainer(
            name=f"skerry-{self._defaults.mark}-{self._name}-{number}",
            image=ecr_image(str(algorithm["TrainingImage"]), self._defaults),
            # Without arguments in the request, an image is started with "train".
            command=algorithm.get("ContainerArguments") or ([] if entrypoint else ["train"]),
            entrypoint=entrypoint,
            environment={
                **endpoint_variables(self._defaults, self._region),
                **keys,
                **own,
                "TRAINING_JOB_NAME": self._name,
                "TRAINING_JOB_ARN": self._arn,
            },
            binds=(Bind(source=str(self._folders()), target="/opt/ml", writable=True),),
        )

    def open_log(self) -> str:
        """Open a new stream for each start; the first job of an account creates the group."""
        backend = self._logs
        backend.ensure_log_group(LOGS)
        # Named by the second of the start; two starts of one job never share a stream.
        now = int(dt.datetime.fromisoformat(SystemClock().utc_text()).timestamp())
        self._started_s = max(now, self._started_s + 1)
        stream = f"{self._name}/{_HOST}-{self._started_s}"
        backend.ensure_log_stream(LOGS, stream)
        return stream

    def write_log(self, stream: str, at_ms: int, text: str) -> None:
        """Add a line to the stream."""
        append_line(self._logs, LOGS, stream, at_ms, text)

    def failure(self) -> str:
        """Return the failure message that the last start wrote; empty if none."""
        file = None if self.folder is None else self.folder / "output/failure"
        return file.read_text(errors="replace").strip() if file is not None and file.is_file() else ""

    @property
    def _logs(self) -> Any:
        return logs_backends[DEFAULT_ACCOUNT_ID][self._region]

    def _folders(self) -> Path:
        """Create /opt/ml of one machine; it is removed with the job."""
        root = Path(tempfile.mkdtemp(prefix=f"skerry-{self._defaults.mark}-"))
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
