"""Jobs of Hugging Face as `labelled_jobs` handles them: states, messages, exit codes.

The exit code of a job is only in the text of its status: "Job failed with exit code: 1. Reason: Error".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.handler_helpers import Absent
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.target_and_store_interfaces import stem_of
from skerry.infra.targets.hf_jobs import requests
from skerry.infra.targets.shared.job_view_helpers import AGAIN
from skerry.infra.targets.shared.labelled_jobs import NAME_LABEL, LabelledJob, run_label
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.infra.targets.shared.store_secrets_option import values_of
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from huggingface_hub import JobInfo

    from skerry.infra.clouds.handler_helpers import Event
    from skerry.infra.provision.graph import Json
    from skerry.infra.provision.handler import Desired
    from skerry.infra.targets.hf_jobs.jobs_api import Hub
    from skerry.runtime.clock import Clock

LIVE: Final = ("SCHEDULING", "RUNNING")
DONE: Final = "COMPLETED"
_STOPPED: Final = ("CANCELED", "DELETED")
_EXIT_CODE: Final = re.compile(r"exit code:?\s*(\d+)", re.IGNORECASE)
_TIMEOUT: Final = re.compile(r"time ?out|timed out", re.IGNORECASE)
_STAGES: Final = {
    "SCHEDULING": "waits for a machine of its flavor, or its image is being pulled",
    "RUNNING": "",
    DONE: "",
    **dict.fromkeys(_STOPPED, f"it was stopped; {AGAIN}"),
}
# The meaning of a message, by a pattern in it; the first that is found counts.
_MEANINGS: Final = (
    (
        re.compile(r"OOMKilled|out of memory", re.IGNORECASE),
        "it used more memory than its machine has; take a larger flavor",
    ),
    (_EXIT_CODE, ""),
    (
        re.compile(r"pull|manifest|registry", re.IGNORECASE),
        "its image could not be pulled; it must be public ({message})",
    ),
)


class HfJobs:
    """See JobService. A region is a namespace."""

    def __init__(self, hub: Hub, environment: Mapping[str, str]) -> None:
        self._hub = hub
        self._environment = environment

    @property
    def title(self) -> str:
        """See JobService."""
        return "Hugging Face"

    @property
    def clock(self) -> Clock:
        """See JobService."""
        return self._hub.clock

    def listed(self, region: str, run: str) -> Iterable[LabelledJob]:
        """See JobService. Live jobs that lost their labels have the run in their variables."""
        name, value = run_label(run)
        labelled = [parse(row) for row in self._hub.jobs(region, [("label", f"{name}={value}")])]
        known = {job.id for job in labelled}
        live = self._hub.jobs(region, [("stage", stage) for stage in LIVE])
        lost = [parse(row) for row in live if row.id not in known and _run_of(row) == run]
        return [*labelled, *lost]

    def described(self, region: str, job: str) -> LabelledJob | None:
        """See JobService."""
        try:
            return parse(self._hub.job(region, job))
        except Absent:
            return None

    def submit(self, desired: Desired) -> str:
        """See JobService. Raises Invalid if a secret is not in the operator's environment."""
        body = ready(requests.job(desired))
        secrets: Mapping[str, str] = body["secrets"]  # pyright: ignore[reportAssignmentType]  names, by the options
        return self._hub.create(desired.resource.region, {**body, "secrets": values_of(secrets, self._environment)})

    def stop(self, region: str, job: str) -> None:
        """See JobService."""
        if parse(self._hub.job(region, job)).live:
            self._hub.cancel(region, job)

    def events(self, region: str, job: str) -> Iterator[Event]:
        """See JobService."""
        return self._hub.events(region, job)


def parse(row: JobInfo) -> LabelledJob:
    """Parse a job. Pure."""
    stage, message = str(getattr(row.status.stage, "value", row.status.stage)), row.status.message or ""
    match = _EXIT_CODE.search(message)
    late = match is None and _TIMEOUT.search(message) is not None
    return LabelledJob(
        id=row.id,
        labels={**_labels_of(row), **(row.labels or {})},
        state=stage,
        condition=_condition(stage),
        settings=_settings(row),
        why=_why(stage, message, late=late),
        exit_code=None if match is None else int(match[1]),
        # An unknown failure may pass; `faults.restarts` limits how often it is tried.
        passing=stage not in {*LIVE, DONE, *_STOPPED} and not late,
        stopped=stage in _STOPPED,
        started_s=None if row.started_at is None else row.started_at.timestamp(),
        ended_s=None if row.finished_at is None else row.finished_at.timestamp(),
    )


def _condition(stage: str) -> Condition:
    if stage == DONE:
        return Condition.DONE
    return Condition.READY if stage in LIVE else Condition.LOST


def _why(stage: str, message: str, *, late: bool) -> str:
    """The meaning of a stage and its message, without that of an exit code."""
    why = _STAGES.get(stage)
    if why is not None:
        return f"{why} ({message})" if why and message else why
    if late:
        return "its time limit was reached: max_runtime, or the limits of the run"
    meaning = next((text for pattern, text in _MEANINGS if pattern.search(message)), None)
    if meaning is not None:
        return meaning.format(message=message)
    return f"{message or 'it failed without a reason'}; {AGAIN}"


def _labels_of(row: JobInfo) -> dict[str, str]:
    """The labels of a job of skerry's, by its variables: those cannot change."""
    run, slot = _run_of(row), (row.environment or {}).get(contract.SLOT)
    if run is None or not slot:
        return {}
    label, value = run_label(run)
    return {label: value, owner_labels.KEY_LABEL: str(slot), NAME_LABEL: f"{stem_of(run)}-{slot}"}


def _settings(row: JobInfo) -> dict[str, Json]:
    return {
        "image": row.docker_image or f"{requests.SPACES}{row.space_id}",
        "command": [*(row.command or ()), *(row.arguments or ())],
        "environment": {name: str(value) for name, value in (row.environment or {}).items()},
        "flavor": str(getattr(row.flavor, "value", row.flavor)),
    }


def _run_of(row: JobInfo) -> str | None:
    run = (row.environment or {}).get(contract.RUN_URI)
    return run if isinstance(run, str) else None
