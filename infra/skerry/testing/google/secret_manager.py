"""Secret Manager: secrets, their versions and policies; only what replicas and their operators ask.

Source: Secret Manager, REST reference of projects.secrets, "Access control with IAM".
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.google.refusals import Refusal, absent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.google.shared_state import Handler, Project, SandboxRequest

_PREFIX: Final = "secretmanager.projects.secrets"
_VERSION: Final = re.compile(r"projects/([^/]+)/secrets/([^/]+)/versions/(\d+|latest)")
_SECRET: Final = re.compile(r"projects/([^/]+)/secrets/([^/]+)")
_TYPE: Final = "secretmanager.googleapis.com/SecretVersion"


class Secrets:
    """The secrets of a project, by name, each with the values of its versions from 1."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._versions: dict[str, list[bytes]] = {}

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by method id."""
        return {
            f"{_PREFIX}.create": self._create,
            f"{_PREFIX}.addVersion": self._add,
            f"{_PREFIX}.delete": self._delete,
            f"{_PREFIX}.getIamPolicy": self._get_policy,
            f"{_PREFIX}.setIamPolicy": self._set_policy,
            f"{_PREFIX}.versions.access": self._access,
        }

    def names(self) -> list[str]:
        """Return the names of all secrets."""
        return list(self._versions)

    def clear(self) -> None:
        """Delete all secrets."""
        self._versions.clear()

    def _create(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = request.parameter("secretId") or ""
        if name in self._versions:
            raise Refusal(409, f"Secret [{self._full(name)}] already exists.", status="ALREADY_EXISTS")
        self._versions[name] = []
        return {"name": self._full(name), "createTime": self._project.text(), "replication": {"automatic": {}}}

    def _add(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = self._existing(request.names["parent"])
        self._versions[name].append(base64.b64decode(request.body["payload"]["data"]))
        return {"name": f"{self._full(name)}/versions/{len(self._versions[name])}", "state": "ENABLED"}

    def _delete(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = self._existing(request.names["name"])
        del self._versions[name]
        self._project.policies.forget(self._policy_name(name))
        return {}

    def _get_policy(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = self._existing(request.names["resource"])
        version = request.int_parameter("options.requestedPolicyVersion")
        return self._project.policies.read(self._policy_name(name), version)

    def _set_policy(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = self._existing(request.names["resource"])
        self._project.policies.write(self._policy_name(name), request.body["policy"])
        return self._project.policies.read(self._policy_name(name), 3)

    def _access(self, request: SandboxRequest) -> Mapping[str, Any]:
        match = _VERSION.fullmatch(request.names["name"])
        if match is None:
            raise absent(f"Secret Version [{request.names['name']}] not found.")
        context = {"resource.type": _TYPE, "resource.name": request.names["name"]}
        # The right is checked first, so that an absent secret is not told apart from a forbidden one.
        self._project.check(request.principal, "secretmanager.versions.access", self._policy_name(match[2]), context)
        name = self._existing(request.names["name"].rpartition("/versions/")[0])
        versions = self._versions[name]
        number = len(versions) if match[3] == "latest" else int(match[3])
        if not 1 <= number <= len(versions):
            raise absent(f"Secret Version [{request.names['name']}] not found or has no versions.")
        data = base64.b64encode(versions[number - 1]).decode()
        return {"name": f"{self._full(name)}/versions/{number}", "payload": {"data": data}}

    def _existing(self, full_name: str) -> str:
        """Return the name of an existing secret. Raises Refusal."""
        match = _SECRET.fullmatch(full_name)
        if match is None or not self._project.is_mine(match[1]) or match[2] not in self._versions:
            raise absent(f"Secret [{full_name}] not found.")
        return match[2]

    def _policy_name(self, name: str) -> str:
        return f"{self._project.resource}/secrets/{name}"

    def _full(self, name: str) -> str:
        return f"projects/{self._project.number}/secrets/{name}"
