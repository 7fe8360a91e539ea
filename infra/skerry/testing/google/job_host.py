"""What Vertex would give to a job's container: image, environment, limits, a metadata server of its own, and a log."""

from __future__ import annotations

import datetime as dt
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.testing.boxes import Box
from skerry.infra.testing.jobs import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.testing.google.logs import Logs
    from skerry.infra.testing.google.project import Project

TASK: Final = "workerpool0-0"
"""The one worker of a job, as logs and errors name it."""
_IMAGE: Final = re.compile(r"[a-z0-9-]+-docker\.pkg\.dev(/.+)")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all jobs of a sandbox share. endpoint: as a container reaches it. registry: stands in for image registries.

    metadata: starts a metadata server for a job's account and tells its host:port. variables: given to every
    container besides, such as those that lead to another cloud's sandbox.
    """

    mark: str
    endpoint: str
    registry: str | None
    metadata: Callable[[str], str]
    variables: Mapping[str, str]


class JobHost:
    """One job's surroundings; `jobs.Host`."""

    def __init__(self, told: Mapping[str, Any], around: Surroundings, project: Project, logs: Logs) -> None:
        self._told = told
        self._around = around
        self._project = project
        self._logs = logs
        self._metadata: str | None = None

    def box(self, number: int) -> Box:
        """The container of attempt `number`, from 1. Raises Refused."""
        container = self._container()
        # "command" overrides the entrypoint and "args" follow it; the engine here has one list for both.
        if container.get("command"):
            raise Refused("this sandbox keeps an image's entrypoint: give args, and no command")
        return Box(
            name=f"skerry-{self._around.mark}-{self._number()}-{number}",
            image=self._image(str(container["imageUri"])),
            command=[str(one) for one in container.get("args") or ()],
            environment=self._environment(container),
        )

    def open_log(self) -> str:
        """All attempts of a job write to the same log."""
        return self._number()

    def write_log(self, stream: str, at_ms: int, text: str) -> None:
        """One line, as Vertex's own agent writes it."""
        with self._project.lock:
            self._logs.add(
                {
                    "logName": f"projects/{self._project.id}/logs/{TASK}",
                    "resource": {
                        "type": "ml_job",
                        "labels": {"job_id": stream, "project_id": self._project.id, "task_name": TASK},
                    },
                    "jsonPayload": {"message": text + "\n", "levelname": "INFO", "attrs": {"tag": TASK}},
                    "labels": {
                        "ml.googleapis.com/job_id/log_area": "root",
                        "ml.googleapis.com/trial_id": "",
                        "ml.googleapis.com/trial_type": "",
                    },
                    "severity": "INFO",
                },
                dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC),
            )

    def _image(self, image: str) -> str:
        found = _IMAGE.fullmatch(image)
        if found is None:
            return image
        if self._around.registry is None:
            raise Refused(f"Image pull failed: {image} lies in Artifact Registry, and this sandbox has no registry")
        return f"{self._around.registry}{found[1]}"

    def _environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        around = self._around
        specification: Any = self._told["jobSpec"]
        if self._metadata is None:
            self._metadata = around.metadata(str(specification.get("serviceAccount", "")))
        cluster = {
            "cluster": {"workerpool0": [f"{TASK}:2222"]},
            "environment": "cloud",
            "task": {"type": "workerpool0", "index": 0},
        }
        base: Mapping[str, str] = specification.get("baseOutputDirectory") or {}
        output = base.get("outputUriPrefix", "").rstrip("/")
        places = {"AIP_MODEL_DIR": "model", "AIP_CHECKPOINT_DIR": "checkpoints", "AIP_TENSORBOARD_LOG_DIR": "logs"}
        return {
            **around.variables,
            "STORAGE_EMULATOR_HOST": around.endpoint,
            "GCE_METADATA_HOST": self._metadata,
            "GCE_METADATA_IP": self._metadata,
            **{one["name"]: str(one.get("value", "")) for one in container.get("env") or ()},
            "CLOUD_ML_JOB_ID": self._number(),
            "CLOUD_ML_PROJECT_ID": self._project.number,
            "CLUSTER_SPEC": json.dumps(cluster),
            "AIP_MODE": "TRAINING",
            **({name: f"{output}/{folder}/" for name, folder in places.items()} if output else {}),
        }

    def _container(self) -> Mapping[str, Any]:
        return self._told["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]

    def _number(self) -> str:
        return str(self._told["name"]).rpartition("/")[2]
