"""Workload identity pools and their providers; deleted ones keep their ids for 30 days.

Source: IAM, "Manage workload identity pools and providers", REST reference of workloadIdentityPools; terraform issue
14191 (a 409 for the id of a deleted pool).
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.google import cel
from skerry.testing.google.refusals import Refusal, absent, invalid
from skerry.testing.google.shared_state import masked, page_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.google.operations import Operations
    from skerry.testing.google.shared_state import Handler, Project, SandboxRequest

_KEPT: Final = dt.timedelta(days=30)
_ID: Final = re.compile(r"(?!gcp-)[a-z0-9-]{4,32}")
_ATTRIBUTE: Final = re.compile(
    r"google\.(subject|groups|display_name|profile_photo|posix_username)|attribute\.[a-z0-9_]{1,100}"
)
_POOL: Final = "iam.projects.locations.workloadIdentityPools"
_PROVIDER: Final = f"{_POOL}.providers"
_LIMITS: Final = {"displayName": 32, "description": 256}


@dataclass(kw_only=True)
class PoolRecord:
    """A pool or a provider. expires: when it is finally deleted; None while it is active."""

    resource: dict[str, Any]
    expires: dt.datetime | None = None
    providers: dict[str, PoolRecord] = field(default_factory=dict[str, "PoolRecord"])

    @property
    def is_usable(self) -> bool:
        """True if active and not disabled."""
        return self.expires is None and not self.resource.get("disabled")


class Pools:
    """The pools of a project, in its one location, `global`."""

    def __init__(self, project: Project, operations: Operations) -> None:
        self._project = project
        self._operations = operations
        self._pools: dict[str, PoolRecord] = {}

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by method id."""
        handlers_by_method: dict[str, Handler] = {}
        for prefix in (_POOL, _PROVIDER):
            handlers_by_method |= {
                f"{prefix}.create": self._create,
                f"{prefix}.get": self._get,
                f"{prefix}.list": self._list,
                f"{prefix}.patch": self._patch,
                f"{prefix}.delete": self._delete,
                f"{prefix}.undelete": self._undelete,
                f"{prefix}.operations.get": self._operations.get,
            }
        return handlers_by_method

    def names(self) -> dict[str, list[str]]:
        """Return the active pools by id and providers as POOL/ID."""
        pools = [name for name, pool in self._pools.items() if pool.expires is None]
        providers = [
            f"{name}/{provider_id}"
            for name, pool in self._pools.items()
            for provider_id, provider in pool.providers.items()
            if pool.expires is None and provider.expires is None
        ]
        return {"identity pool": pools, "identity provider": providers}

    def usable(self, pool: str, provider: str) -> PoolRecord | None:
        """Return the provider if tokens can be exchanged with it now."""
        self._expire()
        pool_record = self._pools.get(pool)
        provider_record = (
            pool_record.providers.get(provider) if pool_record is not None and pool_record.is_usable else None
        )
        return provider_record if provider_record is not None and provider_record.is_usable else None

    def clear(self) -> None:
        """Delete all pools, including soft-deleted ones."""
        self._pools.clear()

    def _create(self, request: SandboxRequest) -> Mapping[str, Any]:
        parent, kind = request.names["parent"], _kind(request)
        new_id = request.parameter(f"workloadIdentity{kind}Id")
        if new_id is None or _ID.fullmatch(new_id) is None:
            raise invalid(
                f"workload_identity_{'pool' if kind == 'Pool' else 'pool_provider'}_id: 4 to 32 lower-case letters, "
                "digits and hyphens, not beginning with gcp-",
                "id",
            )
        siblings = self._siblings(parent, kind)
        if new_id in siblings:
            raise Refusal(409, f"Requested entity already exists: {self._name(parent, kind, new_id)}")
        body = {key: value for key, value in request.body.items() if key != "name"}
        self._check(body, kind)
        resource = {**body, "name": self._name(parent, kind, new_id), "state": "ACTIVE"}

        def effect() -> dict[str, Any]:
            siblings[new_id] = PoolRecord(resource=resource)
            return resource

        if self._project.settling():
            siblings[new_id] = PoolRecord(resource=resource)  # reserves the id
        return self._begin(resource["name"], kind, effect)

    def _get(self, request: SandboxRequest) -> Mapping[str, Any]:
        return self._existing(request)[1].resource

    def _list(self, request: SandboxRequest) -> Mapping[str, Any]:
        kind = _kind(request)
        every = [
            record.resource
            for record in self._siblings(request.names["parent"], kind).values()
            if record.expires is None or request.parameter("showDeleted") == "true"
        ]
        return page_of(request, f"workloadIdentity{kind}s", every, default=50)

    def _patch(self, request: SandboxRequest) -> Mapping[str, Any]:
        _, record = self._existing(request)
        if record.expires is not None:
            raise Refusal(400, f"{record.resource['name']} is deleted; undelete it first", status="FAILED_PRECONDITION")
        if not (mask := request.parameter("updateMask")):
            raise invalid("an update mask is required", "update_mask")
        kind = _kind(request)
        changed = masked(record.resource, request.body, mask)
        self._check({name: value for name, value in changed.items() if name not in {"name", "state"}}, kind)

        def effect() -> dict[str, Any]:
            record.resource = changed
            return changed

        return self._begin(changed["name"], kind, effect)

    def _delete(self, request: SandboxRequest) -> Mapping[str, Any]:
        _, record = self._existing(request)
        if record.expires is not None:
            raise absent(f"Requested entity was not found: {record.resource['name']} is deleted")

        def effect() -> dict[str, Any]:
            record.expires = self._project.now() + _KEPT
            record.resource |= {"state": "DELETED", "expireTime": self._project.text(record.expires)}
            return record.resource

        return self._begin(record.resource["name"], _kind(request), effect)

    def _undelete(self, request: SandboxRequest) -> Mapping[str, Any]:
        _, record = self._existing(request)
        if record.expires is None:
            raise Refusal(400, f"{record.resource['name']} is not deleted", status="FAILED_PRECONDITION")

        def effect() -> dict[str, Any]:
            record.expires = None
            record.resource.pop("expireTime", None)
            record.resource["state"] = "ACTIVE"
            return record.resource

        return self._begin(record.resource["name"], _kind(request), effect)

    def _begin(self, name: str, kind: str, effect: Any) -> dict[str, Any]:
        return self._operations.begin(name, effect, response_type=f"google.iam.v1.WorkloadIdentity{kind}")

    def _check(self, body: Mapping[str, Any], kind: str) -> None:
        for name, limit in _LIMITS.items():
            if len(body.get(name, "")) > limit:
                raise invalid(f"{name} has more than {limit} characters", name)
        if kind == "PoolProvider":
            _check_provider(body)

    def _existing(self, request: SandboxRequest) -> tuple[dict[str, PoolRecord], PoolRecord]:
        parent, _, record_id = request.names["name"].rpartition("/")
        siblings = self._siblings(parent.rpartition("/")[0], _kind(request))
        if record_id not in siblings:
            raise absent(f"Requested entity was not found: {request.names['name']}")
        return siblings, siblings[record_id]

    def _siblings(self, parent: str, kind: str) -> dict[str, PoolRecord]:
        """Return the pools of a location, or the providers of a pool."""
        self._expire()
        parts = parent.split("/")
        if parts[2:4] != ["locations", "global"] or not self._project.is_mine(parts[1]):
            raise absent(f"Requested entity was not found: {parent}")
        if kind == "Pool":
            return self._pools
        pool = self._pools.get(parts[5])
        if pool is None:
            raise absent(f"Requested entity was not found: {parent}")
        return pool.providers

    def _expire(self) -> None:
        now = self._project.now()
        for siblings in (self._pools, *(pool.providers for pool in self._pools.values())):
            for name in [
                name for name, record in siblings.items() if record.expires is not None and record.expires <= now
            ]:
                del siblings[name]

    def _name(self, parent: str, kind: str, record_id: str) -> str:
        """Return the full name with the project's number, as in responses."""
        below = parent.split("/", 2)[2]
        siblings = "workloadIdentityPools" if kind == "Pool" else "providers"
        return f"projects/{self._project.number}/{below}/{siblings}/{record_id}"


def _kind(request: SandboxRequest) -> str:
    return "PoolProvider" if ".providers." in request.method else "Pool"


def _check_provider(body: Mapping[str, Any]) -> None:
    if len([kind for kind in ("aws", "oidc", "saml", "x509") if kind in body]) != 1:
        raise invalid("a provider has exactly one of aws, oidc, saml and x509", "provider_config")
    if "aws" in body and re.fullmatch(r"\d{12}", body["aws"].get("accountId", "")) is None:
        raise invalid("the account id of AWS has 12 digits", "aws.account_id")
    if "oidc" in body and not body["oidc"].get("issuerUri", "").startswith("https://"):
        raise invalid("the issuer URI must start with https://", "oidc.issuer_uri")
    _check_mapping(body.get("attributeMapping", {}), body.get("attributeCondition"), is_aws="aws" in body)


def _check_mapping(mapping: Mapping[str, str], condition: str | None, *, is_aws: bool) -> None:
    if not is_aws and "google.subject" not in mapping:
        raise invalid("attribute_mapping: google.subject is required", "attribute_mapping")
    for name in mapping:
        if _ATTRIBUTE.fullmatch(name) is None:
            raise invalid(f"attribute_mapping: {name} is not an attribute", "attribute_mapping")
    for expression in (*mapping.values(), *filter(None, [condition])):
        if len(expression) > 4096:
            raise invalid("an expression has more than 4096 characters", "attribute_condition")
        try:
            cel.evaluate(expression, {})
        except cel.Absent:
            pass
        except cel.Unsupported as error:
            raise invalid(str(error), "attribute_condition") from error
