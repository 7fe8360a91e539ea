"""Workload identity pools and their providers: soft-deleted for 30 days, and their ids taken for so long.

Source: IAM, "Manage workload identity pools and providers", REST reference of workloadIdentityPools; terraform issue
14191 (a 409 for the id of one that is deleted).
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.testing.google import cel
from skerry.infra.testing.google.project import masked, paged
from skerry.infra.testing.google.refusals import Refusal, absent, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.testing.google.operations import Operations
    from skerry.infra.testing.google.project import Asked, Handler, Project

_KEPT: Final = dt.timedelta(days=30)
_ID: Final = re.compile(r"(?!gcp-)[a-z0-9-]{4,32}")
_ATTRIBUTE: Final = re.compile(
    r"google\.(subject|groups|display_name|profile_photo|posix_username)|attribute\.[a-z0-9_]{1,100}"
)
_POOL: Final = "iam.projects.locations.workloadIdentityPools"
_PROVIDER: Final = f"{_POOL}.providers"
_LIMITS: Final = {"displayName": 32, "description": 256}


@dataclass(kw_only=True)
class Kept:
    """A pool or a provider. expires: when it is gone for good; None while it is active."""

    told: dict[str, Any]
    expires: dt.datetime | None = None
    providers: dict[str, Kept] = field(default_factory=dict[str, "Kept"])

    @property
    def is_usable(self) -> bool:
        """Active and not disabled."""
        return self.expires is None and not self.told.get("disabled")


class Pools:
    """The pools of a project, in its one location, `global`."""

    def __init__(self, project: Project, operations: Operations) -> None:
        self._project = project
        self._operations = operations
        self._pools: dict[str, Kept] = {}

    def handlers(self) -> dict[str, Handler]:
        """By method."""
        made: dict[str, Handler] = {}
        for prefix in (_POOL, _PROVIDER):
            made |= {
                f"{prefix}.create": self._create,
                f"{prefix}.get": self._get,
                f"{prefix}.list": self._list,
                f"{prefix}.patch": self._patch,
                f"{prefix}.delete": self._delete,
                f"{prefix}.undelete": self._undelete,
                f"{prefix}.operations.get": self._operations.get,
            }
        return made

    def names(self) -> dict[str, list[str]]:
        """What is active: pools by id, providers as POOL/ID."""
        pools = [name for name, pool in self._pools.items() if pool.expires is None]
        providers = [
            f"{name}/{one}"
            for name, pool in self._pools.items()
            for one, provider in pool.providers.items()
            if pool.expires is None and provider.expires is None
        ]
        return {"identity pool": pools, "identity provider": providers}

    def usable(self, pool: str, provider: str) -> Kept | None:
        """The provider with which tokens can be exchanged now."""
        self._expire()
        found = self._pools.get(pool)
        one = found.providers.get(provider) if found is not None and found.is_usable else None
        return one if one is not None and one.is_usable else None

    def clear(self) -> None:
        """None at all, not even deleted ones."""
        self._pools.clear()

    def _create(self, asked: Asked) -> Mapping[str, Any]:
        parent, kind = asked.names["parent"], _kind(asked)
        wanted = asked.one(f"workloadIdentity{kind}Id")
        if wanted is None or _ID.fullmatch(wanted) is None:
            raise invalid(
                f"workload_identity_{'pool' if kind == 'Pool' else 'pool_provider'}_id: 4 to 32 lower-case letters, "
                "digits and hyphens, not beginning with gcp-",
                "id",
            )
        among = self._among(parent, kind)
        if wanted in among:
            raise Refusal(409, f"Requested entity already exists: {self._name(parent, kind, wanted)}")
        body = {key: value for key, value in asked.body.items() if key != "name"}
        self._check(body, kind)
        told = {**body, "name": self._name(parent, kind, wanted), "state": "ACTIVE"}

        def effect() -> dict[str, Any]:
            among[wanted] = Kept(told=told)
            return told

        if self._project.settling():
            among[wanted] = Kept(told=told)  # its id is taken from now on
        return self._begin(told["name"], kind, effect)

    def _get(self, asked: Asked) -> Mapping[str, Any]:
        return self._kept(asked)[1].told

    def _list(self, asked: Asked) -> Mapping[str, Any]:
        kind = _kind(asked)
        every = [
            kept.told
            for kept in self._among(asked.names["parent"], kind).values()
            if kept.expires is None or asked.one("showDeleted") == "true"
        ]
        found, token = paged(every, asked.number("pageSize") or 50, asked.one("pageToken"))
        return {f"workloadIdentity{kind}s": found, **({"nextPageToken": token} if token else {})}

    def _patch(self, asked: Asked) -> Mapping[str, Any]:
        _, kept = self._kept(asked)
        if kept.expires is not None:
            raise Refusal(400, f"{kept.told['name']} is deleted; undelete it first", status="FAILED_PRECONDITION")
        if not (mask := asked.one("updateMask")):
            raise invalid("an update mask is required", "update_mask")
        kind = _kind(asked)
        changed = masked(kept.told, asked.body, mask)
        self._check({name: value for name, value in changed.items() if name not in {"name", "state"}}, kind)

        def effect() -> dict[str, Any]:
            kept.told = changed
            return changed

        return self._begin(changed["name"], kind, effect)

    def _delete(self, asked: Asked) -> Mapping[str, Any]:
        _, kept = self._kept(asked)
        if kept.expires is not None:
            raise absent(f"Requested entity was not found: {kept.told['name']} is deleted")

        def effect() -> dict[str, Any]:
            kept.expires = self._project.now() + _KEPT
            kept.told |= {"state": "DELETED", "expireTime": self._project.text(kept.expires)}
            return kept.told

        return self._begin(kept.told["name"], _kind(asked), effect)

    def _undelete(self, asked: Asked) -> Mapping[str, Any]:
        _, kept = self._kept(asked)
        if kept.expires is None:
            raise Refusal(400, f"{kept.told['name']} is not deleted", status="FAILED_PRECONDITION")

        def effect() -> dict[str, Any]:
            kept.expires = None
            kept.told.pop("expireTime", None)
            kept.told["state"] = "ACTIVE"
            return kept.told

        return self._begin(kept.told["name"], _kind(asked), effect)

    def _begin(self, name: str, kind: str, effect: Any) -> dict[str, Any]:
        return self._operations.begin(name, effect, response_type=f"google.iam.v1.WorkloadIdentity{kind}")

    def _check(self, body: Mapping[str, Any], kind: str) -> None:
        for name, limit in _LIMITS.items():
            if len(body.get(name, "")) > limit:
                raise invalid(f"{name} has more than {limit} characters", name)
        if kind == "PoolProvider":
            _check_provider(body)

    def _kept(self, asked: Asked) -> tuple[dict[str, Kept], Kept]:
        parent, _, one = asked.names["name"].rpartition("/")
        among = self._among(parent.rpartition("/")[0], _kind(asked))
        if one not in among:
            raise absent(f"Requested entity was not found: {asked.names['name']}")
        return among, among[one]

    def _among(self, parent: str, kind: str) -> dict[str, Kept]:
        """Pools of a location, or providers of a pool."""
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
        for among in (self._pools, *(pool.providers for pool in self._pools.values())):
            for name in [name for name, kept in among.items() if kept.expires is not None and kept.expires <= now]:
                del among[name]

    def _name(self, parent: str, kind: str, one: str) -> str:
        """With the project's number, as the service tells it."""
        below = parent.split("/", 2)[2]
        among = "workloadIdentityPools" if kind == "Pool" else "providers"
        return f"projects/{self._project.number}/{below}/{among}/{one}"


def _kind(asked: Asked) -> str:
    return "PoolProvider" if ".providers." in asked.method else "Pool"


def _check_provider(body: Mapping[str, Any]) -> None:
    if len([one for one in ("aws", "oidc", "saml", "x509") if one in body]) != 1:
        raise invalid("a provider is exactly one of aws, oidc, saml and x509", "provider_config")
    if "aws" in body and re.fullmatch(r"\d{12}", body["aws"].get("accountId", "")) is None:
        raise invalid("the account id of AWS has 12 digits", "aws.account_id")
    _check_mapping(body.get("attributeMapping", {}), body.get("attributeCondition"), is_aws="aws" in body)


def _check_mapping(mapping: Mapping[str, str], condition: str | None, *, is_aws: bool) -> None:
    if not is_aws and "google.subject" not in mapping:
        raise invalid("attribute_mapping: google.subject is required", "attribute_mapping")
    for name in mapping:
        if _ATTRIBUTE.fullmatch(name) is None:
            raise invalid(f"attribute_mapping: {name} is no attribute", "attribute_mapping")
    for expression in (*mapping.values(), *filter(None, [condition])):
        if len(expression) > 4096:
            raise invalid("an expression has more than 4096 characters", "attribute_condition")
        try:
            cel.evaluated(expression, {})
        except cel.Absent:
            pass
        except cel.Unsupported as error:
            raise invalid(str(error), "attribute_condition") from error
