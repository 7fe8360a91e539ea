"""Handles batch jobs of Slurm, one for each replica: submits, reads and cancels them.

Names are not unique, and a job cannot be made to wait for its submitter. So `create` first looks for a job with the
comment, submits once, and looks again if there was no answer; two jobs of a slot never run at once (singleton).
Slurm forgets an ended job after minutes. Then its own ending counts, else the accounting, if the cluster has one.
Sources: squeue(1), scancel(1), sacct(1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.handler_helpers import NotYetVisible, wait_for
from skerry.infra.provision.handler import NamedJob
from skerry.infra.targets.slurm import requests, responses
from skerry.runtime.errors import Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from skerry.infra.provision.handler import Desired, Observed, StateRecord
    from skerry.infra.targets.slurm.cluster import Cluster
    from skerry.infra.targets.slurm.responses import Row

# KillWait (30 s by default) from SIGTERM to SIGKILL, and the epilog.
_ENDED_S: Final = 300.0
_LISTED_S: Final = 10.0

_SQUEUE: Final = (
    'exec env SLURM_TIME_FORMAT=%s squeue --user="$(id -un)" --noheader --states=all --Format="$1" ${2:+--name="$2"}'
)
# Of any user: a recorded job of another user may run too.
_SQUEUE_JOBS: Final = 'exec env SLURM_TIME_FORMAT=%s squeue --noheader --states=all --Format="$1" --jobs="$2"'
# A job gets the login's environment, and nothing of the operator's: no credentials.
_SUBMIT: Final = (
    'mkdir -p -- "$1" && shift && exec env -i HOME="$HOME" PATH="$PATH" USER="$(id -un)" '
    '${SLURM_CONF:+SLURM_CONF="$SLURM_CONF"} "$@"'
)
_ENDINGS: Final = 'for file; do cat -- "$file" 2> /dev/null || echo; done'
# A cluster without accounting answers with an error, which is an empty answer here.
_SACCT: Final = (
    "env SLURM_TIME_FORMAT=%s sacct --noheader --parsable2 --allocations --duplicates "
    '--format="$1" --jobs="$2" 2> /dev/null || :'
)
_LOGS: Final = 'ls -1 -- "$1" 2> /dev/null || :'
_GONE: Final = "invalid job id"


class Jobs:
    """See JobHandler. cluster_of: the cluster of a region."""

    def __init__(self, cluster_of: Callable[[str], Cluster]) -> None:
        self._cluster_of = cluster_of

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. One listing for each cluster; ended jobs that are missing from it are looked up."""
        seen: dict[int, Observed | None] = {}
        for region in {desired.resource.region for desired in all_desired}:
            wanted = [(at, desired) for at, desired in enumerate(all_desired) if desired.resource.region == region]
            records = [desired.to_record(desired.outputs) for _, desired in wanted]
            rows = described(self._cluster_of(region), records)
            for (at, desired), row in zip(wanted, rows, strict=True):
                seen[at] = None if row is None else _observed(row, desired)
        return [seen[at] for at in range(len(all_desired))]

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. Another job of the slot is ended first."""
        cluster = self._cluster_of(desired.resource.region)
        existing = [row for row in self._named(desired) if row.live]
        for row in existing:
            if _is_this(row, desired):
                return row.outputs
        for row in existing:
            _end(cluster, row)
        words = [str(desired.settings["folder"]), *requests.sbatch(desired)]
        try:
            job = cluster.call(_SUBMIT, words, requests.script(desired)).strip().partition(";")[0]
        except Retryable as error:
            return self._submitted(desired, error)
        if not job.isdecimal():
            raise Invalid(f"{cluster.name}: sbatch printed no job id, but {job[:80]!r}")
        return responses.Row(id=job, name=desired.name, state="PENDING").outputs

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Every setting of a job is fixed."""
        raise Invalid(f"a job cannot change: {desired.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete. A job that has ended, or that Slurm has forgotten, counts as deleted.

        One of another user raises Unauthorized.
        """
        cluster = self._cluster_of(state_record.region)
        known = state_record.outputs.get("id")
        for row in listed(cluster) if known is None else _of_ids(cluster, [known]):
            if row.live and _is_named(row, state_record, unmarked=known is not None):
                _end(cluster, row)

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Ended jobs too, as long as Slurm knows them."""
        for region in sorted(regions):
            for row in listed(self._cluster_of(region)):
                record = responses.owned_record(row, run, region)
                if record is not None and row.live:
                    yield record

    def stop(self, state_record: StateRecord) -> None:
        """See JobHandler.stop."""
        cancel(self._cluster_of(state_record.region), state_record.outputs["id"])

    def names(self, like: StateRecord, run: str) -> Iterable[NamedJob]:
        """See JobHandler.names. Logs in the folder of `like` outlive what Slurm knows of ended jobs."""
        del run
        cluster = self._cluster_of(like.region)
        for row in listed(cluster):
            yield NamedJob(row.full_name, over=not row.live)
        for name in cluster.call(_LOGS, [str(like.settings["folder"])]).split():
            yield NamedJob(name.removesuffix(".log"), over=True)

    def _named(self, desired: Desired) -> list[Row]:
        """Return the jobs of the slot, in any state, newest first."""
        return listed(self._cluster_of(desired.resource.region), desired.resource.name)

    def _submitted(self, desired: Desired, lost: Retryable) -> Mapping[str, str]:
        """Return the job of a submission without an answer. Raises `lost` if there is none."""

        def ask() -> Mapping[str, str] | None:
            rows = (row for row in self._named(desired) if row.live and _is_this(row, desired))
            return next((row.outputs for row in rows), None)

        clock = self._cluster_of(desired.resource.region).clock
        try:
            return wait_for(clock, f"the job {desired.name} is listed", clock.now() + _LISTED_S, ask)
        except (NotYetVisible, Retryable):
            raise lost from None


def listed(cluster: Cluster, name: str = "") -> list[Row]:
    """Return the operator's jobs of this name, or all of skerry's, newest first."""
    rows = responses.queue_rows(cluster.call(_SQUEUE, [responses.FORMAT, name]))
    return sorted(rows, key=lambda row: -int(row.id) if row.id.isdecimal() else 0)


def described(cluster: Cluster, state_records: Sequence[StateRecord]) -> list[Row | None]:
    """Return these jobs, in their order; None for a job of which nothing is known.

    A record without outputs is that of a job whose submission may have had no answer: its name and settings count. An
    ended job may be from before a destroy, and only an id finds it.
    """
    queue = listed(cluster)
    by_id = {row.id: row for row in queue}
    rows: list[Row | None] = []
    for record in state_records:
        known = record.outputs.get("id")
        if known is None:
            row = next((row for row in queue if row.live and _is_recorded(row, record)), None)
        else:
            row = by_id.get(known)
            row = row if row is not None and _is_named(row, record, unmarked=True) else None
        rows.append(row)
    if missing := _unknown(state_records, rows):
        others = {row.id: row for row in _of_ids(cluster, [state_records[at].outputs["id"] for at in missing])}
        for at in missing:
            row = others.get(state_records[at].outputs["id"])
            rows[at] = row if row is not None and _is_named(row, state_records[at], unmarked=True) else None
    if missing := _unknown(state_records, rows):
        for at, row in zip(missing, _ended(cluster, [state_records[at] for at in missing]), strict=True):
            rows[at] = row
    return rows


def _of_ids(cluster: Cluster, ids: Sequence[str]) -> list[Row]:
    """Return the jobs of these ids, of any user, that Slurm still knows and shows."""
    try:
        return responses.queue_rows(cluster.call(_SQUEUE_JOBS, [responses.FORMAT, ",".join(ids)]))
    except Invalid as error:
        if _GONE not in str(error).lower():
            raise
        return []


def cancel(cluster: Cluster, job: str) -> None:
    """Ask Slurm to stop a job: SIGTERM, and SIGKILL after KillWait. One that has ended counts as stopped."""
    try:
        cluster.call('exec scancel -- "$1"', [job])
    except Invalid as error:
        if _GONE not in str(error).lower():
            raise


def _unknown(state_records: Sequence[StateRecord], rows: Sequence[Row | None]) -> list[int]:
    """Return the places of the records with an id of which there is no row."""
    return [at for at, record in enumerate(state_records) if rows[at] is None and record.outputs.get("id")]


def _ended(cluster: Cluster, state_records: Sequence[StateRecord]) -> list[Row | None]:
    """Return jobs that Slurm has forgotten, by their own endings, else by the accounting."""
    paths = [requests.path_of(record.settings, record.name, "ending") for record in state_records]
    endings = cluster.call(_ENDINGS, paths).splitlines()
    rows: list[Row | None] = [
        responses.ending_row(text, record.name, record.outputs["id"])
        for text, record in zip(endings, state_records, strict=True)
    ]
    if missing := [record.outputs["id"] for record, row in zip(state_records, rows, strict=True) if row is None]:
        answer = cluster.call(_SACCT, [responses.ACCOUNTING, ",".join(missing)])
        accounted = {row.id: row for row in responses.accounting_rows(answer)}
        for at, record in enumerate(state_records):
            row = accounted.get(record.outputs["id"])
            if rows[at] is None and row is not None:
                rows[at] = replace(row, name=record.name)
    return rows


def _end(cluster: Cluster, row: Row) -> None:
    """Cancel a job and wait for its end. Raises NotYetVisible on a timeout."""
    cancel(cluster, row.id)

    def ended() -> bool | None:
        return None if any(job.live for job in _of_ids(cluster, [row.id])) else True

    wait_for(cluster.clock, f"the job {row.full_name} has ended", cluster.clock.now() + _ENDED_S, ended)


def _observed(row: Row, desired: Desired) -> Observed:
    seen = responses.observed(row, desired.resource.region)
    # An ending, and the accounting of some clusters, have no comment: the id is the run's own.
    return seen if row.mark is not None or row.live else responses.with_owner(seen, desired.run)


def _is_this(row: Row, desired: Desired) -> bool:
    """Return whether it is this job: a job from before a destroy may have other settings."""
    return row.mark is not None and row.mark == responses.mark_of(requests.comment(desired))


def _is_named(row: Row, record: StateRecord, *, unmarked: bool) -> bool:
    """Return whether it has the record's name: another cluster gave the same id to another job.

    unmarked: a job whose comment is lost, and with it its generation, counts too.
    """
    return row.full_name == record.name or (unmarked and row.mark is None)


def _is_recorded(row: Row, record: StateRecord) -> bool:
    return (
        row.mark is not None
        and row.full_name == record.name
        and row.mark.address == record.address
        and row.mark.spec == requests.spec_digest(record.settings)
    )
