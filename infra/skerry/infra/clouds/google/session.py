"""Calls to Google Cloud: REST over one session of google-auth's, and errors named for what the caller does next.

The only file that holds the library's untyped values and imports it, lazily: planning for another cloud needs none.
What can be tried again has been tried again before an error comes out of here.
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

from skerry.infra.clouds.google.codes import Kind, Refusal, failure, kind_of, refusal
from skerry.infra.clouds.handling import Absent, Late, waited
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.graph import Json
    from skerry.runtime.clock import Clock

__all__ = ["Absent", "Conflict", "Disabled", "Google", "Identity", "Late", "refused", "unauthorized", "waited"]

TOKEN: Final = "CLOUDSDK_AUTH_ACCESS_TOKEN"  # noqa: S105  the name of a variable
"""gcloud's own name for a token to act with, instead of the default credentials."""

_SCOPES: Final = ("https://www.googleapis.com/auth/cloud-platform",)
# google-auth's own name for the project that calls are counted for.
_QUOTA: Final = "GOOGLE_CLOUD_QUOTA_PROJECT"
# Google's own, that a person's login with gcloud counts for if he has set no other; most services refuse them.
_SHARED: Final = frozenset({"764086051850", "32555940559"})
_PROJECTS: Final = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")
_ENDPOINT: Final = "CLOUDSDK_API_ENDPOINT_OVERRIDES_{}"
# What gcloud's own overrides of two services end in, and our paths begin with.
_PATHS: Final = ("/storage/v1", "/compute/v1")
_LOCATION: Final = re.compile(r"/locations/([a-z0-9-]+)")

# A hung connection must not hold an apply for long; five attempts span some 15 s of a busy service. Rates are counted
# by the minute, and others use them up, too.
_CONNECT_S: Final = 10
_READ_S: Final = 60
_ATTEMPTS: Final = 5
_PATIENCE_S: Final = 150.0
_BETWEEN: Final = Backoff(first=1.0, cap=16.0)
_POLLING: Final = Backoff(first=0.5, cap=10.0)
_OPERATION_S: Final = 300.0
# A service that was just enabled still says for minutes that it is not (Service Usage, "Enabling services").
_ENABLED_LATE_S: Final = 300.0


class Disabled(Absent):
    """The service is not enabled in the project, so nothing of it is there; what is made of it cannot be made."""


class _Refused(Exception):  # noqa: N818  the cause of ours
    """An answer that is an error."""

    def __init__(self, said: Refusal) -> None:
        super().__init__(str(said))
        self.said = said


class _NoAnswerError(Exception):
    """sent: whether something may have reached the service."""

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Whose credentials these are. number: of the project. principal: a name for people."""

    project: str
    number: str
    principal: str


class Google:
    """A project, as these credentials reach it. Thread-safe; asks nothing before the first call.

    environment: where token, project and endpoints are looked for; credentials are found by google-auth, which looks in
    the process's own. project: goes before that of the environment. heard: told "before" and "after" each request, and
    which, so that a test can listen.
    """

    def __init__(
        self,
        clock: Clock,
        environment: Mapping[str, str],
        *,
        project: str | None = None,
        heard: Callable[[str, str], None] = lambda _when, _what: None,
    ) -> None:
        self.clock = clock
        self._environment = dict(environment)
        self._named = project
        self._heard = heard
        self._making = threading.RLock()
        self._session: Any = None
        self._credentials: Any = None
        self._default_project: str | None = None
        self._identity: Identity | None = None
        self._identifying = False
        self._enabled_s: dict[str, float] = {}

    @property
    def project(self) -> str:
        """The id of the project that everything is in. Raises Invalid if nobody names one."""
        named = self._known_project()
        if not named:
            self._opened()
            named = self._known_project()
        if not named:
            raise Invalid(
                "no project of Google Cloud is named: write `project` in a group that runs there, set "
                "GOOGLE_CLOUD_PROJECT, or run `gcloud config set project PROJECT`"
            )
        return named

    def identity(self) -> Identity:
        """Project and name behind the credentials; asked once. Raises Unauthorized if there are none."""
        with self._making:
            if self._identity is None:
                self._identifying = True
                try:
                    project, number = self._project_and_number()
                finally:
                    self._identifying = False
                who = _principal(self.credentials, self._environment.get(TOKEN))
                self._identity = Identity(project=project, number=number, principal=who)
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
        """One request. service: as in its address, storage. path: v1/projects/p, with what is in it encoded.

        A busy service is asked again, so what is made must have a name: a repeat then says that it exists. Raises
        Absent for what is not there (Disabled, if the whole service is off), Conflict for what exists or was written by
        somebody else meanwhile, Unauthorized, Retryable, or Invalid with the service's own words.
        """
        return self._asked(service, method, path, body, query, again=lambda _error: True)

    def call_once(
        self, service: str, method: str, path: str, *, body: Mapping[str, Json] | None = None
    ) -> dict[str, Any]:
        """As `call`, for what a repeat would do a second time: only what was turned away unread is asked again.

        Retryable leaves open whether it was done.
        """
        return self._asked(service, method, path, body, None, again=_is_unread)

    def pages(
        self,
        service: str,
        path: str,
        key: str,
        *,
        query: Mapping[str, str | Sequence[str]] | None = None,
        body: Mapping[str, Json] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """The items under `key` of every page of a listing, as they come. body: it is a POST. Raises as `call`."""
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
        """The response of a long-running operation, waited for. what: for people, "the pool x is made".

        Raises Late if it takes longer, and what `call` raises if it failed.
        """
        told: Mapping[str, Any] = operation

        def look() -> Mapping[str, Any] | None:
            nonlocal told
            if told.get("done"):
                return told
            told = self.call(service, "GET", f"{version}/{told['name']}")
            return told if told.get("done") else None

        if not told.get("done"):
            told = waited(self.clock, what, self.clock.now() + within_s, look)
        if "error" in told:
            said = failure(told["error"])
            raise self.meaning(service, what, said) from _Refused(said)
        return dict(told.get("response", {}))

    def meaning(self, service: str, what: str, said: Refusal) -> SkerryError:
        """What a caller is to make of an answer that is an error: one of those that `call` raises."""
        told, kind = f"{what}: {said}", kind_of(said)
        if kind is Kind.DENIED:
            lacking = f"permission {said.permission}" if said.permission else "permission"
            return Unauthorized(f"these credentials lack the {lacking}: {told}")
        if kind is Kind.DISABLED:
            name = said.service or f"{service}.googleapis.com"
            return _disabled(name, self._known_project(), said.consumer, is_ours=self._is_ours(said.consumer))
        meaning, words = _MEANINGS[kind]
        return meaning(words.format(told))

    def enabled(self, service: str) -> None:
        """It was just enabled: what it says for some minutes, that it is not, is asked again. service: iam."""
        with self._making:
            self._enabled_s[service] = self.clock.now()

    def fetched(self, url: str, media_type: str) -> bytes:
        """What lies at an address, asked for with these credentials: of registries. Raises as `call`."""
        what = f"{urlsplit(url).hostname} GET {urlsplit(url).path}"
        return self._tried("artifactregistry", what, "GET", url, headers={"Accept": media_type}).content

    @property
    def credentials(self) -> Any:
        """What google-auth found, for the vendor's own SDK."""
        self._opened()
        return self._credentials

    def endpoint(self, service: str, path: str = "") -> str:
        """Where a service is, without a slash at its end. path: aiplatform is another place in each region."""
        named = self._environment.get(_ENDPOINT.format(service.upper()))
        if named:
            plain = named.rstrip("/")
            return next((plain.removesuffix(end) for end in _PATHS if plain.endswith(end)), plain)
        region = _LOCATION.search(f"/{path}") if service == "aiplatform" else None
        return f"https://{region[1]}-aiplatform.googleapis.com" if region else f"https://{service}.googleapis.com"

    def _project_and_number(self) -> tuple[str, str]:
        try:
            told = self.call("cloudresourcemanager", "GET", f"v3/projects/{self.project}")
        except Disabled:
            # Off in new projects; what says which services are on names the project by its number, too.
            path = f"v1/projects/{self.project}/services/serviceusage.googleapis.com"
            parent = str(self.call("serviceusage", "GET", path)["parent"])
            return self.project, parent.removeprefix("projects/")
        return str(told["projectId"]), str(told["name"]).removeprefix("projects/")

    def _known_project(self) -> str:
        written = next((self._environment[name] for name in _PROJECTS if self._environment.get(name)), "")
        return self._named or written or self._default_project or ""

    def _asked(
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
                patient = _is_of_a_rate(error) and self.clock.now() - began < _PATIENCE_S
                if not (worth or patient or self._comes_late(service, error)):
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
            answer = session.request(method, url, timeout=(_CONNECT_S, _READ_S), **parameters)
            if answer.status_code < 400 and "json" in parameters and answer.content:
                answer.json()
        except auth.TransportError as error:
            raise _NoAnswerError(f"{service}: {error}", sent=False) from error
        except auth.GoogleAuthError as error:
            raise unauthorized(error) from error
        except (requests.ConnectTimeout, requests.ProxyError) as error:
            raise _NoAnswerError(f"{service}: {error}", sent=False) from error
        except (requests.ConnectionError, requests.Timeout, requests.ChunkedEncodingError) as error:
            # A connection that was never made says so in its text alone.
            raise _NoAnswerError(f"{service}: {error}", sent="NewConnectionError" not in str(error)) from error
        except requests.JSONDecodeError as error:
            raise _NoAnswerError(f"{service}: an answer that is no JSON", sent=True) from error
        except requests.RequestException as error:
            raise Invalid(f"cannot ask Google: {what}: {error}") from error
        if answer.status_code >= 400:
            raise _Refused(refusal(answer.status_code, answer.content))
        return answer

    def _comes_late(self, service: str, error: Exception) -> bool:
        """Whether it says that it is off although it was just turned on."""
        if not isinstance(error, _Refused) or kind_of(error.said) is not Kind.DISABLED:
            return False
        if self._is_ours(error.said.consumer) is False:
            return False
        since = self._enabled_s.get(service)
        return since is not None and self.clock.now() - since < _ENABLED_LATE_S

    def _raise(self, service: str, what: str, error: _Refused | _NoAnswerError) -> NoReturn:
        if isinstance(error, _NoAnswerError):
            raise Retryable(f"no answer from Google: {error}") from error
        raise self.meaning(service, what, error.said) from error

    def _is_ours(self, consumer: str) -> bool | None:
        """Whether a call was counted for our project; None if its number cannot be known now."""
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
        """The one session, made when it is first needed."""
        with self._making:
            if self._session is None:
                self._session = self._new_session()
            return self._session

    def _new_session(self) -> Any:
        try:
            transport = importlib.import_module("google.auth.transport.requests")
        except ImportError as error:
            raise Invalid("Google Cloud needs google-auth and requests: pip install 'skerry[gcp]'") from error
        self._credentials, self._default_project = self._found_credentials()
        return transport.AuthorizedSession(self._credentials)

    def _found_credentials(self) -> tuple[Any, str | None]:
        if token := self._environment.get(TOKEN):
            made = importlib.import_module("google.oauth2.credentials").Credentials
            return made(token=token, quota_project_id=self._environment.get(_QUOTA) or None), None
        auth = importlib.import_module("google.auth")
        try:
            return auth.default(scopes=_SCOPES)
        except auth.exceptions.GoogleAuthError as error:
            raise unauthorized(error) from error


def _principal(found: Any, token: str | None) -> str:
    """As well as the library knows; a login of a person has no name in it."""
    for name in ("service_account_email", "account"):
        if told := getattr(found, name, ""):
            return str(told)
    return "the token's owner" if token else "your own login"


def refused(error: BaseException) -> Refusal | None:
    """What the service itself said, of an error that `Google` raised."""
    return error.__cause__.said if isinstance(error.__cause__, _Refused) else None


def _is_passing(error: Exception) -> bool:
    return isinstance(error, _NoAnswerError) or (isinstance(error, _Refused) and kind_of(error.said) is Kind.BUSY)


def _is_of_a_rate(error: Exception) -> bool:
    return isinstance(error, _Refused) and error.said.is_of_a_rate


def _is_unread(error: Exception) -> bool:
    """Whether what was asked was surely not done."""
    return not error.sent if isinstance(error, _NoAnswerError) else isinstance(error, _Refused) and error.said.is_unread


def unauthorized(error: Exception) -> Unauthorized:
    """For an error of google-auth: nobody can be asked with what there is."""
    return Unauthorized(
        f"no credentials of Google Cloud that work: {error}; run `gcloud auth application-default login`, or set "
        f"GOOGLE_APPLICATION_CREDENTIALS or {TOKEN}"
    )


_MEANINGS: Final[Mapping[Kind, tuple[type[SkerryError], str]]] = {
    Kind.BUSY: (Retryable, "Google is busy, or a quota is used up: {}"),
    Kind.EXPIRED: (Unauthorized, "these credentials are not valid, or not any more: {}; log in again"),
    Kind.ABSENT: (Absent, "not there: {}"),
    Kind.TAKEN: (Conflict, "it exists already, is in use, or was changed meanwhile: {}"),
    Kind.REFUSED: (Invalid, "Google refuses: {}"),
}


def _disabled(name: str, project: str, consumer: str, *, is_ours: bool | None) -> SkerryError:
    """A service is off in the project that the call was counted for, which need not be the one that was asked about."""
    other = (
        f"run `gcloud auth application-default set-quota-project {project}`, or set {_QUOTA}={project}; it takes the "
        "permission serviceusage.services.use"
    )
    if is_ours is False:
        return Invalid(
            f"these credentials' calls are counted for the project {consumer}, which is not {project}, and there "
            f"{name} is not enabled: {other}"
        )
    text = (
        f"{name} is not enabled in the project {project}: `skerry apply` enables what it needs, or run "
        f"`gcloud services enable {name} --project {project}`"
    )
    return Disabled(text if is_ours else f"{text}; if {consumer} is not the number of {project}: {other}")
