"""Calls the API server of a Kubernetes cluster, with the credentials of a kubeconfig or of the pod that runs skerry.

Requests and answers are plain dicts. lightkube, imported with the first call, finds the cluster and logs in; errors are
translated here. Objects are created by server-side apply only, because another way to create one owns its fields, too.
Sources: Kubernetes, "API Concepts", "Server-Side Apply", "API Priority and Fairness" (429 with Retry-After).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.handler_helpers import NO_LIMIT, Absent
from skerry.runtime.errors import Conflict, Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from skerry.runtime.clock import Clock

_MANAGER: Final = "skerry"
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"

_IN_CLUSTER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S: Final = 30.0
_PAGE: Final = "500"
# A busy server asks to come back in a second; an apply of a thousand jobs at 50 calls a second takes 40.
_PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 1.0
_TOO_MANY: Final = 429


class Cluster:
    """One cluster. Thread-safe. context: of the kubeconfig; None is the current one. calls: held during each call."""

    def __init__(
        self,
        clock: Clock,
        environment: Mapping[str, str],
        context: str | None = None,
        calls: AbstractContextManager[object] = NO_LIMIT,
    ) -> None:
        self.clock = clock
        self._calls = calls
        self._environment = environment
        self._context = context
        self._lock = threading.Lock()
        self._http: Any = None

    def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """One object. Raises Absent if there is none."""
        return self._json("GET", path, query)

    def items(self, path: str, query: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
        """All objects of a list, page by page."""
        following: str | None = None
        while following != "":
            more = {"limit": _PAGE} | ({"continue": following} if following else {})
            answer = self._json("GET", path, {**(query or {}), **more})
            yield from answer.get("items") or ()
            following = str(answer.get("metadata", {}).get("continue") or "")

    def text(self, path: str, query: Mapping[str, str] | None = None) -> str:
        """An answer that is no JSON: a log."""
        return self._call("GET", path, query, None, None).text

    def apply(
        self, path: str, body: Mapping[str, object], manager: str, *, force: bool = False, dry_run: bool = False
    ) -> dict[str, Any]:
        """Create an object, or change it to this one. Raises Conflict if another manager owns a field that differs.

        manager: owns the fields. force: take those of others. dry_run: the server checks it and changes nothing.
        """
        query = {"fieldManager": manager, "fieldValidation": "Strict"}
        query |= {"force": "true"} if force else {}
        query |= {"dryRun": "All"} if dry_run else {}
        return self._json("PATCH", path, query, body, APPLY)

    def patch(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Change fields of an object. Raises Absent if there is none."""
        return self._json("PATCH", path, {"fieldManager": _MANAGER}, body, MERGE)

    def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Ask a question whose answer is an object, such as a review of rights."""
        return self._json("POST", path, None, body, "application/json")

    def delete(self, path: str, uid: str | None = None) -> None:
        """Delete an object after what it owns. Raises Absent if there is none, Conflict if it has another uid."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        condition = {"preconditions": {"uid": uid}} if uid else {}
        self._json("DELETE", path, None, {**options, **condition}, "application/json")

    @property
    def name(self) -> str:
        """The address of its API server, for people. Raises Unauthorized without a configuration."""
        return str(self._client().base_url).rstrip("/")

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        content: str | None = None,
    ) -> dict[str, Any]:
        answer = self._call(method, path, query, body, content)
        try:
            document: dict[str, Any] = answer.json()
        except ValueError as error:
            raise Retryable(f"Kubernetes gave no JSON: {method} {path}: {answer.text[:200]}") from error
        return document

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, object] | None,
        content: str | None,
    ) -> Any:
        """The response of the server. A busy one is asked again for a minute."""
        headers = {"Content-Type": content} if content is not None else {}
        data = None if body is None else json.dumps(body).encode()
        deadline = self.clock.now() + _PATIENCE_S
        while True:
            response = self.send(method, path, dict(query or {}), data, headers)
            if response.status_code != _TOO_MANY or self.clock.now() >= deadline:
                break
            self.clock.pause(float(response.headers.get("Retry-After") or _PAUSE_S))
        if response.status_code >= 400:
            raise _error(method, path, response.status_code, response.text)
        return response

    def send(
        self, method: str, path: str, query: Mapping[str, str], data: bytes | None, headers: Mapping[str, str]
    ) -> Any:
        """Send one request once, and return the response of any status. Raises Retryable, Unauthorized."""
        from httpx2 import HTTPError  # noqa: PLC0415  lightkube's own HTTP client
        from lightkube.core.exceptions import ConfigError  # noqa: PLC0415  see the module

        client = self._client()
        try:
            with self._calls:
                return client.request(method, path, params=query, content=data, headers=headers)
        except ConfigError as error:  # the login program of the kubeconfig
            raise Unauthorized(f"cannot log in to the cluster: {error}") from error
        except (HTTPError, OSError) as error:
            raise Retryable(f"no answer from Kubernetes at {client.base_url}: {error}") from error

    def _client(self) -> Any:
        with self._lock:
            if self._http is None:
                self._http = self._open()
            return self._http

    def _open(self) -> Any:
        try:
            from httpx2 import Timeout  # noqa: PLC0415  only with the first call
            from lightkube.config.client_adapter import Client, ConnectionParams  # noqa: PLC0415  same
            from lightkube.core.exceptions import ConfigError  # noqa: PLC0415  same
        except ModuleNotFoundError as error:
            raise Invalid(f"Kubernetes needs {error.name}: pip install 'skerry[kubernetes]'") from error
        try:
            params = ConnectionParams(timeout=Timeout(_TIMEOUT_S), trust_env=False)
            return Client(self._config(), params)
        except (ConfigError, KeyError, AssertionError, OSError, ValueError) as error:
            text = "no cluster to use: log in, so that kubectl works, or set KUBECONFIG"
            raise Unauthorized(f"{text} ({type(error).__name__}: {error})") from error

    def _config(self) -> Any:
        """The first file of KUBECONFIG, else the pod's own account, else the kubeconfig of the home folder."""
        from lightkube.config.kubeconfig import KubeConfig  # noqa: PLC0415  see the module

        named = self._environment.get("KUBECONFIG", "").partition(os.pathsep)[0]
        if not named and self._context is None and (_IN_CLUSTER / "token").exists():
            return KubeConfig.from_service_account().get()
        home = self._environment.get("HOME") or str(Path.home())
        return KubeConfig.from_file(named or Path(home) / ".kube" / "config").get(self._context)


def jobs_path(namespace: str, name: str | None = None) -> str:
    """The path of the jobs of a namespace, or of one of them."""
    return _path("apis/batch/v1", namespace, "jobs", name)


def core_path(namespace: str, kind: str, name: str | None = None) -> str:
    """The path of the pods, events or service accounts of a namespace, or of one of them."""
    return _path("api/v1", namespace, kind, name)


def _path(group: str, namespace: str, kind: str, name: str | None) -> str:
    path = f"/{group}/namespaces/{namespace}/{kind}"
    return path if name is None else f"{path}/{name}"


def _error(method: str, path: str, status: int, text: str) -> Exception:
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = text[:200] or f"{method} {path}: status {status}"
    match status:
        case 401:
            return Unauthorized(f"Kubernetes does not know these credentials: {message}")
        case 403:
            return Unauthorized(f"Kubernetes refuses: {message}")
        case 404 | 410:
            return Absent(message)
        case 409:
            return Conflict(message)
        case _ if status == _TOO_MANY or status >= 500:
            return Retryable(f"Kubernetes is busy: {message}")
        case _:
            return Invalid(f"Kubernetes refuses it: {message}")
