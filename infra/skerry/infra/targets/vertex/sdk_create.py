"""Creates a custom job with Google's client, which is imported at the first creation. All other calls use REST.

`JobServiceClient` of google-cloud-aiplatform uses REST too, here with the endpoint and credentials of our session. It
sends exactly `requests.job`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The client's types are protocol buffers, generated when it is imported.

from __future__ import annotations

import importlib
import itertools
import json
import threading
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.google.errors import Refusal, parse_refusal
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.google.session import Google

# The client's default of 5 s is too short: after a timeout it is unknown whether there is a job.
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
        client, parent = self._client(region), f"projects/{project}/locations/{region}"
        job = self._sdk().CustomJob.from_json(json.dumps(body))
        for number in itertools.count():
            try:
                with self._google.calls:
                    created = client.create_custom_job(parent=parent, custom_job=job, retry=None, timeout=_ANSWER_S)
            except Exception as error:  # of several libraries whose classes are imported late; others go on
                answer = _answer_of(error)
                if answer is None or not answer.is_unread or number + 1 >= _ATTEMPTS:
                    meaning = self._meaning(f"create a custom job in {region}", error, answer)
                    if meaning is None:
                        raise
                    raise meaning from error
            else:
                return str(created.name)
            self._google.clock.pause(_BETWEEN.delay(number, self._google.clock))
        raise AssertionError("unreachable")

    def _sdk(self) -> Any:
        with self._making:
            try:
                return importlib.import_module("google.cloud.aiplatform_v1")
            except ImportError as error:
                text = "jobs of Vertex AI are made with google-cloud-aiplatform: pip install 'skerry[vertex]'"
                raise Invalid(text) from error

    def _meaning(self, what: str, error: Exception, answer: Refusal | None) -> SkerryError | None:
        """Translate an error of the client; None for errors of other libraries."""
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
                self._clients[region] = self._sdk().JobServiceClient(
                    credentials=self._google.login.credentials, transport="rest", client_options={"api_endpoint": place}
                )
            return self._clients[region]


def _answer_of(error: Exception) -> Refusal | None:
    """Return the answer of the service; None if there was none."""
    response = getattr(error, "response", None)
    status, content = getattr(response, "status_code", None), getattr(response, "content", None)
    return parse_refusal(status, content) if isinstance(status, int) and isinstance(content, bytes) else None
