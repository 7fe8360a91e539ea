"""Starts and ends custom jobs, one for each replica.

A job gets a number of Google's, and nothing keeps two of the same from being made: whoever creates looks first for a
job with its labels, asks once, and looks again if there was no answer. A job that has ended stays on record until it is
deleted, which is how one goes: cancelled, waited for, deleted. What it wrote stays in Cloud Logging.
Sources: Vertex AI API, customJobs.cancel ("the job is not deleted"), .delete; IAM, "Access change propagation".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.google import marks
from skerry.infra.clouds.google.session import Absent, Disabled, Late, waited
from skerry.infra.clouds.handling import text
from skerry.infra.handler import Condition
from skerry.infra.targets.vertex import reading, requests
from skerry.infra.targets.vertex.creating import Creator
from skerry.runtime import contract
from skerry.runtime.errors import Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.handler import Made, Seen, Wanted

# A container gets half a minute; then a machine has to be given back, which takes minutes.
_ENDED_S: Final = 900.0
# Whether a job was made shows in a listing; how soon, Google does not say.
_LISTED_S: Final = 10.0
# An account that was just made is known everywhere within a minute or two, and so are the rights in it.
_KNOWN_S: Final = 120.0
_OF_AN_ACCOUNT: Final = re.compile(
    r"service account .*does not exist|act as service_account|service agents? (is|are) (still )?being provisioned",
    re.IGNORECASE,
)
_ENABLED_S: Final = 300.0
_PAGE: Final = "100"
# What Google calls a region; AWS has another dash before the number.
_REGION: Final = re.compile(r"[a-z]+(-[a-z]+)+[0-9]{1,2}")


class Jobs:
    """See Handler. create: makes a job of a body, in a project and a region, and returns its name."""

    def __init__(self, google: Google, create: Callable[[str, str, Mapping[str, object]], str] | None = None) -> None:
        self._google = google
        self._create = Creator(google).create if create is None else create

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. One listing of the run's jobs for each region; what it does not show is asked for."""
        known: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
        seen: list[Seen | None] = []
        for one in wanted:
            place = (one.run, _project(one), one.resource.region)
            if place not in known:
                known[place] = list(listed(self._google, *place))
            row = self._row_of(one, known[place])
            seen.append(None if row is None else reading.job(row, one.resource.region, one.run))
        return seen

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create. What else runs under its name is ended first: a slot has one job."""
        there = [row for row in self._named(wanted) if reading.condition(row) is not Condition.LOST]
        for row in there:
            if _is_this(row, wanted):
                return reading.outputs(row)
        for row in there:
            self._end(str(row["name"]), wanted.name)
        body = requests.ready(requests.job(wanted))
        try:
            return self._created(wanted, body)
        except Retryable as error:
            return self._submitted(wanted, error)

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Every setting of a job is fixed."""
        raise Invalid(f"a job cannot change: {wanted.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, made: Made) -> None:
        """See Handler.delete. Whatever it is doing; gone already is success."""
        for name in self._names_of(made):
            self._end(name, made.name)

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. Those that have ended, too: they are on record until they are deleted."""
        for region in sorted(one for one in regions if _REGION.fullmatch(one)):
            for row in listed(self._google, run, self._google.project, region):
                mark = marks.of_labels(reading.labels(row))
                if mark is not None:
                    yield reading.made(row, mark, region)

    def _row_of(self, wanted: Wanted, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        known = wanted.outputs.get("id")
        if known is None:
            return next((row for row in rows if _is_this(row, wanted)), None)
        row = next((row for row in rows if reading.outputs(row)["id"] == known), None)
        return described(self._google, wanted.outputs["name"]) if row is None else row

    def _created(self, wanted: Wanted, body: Mapping[str, object]) -> Mapping[str, str]:
        """Make it, and be patient with what was just made itself: an account, its rights, the service."""
        began = self._google.clock.now()

        def attempt() -> Mapping[str, str] | None:
            try:
                name = self._create(_project(wanted), wanted.resource.region, body)
            except (Invalid, Unauthorized) as error:
                patience = _ENABLED_S if isinstance(error, Disabled) else _KNOWN_S if _is_of_an_account(error) else 0.0
                if self._google.clock.now() - began >= patience:
                    raise
                return None
            return {"name": name, "id": name.rpartition("/")[2]}

        # Later than any last attempt, whose error says more than that time is up.
        deadline = began + 2 * _ENABLED_S
        return waited(self._google.clock, f"the job {wanted.name} can be made", deadline, attempt)

    def _submitted(self, wanted: Wanted, lost: Retryable) -> Mapping[str, str]:
        """What became of a creation without an answer. Raises `lost` if no job is seen: the next apply looks, too."""

        def ask() -> Mapping[str, str] | None:
            for row in self._named(wanted):
                if _is_this(row, wanted) and reading.condition(row) is not Condition.LOST:
                    return reading.outputs(row)
            return None

        clock = self._google.clock
        try:
            return waited(clock, f"the job {wanted.name} is listed", clock.now() + _LISTED_S, ask)
        except Late:
            raise lost from None

    def _end(self, name: str, what: str) -> None:
        """Cancel what has not ended, wait, and delete. Raises Late if it takes longer than any machine should."""
        deadline = self._google.clock.now() + _ENDED_S

        def ended() -> bool | None:
            row = described(self._google, name)
            return True if row is None or reading.state(row) not in reading.LIVE else None

        try:
            if ended() is None:
                cancel(self._google, name)
                waited(self._google.clock, f"the job {what} has ended", deadline, ended)
            told = self._google.call("aiplatform", "DELETE", f"v1/{name}")
            self._google.finished("aiplatform", told, f"the job {what} is deleted")
        except Disabled:
            raise
        except Absent:
            return

    def _names_of(self, made: Made) -> list[str]:
        """Of what is to end: the job as recorded, or whatever of its name was made and never recorded."""
        if name := made.outputs.get("name"):
            return [name]
        place = place_of(made)
        rows = () if place is None else listed(self._google, *place, made.name)
        return [str(row["name"]) for row in rows]

    def _named(self, wanted: Wanted) -> Iterator[Mapping[str, Any]]:
        """The run's jobs of this name, whatever became of them."""
        return listed(self._google, wanted.run, _project(wanted), wanted.resource.region, wanted.name)


def listed(google: Google, run: str, project: str, region: str, name: str | None = None) -> Iterator[Mapping[str, Any]]:
    """All jobs of a run in a region, or those of this name, newest first. None while the service is off."""
    wanted = f'labels.{marks.RUN_LABEL}="{marks.run_mark(run)}"'
    if name is not None:
        wanted = f'{wanted} AND display_name="{name}"'
    path = f"v1/projects/{project}/locations/{region}/customJobs"
    try:
        yield from google.pages("aiplatform", path, "customJobs", query={"filter": wanted, "pageSize": _PAGE})
    except Absent:
        return


def place_of(made: Made) -> tuple[str, str, str] | None:
    """Run, project and region of a job, as state remembers it; None if it does not."""
    project, told = made.settings.get("project"), made.settings.get("environment")
    run = told.get(contract.RUN_URI) if isinstance(told, Mapping) else None
    return (run, project, made.region) if isinstance(project, str) and isinstance(run, str) else None


def described(google: Google, name: str) -> Mapping[str, Any] | None:
    """What Vertex AI says of a job by its whole name; None if it has none of it."""
    try:
        return google.call("aiplatform", "GET", f"v1/{name}")
    except Absent:
        return None


def cancel(google: Google, name: str) -> None:
    """Ask a job to end, by its whole name. One that ended just now is success, and one that is ending already.

    Raises Absent if there is none, or it does not show yet. Training pipelines refuse what has ended, so jobs may, too.
    """
    try:
        google.call("aiplatform", "POST", f"v1/{name}:cancel", body={})
    except Disabled:
        raise
    except Invalid as error:
        row = described(google, name)
        if row is None and isinstance(error, Absent):
            raise
        if row is not None and reading.state(row) in reading.STOPPABLE:
            raise


def _is_this(row: Mapping[str, Any], wanted: Wanted) -> bool:
    """Whether it is the very one: what had the name before a destroy may have been made with something else."""
    digest = requests.known_by(wanted)
    known = digest is None or reading.labels(row).get(requests.SPEC_LABEL) == digest
    return known and row.get("displayName") == wanted.name


def _is_of_an_account(error: Exception) -> bool:
    return _OF_AN_ACCOUNT.search(str(error)) is not None


def _project(wanted: Wanted) -> str:
    return text(wanted.settings["project"])
