"""Provides the containers of Vertex jobs: image, environment, a metadata server per job, log entries."""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.docker_containers import JobContainer
from skerry.testing.job_runner import StartRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.testing.container_environment import JobDefaults
    from skerry.testing.google.logs import Logs
    from skerry.testing.google.shared_state import Project

TASK: Final = "workerpool0-0"
"""A job's only worker, as named in logs and errors."""
_IMAGE: Final = re.compile(r"[a-z0-9-]+-docker\.pkg\.dev(/.+)")


class VertexJobHost:
    """A `jobs.JobHost` for one job. start_metadata: starts an account's metadata server and returns its host:port."""

    def __init__(
        self,
        resource: Mapping[str, Any],
        defaults: JobDefaults,
        start_metadata: Callable[[str], str],
        project: Project,
        logs: Logs,
    ) -> None:
        self._resource = resource
        self._defaults = defaults
        self._project = project
        self._logs = logs
        self._start_metadata = start_metadata
        self._metadata: str | None = None

    def container_for(self, number: int) -> JobContainer:
        """Return the container of attempt `number`, from 1. Raises StartRefused."""
        container = self._container()
        # "command" overrides the entrypoint and "args" follow it; the sandbox supports only args.
        if container.get("command"):
            raise StartRefused("the sandbox does not support command; use args, after the image's entrypoint")
        return JobContainer(
            name=f"skerry-{self._defaults.mark}-{self._number()}-{number}",
            image=self._defaults.local_image(str(container["imageUri"]), _IMAGE, "Image pull failed"),
            command=[str(argument) for argument in container.get("args") or ()],
            environment=self._environment(container),
        )

    def open_log(self) -> str:
        """Return the job's number; all its attempts write to the same log."""
        return self._number()

    def write_log(self, stream: str, at_ms: int, text: str) -> None:
        """Add an entry, in the format of Vertex's agent."""
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

    def _environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        defaults = self._defaults
        specification: Any = self._resource["jobSpec"]
        if self._metadata is None:
            self._metadata = self._start_metadata(str(specification.get("serviceAccount", "")))
        cluster = {
            "cluster": {"workerpool0": [f"{TASK}:2222"]},
            "environment": "cloud",
            "task": {"type": "workerpool0", "index": 0},
        }
        base: Mapping[str, str] = specification.get("baseOutputDirectory") or {}
        output = base.get("outputUriPrefix", "").rstrip("/")
        folders = {"AIP_MODEL_DIR": "model", "AIP_CHECKPOINT_DIR": "checkpoints", "AIP_TENSORBOARD_LOG_DIR": "logs"}
        return {
            **defaults.variables,
            "STORAGE_EMULATOR_HOST": defaults.endpoint,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER": f"{defaults.endpoint}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM": f"{defaults.endpoint}/",
            "GCE_METADATA_HOST": self._metadata,
            "GCE_METADATA_IP": self._metadata,
            **{variable["name"]: str(variable.get("value", "")) for variable in container.get("env") or ()},
            "CLOUD_ML_JOB_ID": self._number(),
            "CLOUD_ML_PROJECT_ID": self._project.number,
            "CLUSTER_SPEC": json.dumps(cluster),
            "AIP_MODE": "TRAINING",
            **({name: f"{output}/{folder}/" for name, folder in folders.items()} if output else {}),
        }

    def _container(self) -> Mapping[str, Any]:
        return self._resource["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]

    def _number(self) -> str:
        return str(self._resource["name"]).rpartition("/")[2]
