"""Creates a custom job with Google's SDK, which is imported at the first creation. All other calls use REST.

The SDK uses REST too, with the endpoint and credentials of our session, and without process-wide settings. It sends
exactly `requests.job`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The SDK's types are protocol buffers, generated when it is imported.

from __future__ import annotations

import importlib
import itertools
import json
import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.google.errors import Refusal, parse_refusal
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.google.session import Google

# The constructor requires a bucket for output; it is removed again, because jobs write only to their run.
_NOWHERE: Final = "gs://none"
# The SDK's default of 5 s is too short: after a timeout it is unknown whether there is a job.
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
        """Create a job from `body`, a CustomJob of the REST API, and return its full name.

        After Retryable it is unknown whether there is a job. Raises as `Google.call`.
        """
        sdk, client = self._sdk(), self._client(region)
        message = sdk.gapic.CustomJob.from_json(json.dumps(body))
        job = sdk.CustomJob(
            display_name=message.display_name,
            worker_pool_specs=list(message.job_spec.worker_pool_specs),
            labels=dict(message.labels),
            project=project,
            location=region,
            credentials=self._google.login.credentials,
            encryption_spec_key_name=message.encryption_spec.kms_key_name or None,
            staging_bucket=_NOWHERE,
            base_output_dir=_NOWHERE,
        )
        del job.job_spec.base_output_directory
        job.api_client = client
        submission = _submission(message)
        for number in itertools.count():
            try:
                job.submit(**submission, create_request_timeout=_ANSWER_S)
            except Exception as error:  # of several libraries whose classes are imported late; others go on
                answer = _answer_of(error)
                if answer is None or not answer.is_unread or number + 1 >= _ATTEMPTS:
                    meaning = self._meaning(f"create a custom job in {region}", error, answer)
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
                package = importlib.import_module("google.cloud.aiplatform")
            except ImportError as error:
                text = "jobs of Vertex AI are made with google-cloud-aiplatform: pip install 'skerry[vertex]'"
                raise Invalid(text) from error
            # The SDK logs every job to the terminal, between the lines of our own output.
            logging.getLogger("google.cloud.aiplatform.jobs").setLevel(logging.WARNING)
            return package

    def _meaning(self, what: str, error: Exception, answer: Refusal | None) -> SkerryError | None:
        """Translate an error of the SDK; None for errors of other libraries."""
        if answer is not None:
            return self._google.meaning("aiplatform", what, answer)
        auth = importlib.import_module("google.auth.exceptions")
        if isinstance(error, auth.GoogleAuthError):
            return self._google.login.meaning(error)
        modules = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
        # Any other failure of the connection: there may be a job.
        watched = modules & {"google", "requests", "urllib3"}
        return Retryable(f"no answer from Google: {what}: {error}") if watched else None

    def _client(self, region: str) -> Any:
        with self._making:
            if region not in self._clients:
                place = self._google.endpoint("aiplatform", f"v1/projects/p/locations/{region}/customJobs")
                self._clients[region] = self._sdk().gapic.JobServiceClient(
                    credentials=self._google.login.credentials, transport="rest", client_options={"api_endpoint": place}
                )
            return self._clients[region]


def _submission(message: Any) -> dict[str, Any]:
    """Return the settings that the SDK accepts with a submission instead of with the job."""
    spec, scheduling = message.job_spec, message.job_spec.scheduling
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
    """Return a duration of the schedule; None if it is not set, which would read as 0, unlimited."""
    return int(getattr(scheduling, name).total_seconds()) if name in scheduling else None


def _answer_of(error: Exception) -> Refusal | None:
    """Return the answer of the service; None if there was none."""
    response = getattr(error, "response", None)
    status, content = getattr(response, "status_code", None), getattr(response, "content", None)
    return parse_refusal(status, content) if isinstance(status, int) and isinstance(content, bytes) else None
