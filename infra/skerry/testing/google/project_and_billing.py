"""Service Usage, Resource Manager and Cloud Billing: enabled APIs, the project, its billing account.

Sources: REST references of Service Usage, Resource Manager and Cloud Billing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.google.refusals import Refusal, invalid
from skerry.testing.google.shared_state import page_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.google.operations import Operations
    from skerry.testing.google.shared_state import Handler, Project, SandboxRequest

_SERVICE: Final = re.compile(r"[a-z][a-z0-9-]*\.googleapis\.com")
_MANY: Final = 20


class Services:
    """The enabled APIs of a project, by Service Usage."""

    def __init__(self, project: Project, operations: Operations) -> None:
        self._project = project
        self._operations = operations

    def handlers(self) -> dict[str, Handler]:
        """By method."""
        return {
            "serviceusage.services.enable": lambda request: self._enable([request.names["name"].rpartition("/")[2]]),
            "serviceusage.services.batchEnable": self._batch,
            "serviceusage.services.get": lambda request: self._description(request.names["name"].rpartition("/")[2]),
            "serviceusage.services.list": self._list,
            "serviceusage.services.disable": self._disable,
            "serviceusage.operations.get": self._operations.get,
        }

    def _batch(self, request: SandboxRequest) -> Mapping[str, Any]:
        names = list(request.body.get("serviceIds", ()))
        if not 0 < len(names) <= _MANY:
            raise invalid(f"between 1 and {_MANY} services can be enabled at once", "service_ids")
        return self._enable(names, is_batch=True)

    def _enable(self, names: list[str], *, is_batch: bool = False) -> Mapping[str, Any]:
        for name in names:
            self._check(name)

        def effect() -> dict[str, Any]:
            self._project.enabled |= set(names)
            descriptions = [self._description(name) for name in names]
            return {"services": descriptions} if is_batch else {"service": descriptions[0]}

        kind = f"google.api.serviceusage.v1.{'BatchEnableServices' if is_batch else 'EnableService'}Response"
        return self._operations.begin("", effect, response_type=kind)

    def _disable(self, request: SandboxRequest) -> Mapping[str, Any]:
        name = request.names["name"].rpartition("/")[2]
        self._check(name)

        def effect() -> dict[str, Any]:
            self._project.enabled.discard(name)
            return {"service": self._description(name)}

        kind = "google.api.serviceusage.v1.DisableServiceResponse"
        return self._operations.begin("", effect, response_type=kind)

    def _list(self, request: SandboxRequest) -> Mapping[str, Any]:
        if (filter_text := request.parameter("filter")) not in {None, "state:ENABLED"}:
            raise invalid(f"the sandbox supports only the filter state:ENABLED, not {filter_text}", "filter")
        every = [self._description(name) for name in sorted(self._project.enabled)]
        return page_of(request, "services", every, default=50, most=200)

    def _description(self, name: str) -> dict[str, Any]:
        self._check(name)
        parent = f"projects/{self._project.number}"
        return {
            "name": f"{parent}/services/{name}",
            "parent": parent,
            "config": {"name": name},
            "state": "ENABLED" if name in self._project.enabled else "DISABLED",
        }

    def _check(self, name: str) -> None:
        if _SERVICE.fullmatch(name) is None:
            raise Refusal(403, f"Not found or permission denied for service(s): {name}.")


class Projects:
    """The project, by Resource Manager v1 and v3 and by Cloud Billing."""

    def __init__(self, project: Project) -> None:
        self._project = project

    def handlers(self) -> dict[str, Handler]:
        """By method."""
        return {
            "cloudbilling.projects.getBillingInfo": self._billing,
            "cloudresourcemanager.projects.get": self._get,
            "cloudresourcemanager.projects.getIamPolicy": self._get_policy,
            "cloudresourcemanager.projects.setIamPolicy": self._set_policy,
            "cloudresourcemanager.projects.testIamPermissions": self._test,
        }

    def _get(self, request: SandboxRequest) -> Mapping[str, Any]:
        project = self._project
        self._check(request)
        if "projectId" in request.names:
            return {
                "projectNumber": project.number,
                "projectId": project.id,
                "lifecycleState": "ACTIVE",
                "name": project.id,
                "createTime": "2026-01-01T00:00:00.000Z",
            }
        return {
            "name": f"projects/{project.number}",
            "projectId": project.id,
            "state": "ACTIVE",
            "displayName": project.id,
            "createTime": "2026-01-01T00:00:00.000Z",
        }

    def _billing(self, request: SandboxRequest) -> Mapping[str, Any]:
        self._check(request)
        account = "billingAccounts/012345-567890-ABCDEF" if self._project.is_paid else ""
        return {
            "name": f"projects/{self._project.id}/billingInfo",
            "projectId": self._project.id,
            "billingAccountName": account,
            "billingEnabled": self._project.is_paid,
        }

    def _get_policy(self, request: SandboxRequest) -> Mapping[str, Any]:
        self._check(request)
        version = request.body.get("options", {}).get("requestedPolicyVersion")
        return self._project.policies.read(self._project.resource, version)

    def _set_policy(self, request: SandboxRequest) -> Mapping[str, Any]:
        self._check(request)
        self._project.policies.write(self._project.resource, request.body.get("policy", {}))
        return self._project.policies.read(self._project.resource, 3)

    def _test(self, request: SandboxRequest) -> Mapping[str, Any]:
        self._check(request)
        return self._project.permitted(request)

    def _check(self, request: SandboxRequest) -> None:
        name = next(iter(request.names.values())).removeprefix("projects/")
        if not self._project.is_mine(name) or name == "-":
            # Resource Manager does not reveal if such a project exists.
            raise Refusal(403, f"The caller does not have permission on project {name} (or it may not exist).")
