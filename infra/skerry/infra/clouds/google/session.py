"""Calls to Google Cloud: REST over one google-auth session, and its errors translated into ours.

The only file that holds the library's untyped values. It imports the library lazily: planning for another cloud needs
none. Calls are retried before an error leaves this module.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# google-auth and requests have no types.

from __future__ import annotations

import importlib
import itertools
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import urlsplit

from skerry.infra.clouds.google.errors import Kind, Refusal, failure, kind_of, parse_refusal
from skerry.infra.clouds.google.login import QUOTA, Login
from skerry.infra.clouds.handler_helpers import NO_LIMIT, Absent, wait_for
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from skerry.infra.clouds.google.login import Impersonation
    from skerry.infra.provision.graph import Json
    from skerry.runtime.clock import Clock

# Google's own projects, for user logins with gcloud without a quota project; most services refuse them.
_SHARED: Final = frozenset({"764086051850", "32555940559"})
_PROJECTS: Final = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")
_ENDPOINT: Final = "CLOUDSDK_API_ENDPOINT_OVERRIDES_{}"
# gcloud's overrides of two services end in these, and our paths begin with them.
_PATHS: Final = ("/storage/v1", "/compute/v1")
_LOCATION: Final = re.compile(r"/locations/([a-z0-9-]+)")

# A hung connection must not hold an apply for long; five attempts span some 15 s of a busy service. Rates are counted
# by the minute, for all users together.
_CONNECT_S: Final = 10
_READ_S: Final = 60
_ATTEMPTS: Final = 5
_PATIENCE_S: Final = 150.0
_BETWEEN: Final = Backoff(first=1.0, cap=16.0)
_POLLING: Final = Backoff(first=0.5, cap=10.0)
_OPERATION_S: Final = 300.0
# A newly enabled service reports for minutes that it is disabled (Service Usage, "Enabling services").
_ENABLED_LATE_S: Final = 300.0


class Disabled(Absent):
    """The service is not enabled in the project, so none of its resources exist or can be created."""


def delete_if_present(delete: Callable[[], object]) -> None:
    """Delete a resource. Absent is success; a disabled service is an error, because the resource may exist."""
    try:
        delete()
    except Disabled:
        raise
    except Absent:
        return


class _Refused(Exception):  # noqa: N818  the cause of ours
    """An error answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class _NoAnswerError(Exception):
    """A request without an answer. sent: the service may have received it."""

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The project and name behind the credentials. number: of the project. principal: for people."""

    project: str
    number: str
    principal: str


class Google:
    """Calls to one project. Thread-safe; makes no calls before the first use.

    environment: has token, project and endpoints; google-auth finds credentials in the process's own environment.
    project: overrides that of the environment. impersonation: all calls are made as its account. heard: called with
    "before" and "after" and each request, so that a test can observe the calls.
    """

    def __init__(
        self,
        clock: Clock,
        environment: Mapping[str, str],
        *,
        project: str | None = None,
        impersonation: Impersonation | None = None,
        calls: AbstractContextManager[object] = NO_LIMIT,
        heard: Callable[[str, str], None] = lambda _when, _what: None,
    ) -> None:
        self.clock = clock
        self._environment = dict(environment)
        self._named = project
        self.calls: Final = calls
        self._heard = heard
        self._making = threading.RLock()
        self._session: Any = None
        self.login: Final = Login(self._environment, impersonation, self.endpoint("iamcredentials"))
        self._identity: Identity | None = None
        self._identifying = False
        self._enabled_s: dict[str, float] = {}

    @property
    def project(self) -> str:
        """The id of the project. Raises Invalid if no project is named."""
        project = self._known_project()
        if not project:
            self._opened()
            project = self._known_project()
        if not project:
            raise Invalid(
                "no project of Google Cloud is set: add `project` to a group that runs there, set "
                "GOOGLE_CLOUD_PROJECT, or run `gcloud config set project PROJECT`"
            )
        return project

    def identity(self) -> Identity:
        """Project and name behind the credentials; read once. Raises Unauthorized without credentials."""
        with self._making:
            if self._identity is None:
                self._identifying = True
                try:
                    project, number = self._project_and_number()
                finally:
                    self._identifying = False
                self._identity = Identity(project=project, number=number, principal=self.login.principal())
            return self._identity

    def call(
        self,
        service: str,
        method: str,
        path: str,
        *,
        body: Mapping[str, Json] | None = None,
        query: Mapping[str, str | Sequence[str]] | None = None,
    ) -> dict[str, Any]:
        """One request. service: as in its address, storage. path: v1/projects/p, URL-encoded.

        Requests to a busy service are repeated, so a created resource must have a name: a repeat then raises Conflict.
        Raises Absent if it does not exist (Disabled, if the whole service is disabled), Conflict if it exists or was
        changed meanwhile, Unauthorized, Retryable, or Invalid with the service's own message.
        """
        return self._request(service, method, path, body, query, again=lambda _error: True)

    def call_once(
        self, service: str, method: str, path: str, *, body: Mapping[str, Json] | None = None
    ) -> dict[str, Any]:
        """As `call`, for operations that are not idempotent: repeats only requests that were surely not executed.

        After Retryable, the operation may or may not have been executed.
        """
        return self._request(service, method, path, body, None, again=_was_not_executed)

    def pages(
        self,
        service: str,
        path: str,
        key: str,
        *,
        query: Mapping[str, str | Sequence[str]] | None = None,
        body: Mapping[str, Json] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """The items under `key` of every page of a listing, page by page. body: of a POST. Raises as `call`."""
        token = ""
        while True:
            following = {"pageToken": token} if token else {}
            if body is None:
                page = self.call(service, "GET", path, query={**(query or {}), **following})
            else:
                page = self.call(service, "POST", path, body={**body, **following}, query=query)
            yield from page.get(key, [])
            token = str(page.get("nextPageToken", ""))
            if not token:
                return

    def finished(
        self,
        service: str,
        operation: Mapping[str, Any],
        what: str,
        *,
        version: str = "v1",
        within_s: float = _OPERATION_S,
    ) -> dict[str, Any]:
        """Waits for a long-running operation and returns its response. what: for errors, "the pool x is created".

        Raises NotYetVisible if it takes longer, and the errors of `call` if it failed.
        """
        current: Mapping[str, Any] = operation

        def look() -> Mapping[str, Any] | None:
            row = self.call(service, "GET", f"{version}/{operation['name']}")
            return row if row.get("done") else None

        if not current.get("done"):
            current = wait_for(self.clock, what, self.clock.now() + within_s, look)
        if "error" in current:
            refusal = failure(current["error"])
            raise self.meaning(service, what, refusal) from _Refused(refusal)
        return dict(current.get("response", {}))

    def meaning(self, service: str, what: str, refusal: Refusal) -> SkerryError:
        """The error that `call` raises for a refusal. what: the request, for people."""
        description, kind = f"{what}: {refusal}", kind_of(refusal)
        if kind is Kind.DENIED:
            permission = f"permission {refusal.permission}" if refusal.permission else "permission"
            return Unauthorized(f"these credentials lack the {permission}: {description}")
        if kind is Kind.DISABLED:
            name, consumer = refusal.service or f"{service}.googleapis.com", refusal.consumer
            return _disabled(name, self._known_project(), consumer, is_ours=self._is_ours(consumer))
        error_type, template = _ERRORS[kind]
        return error_type(template.format(description))

    def enabled(self, service: str) -> None:
        """Records that a service was just enabled, so that calls to it are repeated for some minutes. service: iam."""
        with self._making:
            self._enabled_s[service] = self.clock.now()

    def fetched(self, url: str, media_type: str) -> bytes:
        """The content at an address of a registry, with these credentials. Raises as `call`."""
        what = f"{urlsplit(url).hostname} GET {urlsplit(url).path}"
        return self._tried("artifactregistry", what, "GET", url, headers={"Accept": media_type}).content

    def endpoint(self, service: str, path: str = "") -> str:
        """The address of a service, without a slash at its end. path: for aiplatform, has the region."""
        override = self._environment.get(_ENDPOINT.format(service.upper()))
        if override:
            plain = override.rstrip("/")
            return next((plain.removesuffix(end) for end in _PATHS if plain.endswith(end)), plain)
        region = _LOCATION.search(f"/{path}") if service == "aiplatform" else None
        return f"https://{region[1]}-aiplatform.googleapis.com" if region else f"https://{service}.googleapis.com"

    def _project_and_number(self) -> tuple[str, str]:
        try:
            response = self.call("cloudresourcemanager", "GET", f"v3/projects/{self.project}")
        except Disabled:
            # Disabled in new projects; Service Usage also returns the number of the project.
            path = f"v1/projects/{self.project}/services/serviceusage.googleapis.com"
            parent = str(self.call("serviceusage", "GET", path)["parent"])
            return self.project, parent.removeprefix("projects/")
        return str(response["projectId"]), str(response["name"]).removeprefix("projects/")

    def _known_project(self) -> str:
        from_environment = next((self._environment[name] for name in _PROJECTS if self._environment.get(name)), "")
        return self._named or from_environment or self.login.default_project or ""

    def _request(
        self,
        service: str,
        method: str,
        path: str,
        body: Mapping[str, Json] | None,
        query: Mapping[str, str | Sequence[str]] | None,
        *,
        again: Callable[[Exception], bool],
    ) -> dict[str, Any]:
        what, url = f"{service} {method} {path}", f"{self.endpoint(service, path)}/{path}"
        answer = self._tried(service, what, method, url, again=again, params=query, json=body)
        return answer.json() if answer.content else {}

    def _tried(
        self,
        service: str,
        what: str,
        method: str,
        url: str,
        *,
        again: Callable[[Exception], bool] = lambda _error: True,
        **parameters: object,
    ) -> Any:
        began = self.clock.now()
        for number in itertools.count():
            try:
                self._heard("before", what)
                answer = self._sent(service, what, method, url, parameters)
                self._heard("after", what)
            except (_Refused, _NoAnswerError) as error:
                worth = number + 1 < _ATTEMPTS and _is_passing(error) and again(error)
                throttled = _is_of_a_rate(error) and self.clock.now() - began < _PATIENCE_S
                if not (worth or throttled or self._is_just_enabled(service, error)):
                    self._raise(service, what, error)
            else:
                return answer
            self.clock.pause(_BETWEEN.delay(number, self.clock))
        raise AssertionError("unreachable")

    def _sent(self, service: str, what: str, method: str, url: str, parameters: Mapping[str, object]) -> Any:
        """One attempt. Raises _Refused and _NoAnswerError."""
        session = self._opened()
        requests = importlib.import_module("requests.exceptions")
        auth = importlib.import_module("google.auth.exceptions")
        try:
            with self.calls:
                answer = session.request(method, url, timeout=(_CONNECT_S, _READ_S), **parameters)
            if answer.status_code < 400 and "json" in parameters and answer.content:
                answer.json()
        except auth.GoogleAuthError as error:
            meaning = self.login.meaning(error)
            if isinstance(meaning, Retryable):
                raise _NoAnswerError(f"{service}: {meaning}", sent=False) from error
            raise meaning from error
        except (requests.ConnectTimeout, requests.ProxyError) as error:
            raise _NoAnswerError(f"{service}: {error}", sent=False) from error
        except (requests.ConnectionError, requests.Timeout, requests.ChunkedEncodingError) as error:
            # A connection that was never opened is identified by its message only.
            raise _NoAnswerError(f"{service}: {error}", sent="NewConnectionError" not in str(error)) from error
        except requests.JSONDecodeError as error:
            raise _NoAnswerError(f"{service}: the answer is not JSON", sent=True) from error
        except requests.RequestException as error:
            raise Invalid(f"cannot call Google: {what}: {error}") from error
        if answer.status_code >= 400:
            raise _Refused(parse_refusal(answer.status_code, answer.content))
        return answer

    def _is_just_enabled(self, service: str, error: Exception) -> bool:
        """True if the service reports that it is disabled although it was just enabled."""
        if not isinstance(error, _Refused) or kind_of(error.refusal) is not Kind.DISABLED:
            return False
        if self._is_ours(error.refusal.consumer) is False:
            return False
        since = self._enabled_s.get(service)
        return since is not None and self.clock.now() - since < _ENABLED_LATE_S

    def _raise(self, service: str, what: str, error: _Refused | _NoAnswerError) -> NoReturn:
        if isinstance(error, _NoAnswerError):
            raise Retryable(f"no answer from Google: {error}") from error
        raise self.meaning(service, what, error.refusal) from error

    def _is_ours(self, consumer: str) -> bool | None:
        """True if a call was counted for our project; None if the project's number is unknown."""
        if not consumer or consumer == self._known_project():
            return True
        if consumer in _SHARED:
            return False
        with self._making:
            if self._identity is None and not self._identifying:
                with suppress(SkerryError):
                    self.identity()
            return None if self._identity is None else consumer in {self._identity.project, self._identity.number}

    def _opened(self) -> Any:
        """The session, created on first use."""
        with self._making:
            if self._session is None:
                self._session = self._new_session()
            return self._session

    def _new_session(self) -> Any:
        credentials = self.login.credentials
        return importlib.import_module("google.auth.transport.requests").AuthorizedSession(credentials)


def refused(error: BaseException) -> Refusal | None:
    """The refusal behind an error that `Google` raised."""
    return error.__cause__.refusal if isinstance(error.__cause__, _Refused) else None


def _is_passing(error: Exception) -> bool:
    return isinstance(error, _NoAnswerError) or (isinstance(error, _Refused) and kind_of(error.refusal) is Kind.BUSY)


def _is_of_a_rate(error: Exception) -> bool:
    return isinstance(error, _Refused) and error.refusal.is_of_a_rate


def _was_not_executed(error: Exception) -> bool:
    """True if the request was surely not executed."""
    return (
        not error.sent if isinstance(error, _NoAnswerError) else isinstance(error, _Refused) and error.refusal.is_unread
    )


_ERRORS: Final[Mapping[Kind, tuple[type[SkerryError], str]]] = {
    Kind.BUSY: (Retryable, "Google is busy, or a quota is used up: {}"),
    Kind.EXPIRED: (Unauthorized, "these credentials are not valid or have expired: {}; log in again"),
    Kind.ABSENT: (Absent, "does not exist: {}"),
    Kind.TAKEN: (Conflict, "exists already, is in use, or was changed meanwhile: {}"),
    Kind.REFUSED: (Invalid, "Google refuses: {}"),
}


def _disabled(name: str, project: str, consumer: str, *, is_ours: bool | None) -> SkerryError:
    """The error for a service that is disabled in the project that the call was counted for."""
    other = (
        f"run `gcloud auth application-default set-quota-project {project}`, or set {QUOTA}={project}; this needs the "
        "permission serviceusage.services.use"
    )
    if is_ours is False:
        return Invalid(
            f"these credentials' calls are counted for the project {consumer}, which is not {project}; "
            f"{name} is not enabled there: {other}"
        )
    text = (
        f"{name} is not enabled in the project {project}: enable it with "
        f"`gcloud services enable {name} --project {project}`"
    )
    return Disabled(text if is_ours else f"{text}; if {consumer} is not the number of {project}: {other}")
