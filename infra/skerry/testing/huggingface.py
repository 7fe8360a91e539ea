"""Plays Hugging Face Jobs behind a real endpoint on this machine: huggingface_hub and skerry use it alike.

Jobs are containers, processes, or driven by a test. Answers have the fields that the SDK's own classes read, and the
messages of ended jobs are those of public logs. Ended jobs stay, as they do at the service.
Source: huggingface_hub 2.4, `_jobs_api.py` and `hf_api.py`.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode

from skerry.infra.local.docker_engine import Engine
from skerry.testing.batch_retry_rules import TIMED_OUT
from skerry.testing.calls import Call
from skerry.testing.cloud_sandbox import CloudSandbox
from skerry.testing.docker_containers import NOT_STARTED, JobContainer, JobContainers
from skerry.testing.http_server import Server, drop_connection
from skerry.testing.job_runner import INTERRUPTED, JobRun, Jobs
from skerry.testing.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from skerry.testing.faults import How

_LOG: Final = logging.getLogger(__name__)
USER: Final = "ada"
ORGANIZATION: Final = "acme"
_NAMESPACES: Final = (USER, ORGANIZATION)
_PATH: Final = re.compile(r"/api/jobs/(?P<namespace>[^/]+)(?:/(?P<job>[^/]+))?(?:/(?P<verb>[^/]+))?")
_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")
_FIELDS: Final = frozenset(
    {
        "dockerImage",
        "spaceId",
        "command",
        "arguments",
        "environment",
        "secrets",
        "flavor",
        "timeoutSeconds",
        "attempts",
        "labels",
        "volumes",
        "expose",
        "ssh",
        "network",
        "resourceGroupId",
    }
)
_DEFAULT_TIMEOUT_S: Final = 1800
_STAGES: Final = {"RUNNABLE": "SCHEDULING", "STARTING": "SCHEDULING", "RUNNING": "RUNNING", "SUCCEEDED": "COMPLETED"}
LOST: Final = "Job failed: the machine was lost"
"""The message of a job whose machine was lost. The words are made up: no public log has them."""


def _flavor(name: str, micro_usd: int, gpus: int = 0, model: str = "") -> dict[str, Any]:
    accelerator = {"type": "gpu", "model": model, "quantity": str(gpus), "vram": "24 GB", "manufacturer": "Nvidia"}
    return {
        "name": name,
        "prettyName": name,
        "cpu": "4 vCPU",
        "ram": "16 GB",
        "ephemeralStorage": "50 GB",
        "accelerator": accelerator if gpus else None,
        "unitCostMicroUSD": micro_usd,
        "unitCostUSD": micro_usd / 1e6,
        "unitLabel": "minute",
    }


HARDWARE: Final = (
    _flavor("cpu-basic", 167),
    _flavor("l4x1", 13_333, 1, "L4"),
    _flavor("a10g-largex2", 50_000, 2, "A10G"),
)
"""The flavors, with prices in millionths of a US dollar for a minute."""


class _Refused(Exception):  # noqa: N818  named for what happened
    """An answer with an error. code: the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(kw_only=True)
class _Job:
    """A job as it was created. lines: of its log, with their times in milliseconds."""

    id: str
    namespace: str
    body: Mapping[str, Any]
    run: JobRun
    labels: dict[str, str]
    lines: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])


class _Host:
    """A `jobs.JobHost` for one job. variables: added to its container's environment."""

    def __init__(self, job: str, mark: str, body: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        self._job = job
        self._mark = mark
        self._body = body
        self._variables = variables
        self.lines: list[tuple[int, str]] = []

    def container_for(self, number: int) -> JobContainer:
        """The container: the command replaces the image's entrypoint."""
        del number
        body = self._body
        return JobContainer(
            name=f"skerry-{self._mark}-{self._job}",
            image=str(body.get("dockerImage") or body.get("spaceId")),
            entrypoint=[str(word) for word in body["command"]],
            command=[str(word) for word in body.get("arguments") or ()],
            environment={
                **self._variables,
                **body.get("environment", {}),
                **body.get("secrets", {}),
                "JOB_ID": self._job,
            },
        )

    def open_log(self) -> str:
        """The job has one log."""
        return self._job

    def write_log(self, stream: str, at_ms: int, text: str) -> None:
        """Add a line."""
        del stream
        self.lines.append((at_ms, text))


class HuggingFaceSandbox(CloudSandbox):
    """Hugging Face Jobs for tests. A context manager; everything created in it is gone afterwards.

    containers: jobs run in Docker. processes: they are replicas that run as processes. Otherwise a test drives them
    through `jobs`, by their ids. network: of the containers. page: jobs in one answer.
    """

    def __init__(
        self,
        *,
        containers: bool = False,
        processes: bool = False,
        network: str = "bridge",
        stop_grace_s: float = 30.0,
        page: int = 100,
    ) -> None:
        """Start it. Raises Retryable if containers need an engine and none answers."""
        engine = Engine() if containers else None
        super().__init__(registry=None, settling=0, any_image=True)
        self._mark = uuid.uuid4().hex[:8]
        self._page = page
        self._jobs: dict[str, _Job] = {}
        boxes = (
            None if engine is None else JobContainers(engine, mark=self._mark, network=network, grace_s=stop_grace_s)
        )
        self.jobs: Final = Jobs(Processes() if processes else boxes)
        self.violations: Final[list[str]] = []
        """Requests that the service does not have, or would refuse because of a mistake of the client."""
        self._server = Server(self._application, all_addresses=False)
        self.endpoint: Final = f"http://127.0.0.1:{self._server.port}"
        self._token = f"hf_{uuid.uuid4().hex}"
        self.environment: Final[Mapping[str, str]] = {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": self._token}
        """Variables that make skerry and huggingface_hub use this sandbox as the user `ada` of `acme`."""
        self._server.start()

    def inventory(self) -> dict[str, tuple[str, ...]]:
        """The names of the jobs that wait or run; empty without any. Ended ones stay, and are not listed."""
        live = sorted(job.labels.get("name", job.id) for job in list(self._jobs.values()) if not job.run.is_over)
        return {"job": tuple(live)} if live else {}

    def variables_of(self, job: str) -> Mapping[str, str]:
        """The environment of a job's container, with its secrets."""
        return self._jobs[job].run.host.container_for(1).environment

    def relabel(self, job: str, labels: Mapping[str, str]) -> None:
        """Replace the labels of a job, as another person may do."""
        self._jobs[job].labels = dict(labels)

    def reset(self) -> None:
        """Forget all jobs, faults and calls; the token stays."""
        self.jobs.close()
        self.heal()
        self._jobs.clear()
        self.violations.clear()
        self.calls.clear()

    def _stop(self) -> None:
        self.jobs.close()
        self._server.close()

    def _application(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Handle one request."""
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body: dict[str, Any] = json.loads(environ["wsgi.input"].read(length)) if length else {}
        path, method = str(environ["PATH_INFO"]), str(environ["REQUEST_METHOD"])
        match = _PATH.fullmatch(path)
        operation = _operation(method, path, match)
        known = environ.get("HTTP_AUTHORIZATION") == f"Bearer {self._token}"
        named = {name: str(match[name]) for name in ("namespace", "job") if match is not None and match[name]}
        call = Call(
            service="huggingface",
            operation=operation,
            params={**named, "body": body},
            caller=USER if known else "anonymous",
        )
        number = self.calls.add(call)
        fault = self._faults.apply(call)
        if fault == "timeout":
            return drop_connection(environ, start)
        status, headers, answer = 200, [], ""
        try:
            _check(fault, known=known)
            if operation == "GetLogs":
                lines = self._log(self._find(named))
                self.calls.answered(number, call, 200)
                start("200 OK", [("Content-Type", "text/event-stream")])
                return lines
            query = parse_qsl(str(environ.get("QUERY_STRING", "")))
            answer, headers = self._answer(operation, named, query, body)
        except _Refused as error:
            status, answer = error.code, {"error": str(error)}
        except Exception as error:  # noqa: BLE001  a thread's entry: the error is logged and returned
            _LOG.exception("%s %s failed in the sandbox", method, path)
            self.violations.append(f"{method} {path}: {error}")
            status, answer = 500, {"error": str(error)}
        self.calls.answered(number, call, status)
        if fault == "lost_reply":
            return drop_connection(environ, start)
        data = json.dumps(answer).encode()
        start(f"{status} ", [("Content-Type", "application/json"), ("Content-Length", str(len(data))), *headers])
        return [data]

    def _answer(
        self, operation: str, named: Mapping[str, str], query: list[tuple[str, str]], body: Mapping[str, Any]
    ) -> tuple[Any, list[tuple[str, str]]]:
        match operation:
            case "GetUser":
                auth = {"type": "access_token", "accessToken": {"role": "write"}}
                return {"type": "user", "name": USER, "orgs": [{"name": ORGANIZATION}], "auth": auth}, []
            case "ListHardware":
                return list(HARDWARE), []
            case "ListJobs":
                return self._list(named, query)
            case "RunJob":
                return _document(self._create(named["namespace"], body)), []
            case "GetJob":
                return _document(self._find(named)), []
            case "CancelJob":
                self.jobs.stop(self._find(named).id, "cancelled")
                return {}, []
            case _:
                self.violations.append(f"no such request: {operation}")
                raise _Refused(404, "Not Found")

    def _create(self, namespace: str, body: Mapping[str, Any]) -> _Job:
        self._check_namespace(namespace)
        if problem := _problem(body):
            self.violations.append(problem)
            raise _Refused(400, problem)
        if body["flavor"] not in {row["name"] for row in HARDWARE}:
            raise _Refused(400, f"Invalid flavor {body['flavor']}")
        job = uuid.uuid4().hex[:24]
        host = _Host(job, self._mark, body, self.variables)
        run = JobRun(
            job=job,
            host=host,
            retry={"attempts": body.get("attempts", 1)},
            limit_s=body.get("timeoutSeconds", _DEFAULT_TIMEOUT_S),
            created_ms=self.jobs.now_ms(),
        )
        created = _Job(
            id=job, namespace=namespace, body=body, run=run, labels=dict(body.get("labels") or {}), lines=host.lines
        )
        self._jobs[job] = created
        self.jobs.submit(run)
        return created

    def _list(
        self, named: Mapping[str, str], query: list[tuple[str, str]]
    ) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
        self._check_namespace(named["namespace"])
        stages = {value for name, value in query if name == "stage"}
        labels = [value.partition("=") for name, value in query if name == "label"]
        rows = [
            row
            for job in reversed(list(self._jobs.values()))
            if job.namespace == named["namespace"] and all(job.labels.get(key) == value for key, _, value in labels)
            for row in [_document(job)]
            if not stages or row["status"]["stage"] in stages
        ]
        first = int(dict(query).get("cursor", "0"))
        rest = [pair for pair in query if pair[0] != "cursor"]
        following = urlencode([*rest, ("cursor", str(first + self._page))])
        url = f"{self.endpoint}/api/jobs/{named['namespace']}?{following}"
        more = [("Link", f'<{url}>; rel="next"')] if first + self._page < len(rows) else []
        return rows[first : first + self._page], more

    def _find(self, named: Mapping[str, str]) -> _Job:
        job = self._jobs.get(named["job"])
        if job is None or job.namespace != named["namespace"]:
            raise _Refused(404, "Job not found")
        return job

    def _check_namespace(self, namespace: str) -> None:
        if namespace not in _NAMESPACES:
            raise _Refused(403, f"You don't have the rights to use the namespace {namespace}")

    def _log(self, job: _Job) -> Iterator[bytes]:
        """The log as events: replayed from the start, and kept open until the job ends.

        The first comment that keeps it alive comes at once; that of the service after 30 s.
        """
        sent = 0
        if job.run.attempts:
            yield _event(job.run.created_ms, "===== Job started =====")
        while True:
            over = job.run.is_over
            for at_ms, text in job.lines[sent:]:
                sent += 1
                yield _event(at_ms, text)
            if over:
                return
            yield b": keep-alive\n\n"
            try:
                self.jobs.wait(job.id, within_s=1.0)
            except TimeoutError:
                continue
            except KeyError:  # the sandbox was reset
                return


def _check(fault: How | None, *, known: bool) -> None:
    if fault == "throttle":
        raise _Refused(429, "Too many requests")
    if fault == "deny":
        raise _Refused(403, "Forbidden")
    if not known:
        raise _Refused(401, "Invalid username or password.")


def _operation(method: str, path: str, match: re.Match[str] | None) -> str:
    fixed = {"/api/whoami-v2": "GetUser", "/api/jobs/hardware": "ListHardware"}
    if method == "GET" and path in fixed:
        return fixed[path]
    if match is None:
        return f"{method} {path}"
    known = {
        ("POST", False, None): "RunJob",
        ("GET", False, None): "ListJobs",
        ("GET", True, None): "GetJob",
        ("GET", True, "logs"): "GetLogs",
        ("POST", True, "cancel"): "CancelJob",
    }
    return known.get((method, match["job"] is not None, match["verb"]), f"{method} {path}")


def _problem(body: Mapping[str, Any]) -> str:
    """A mistake in the body of a new job; the empty text without one."""
    if unknown := sorted(body.keys() - _FIELDS):
        return f"unknown fields: {', '.join(unknown)}"
    texts = [*body.get("command", ()), *body.get("arguments", ())]
    if not body.get("command") or not all(isinstance(word, str) for word in texts):
        return "command must be a list of words"
    if ("dockerImage" in body) is ("spaceId" in body):
        return "either dockerImage or spaceId is required"
    variables = {**body.get("environment", {}), **body.get("secrets", {})}
    if wrong := [name for name, value in variables.items() if not isinstance(value, str)]:
        return f"variables must be texts: {', '.join(wrong)}"
    labels: dict[str, str] = body.get("labels") or {}
    pairs = [text for pair in labels.items() for text in pair]
    if wrong := [text for text in pairs if _LABEL.fullmatch(text) is None]:
        return f"invalid labels: {', '.join(wrong)}"
    return ""


def _document(job: _Job) -> dict[str, Any]:
    """A job as the API shows it, without the values of its secrets."""
    body, run = job.body, job.run
    stage, message = _status(run)
    attempt = run.last
    return {
        "id": job.id,
        "createdAt": _time(run.created_ms),
        "startedAt": None if attempt is None else _time(attempt.started_ms),
        "finishedAt": None if run.stopped_ms is None else _time(run.stopped_ms),
        "dockerImage": body.get("dockerImage"),
        "spaceId": body.get("spaceId"),
        "command": body["command"],
        "arguments": body.get("arguments") or [],
        "environment": body.get("environment") or {},
        "secrets": dict.fromkeys(body.get("secrets") or {}, ""),
        "flavor": body["flavor"],
        "labels": job.labels,
        "volumes": None,
        "retry": body.get("attempts", 1) - 1,
        "status": {"stage": stage, "message": message},
        "owner": {"id": "1", "name": job.namespace, "type": "org" if job.namespace == ORGANIZATION else "user"},
        "initiator": {"type": "user", "id": "1", "name": USER},
    }


def _status(run: JobRun) -> tuple[str, str | None]:
    if run.status in _STAGES:
        return _STAGES[run.status], None
    if run.stopping is not None:
        return "CANCELED", None
    end = None if run.last is None else run.last.end
    if end is None or run.status_reason == INTERRUPTED:
        return "ERROR", LOST
    if run.status_reason == TIMED_OUT:
        return "ERROR", "Job timeout"
    if run.status_reason == NOT_STARTED:
        return "ERROR", f"Failed to pull image: {end.reason}"
    reason = "OOMKilled" if end.reason.startswith("OutOfMemoryError") else "Error"
    return "ERROR", f"Job failed with exit code: {end.exit_code}. Reason: {reason}"


def _event(at_ms: int, text: str) -> bytes:
    """One line of a log. JSON of JavaScript has all characters but those below 32 as they are."""
    return f"data: {json.dumps({'timestamp': _time(at_ms), 'data': text}, ensure_ascii=False)}\n\n".encode()


def _time(at_ms: int) -> str:
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
