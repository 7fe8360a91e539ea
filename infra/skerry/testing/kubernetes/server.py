"""The API server: routes a request, checks the caller's rights, records the call, injects faults.

A path that skerry does not use is 404 and recorded as a violation, so that a test can assert that there was none.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from skerry.testing.calls import Call
from skerry.testing.http_server import drop_connection
from skerry.testing.kubernetes.objects import CLUSTER_WIDE, KINDS
from skerry.testing.kubernetes.refusals import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from skerry.testing.calls import Calls
    from skerry.testing.faults import Faults, How
    from skerry.testing.kubernetes.job_controller import JobController
    from skerry.testing.kubernetes.objects import Key, Objects
    from skerry.testing.kubernetes.pod_container_setup import PodLogs

_LOG: Final = logging.getLogger(__name__)
_PATH: Final = re.compile(
    r"/(?:api/v1|apis/batch/v1)(?:/namespaces/(?P<namespace>[^/]+)(?=/.))?/(?P<resource>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<part>[a-z]+))?"
)
_REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_APPLY: Final = "application/apply-patch+yaml"
_BUSY: Final = "the server has received too many requests, please try again later"
_VERBS: Final = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}
Rights = frozenset[tuple[str, str, str]]
"""Namespace, verb and resource, such as ("train", "get", "pods/log"), as a Role and its binding give them."""


@dataclass(frozen=True, kw_only=True)
class KubernetesCall(Call):
    """One call. operation: `apply jobs`, `dry-run jobs`, `list pods`. params: namespace and name. body: as sent."""

    body: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def writes(self) -> bool:
        """True if such a call can change anything."""
        return self.operation.partition(" ")[0] in {"apply", "patch", "create", "delete"}


class CallLimit:
    """Admits so many calls a second; after a pause, as many at once."""

    def __init__(self, objects: Objects, calls_per_s: float) -> None:
        self._objects = objects
        self._rate = self._left = calls_per_s
        self._looked = objects.clock.now()

    def admits(self) -> bool:
        """Count a call, and return whether the server answers it."""
        with self._objects.lock:
            now = self._objects.clock.now()
            self._left = min(self._rate, self._left + (now - self._looked) * self._rate)
            self._looked = now
            if self._left < 1:
                return False
            self._left -= 1
            return True


@dataclass(frozen=True, kw_only=True)
class _Request:
    method: str
    path: str
    query: Mapping[str, str]
    body: Mapping[str, Any]
    content: str
    token: str


class KubernetesApplication:
    """The WSGI application. operator: the user of the token, for messages. rights: None is every right."""

    def __init__(
        self,
        objects: Objects,
        controller: JobController,
        logs: PodLogs,
        calls: Calls,
        faults: Faults,
        token: str,
        issuer: str,
    ) -> None:
        self._objects = objects
        self._controller = controller
        self._logs = logs
        self._calls = calls
        self._faults = faults
        self._token = token
        self._issuer = issuer
        self.version: tuple[str, str] = ("1", "36")
        self.operator = "operator"
        self.rights: Rights | None = None
        self.limit: CallLimit | None = None
        self.violations: Final[list[str]] = []

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Handle one request."""
        length = int(environ.get("CONTENT_LENGTH") or 0)
        raw = environ["wsgi.input"].read(length) if length else b""
        request = _Request(
            method=str(environ["REQUEST_METHOD"]),
            path=str(environ["PATH_INFO"]),
            query=dict(parse_qsl(str(environ.get("QUERY_STRING", "")))),
            body=json.loads(raw) if raw else {},
            content=str(environ.get("CONTENT_TYPE", "")),
            token=str(environ.get("HTTP_AUTHORIZATION", "")).removeprefix("Bearer "),
        )
        call = self._call(request)
        number = self._calls.add(call)
        fault = self._faults.apply(call)
        if fault == "timeout":
            return drop_connection(environ, start)
        try:
            self._check_fault(fault, call)
            status, answer = self._answer(request, call)
        except Refused as error:
            status, answer = error.code, error.status
        except Exception as error:  # noqa: BLE001  a thread's entry: the error is logged and returned
            _LOG.exception("%s %s failed in the sandbox", request.method, request.path)
            self.violations.append(f"{request.method} {request.path}: {error}")
            status, answer = 500, Refused(500, str(error)).status
        self._calls.answered(number, call, status)
        if fault == "lost_reply":
            return drop_connection(environ, start)
        with self._objects.lock:  # controllers change objects in place
            return _respond(start, status, answer)

    def _check_fault(self, fault: How | None, call: KubernetesCall) -> None:
        if fault == "throttle" or (self.limit is not None and not self.limit.admits()):
            raise Refused(429, _BUSY)
        if fault == "deny":
            raise self._forbidden(call)

    def _call(self, request: _Request) -> KubernetesCall:
        match = _PATH.fullmatch(request.path)
        if match is None:
            what = "review rights" if request.path == _REVIEWS else f"get {request.path}"
            return KubernetesCall(service="kubernetes", operation=what, body=request.body)
        verb = _VERBS.get(request.method, request.method)
        if request.query.get("dryRun") == "All":
            verb = "dry-run"
        elif request.method == "PATCH" and request.content == _APPLY:
            verb = "apply"
        elif verb == "get" and match["name"] is None:
            verb = "list"
        resource = match["resource"] + (f"/{match['part']}" if match["part"] else "")
        names = {name: str(match[name] or "") for name in ("namespace", "name")}
        if resource == "namespaces":  # a right on a namespace is one in it
            names["namespace"] = names["name"]
        caller = self.operator if request.token == self._token else "anonymous"
        return KubernetesCall(
            service="kubernetes", operation=f"{verb} {resource}", params=names, caller=caller, body=request.body
        )

    def _answer(self, request: _Request, call: KubernetesCall) -> tuple[int, Any]:
        if request.token != self._token:
            raise Refused(401, "Unauthorized")
        if request.path == "/version":
            major, minor = self.version
            return 200, {"major": major, "minor": minor, "gitVersion": f"v{major}.{minor}.2"}
        if request.path == "/.well-known/openid-configuration":
            return 200, {"issuer": self._issuer, "jwks_uri": f"{self._issuer}/openid/v1/jwks"}
        if request.path == _REVIEWS and request.method == "POST":
            return 201, self._review(request.body)
        match = _PATH.fullmatch(request.path)
        if match is None or match["resource"] not in KINDS:
            self.violations.append(f"no such path: {request.method} {request.path}")
            raise Refused(404, "the server could not find the requested resource")
        namespace, resource, name, part = (match[group] or "" for group in ("namespace", "resource", "name", "part"))
        self._check_right(request, call)
        key = (resource, "" if resource in CLUSTER_WIDE else namespace, name)
        with self._objects.lock:
            self._sync(key)
            answer = self._act(request, key, part)
            if request.method != "GET":
                self._sync(key)
            return answer

    def _sync(self, key: Key) -> None:
        """Bring up to date what a request reads: one job, or all of them; accounts have no state."""
        if key[0] == "jobs" and key[2]:
            self._controller.sync(key)
        elif key[0] != "serviceaccounts":
            self._controller.sync()

    def _act(self, request: _Request, key: Key, part: str) -> tuple[int, Any]:
        resource, namespace, name = key
        dry = request.query.get("dryRun") == "All"
        match request.method:
            case "GET" if not name:
                return 200, self._page(resource, namespace, request.query)
            case "GET":
                row = self._objects.get(*key)
                return 200, self._log(row, request.query) if part == "log" else row
            case "POST":
                manager = request.query.get("fieldManager", "unknown")
                return 201, self._objects.create(resource, namespace, request.body, manager=manager, dry=dry)
            case "PATCH" if request.content == _APPLY:
                force = request.query.get("force") == "true"
                manager = request.query["fieldManager"]
                row, new = self._objects.apply(key, request.body, manager, force=force, dry=dry)
                return 201 if new else 200, row
            case "PATCH":
                return 200, self._objects.patch(key, request.body, request.query.get("fieldManager", "unknown"))
            case _:
                return 200, self._delete(key, request.body)

    def _page(self, resource: str, namespace: str, query: Mapping[str, str]) -> dict[str, Any]:
        rows = self._objects.list(resource, namespace, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        first, limit = int(query.get("continue", "0")), int(query.get("limit", "0")) or len(rows)
        rest = first + limit < len(rows)
        version, kind = KINDS[resource]
        return {
            "kind": f"{kind}List",
            "apiVersion": version,
            "metadata": {"resourceVersion": "1", **({"continue": str(first + limit)} if rest else {})},
            "items": rows[first : first + limit],
        }

    def _log(self, pod: Mapping[str, Any], query: Mapping[str, str]) -> str:
        run = self._controller.pods.run_of(pod)
        if run is None or not run.attempts:
            name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]["name"]
            raise Refused(400, f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating')
        lines = [(_nano_time(at), text) for at, text in self._logs.read(str(pod["metadata"]["uid"]))]
        since = query.get("sinceTime", "")
        return "".join(f"{at} {text}\n" for at, text in lines if at[:19] >= since[:19])

    def _delete(self, key: Key, options: Mapping[str, Any]) -> dict[str, Any]:
        row = self._objects.get(*key)
        wanted = (options.get("preconditions") or {}).get("uid")
        if wanted is not None and wanted != row["metadata"]["uid"]:
            uid = row["metadata"]["uid"]
            raise Refused(
                409, f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {uid}", "Conflict"
            )
        if key[0] == "pods":
            self._controller.pods.delete(row)
        elif key[0] == "jobs":
            row["metadata"].setdefault("deletionTimestamp", self._objects.now())
            row["metadata"]["finalizers"] = ["foregroundDeletion"]
            self._objects.touch(key)
        else:
            self._objects.remove(key)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _check_right(self, request: _Request, call: KubernetesCall) -> None:
        if self.rights is None:
            return
        verb, _, resource = call.operation.partition(" ")
        needed = ["create", "patch"] if request.content == _APPLY else [verb]
        if any((call.params["namespace"], verb, resource) not in self.rights for verb in needed):
            raise self._forbidden(call)

    def _forbidden(self, call: KubernetesCall) -> Refused:
        verb, _, resource = call.operation.partition(" ")
        verb = "patch" if verb in {"apply", "dry-run"} else verb
        group, qualified = ("batch", f"{resource}.batch") if resource == "jobs" else ("", resource)
        named = f' "{call.params["name"]}"' if call.params.get("name") else ""
        who = f'User "{self.operator}" cannot {verb} resource "{resource}" in API group "{group}"'
        namespace = call.params.get("namespace")
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        return Refused(403, f"{qualified}{named} is forbidden: {who} {where}")

    def _review(self, body: Mapping[str, Any]) -> dict[str, Any]:
        attributes = body["spec"]["resourceAttributes"]
        part = f"/{attributes['subresource']}" if attributes.get("subresource") else ""
        right = (attributes.get("namespace", ""), attributes["verb"], f"{attributes['resource']}{part}")
        return {**body, "status": {"allowed": self.rights is None or right in self.rights}}


def _nano_time(at_ns: int) -> str:
    """A time as the API writes it: in nanoseconds, without the last zeros."""
    import datetime as dt  # noqa: PLC0415  one use

    seconds, rest = divmod(at_ns, 1_000_000_000)
    whole = dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{rest:09d}".rstrip("0").rstrip(".") + "Z"


def _respond(start: Callable[..., Any], status: int, answer: Any) -> list[bytes]:
    text = isinstance(answer, str)
    body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    headers = [("Content-Type", "text/plain" if text else "application/json"), ("Content-Length", str(len(body)))]
    if status == 429:
        headers.append(("Retry-After", "1"))
    start(f"{status} ", headers)
    return [body]
