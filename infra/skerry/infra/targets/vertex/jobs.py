"""Handles custom jobs, one for each replica: creates, reads, cancels and deletes them.

Google numbers jobs and does not prevent duplicates. So `create` first looks for a job with the labels, creates once,
and looks again if there was no answer. The record of an ended job remains until it is deleted: `delete` cancels a job,
waits for its end and deletes it. Its logs remain in Cloud Logging.
Sources: Vertex AI API, customJobs.cancel ("the job is not deleted"), .delete; IAM, "Access change propagation".
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.google.session import Disabled
from skerry.infra.clouds.handler_helpers import Absent, NotYetVisible, text, wait_for
from skerry.infra.provision.handler import Condition, NamedJob
from skerry.infra.provision.target_and_store_interfaces import is_named_by, named_job
from skerry.infra.targets.shared.job_view_helpers import slot_of
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.infra.targets.vertex import parse_observed_settings, requests
from skerry.infra.targets.vertex.sdk_create import Creator
from skerry.runtime import contract
from skerry.runtime.errors import Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.handler import Desired, Observed, StateRecord

# A container has 30 s to stop; then its machine is released, which takes minutes.
_ENDED_S: Final = 900.0
# A created job appears in the listing; Google does not document how soon.
_LISTED_S: Final = 10.0
# A new account and its permissions are visible everywhere within two minutes.
_KNOWN_S: Final = 120.0
_OF_AN_ACCOUNT: Final = re.compile(
    r"service account .*does not exist|act as service_account|service agents? (is|are) (still )?being provisioned",
    re.IGNORECASE,
)
_ENABLED_S: Final = 300.0
_PAGE: Final = "100"
# A region of Google; AWS has another dash before the number.
_REGION: Final = re.compile(r"[a-z]+(-[a-z]+)+[0-9]{1,2}")


class Jobs:
    """See JobHandler. create: creates a job in a project and a region from a body, and returns its name."""

    def __init__(self, google: Google, create: Callable[[str, str, Mapping[str, object]], str] | None = None) -> None:
        self._google = google
        self._create = Creator(google).create if create is None else create

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. One listing for each region; recorded jobs that are missing from it are read by name."""
        known: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
        seen: list[Observed | None] = []
        for desired in all_desired:
            place = (desired.run, _project(desired), desired.resource.region)
            if place not in known:
                known[place] = list(listed(self._google, *place))
            row = self._row_of(desired, known[place])
            seen.append(None if row is None else parse_observed_settings.job(row, desired.resource.region, desired.run))
        return seen

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. Another job of the name is ended first, because a slot has one job."""
        existing = [row for row in self._named(desired) if parse_observed_settings.condition(row) is not Condition.LOST]
        for row in existing:
            # A job that a replica has started ends if the record of the one before it is deleted, as here.
            if _is_this(row, desired) and contract.REVIVED_LABEL not in parse_observed_settings.labels(row):
                return parse_observed_settings.outputs(row)
        for row in existing:
            self._end(str(row["name"]), desired.name)
        body = ready(requests.job(desired))
        try:
            return self._created(desired, body)
        except Retryable as error:
            return self._submitted(desired, error)

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Every setting of a job is fixed."""
        raise Invalid(f"a job cannot change: {desired.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete. In any state; a job without a record counts as deleted."""
        for name in self._names_of(state_record):
            self._end(name, state_record.name)

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Ended jobs too, which have a record until they are deleted."""
        for region in sorted(region for region in regions if _REGION.fullmatch(region)):
            for row in listed(self._google, run, self._google.project, region):
                mark = owner_labels.of_labels(parse_observed_settings.labels(row))
                if mark is not None:
                    yield parse_observed_settings.record_of(row, mark, region)
            yield from self._unlabelled(run, region)

    def stop(self, state_record: StateRecord) -> None:
        """See JobHandler.stop."""
        cancel(self._google, state_record.outputs["name"])

    def names(self, like: StateRecord, run: str) -> Iterable[NamedJob]:
        """See JobHandler.names. In the project and region of `like`."""
        for row in listed(self._google, run, str(like.settings["project"]), like.region):
            over = parse_observed_settings.state(row) not in parse_observed_settings.LIVE
            yield NamedJob(str(row.get("displayName", "")), over=over)

    def list_revived(self, run: str, records: Sequence[StateRecord]) -> Mapping[str, StateRecord]:
        """See RevivableJobHandler.list_revived. Of several jobs with one number the first: the others end."""
        revived: dict[str, StateRecord] = {}
        for project, region in {(str(record.settings["project"]), record.region) for record in records}:
            rows = sorted(listed(self._google, run, project, region), key=_created)
            live = {row["name"] for row in rows if parse_observed_settings.state(row) in parse_observed_settings.LIVE}
            for record in (record for record in records if record.region == region):
                newest = record
                for row in rows:
                    if newest.outputs.get("name") in live:
                        break  # whatever was created beside a live job does not follow it
                    mark = owner_labels.of_labels(parse_observed_settings.labels(row))
                    if (
                        mark is not None
                        and mark.key == slot_of(record)
                        and mark.generation > newest.generation
                        # Any account that may create jobs in the project can set these labels.
                        and row["jobSpec"].get("serviceAccount") == record.settings["service_account"]
                        and contract.REVIVED_LABEL in parse_observed_settings.labels(row)
                    ):
                        newest = revived[record.address] = dataclasses.replace(
                            record,
                            name=str(row["displayName"]),
                            generation=mark.generation,
                            outputs=parse_observed_settings.outputs(row),
                        )
        return revived

    def forbid_revival(self, state_record: StateRecord) -> None:
        """See RevivableJobHandler.forbid_revival: a job cannot be labelled later, so its record is deleted."""
        self.delete(state_record)

    def _unlabelled(self, run: str, region: str) -> Iterator[StateRecord]:
        """Return the live jobs that have the run's names and no label of a run. A filter matches whole names only."""
        path = f"v1/projects/{self._google.project}/locations/{region}/customJobs"
        for state in parse_observed_settings.LIVE:
            rows = _all(self._google, path, f'state="{state}"')
            for row in rows:
                name = str(row.get("displayName", ""))
                if owner_labels.of_labels(parse_observed_settings.labels(row)) is None and is_named_by(run, name):
                    key, generation = named_job(run, name)
                    mark = owner_labels.OwnerLabel(run=owner_labels.run_mark(run), key=key, generation=generation)
                    yield parse_observed_settings.record_of(row, mark, region)

    def _row_of(self, desired: Desired, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        known = desired.outputs.get("id")
        if known is None:
            return next((row for row in rows if _is_this(row, desired)), None)
        row = next((row for row in rows if parse_observed_settings.outputs(row)["id"] == known), None)
        return described(self._google, desired.outputs["name"]) if row is None else row

    def _created(self, desired: Desired, body: Mapping[str, object]) -> Mapping[str, str]:
        """Create the job, and wait until a new account, its permissions and the service are visible."""
        began = self._google.clock.now()

        def attempt() -> Mapping[str, str] | None:
            try:
                name = self._create(_project(desired), desired.resource.region, body)
            except (Invalid, Unauthorized) as error:
                patience = _ENABLED_S if isinstance(error, Disabled) else _KNOWN_S if _is_of_an_account(error) else 0.0
                if self._google.clock.now() - began >= patience:
                    raise
                return None
            return {"name": name, "id": name.rpartition("/")[2]}

        # Later than the last attempt, whose error says more than a timeout.
        deadline = began + 2 * _ENABLED_S
        return wait_for(self._google.clock, f"the job {desired.name} can be made", deadline, attempt)

    def _submitted(self, desired: Desired, lost: Retryable) -> Mapping[str, str]:
        """Return the job of a request without an answer. Raises `lost` if there is none."""

        def ask() -> Mapping[str, str] | None:
            for row in self._named(desired):
                if _is_this(row, desired) and parse_observed_settings.condition(row) is not Condition.LOST:
                    return parse_observed_settings.outputs(row)
            return None

        clock = self._google.clock
        try:
            return wait_for(clock, f"the job {desired.name} is listed", clock.now() + _LISTED_S, ask)
        except NotYetVisible:
            raise lost from None

    def _end(self, name: str, what: str) -> None:
        """Cancel a live job, wait for its end, and delete its record. Raises NotYetVisible on a timeout."""
        deadline = self._google.clock.now() + _ENDED_S

        def ended() -> bool | None:
            row = described(self._google, name)
            return (
                True if row is None or parse_observed_settings.state(row) not in parse_observed_settings.LIVE else None
            )

        try:
            if ended() is None:
                cancel(self._google, name)
                wait_for(self._google.clock, f"the job {what} has ended", deadline, ended)
            answer = self._google.call("aiplatform", "DELETE", f"v1/{name}")
            self._google.finished("aiplatform", answer, f"the job {what} is deleted")
        except Disabled:
            raise
        except Absent:
            return

    def _names_of(self, state_record: StateRecord) -> list[str]:
        """Return the name of the recorded job, or of unrecorded jobs of its display name."""
        if name := state_record.outputs.get("name"):
            return [name]
        place = place_of(state_record)
        rows = () if place is None else listed(self._google, *place, state_record.name)
        return [str(row["name"]) for row in rows]

    def _named(self, desired: Desired) -> Iterator[Mapping[str, Any]]:
        """Return the run's jobs of this name, in any state."""
        return listed(self._google, desired.run, _project(desired), desired.resource.region, desired.name)


def listed(google: Google, run: str, project: str, region: str, name: str | None = None) -> Iterator[Mapping[str, Any]]:
    """Return the jobs of a run in a region, newest first; none while the service is disabled."""
    wanted = f'labels.{owner_labels.RUN_LABEL}="{owner_labels.run_mark(run)}"'
    if name is not None:
        wanted = f'{wanted} AND display_name="{name}"'
    return _all(google, f"v1/projects/{project}/locations/{region}/customJobs", wanted)


def _all(google: Google, path: str, wanted: str) -> Iterator[Mapping[str, Any]]:
    try:
        yield from google.pages("aiplatform", path, "customJobs", query={"filter": wanted, "pageSize": _PAGE})
    except Absent:
        return


def place_of(state_record: StateRecord) -> tuple[str, str, str] | None:
    """Return run, project and region of a recorded job; None if its record lacks them."""
    project, environment = state_record.settings.get("project"), state_record.settings.get("environment")
    run = environment.get(contract.RUN_URI) if isinstance(environment, Mapping) else None
    return (run, project, state_record.region) if isinstance(project, str) and isinstance(run, str) else None


def described(google: Google, name: str) -> Mapping[str, Any] | None:
    """Return the description of a job by its full name; None if Vertex AI has no record of it."""
    try:
        return google.call("aiplatform", "GET", f"v1/{name}")
    except Absent:
        return None


def cancel(google: Google, name: str) -> None:
    """Cancel a job by its full name. A job that has ended, or is ending, counts as cancelled.

    Raises Absent if there is none, or it is not visible yet.
    """
    try:
        google.call("aiplatform", "POST", f"v1/{name}:cancel", body={})
    except Disabled:
        raise
    except Invalid as error:
        row = described(google, name)
        if row is None and isinstance(error, Absent):
            raise
        if row is not None and parse_observed_settings.state(row) in parse_observed_settings.STOPPABLE:
            raise


def _created(row: Mapping[str, Any]) -> dt.datetime:
    return dt.datetime.fromisoformat(str(row["createTime"]))


def _is_this(row: Mapping[str, Any], desired: Desired) -> bool:
    """Return whether it is this job: a job from before a destroy may have other settings."""
    digest = requests.known_digest(desired)
    known = digest is None or parse_observed_settings.labels(row).get(requests.SPEC_LABEL) == digest
    return known and row.get("displayName") == desired.name


def _is_of_an_account(error: Exception) -> bool:
    return _OF_AN_ACCOUNT.search(str(error)) is not None


def _project(desired: Desired) -> str:
    return text(desired.settings["project"])
