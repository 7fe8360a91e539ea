"""Makes a custom job by Google's own SDK, which is imported at the first one: all else goes over REST.

The SDK asks over REST too, at the endpoint and with the credentials of our session, and keeps nothing of what its user
has set for a whole process. What it sends is `requests.job`, and nothing besides.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The SDK's types are protocol buffers, made when it is imported.

from __future__ import annotations

import importlib
import itertools
import json
import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.google.codes import Refusal, refusal
from skerry.infra.clouds.google.session import unauthorized
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.google.session import Google

# The constructor wants a bucket for a folder with the time in its name, which is taken out again: a job of ours writes
# to its run alone.
_NOWHERE: Final = "gs://none"
# The SDK's own is 5 s, after which nobody knows whether there is a job.
_ANSWER_S: Final = 60.0
_ATTEMPTS: Final = 5
_BETWEEN: Final = Backoff(first=1.0, cap=16.0)


class Creator:
    """Creates jobs in one project. Thread-safe."""

    def __init__(self, google: Google) -> None:
        self._google = google
        self._making = threading.RLock()
        self._clients: dict[str, Any] = {}

    def create(self, project: str, region: str, body: Mapping[str, object]) -> str:
        """The whole name of a job that was made of `body`, a CustomJob as REST has it.

        Asked once: Retryable leaves open whether there is a job now. Raises as `Google.call`.
        """
        sdk, client = self._sdk(), self._client(region)
        told = sdk.gapic.CustomJob.from_json(json.dumps(body))
        job = sdk.CustomJob(
            display_name=told.display_name,
            worker_pool_specs=list(told.job_spec.worker_pool_specs),
            labels=dict(told.labels),
            project=project,
            location=region,
            credentials=self._google.credentials,
            encryption_spec_key_name=told.encryption_spec.kms_key_name or None,
            staging_bucket=_NOWHERE,
            base_output_dir=_NOWHERE,
        )
        del job.job_spec.base_output_directory
        job.api_client = client
        submission = _submission(told)
        for number in itertools.count():
            try:
                job.submit(**submission, create_request_timeout=_ANSWER_S)
            except Exception as error:  # of several libraries whose classes are imported late; others go on
                said = _said(error)
                if said is None or not said.is_unread or number + 1 >= _ATTEMPTS:
                    meaning = self._meaning(f"create a custom job in {region}", error, said)
                    if meaning is None:
                        raise
                    raise meaning from error
            else:
                return str(job.resource_name)
            self._google.clock.pause(_BETWEEN.delay(number, self._google.clock))
        raise AssertionError("unreachable")

    def _sdk(self) -> Any:
        with self._making:
            try:
                found = importlib.import_module("google.cloud.aiplatform")
            except ImportError as error:
                text = "jobs of Vertex AI are made with google-cloud-aiplatform: pip install 'skerry[vertex]'"
                raise Invalid(text) from error
            # It tells of every job on the terminal, in the middle of what is told there.
            logging.getLogger("google.cloud.aiplatform.jobs").setLevel(logging.WARNING)
            return found

    def _meaning(self, what: str, error: Exception, said: Refusal | None) -> SkerryError | None:
        """One of our errors for one of the SDK's; None for what is none of its own."""
        if said is not None:
            return self._google.meaning("aiplatform", what, said)
        auth = importlib.import_module("google.auth.exceptions")
        if isinstance(error, auth.GoogleAuthError) and not isinstance(error, auth.TransportError):
            return unauthorized(error)
        modules = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
        # Whatever else goes wrong between here and there: there may be a job now.
        asked = modules & {"google", "requests", "urllib3"}
        return Retryable(f"no answer from Google: {what}: {error}") if asked else None

    def _client(self, region: str) -> Any:
        with self._making:
            if region not in self._clients:
                place = self._google.endpoint("aiplatform", f"v1/projects/p/locations/{region}/customJobs")
                self._clients[region] = self._sdk().gapic.JobServiceClient(
                    credentials=self._google.credentials, transport="rest", client_options={"api_endpoint": place}
                )
            return self._clients[region]


def _submission(told: Any) -> dict[str, Any]:
    """What the SDK takes with a submission instead of with the job."""
    spec, scheduling = told.job_spec, told.job_spec.scheduling
    return {
        "service_account": spec.service_account,
        "network": spec.network or None,
        "timeout": _seconds(scheduling, "timeout"),
        "disable_retries": scheduling.disable_retries,
        "restart_job_on_worker_restart": scheduling.restart_job_on_worker_restart,
        "scheduling_strategy": scheduling.strategy,
        "max_wait_duration": _seconds(scheduling, "max_wait_duration"),
    }


def _seconds(scheduling: Any, name: str) -> int | None:
    """A duration, read as 0 where there is none, which for a wait is without end."""
    return int(getattr(scheduling, name).total_seconds()) if name in scheduling else None


def _said(error: Exception) -> Refusal | None:
    """What the service answered; None if it did not."""
    response = getattr(error, "response", None)
    status, content = getattr(response, "status_code", None), getattr(response, "content", None)
    return refusal(status, content) if isinstance(status, int) and isinstance(content, bytes) else None
