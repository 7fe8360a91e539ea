"""The project itself, the APIs that are enabled in it, and whether it has a billing account.

Sources: REST references of Service Usage, Resource Manager and Cloud Billing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.testing.google.project import paged
from skerry.infra.testing.google.refusals import Refusal, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.testing.google.operations import Operations
    from skerry.infra.testing.google.project import Asked, Handler, Project

_SERVICE: Final = re.compile(r"[a-z][a-z0-9-]*\.googleapis\.com")
_MANY: Final = 20


class Services:
    """Which APIs a project may use."""

    def __init__(self, project: Project, operations: Operations) -> None:
        self._project = project
        self._operations = operations

    def handlers(self) -> dict[str, Handler]:
        """By method."""
        return {
            "serviceusage.services.enable": lambda asked: self._enable([asked.names["name"].rpartition("/")[2]]),
            "serviceusage.services.batchEnable": self._batch,
            "serviceusage.services.get": lambda asked: self._told(asked.names["name"].rpartition("/")[2]),
            "serviceusage.services.list": self._list,
            "serviceusage.services.disable": self._disable,
            "serviceusage.operations.get": self._operations.get,
        }

    def _batch(self, asked: Asked) -> Mapping[str, Any]:
        wanted = list(asked.body.get("serviceIds", ()))
        if not 0 < len(wanted) <= _MANY:
            raise invalid(f"between 1 and {_MANY} services can be enabled at once", "service_ids")
        return self._enable(wanted, several=True)

    def _enable(self, wanted: list[str], *, several: bool = False) -> Mapping[str, Any]:
        for name in wanted:
            self._check(name)

        def effect() -> dict[str, Any]:
            self._project.enabled |= set(wanted)
            told = [self._told(one) for one in wanted]
            return {"services": told} if several else {"service": told[0]}

        kind = f"google.api.serviceusage.v1.{'BatchEnableServices' if several else 'EnableService'}Response"
        return self._operations.begin("", effect, response_type=kind)

    def _disable(self, asked: Asked) -> Mapping[str, Any]:
        name = asked.names["name"].rpartition("/")[2]
        self._check(name)

        def effect() -> dict[str, Any]:
            self._project.enabled.discard(name)
            return {"service": self._told(name)}

        kind = "google.api.serviceusage.v1.DisableServiceResponse"
        return self._operations.begin("", effect, response_type=kind)

    def _list(self, asked: Asked) -> Mapping[str, Any]:
        if (wanted := asked.one("filter")) not in {None, "state:ENABLED"}:
            raise invalid(f"this sandbox lists with state:ENABLED only, not {wanted}", "filter")
        every = [self._told(name) for name in sorted(self._project.enabled)]
        found, token = paged(every, asked.number("pageSize") or 50, asked.one("pageToken"), most=200)
        return {"services": found, **({"nextPageToken": token} if token else {})}

    def _told(self, name: str) -> dict[str, Any]:
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
    """The project as Resource Manager tells it, in its versions 1 and 3."""

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

    def _get(self, asked: Asked) -> Mapping[str, Any]:
        project = self._project
        self._check(asked)
        if "projectId" in asked.names:
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

    def _billing(self, asked: Asked) -> Mapping[str, Any]:
        self._check(asked)
        account = "billingAccounts/012345-567890-ABCDEF" if self._project.is_paid else ""
        return {
            "name": f"projects/{self._project.id}/billingInfo",
            "projectId": self._project.id,
            "billingAccountName": account,
            "billingEnabled": self._project.is_paid,
        }

    def _get_policy(self, asked: Asked) -> Mapping[str, Any]:
        self._check(asked)
        version = asked.body.get("options", {}).get("requestedPolicyVersion")
        return self._project.policies.told(self._project.resource, version)

    def _set_policy(self, asked: Asked) -> Mapping[str, Any]:
        self._check(asked)
        self._project.policies.put(self._project.resource, asked.body.get("policy", {}))
        return self._project.policies.told(self._project.resource, 3)

    def _test(self, asked: Asked) -> Mapping[str, Any]:
        self._check(asked)
        found = [one for one in asked.body.get("permissions", ()) if self._project.may(asked.principal, one)]
        return {"permissions": found} if found else {}

    def _check(self, asked: Asked) -> None:
        name = next(iter(asked.names.values())).removeprefix("projects/")
        if not self._project.is_mine(name) or name == "-":
            # Resource Manager does not say whether there is such a project.
            raise Refusal(403, f"The caller does not have permission on project {name} (or it may not exist).")
