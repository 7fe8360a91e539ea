"""The objects of a cluster: reads, writes, selectors, dry runs, versions. Everything goes through one lock."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import copy
import datetime as dt
import hashlib
import threading
import uuid
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.kubernetes.field_owners import FieldOwners
from skerry.testing.kubernetes.refusals import Refused
from skerry.testing.kubernetes.schemas import check_schema
from skerry.testing.kubernetes.semantics import check_semantics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.clock import Clock

KINDS: Final = {
    "namespaces": ("v1", "Namespace"),
    "nodes": ("v1", "Node"),
    "pods": ("v1", "Pod"),
    "secrets": ("v1", "Secret"),
    "serviceaccounts": ("v1", "ServiceAccount"),
    "events": ("v1", "Event"),
    "resourcequotas": ("v1", "ResourceQuota"),
    "persistentvolumes": ("v1", "PersistentVolume"),
    "persistentvolumeclaims": ("v1", "PersistentVolumeClaim"),
    "jobs": ("batch/v1", "Job"),
}
"""The resources that the sandbox has: version and kind."""
CLUSTER_WIDE: Final = ("namespaces", "nodes", "persistentvolumes")
_DEFAULTS: Final[Mapping[str, Any]] = {
    "completions": 1,
    "parallelism": 1,
    "backoffLimit": 6,
    "completionMode": "NonIndexed",
    "suspend": False,
    "podReplacementPolicy": "TerminatingOrFailed",
    "manualSelector": False,
}
# A suspended job's pods may change in these.
_OF_SUSPENDED: Final = ("nodeSelector", "tolerations")
Key = tuple[str, str, str]
"""Resource, namespace (empty for one of the whole cluster), name."""


class Objects:
    """See the module. clock: of all times and limits, and the test may replace it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lock: Final = threading.RLock()
        self._rows: Final[dict[str, dict[Key, dict[str, Any]]]] = {resource: {} for resource in KINDS}
        self._owners: dict[Key, FieldOwners] = {}
        self._version = 1

    def now(self) -> str:
        """The time as the API has it: whole seconds."""
        return time_text(self.clock.utc_text())

    def find(self, key: Key) -> dict[str, Any] | None:
        """One object; None if there is none."""
        return self._rows[key[0]].get(key)

    def clear(self) -> None:
        """Remove all objects, and forget the owners of their fields."""
        self._owners.clear()
        for rows in self._rows.values():
            rows.clear()

    def get(self, resource: str, namespace: str, name: str) -> dict[str, Any]:
        """One object. Refuses a name that does not exist."""
        row = self.find((resource, namespace, name))
        if row is None:
            raise Refused(404, f'{_qualified(resource)} "{name}" not found')
        return row

    def list(self, resource: str, namespace: str, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        """The objects that match both selectors, oldest first. namespace: empty for all."""
        by_label, by_field = _equalities(labels), _equalities(fields)
        return [
            row
            for (_, place, _), row in self._rows[resource].items()
            if (not namespace or place == namespace)
            and all((row["metadata"].get("labels") or {}).get(name) == value for name, value in by_label)
            and all(_field(row, name) == value for name, value in by_field)
        ]

    def create(
        self, resource: str, namespace: str, body: Mapping[str, Any], *, manager: str | None = None, dry: bool = False
    ) -> dict[str, Any]:
        """Create an object by POST. manager: owns its fields, other than by an apply; None for the cluster itself."""
        row = self._new(resource, namespace, body)
        key = (resource, namespace, str(row["metadata"]["name"]))
        if self.find(key) is not None:
            raise Refused(409, f'{_qualified(resource)} "{key[2]}" already exists', "AlreadyExists")
        if dry:
            return row
        if manager is not None:
            self._owners.setdefault(key, FieldOwners()).update({}, row, manager)
        return self._put(key, row, new=True)

    def apply(
        self, key: Key, body: Mapping[str, Any], manager: str, *, force: bool, dry: bool
    ) -> tuple[dict[str, Any], bool]:
        """Create or change an object by server-side apply; whether it is new."""
        resource, namespace, name = key
        metadata = {**body.get("metadata", {}), "name": name}
        live = self.find(key)
        owners = copy.deepcopy(self._owners.get(key, FieldOwners()))
        version = KINDS[resource][0]
        if live is None:
            row = self._new(resource, namespace, {**body, "metadata": metadata})
            owners.apply({}, body, manager, version, force=force)
        else:
            check_schema(KINDS[resource][1], body)
            row = owners.apply(live, body, manager, version, force=force)
            _add_pod_defaults(row)
            self._check_change(resource, live, row)
        if dry:
            return row, live is None
        self._owners[key] = owners
        return self._put(key, row, new=live is None), live is None

    def patch(self, key: Key, change: Mapping[str, Any], manager: str) -> dict[str, Any]:
        """Change an object by a merge patch, as `kubectl edit` and controllers do."""
        live = self.get(*key)
        row = merge_patch(live, change)
        self._check_change(key[0], live, row)
        self._owners.setdefault(key, FieldOwners()).update(live, row, manager)
        return self._put(key, row, new=False)

    def remove(self, key: Key) -> None:
        """Delete an object at once."""
        self._rows[key[0]].pop(key, None)
        self._owners.pop(key, None)

    def touch(self, key: Key) -> None:
        """Give an object that a controller changed in place its next version."""
        self._version += 1
        self._rows[key[0]][key]["metadata"]["resourceVersion"] = str(self._version)

    def event(self, row: Mapping[str, Any], reason: str, message: str, kind: str = "Warning") -> None:
        """Record an event of an object; the same one again is counted."""
        metadata = row["metadata"]
        about = {"kind": row["kind"], "name": metadata["name"], "namespace": metadata["namespace"]}
        digest = hashlib.sha256(f"{row['kind']} {reason} {message}".encode()).hexdigest()[:16]
        name = f"{metadata['name']}.{digest}"
        if (known := self.find(("events", metadata["namespace"], name))) is not None:
            known["count"] += 1
            return
        self.create(
            "events",
            metadata["namespace"],
            {
                "metadata": {"name": name},
                "involvedObject": about,
                "reason": reason,
                "message": message,
                "type": kind,
                "count": 1,
            },
        )

    def _new(self, resource: str, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        version, kind = KINDS[resource]
        row: dict[str, Any] = copy.deepcopy(dict(body))
        row.setdefault("apiVersion", version)
        row.setdefault("kind", kind)
        metadata: dict[str, Any] = row.setdefault("metadata", {})
        check_schema(kind, row)
        if namespace:
            if self.find(("namespaces", "", namespace)) is None:
                raise Refused(404, f'namespaces "{namespace}" not found')
            metadata["namespace"] = namespace
        check_semantics(kind, row)
        metadata.update(uid=str(uuid.uuid4()), creationTimestamp=self.now(), generation=1)
        if kind == "Job":
            selector = {"matchLabels": {"batch.kubernetes.io/controller-uid": metadata["uid"]}}
            row["spec"] = {**_DEFAULTS, **row["spec"], "selector": selector}
            row["status"] = {}
            _add_pod_defaults(row)
        return row

    def _put(self, key: Key, row: dict[str, Any], *, new: bool) -> dict[str, Any]:
        before = self.find(key)
        if not new and before is not None and before.get("spec") != row.get("spec"):
            row["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
        if (owners := self._owners.get(key)) is not None:
            row["metadata"]["managedFields"] = owners.managed_fields(KINDS[key[0]][0])
        self._rows[key[0]][key] = row
        self.touch(key)
        return row

    def _check_change(self, resource: str, live: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        check_semantics(KINDS[resource][1], row)
        if resource != "jobs":
            return
        suspended = bool(live["spec"].get("suspend"))
        if _fixed(live, suspended=suspended) != _fixed(row, suspended=suspended):
            name = row["metadata"]["name"]
            text = "spec.template.spec: Invalid value: {...}: field is immutable"
            raise Refused(422, f'Job.batch "{name}" is invalid: {text}')


def merge_patch(live: Any, change: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7396: null removes a field."""
    result: dict[str, Any] = dict(live) if isinstance(live, dict) else {}  # pyright: ignore[reportUnknownArgumentType]
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            result[name] = merge_patch(result.get(name), value)  # pyright: ignore[reportUnknownArgumentType]
        else:
            result[name] = copy.deepcopy(value)
    return result


def time_text(text: str) -> str:
    """A time in the API's form."""
    return dt.datetime.fromisoformat(text).astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def key_of(row: Mapping[str, Any]) -> Key:
    """The key of a pod or a Job."""
    return f"{row['kind'].lower()}s", str(row["metadata"]["namespace"]), str(row["metadata"]["name"])


def set_condition(objects: Objects, row: dict[str, Any], kind: str, status: str, reason: str, message: str) -> None:
    """Set a condition of a pod or a Job; one that says the same keeps its time."""
    conditions = row["status"].setdefault("conditions", [])
    new = {"type": kind, "status": status, "reason": reason, "message": message}
    known = next((condition for condition in conditions if condition["type"] == kind), None)
    if known is None or any(known[name] != value for name, value in new.items()):
        others = [condition for condition in conditions if condition["type"] != kind]
        row["status"]["conditions"] = [*others, {**new, "lastTransitionTime": objects.now()}]


def _qualified(resource: str) -> str:
    return f"{resource}.batch" if resource == "jobs" else resource


def _equalities(selector: str) -> list[tuple[str, str]]:
    parts = [part.partition("=") for part in selector.split(",") if part]
    return [(name, value.removeprefix("=")) for name, _, value in parts]


def _field(row: Any, path: str) -> object:
    for name in path.split("."):
        row = (row or {}).get(name)
    return row


def _add_pod_defaults(row: Mapping[str, Any]) -> None:
    """Complete a Job as the server does: a reference to a field of the pod has a version."""
    containers = row["spec"]["template"]["spec"]["containers"] if row["kind"] == "Job" else ()
    for variable in (variable for container in containers for variable in container.get("env") or ()):
        if (reference := (variable.get("valueFrom") or {}).get("fieldRef")) is not None:
            reference.setdefault("apiVersion", "v1")


def _fixed(row: Mapping[str, Any], *, suspended: bool) -> Any:
    """The parts of a job that may not change: the template of its pods, and the policy of their ends."""
    spec = copy.deepcopy(row["spec"])
    pod = spec["template"]["spec"]
    if suspended:
        for name in _OF_SUSPENDED:
            pod.pop(name, None)
        for container in pod["containers"]:
            container.pop("resources", None)
    return [spec.get(name) for name in ("template", "podFailurePolicy", "completions", "selector")]
