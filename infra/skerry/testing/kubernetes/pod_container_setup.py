"""Provides the container of a pod as a kubelet would: image, variables, user, memory, log with times."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.docker_containers import JobContainer
from skerry.testing.job_runner import StartRefused
from skerry.testing.kubernetes.scheduler_and_nodes import entries_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.kubernetes.objects import Objects
    from skerry.testing.kubernetes.pod_volumes import PodVolumes

_REFERENCE: Final = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")


class PodLogs:
    """The lines of all pods, with their times in nanoseconds. A pod's log ends with the pod."""

    def __init__(self) -> None:
        self._lines: dict[str, list[tuple[int, str]]] = {}

    def add(self, pod: str, at_ms: int, text: str) -> None:
        """Add a line; each has a later time than the one before."""
        lines = self._lines.setdefault(pod, [])
        lines.append((max(at_ms * 1_000_000, lines[-1][0] + 1 if lines else 0), text))

    def read(self, pod: str) -> list[tuple[int, str]]:
        """The lines of a pod."""
        return list(self._lines.get(pod, ()))

    def clear(self) -> None:
        """Forget all lines."""
        self._lines.clear()


class PodHost:
    """A `jobs.JobHost` for one pod. variables: added to its container's environment."""

    def __init__(
        self,
        pod: Mapping[str, Any],
        objects: Objects,
        logs: PodLogs,
        mark: str,
        variables: Mapping[str, str],
        volumes: PodVolumes,
    ) -> None:
        self._pod = pod
        self._objects = objects
        self._logs = logs
        self._mark = mark
        self._variables = variables
        self._volumes = volumes

    def container_for(self, number: int) -> JobContainer:
        """Return the container of the pod. Raises StartRefused."""
        del number
        container = self._pod["spec"]["containers"][0]
        environment = self._environment(container)
        security = {**(self._pod["spec"].get("securityContext") or {}), **(container.get("securityContext") or {})}
        user = security.get("runAsUser")
        if security.get("runAsNonRoot") and user == 0:
            raise StartRefused("CreateContainerConfigError: container has runAsNonRoot and image will run as root")
        limits = (container.get("resources") or {}).get("limits") or {}
        command = container.get("command")
        return JobContainer(
            name=f"skerry-{self._mark}-{self._pod['metadata']['name']}",
            image=str(container["image"]),
            command=[expanded(str(word), environment) for word in container.get("args") or ()],
            environment=environment,
            entrypoint=None if command is None else [expanded(str(word), environment) for word in command],
            user=None if user is None else f"{user}:{security.get('runAsGroup', user)}",
            memory_bytes=None if "memory" not in limits else int(limits["memory"]),
            shm_bytes=self._shared_memory(),
            binds=self._volumes.claimed(container),
            files=self._volumes.projected(container),
        )

    def open_log(self) -> str:
        """Return the pod's uid: it has one log."""
        return str(self._pod["metadata"]["uid"])

    def write_log(self, stream: str, at_ms: int, text: str) -> None:
        """Add a line."""
        self._logs.add(stream, at_ms, text)

    def _environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        variables = dict(self._variables)
        for source in container.get("envFrom") or ():
            variables |= {name: value.decode() for name, value in self._secret(source["secretRef"]["name"]).items()}
        for variable in container.get("env") or ():
            if (entry := variable.get("valueFrom", {}).get("secretKeyRef")) is not None:
                variables[variable["name"]] = self._secret(entry["name"])[entry["key"]].decode()
            else:
                variables[variable["name"]] = expanded(str(variable.get("value", "")), variables)
        return variables

    def _secret(self, name: str) -> dict[str, bytes]:
        with self._objects.lock:
            return entries_of(self._objects.get("secrets", str(self._pod["metadata"]["namespace"]), name))

    def _shared_memory(self) -> int | None:
        sizes = [
            int(volume["emptyDir"]["sizeLimit"])
            for volume in self._pod["spec"].get("volumes") or ()
            if volume.get("emptyDir", {}).get("medium") == "Memory"
        ]
        return sizes[0] if sizes else None


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """A value as a container gets it: $(NAME) is a variable, $$ is a dollar sign, an unknown name stays."""
    return _REFERENCE.sub(lambda match: "$" if match[1] is None else variables.get(match[1], match[0]), text)
