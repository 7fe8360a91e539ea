"""Lists the custom jobs of this job's group, and creates the one that follows a lost one, by the job's own account.

Vertex AI numbers jobs and does not prevent duplicates. So each job that a replica has created looks when it starts: of
several with one number the first one runs, and the others end. The record of a cancelled job is deleted, so a job that
follows one without a record ends as well. Any account that may create jobs in the project can label one as this run's.
So only jobs of this job's own account count: creating one needs the right to act as it.
Source: Vertex AI API, projects.locations.customJobs.
"""

from __future__ import annotations

import datetime as dt
import http.client
import json
import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from skerry.runtime import contract
from skerry.runtime.container.choose_jobs_to_restart import JobLoss, PeerJob, PeerJobState
from skerry.runtime.contract import may_succeed_again
from skerry.runtime.errors import Invalid, Retryable, Unauthorized
from skerry.runtime.store.credentials.google_metadata import metadata_token_of_job
from skerry.runtime.store.credentials.http import redact, send_request

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.container.choose_jobs_to_restart import Start

_RUN_LABEL: Final = "skerry-run"
_GENERATION_LABEL: Final = "skerry-generation"
_ENDPOINT: Final = "CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM"
_LIVE: Final = frozenset(
    f"JOB_STATE_{state}"
    for state in ("UNSPECIFIED", "QUEUED", "PENDING", "RUNNING", "PAUSED", "UPDATING", "CANCELLING")
)
_GENERATION: Final = re.compile(r"-g\d+$")
_EXIT_CODE: Final = re.compile(r"non-zero status of (\d+)")
# Messages without an exit code: a quota first, then those after which another start may succeed, then the others.
_QUOTA: Final = re.compile(r"quota", re.IGNORECASE)
_PASSING: Final = re.compile(
    r"STOCKOUT|preempt|insufficient (resources|capacity)|not have enough resources|"
    r"resources are (insufficient|.*unavailable)",
    re.IGNORECASE,
)
_FINAL: Final = re.compile(
    r"out-of-memory|out of memory|timeout|time limit|image.*(not found|does not exist)|manifest unknown|"
    r"artifactregistry|pull image|image pull|permission|authentication scopes|unauthorized|CANCELED|cancelled",
    re.IGNORECASE,
)
# google.rpc.Code: INTERNAL, UNAVAILABLE.
_PASSING_CODES: Final = (13, 14)
_PAGE: Final = 100
# A description has about 5 KB.
_MAX_BYTES: Final = 4 << 20


class _AbsentError(Invalid):
    """There is no record of the job."""


class VertexPeerJobs:
    """See PeerJobs. place: `projects/PROJECT/locations/REGION`. number: of this job."""

    def __init__(self, place: str, number: str, environment: Mapping[str, str]) -> None:
        self._place, self._own = place, number
        self._environment = environment

    def list(self) -> Sequence[PeerJob]:
        """See PeerJobs.list. Of several jobs with one number only the first: the others end when they start."""
        first: dict[tuple[str, int], PeerJob] = {}
        own = self._read(self._own)
        wanted = quote(f'labels.{_RUN_LABEL}="{self._labels(own)[_RUN_LABEL]}"')
        query = f"pageSize={_PAGE}&filter={wanted}"
        token = ""
        while True:
            answer = self._ask("GET", f"{self._place}/customJobs?{query}{token}")
            for row in answer.get("customJobs", []):
                if _account(row) != _account(own):
                    continue
                job = self._job(row)
                earlier = first.get((job.slot, job.generation))
                if earlier is None or (job.created_s, job.key) < (earlier.created_s, earlier.key):
                    first[job.slot, job.generation] = job
            if not answer.get("nextPageToken"):
                return [*first.values()]
            token = f"&pageToken={quote(answer['nextPageToken'])}"

    def read_loss(self, job: PeerJob) -> JobLoss:
        """See PeerJobs.read_loss."""
        try:
            row = self._read(job.key)
        except _AbsentError:
            return JobLoss(again=False, reason="no record", is_cancelled=True, description={})
        error: Mapping[str, Any] = row.get("error", {})
        return JobLoss(
            # It may have changed since it was listed.
            again=row.get("state") == "JOB_STATE_FAILED" and may_help(error),
            reason=redact(str(error.get("message", ""))),
            is_cancelled=False,
            description=row,
        )

    def start_next(self, start: Start) -> str:
        """See PeerJobs.start_next. The new job is the lost one in all but number and the mark of its origin."""
        row = self._ask("POST", f"{self._place}/customJobs", next_body(start.loss.description, start.generation))
        return str(row["name"]).rpartition("/")[2]

    def superfluous(self) -> str | None:
        """See PeerJobs.superfluous: the lost job was cancelled meanwhile, or another job has this one's number."""
        own = self._read(self._own)
        if (lost := self._labels(own).get(contract.REVIVED_LABEL)) is None:
            return None
        job = self._job(own)
        same = (other for other in self.list() if (other.slot, other.generation) == (job.slot, job.generation))
        first = next(same, job)
        if first.key != job.key:
            return f"{first.key} was created before this job, for the same slot"
        try:
            self._read(lost)
        except _AbsentError:
            return f"{lost}, which this job follows, was cancelled"
        return None

    def _job(self, row: Mapping[str, Any]) -> PeerJob:
        state = str(row.get("state") or "JOB_STATE_PENDING")
        failed = PeerJobState.FAILED if state == "JOB_STATE_FAILED" else PeerJobState.ENDED
        pools: Sequence[Mapping[str, Any]] = row["jobSpec"]["workerPoolSpecs"]
        variables = {item["name"]: item.get("value", "") for item in pools[0]["containerSpec"].get("env", [])}
        return PeerJob(
            slot=str(variables.get(contract.SLOT, "")),
            key=str(row["name"]).rpartition("/")[2],
            generation=int(self._labels(row).get(_GENERATION_LABEL, 0)),
            state=PeerJobState.LIVE if state in _LIVE else failed,
            created_s=dt.datetime.fromisoformat(str(row["createTime"])).timestamp(),
        )

    @staticmethod
    def _labels(row: Mapping[str, Any]) -> Mapping[str, str]:
        return row.get("labels", {})

    def _read(self, number: str) -> Mapping[str, Any]:
        return self._ask("GET", f"{self._place}/customJobs/{number}")

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        try:
            token = metadata_token_of_job(self._environment)
        except OSError as error:  # its text contains no secret
            raise Retryable(str(error)) from None
        region = self._place.rpartition("/")[2]
        endpoint = self._environment.get(_ENDPOINT) or f"https://{region}-aiplatform.googleapis.com/"
        response = send_request(
            method,
            f"{endpoint.rstrip('/')}/v1/{path}",
            {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            None if body is None else json.dumps(body).encode(),
            max_bytes=_MAX_BYTES,
        )
        try:
            document: Any = json.loads(response.body)
        except ValueError:
            raise Retryable(f"the response is not JSON: status={response.status}") from None
        if response.status == http.client.OK:
            return document
        kinds = {
            http.client.NOT_FOUND: _AbsentError,
            http.client.FORBIDDEN: Unauthorized,
            http.client.UNAUTHORIZED: Unauthorized,
        }
        message = redact(str(document.get("error", {}).get("message", "")))
        raise kinds.get(response.status, Invalid)(f"{method} customJobs: status={response.status}: {message}")


def _account(row: Mapping[str, Any]) -> object:
    return row["jobSpec"].get("serviceAccount")


def may_help(error: Mapping[str, Any]) -> bool:
    """True if another start may succeed after this error of a job. `skerry status` decides in the same way."""
    message = str(error.get("message", ""))
    codes = _EXIT_CODE.findall(message)
    if codes:
        return may_succeed_again(int(codes[0]))
    if _QUOTA.search(message):
        return False
    if _PASSING.search(message):
        return True
    return not _FINAL.search(message) and error.get("code") in _PASSING_CODES


def next_body(description: Mapping[str, Any], generation: int) -> dict[str, object]:
    """CustomJob of the next generation. description: of the lost job. Pure."""
    name, number = str(description["displayName"]), str(description["name"]).rpartition("/")[2]
    labels = {**description["labels"], _GENERATION_LABEL: str(generation), contract.REVIVED_LABEL: number}
    encryption = {"encryptionSpec": description["encryptionSpec"]} if description.get("encryptionSpec") else {}
    return {
        "displayName": f"{_GENERATION.sub('', name)}-g{generation}",
        "jobSpec": description["jobSpec"],
        "labels": labels,
        **encryption,
    }
