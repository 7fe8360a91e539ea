"""Calls Hugging Face's API for jobs, with the public functions of huggingface_hub. Errors are translated.

The methods of HfApi for jobs wait without a limit, and drop the times of log lines; so requests are sent here, and
answers are parsed by the SDK's own classes. The SDK is imported with the first call.
Source: huggingface_hub 2.4, `_jobs_api.py` and `hf_api.py`.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Answers of the API have no types.

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from skerry.infra.clouds.handler_helpers import NO_LIMIT, Absent, Event
from skerry.runtime.errors import Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from huggingface_hub import JobHardwareInfo, JobInfo

    from skerry.runtime.clock import Clock

_ENDPOINT: Final = "https://huggingface.co"
_TIMEOUT_S: Final = 30.0
# The log of a running job is replayed at once; then the connection is quiet for up to 30 s.
_QUIET_S: Final = 5.0
_BUSY: Final = 429
_LOG_IN: Final = "set HF_TOKEN to a token that may write, or run `hf auth login`"
_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 2.0
# The service's own line before the first of the job.
_BANNER: Final = "===== Job started"


class Hub:
    """The API, as the user of the token in `environment`, or of `hf auth login`. Thread-safe.

    calls: held during each call.
    """

    def __init__(
        self,
        clock: Clock,
        environment: Mapping[str, str],
        calls: AbstractContextManager[object] = NO_LIMIT,
    ) -> None:
        self.clock = clock
        self._calls = calls
        self._endpoint = (environment.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")
        self._token = environment.get("HF_TOKEN") or None

    def user(self) -> dict[str, Any]:
        """The user of the token, with the organizations."""
        return self._json("GET", "/api/whoami-v2")

    def hardware(self) -> list[JobHardwareInfo]:
        """The flavors, with their prices."""
        from huggingface_hub import JobHardwareInfo  # noqa: PLC0415  see the module

        return [JobHardwareInfo(**row) for row in self._json("GET", "/api/jobs/hardware")]

    def jobs(self, namespace: str, query: Sequence[tuple[str, str]]) -> Iterator[JobInfo]:
        """The jobs of a namespace that match the query, newest first."""
        from huggingface_hub import JobInfo  # noqa: PLC0415  see the module

        url: str | None = self._url(jobs_path(namespace))
        parameters: Sequence[tuple[str, str]] | None = query
        while url is not None:
            response = self._call("GET", url, params=parameters)
            for row in response.json():
                yield JobInfo(**row)
            # The link to the next page holds the query.
            url, parameters = response.links.get("next", {}).get("url"), None

    def job(self, namespace: str, job: str) -> JobInfo:
        """One job. Raises Absent if there is none."""
        from huggingface_hub import JobInfo  # noqa: PLC0415  see the module

        return JobInfo(**self._json("GET", jobs_path(namespace, job)))

    def create(self, namespace: str, body: Mapping[str, object]) -> str:
        """Create a job, once; its id. Raises Retryable if there was no answer."""
        return str(self._json("POST", jobs_path(namespace), body)["id"])

    def cancel(self, namespace: str, job: str) -> None:
        """Stop a job. Raises Absent if there is none."""
        self._call("POST", self._url(f"{jobs_path(namespace, job)}/cancel"))

    def events(self, namespace: str, job: str) -> Iterator[Event]:
        """The lines of a job so far, always from the first. Raises Absent if there is no such job."""
        import httpx2  # noqa: PLC0415  the SDK's own client
        from huggingface_hub import get_session  # noqa: PLC0415  see the module

        url = self._url(f"{jobs_path(namespace, job)}/logs")
        try:
            with get_session().stream("GET", url, headers=self._headers(), timeout=_QUIET_S) as response:
                if response.status_code != 200:
                    response.read()
                    raise self._error(response)
                yield from _replayed(_lines(response.iter_bytes()))
        except (httpx2.ReadTimeout, httpx2.RemoteProtocolError):  # quiet, or cut off at the end of the job
            return
        except httpx2.HTTPError as error:
            raise Retryable(f"no log of job {job} from {self._endpoint}: {type(error).__name__}") from error

    def _json(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        return self._call(method, self._url(path), json=body).json()

    def _call(self, method: str, url: str, **more: Any) -> Any:
        """The response. A busy service is asked again for a minute."""
        deadline = self.clock.now() + _PATIENCE_S
        while True:
            response = self.send(method, url, **more)
            if response.status_code != _BUSY or self.clock.now() >= deadline:
                break
            self.clock.pause(_PAUSE_S)
        if response.status_code >= 400:
            raise self._error(response)
        return response

    def send(self, method: str, url: str, **more: Any) -> Any:
        """Send one request once, and return the response of any status. Raises Retryable."""
        try:
            import httpx2  # noqa: PLC0415  the SDK's own client
            from huggingface_hub import get_session  # noqa: PLC0415  see the module
        except ModuleNotFoundError as error:
            raise Invalid(f"Hugging Face Jobs need {error.name}: pip install 'skerry[hf-jobs]'") from error
        try:
            with self._calls:
                return get_session().request(method, url, headers=self._headers(), timeout=_TIMEOUT_S, **more)
        except httpx2.HTTPError as error:
            raise Retryable(f"no answer from {self._endpoint}: {type(error).__name__}: {error}") from error

    def _headers(self) -> dict[str, str]:
        from huggingface_hub import get_token  # noqa: PLC0415  see the module

        token = self._token or get_token()
        if token is None:
            raise Unauthorized(f"no token of Hugging Face: {_LOG_IN}")
        # The SDK's own function for headers calls the service to learn about coding agents.
        return {"Authorization": f"Bearer {token}", "User-Agent": "skerry"}

    def _url(self, path: str) -> str:
        return f"{self._endpoint}{path}"

    def _error(self, response: Any) -> Exception:
        message = response.headers.get("X-Error-Message") or _message(response.text) or "no reason given"
        match response.status_code:
            case 401:
                return Unauthorized(f"Hugging Face does not accept the token: {message}; {_LOG_IN}")
            case 403:
                return Unauthorized(f"Hugging Face refuses: {message}; {_LOG_IN}")
            case 402:
                return Unauthorized(f"Hugging Face asks for a payment first: {message}")
            case 404:
                return Absent(message)
            case status if status == _BUSY or status >= 500:
                return Retryable(f"Hugging Face is busy: {message} ({status})")
            case status:
                return Invalid(f"Hugging Face refuses it: {message} ({status})")


def jobs_path(namespace: str, job: str | None = None) -> str:
    """The path of the jobs of a namespace, or of one of them."""
    path = f"/api/jobs/{quote(namespace, safe='')}"
    return path if job is None else f"{path}/{quote(job, safe='')}"


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """The whole lines of a stream. `iter_lines` also ends one within JSON, at characters such as U+2028."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)


def _replayed(lines: Iterator[str]) -> Iterator[Event]:
    """The events of a stream up to the first sign that it waits for new ones: a comment that keeps it alive."""
    for line in lines:
        if line.startswith(":"):
            return
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            text = str(event.get("data", ""))
            if not text.startswith(_BANNER):
                at_s = dt.datetime.fromisoformat(event["timestamp"]).timestamp()
                yield Event(at_s=at_s, text=text.rstrip("\r\n"), cursor="")


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
