"""Handles the Jobs and service accounts of a run in a Kubernetes cluster.

An apply creates an object or finds it made, so a repeated call has one effect. An ended Job of the same name, from
before a destroy, is deleted first: the server refuses another template.
Sources: Kubernetes, "Server-Side Apply", "Garbage Collection" (foreground deletion), "Jobs".
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.handler_helpers import Absent, check_owner, each, wait_for
from skerry.infra.provision.handler import Condition, NamedJob
from skerry.infra.provision.target_and_store_interfaces import is_named_by, named_job
from skerry.infra.targets.kubernetes import manifests, parse_observed_settings
from skerry.infra.targets.kubernetes.cluster import core_path, jobs_path
from skerry.infra.targets.kubernetes.resource_types import Job, ServiceAccount
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.runtime.errors import Conflict, Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from skerry.infra.provision.handler import Desired, Observed, StateRecord
    from skerry.infra.targets.kubernetes.cluster import Cluster

# A pod has its grace to stop, an hour at most; then its objects are deleted within seconds.
_MOST_GRACE_S: Final = 3600.0
_DELETED_S: Final = 120.0
_REMEDY: Final = "delete it, or give the run another name"


class Jobs:
    """See JobHandler."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. One listing for each namespace; recorded jobs that are missing from it are read by name."""
        rows = _rows(self._cluster, all_desired, jobs_path)
        return [None if row is None else parse_observed_settings.job(row) for row in rows]

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. Another job of the name is deleted first, because a slot has one job."""
        path, body = jobs_path(desired.resource.region, desired.name), ready(manifests.job(desired))
        manager = manifests.manager(desired.run)
        try:
            row = self._cluster.apply(path, body, manager)
        except (Conflict, Invalid) as error:
            row = self._existing(path, desired, error)
        except Retryable:
            with suppress(Absent):
                return self._created(path, desired)
            raise
        if _is_this(row, desired) and not parse_observed_settings.over(row):
            return parse_observed_settings.outputs(row)
        self._end(path, row)
        return parse_observed_settings.outputs(self._cluster.apply(path, body, manager))

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Fields that another manager changed are taken back, as the plan has shown."""
        if fixed := set(changed) & Job.FIXED:
            raise Invalid(f"a job cannot change: {desired.resource.address}: {', '.join(sorted(fixed))}")
        path = jobs_path(desired.resource.region, desired.name)
        body = ready(manifests.job(desired))
        row = self._cluster.apply(path, body, manifests.manager(desired.run), force=True)
        if desired.settings["deadline_s"] is None and "activeDeadlineSeconds" in row["spec"]:
            # An apply removes no field that it does not name and another manager has added.
            row = self._cluster.patch(path, {"spec": {"activeDeadlineSeconds": None}})
        return parse_observed_settings.outputs(row)

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete. Its pods are stopped, and deleted with it and their logs."""
        path = jobs_path(state_record.region, state_record.name)
        with suppress(Absent):
            row = self._cluster.get(path)
            if state_record.outputs.get("uid") in {None, "", parse_observed_settings.outputs(row)["uid"]}:
                self._end(path, row)

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Ended jobs too, which have a record until they are deleted."""
        for namespace in sorted(regions):
            for row in self._cluster.items(jobs_path(namespace)):
                name = str(row["metadata"]["name"])
                if parse_observed_settings.owner(row) == run:
                    yield parse_observed_settings.record_of(Job, row, name, 0)
                elif (
                    parse_observed_settings.owner(row) is None
                    and is_named_by(run, name)
                    and not parse_observed_settings.over(row)
                ):
                    yield parse_observed_settings.record_of(Job, row, *named_job(run, name))

    def stop(self, state_record: StateRecord) -> None:
        """See JobHandler.stop."""
        stop(self._cluster, state_record.region, state_record.name)

    def names(self, like: StateRecord, run: str) -> Iterable[NamedJob]:
        """See JobHandler.names."""
        for row in self._cluster.items(jobs_path(like.region), {"labelSelector": manifests.selector(run)}):
            yield NamedJob(str(row["metadata"]["name"]), over=parse_observed_settings.pods_over(row))

    def _created(self, path: str, desired: Desired) -> Mapping[str, str]:
        """The outputs of the job whose request had no answer. Raises Absent if it was not made."""
        row = self._cluster.get(path)
        if _is_this(row, desired) and not parse_observed_settings.over(row):
            return parse_observed_settings.outputs(row)
        raise Absent(desired.name)

    def _existing(self, path: str, desired: Desired, error: Exception) -> dict[str, Any]:
        """The job that exists under the name. Raises `error` if there is none, so that the server refused this one."""
        try:
            row = self._cluster.get(path)
        except Absent:
            raise error from None
        check_owner(parse_observed_settings.job(row), desired, "job", _REMEDY)
        return row

    def _end(self, path: str, row: Mapping[str, Any]) -> None:
        """Delete a job after its pods. Raises NotYetVisible on a timeout."""
        uid = parse_observed_settings.outputs(row)["uid"]
        clock = self._cluster.clock
        with suppress(Absent, Conflict):  # Conflict: it is another one already
            self._cluster.delete(path, uid)

        def gone() -> bool | None:
            try:
                return True if parse_observed_settings.outputs(self._cluster.get(path))["uid"] != uid else None
            except Absent:
                return True

        grace = row["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", _MOST_GRACE_S)
        what = f"the job {row['metadata']['name']} is deleted (a pod of a lost node ends when its Node is deleted)"
        wait_for(clock, what, clock.now() + float(grace) + _DELETED_S, gone)


class ServiceAccounts:
    """See Handler."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. One listing for each namespace."""
        rows = _rows(self._cluster, all_desired, _accounts_path)
        return [None if row is None else parse_observed_settings.service_account(row) for row in rows]

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        try:
            return self._apply(desired, force=False)
        except Conflict:
            row = self._cluster.get(_accounts_path(desired.resource.region, desired.name))
            check_owner(parse_observed_settings.service_account(row), desired, "service account", _REMEDY)
            return self._apply(desired, force=True)

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Fields that another manager changed are taken back, as the plan has shown."""
        del changed
        return self._apply(desired, force=True)

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete."""
        with suppress(Absent, Conflict):
            path = _accounts_path(state_record.region, state_record.name)
            self._cluster.delete(path, state_record.outputs.get("uid"))

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned."""
        for namespace in sorted(regions):
            query = {"labelSelector": manifests.selector(run)}
            for row in self._cluster.items(_accounts_path(namespace), query):
                if parse_observed_settings.owner(row) == run:
                    yield parse_observed_settings.record_of(ServiceAccount, row, str(row["metadata"]["name"]), 0)

    def _apply(self, desired: Desired, *, force: bool) -> Mapping[str, str]:
        path, body = _accounts_path(desired.resource.region, desired.name), ready(manifests.service_account(desired))
        return parse_observed_settings.outputs(
            self._cluster.apply(path, body, manifests.manager(desired.run), force=force)
        )


def _accounts_path(namespace: str, name: str | None = None) -> str:
    return core_path(namespace, "serviceaccounts", name)


def _rows(cluster: Cluster, all_desired: Sequence[Desired], path_of: Any) -> list[Mapping[str, Any] | None]:
    """The objects of these names, of any run. A listing is complete, but for one that lost its labels."""
    query = {"labelSelector": manifests.ALL_RUNS}
    known: dict[str, dict[str, Mapping[str, Any]]] = {}
    for namespace in {desired.resource.region for desired in all_desired}:
        known[namespace] = {str(row["metadata"]["name"]): row for row in cluster.items(path_of(namespace), query)}

    rows = [known[desired.resource.region].get(desired.name) for desired in all_desired]

    def find(at: int) -> Mapping[str, Any] | None:
        with suppress(Absent):
            return cluster.get(path_of(all_desired[at].resource.region, all_desired[at].name))
        return None

    missing = [at for at, desired in enumerate(all_desired) if rows[at] is None and desired.outputs]
    for at, row in zip(missing, each(find, missing), strict=True):
        rows[at] = row
    return rows


def _is_this(row: Mapping[str, Any], desired: Desired) -> bool:
    """Return whether it is this job: one from before a destroy may have other settings."""
    return parse_observed_settings.notes(row).get(manifests.SETTINGS) == manifests.settings_digest(desired)


def stop(cluster: Cluster, namespace: str, name: str) -> None:
    """Stop a job and keep its record. An ended one is left as it is. Raises Absent if there is none.

    A suspended job has no pods. Kueue, which owns `suspend`, may take that back; then the time limit is over at once.
    """
    path = jobs_path(namespace, name)
    if parse_observed_settings.condition(cluster.get(path)) is Condition.READY:
        cluster.patch(
            path,
            {
                "metadata": {"annotations": {manifests.STOPPED: "true"}},
                "spec": {"suspend": True, "activeDeadlineSeconds": 1},
            },
        )
