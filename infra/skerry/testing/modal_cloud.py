"""Plays Modal's control plane behind a real endpoint on this machine, as far as sandboxes of Apps need it.

The SDK talks gRPC to it, by the service classes and messages that Modal publishes with the SDK, so a call or a field
that does not exist fails. Both backends of sandboxes are played: with GPUs (V1) and without (V2). Sandboxes are
containers, processes, or driven by a test.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false
# Generated messages have no types.

from __future__ import annotations

import asyncio
import base64
import inspect
import itertools
import json
import logging
import os
import threading
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server
from modal_proto import api_grpc, api_pb2

from skerry.infra.local.docker_engine import Engine
from skerry.runtime.clock import SystemClock
from skerry.testing.batch_retry_rules import TIMED_OUT
from skerry.testing.calls import Call
from skerry.testing.cloud_sandbox import CloudSandbox
from skerry.testing.docker_containers import JobContainer, JobContainers
from skerry.testing.grpc_server import service_of, transports_of
from skerry.testing.job_runner import JobRun, Jobs
from skerry.testing.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LOG: Final = logging.getLogger(__name__)
WORKSPACE: Final = "acme"
ENVIRONMENT: Final = "main"
TOKEN: Final = "header.payload.signature"  # noqa: S105  of no worth
"""The identity token of every sandbox."""
_BUILDER: Final = "2025.06"
_DEFAULT_TIMEOUT_S: Final = 300
_POLL_S: Final = 0.02
# Calls that change nothing that lasts, by the beginning of their names.
_READING: Final = (
    *("AppCount", "AppFetch", "AppGetTags", "AuthToken", "ClientHello", "Environment", "Image", "SandboxGet"),
    *("SandboxList", "SandboxTagsGet", "SandboxWait", "Secret", "Workspace"),
)


@dataclass(kw_only=True)
class _Sandbox:
    """A sandbox as it was created. lines: of its log, with their times in milliseconds."""

    id: str
    app: str
    definition: Any
    environment: dict[str, str]
    tags: dict[str, str]
    run: JobRun
    lines: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    @property
    def task(self) -> str:
        """The id of its task; empty before it runs."""
        return self.id.replace("sb-", "ta-") if self.run.attempts else ""


class _Host:
    """A `jobs.JobHost` for one sandbox."""

    def __init__(self, container: JobContainer) -> None:
        self.container = container
        self.lines: list[tuple[int, str]] = []

    def container_for(self, number: int) -> JobContainer:
        """The container of the sandbox."""
        del number
        return self.container

    def open_log(self) -> str:
        """The sandbox has one log."""
        return self.container.name

    def write_log(self, stream: str, at_ms: int, text: str) -> None:
        """Add a line."""
        del stream
        self.lines.append((at_ms, text))


class _ControlPlane:
    """Modal's calls, by their names, and what they make. variables: added to every sandbox's environment."""

    def __init__(self, jobs: Jobs, mark: str, keys: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self.jobs = jobs
        self.secrets: dict[str, dict[str, str]] = {"store-keys": dict(keys)}
        self.apps: dict[str, str] = {}
        self.boxes: dict[str, _Sandbox] = {}
        self._variables = variables
        self._mark = mark
        self._numbers = itertools.count(1)
        self._tags: dict[str, dict[str, str]] = {}
        self._images: dict[str, Any] = {}

    def clear(self) -> None:
        """Forget all but the Secrets."""
        for known in (self.apps, self._tags, self.boxes, self._images):
            known.clear()

    def call(self, name: str) -> Callable[[Any], Any] | None:
        """The call of this name; None if it is not played."""
        return getattr(self, f"_{name}", None)

    def _ClientHello(self, request: Any) -> Any:  # noqa: N802  the name of the call
        del request
        return api_pb2.ClientHelloResponse(image_builder_version=_BUILDER)

    def _AuthTokenGet(self, request: Any) -> Any:  # noqa: N802
        del request

        def part(value: Mapping[str, Any]) -> str:
            return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

        return api_pb2.AuthTokenGetResponse(token=f"{part({'alg': 'none'})}.{part({'exp': 4_000_000_000})}.x")

    def _WorkspaceNameLookup(self, request: Any) -> Any:  # noqa: N802
        del request
        return api_pb2.WorkspaceNameLookupResponse(username=WORKSPACE)

    def _EnvironmentGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        del request
        settings = api_pb2.EnvironmentSettings(image_builder_version=_BUILDER)
        metadata = api_pb2.EnvironmentMetadata(name=ENVIRONMENT, settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    def _AppGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        if request.app_name not in self.apps:
            if request.object_creation_type == api_pb2.OBJECT_CREATION_TYPE_UNSPECIFIED:
                raise GRPCError(Status.NOT_FOUND, f"App {request.app_name} not found")
            self.apps[request.app_name] = self._new("ap")
        return api_pb2.AppGetOrCreateResponse(app_id=self.apps[request.app_name])

    def _AppStop(self, request: Any) -> Any:  # noqa: N802
        for name in [name for name, app in self.apps.items() if app == request.app_id]:
            del self.apps[name]
        for box in [box for box in self.boxes.values() if box.app == request.app_id]:
            self.jobs.stop(box.id, "the App was stopped")
        return _empty()

    def _AppGetTags(self, request: Any) -> Any:  # noqa: N802
        return api_pb2.AppGetTagsResponse(tags=self._tags.get(request.app_id, {}))

    def _AppSetTags(self, request: Any) -> Any:  # noqa: N802
        self._tags[request.app_id] = dict(request.tags)
        return _empty()

    def _SecretGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        if request.deployment_name:
            if request.deployment_name not in self.secrets:
                raise GRPCError(Status.NOT_FOUND, f"Secret {request.deployment_name} not found")
            return api_pb2.SecretGetOrCreateResponse(secret_id=f"st-{request.deployment_name}")
        name = self._new("env")
        self.secrets[name] = dict(request.env_dict)
        return api_pb2.SecretGetOrCreateResponse(secret_id=f"st-{name}")

    def _ImageGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        image = self._new("im")
        self._images[image] = request.image
        return api_pb2.ImageGetOrCreateResponse(
            image_id=image,
            result=api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS),
            metadata=api_pb2.ImageMetadata(image_builder_version=_BUILDER),
        )

    def _SandboxCreate(self, request: Any) -> Any:  # noqa: N802
        """A sandbox of the first backend: with GPUs, and Secrets by their ids."""
        variables = self._secrets_of(request.definition.secret_ids)
        return api_pb2.SandboxCreateResponse(sandbox_id=self._create(self._new("sb"), request, variables))

    def _SandboxCreateV2(self, request: Any) -> Any:  # noqa: N802
        """A sandbox of the second backend: without GPUs, and with variables in the request."""
        if request.definition.resources.gpu_config.count:
            raise GRPCError(Status.INVALID_ARGUMENT, "GPUs are not supported by V2 Sandboxes")
        variables: dict[str, str] = {}
        for source in request.secret_sources:
            variables |= self._secrets_of([source.secret_id]) if source.secret_id else dict(source.env.contents)
        sandbox = self._create(self._new("sb", 30), request, variables)
        return api_pb2.SandboxCreateV2Response(sandbox_id=sandbox, task_id=sandbox.replace("sb-", "ta-"))

    def _SandboxGetTaskId(self, request: Any) -> Any:  # noqa: N802
        box = self._box(request.sandbox_id)
        # A sandbox that a test drives has its machine at once; otherwise a creation would wait for it.
        return api_pb2.SandboxGetTaskIdResponse(task_id=box.task or box.id.replace("sb-", "ta-"))

    async def _SandboxWait(self, request: Any) -> Any:  # noqa: N802
        box = self._box(request.sandbox_id)
        clock = SystemClock()
        deadline = clock.now() + request.timeout
        while not box.run.is_over and clock.now() < deadline:  # noqa: ASYNC110  it ends in another thread
            await asyncio.sleep(_POLL_S)
        metadata = api_pb2.SandboxHandleMetadata(app_id=box.app, result=_result(box.run))
        return api_pb2.SandboxWaitResponse(result=_result(box.run), metadata=metadata)

    def _SandboxTerminate(self, request: Any) -> Any:  # noqa: N802
        box = self._box(request.sandbox_id)
        before = _result(box.run)
        self.jobs.stop(box.id, "terminated")
        return api_pb2.SandboxTerminateResponse(existing_result=before)

    def _SandboxList(self, request: Any) -> Any:  # noqa: N802
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        boxes = [
            box
            for box in self.boxes.values()
            if box.app == request.app_id
            and wanted.items() <= box.tags.items()
            and (request.include_finished or not box.run.is_over)
            and (not request.before_timestamp or _created_s(box) < request.before_timestamp)
        ]
        infos = [
            api_pb2.SandboxInfo(
                id=box.id,
                created_at=_created_s(box),
                app_id=box.app,
                name=box.definition.name,
                task_info=api_pb2.TaskInfo(id=box.task, result=_result(box.run)),
                metadata=api_pb2.SandboxHandleMetadata(app_id=box.app, result=_result(box.run)),
            )
            for box in sorted(boxes, key=_created_s, reverse=True)
        ]
        return api_pb2.SandboxListResponse(sandboxes=infos)

    def _SandboxTagsGet(self, request: Any) -> Any:  # noqa: N802
        tags = self._box(request.sandbox_id).tags
        return api_pb2.SandboxTagsGetResponse(
            tags=[api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]
        )

    def _SandboxTagsSet(self, request: Any) -> Any:  # noqa: N802
        self._box(request.sandbox_id).tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        return _empty()

    def _AppCountLogs(self, request: Any) -> Any:  # noqa: N802
        count = len(self._lines(request))
        bucket = api_pb2.AppCountLogsResponse.LogBucket(bucket_start_at=request.since, stdout_logs=count)
        # One bucket covers all, so that one request fetches all.
        bucket.bucket_start_at.CopyFrom(request.until)
        bucket.bucket_start_at.seconds -= request.bucket_secs
        return api_pb2.AppCountLogsResponse(app_id=request.app_id, buckets=[bucket])

    def _AppFetchLogs(self, request: Any) -> Any:  # noqa: N802
        items = [
            api_pb2.TaskLogs(data=f"{text}\n", timestamp=at_ms / 1000, file_descriptor=api_pb2.FILE_DESCRIPTOR_STDOUT)
            for at_ms, text in self._lines(request)
        ]
        return api_pb2.AppFetchLogsResponse(batches=[api_pb2.TaskLogsBatch(task_id=request.task_id, items=items)])

    _SandboxGetTaskIdV2 = _SandboxGetTaskId
    _SandboxListV2 = _SandboxList
    _SandboxTagsGetV2 = _SandboxTagsGet
    _SandboxTagsSetV2 = _SandboxTagsSet
    _SandboxTerminateV2 = _SandboxTerminate
    _SandboxWaitV2 = _SandboxWait

    def _lines(self, request: Any) -> list[tuple[int, str]]:
        return list(self._box(request.task_id.replace("ta-", "sb-")).lines)

    def _create(self, sandbox: str, request: Any, variables: dict[str, str]) -> str:
        definition = request.definition
        if request.app_id not in self.apps.values():
            raise GRPCError(Status.NOT_FOUND, f"App {request.app_id} not found")
        live = [box for box in self.boxes.values() if box.app == request.app_id and not box.run.is_over]
        if definition.name and any(box.definition.name == definition.name for box in live):
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox {definition.name} already exists")
        environment = {**self._variables, **variables, "MODAL_SANDBOX_ID": sandbox}
        if definition.include_oidc_identity_token:
            environment["MODAL_IDENTITY_TOKEN"] = TOKEN
        host = _Host(
            JobContainer(
                name=f"skerry-{self._mark}-{sandbox[-8:]}",
                image=self._reference(definition.image_id),
                entrypoint=list(definition.entrypoint_args),
                command=(),
                environment=environment,
            )
        )
        run = JobRun(
            job=sandbox,
            host=host,
            retry=None,
            limit_s=definition.timeout_secs or _DEFAULT_TIMEOUT_S,
            created_ms=self.jobs.now_ms(),
        )
        tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        self.boxes[sandbox] = _Sandbox(
            id=sandbox,
            app=request.app_id,
            definition=definition,
            environment=environment,
            tags=tags,
            run=run,
            lines=host.lines,
        )
        self.jobs.submit(run)
        return sandbox

    def _reference(self, image: str) -> str:
        """The reference of the registry image that an image is built on."""
        definition = self._images[image]
        for command in definition.dockerfile_commands:
            if command.startswith("FROM ") and not definition.base_images:
                return str(command.removeprefix("FROM ").strip())
        return self._reference(definition.base_images[0].image_id)

    def _secrets_of(self, ids: Any) -> dict[str, str]:
        return {name: value for each in ids for name, value in self.secrets[each.removeprefix("st-")].items()}

    def _box(self, sandbox: str) -> _Sandbox:
        if sandbox not in self.boxes:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {sandbox} not found")
        return self.boxes[sandbox]

    def _new(self, kind: str, width: int = 22) -> str:
        return f"{kind}-{next(self._numbers):0{width}d}"


class ModalSandbox(CloudSandbox):
    """Modal for tests. A context manager; everything created in it is gone afterwards.

    containers: sandboxes run in Docker. processes: they are replicas that run as processes. Otherwise a test drives
    them through `jobs`, by their ids. network: of the containers. keys: entries of the Secret `store-keys`. A process
    is led to it by `environment` alone, because the SDK reads the address from nowhere else. One at a time.
    """

    def __init__(
        self,
        *,
        containers: bool = False,
        processes: bool = False,
        network: str = "bridge",
        stop_grace_s: float = 0.0,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        """Start it. Raises Retryable if containers need an engine and none answers."""
        engine = Engine() if containers else None
        super().__init__(registry=None, settling=0, any_image=True)
        mark = uuid.uuid4().hex[:8]
        boxes = None
        if engine is not None:
            boxes = JobContainers(engine, mark=mark, network=network, grace_s=stop_grace_s)
        self.jobs: Final = Jobs(Processes() if processes else boxes)
        self._control = _ControlPlane(self.jobs, mark, keys or {}, self.variables)
        self.secrets: Final = self._control.secrets
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.endpoint = ""
        self._thread = threading.Thread(target=self._serve, daemon=True, name="skerry-modal")
        self._thread.start()
        self._ready.wait()
        self.environment: Final[Mapping[str, str]] = {
            "MODAL_SERVER_URL": self.endpoint,
            "MODAL_TOKEN_ID": "ak-1",
            "MODAL_TOKEN_SECRET": "as-1",
            "MODAL_CONFIG_PATH": os.devnull,
        }
        """Variables that make skerry and the SDK use this sandbox."""

    def inventory(self) -> dict[str, tuple[str, ...]]:
        """The names of the Apps, and of the sandboxes that wait or run; empty without any."""
        live = sorted(box.tags.get("name", box.id) for box in list(self._control.boxes.values()) if not box.run.is_over)
        names = {"app": tuple(sorted(self._control.apps)), "job": tuple(live)}
        return {kind: existing for kind, existing in names.items() if existing}

    def variables_of(self, sandbox: str) -> Mapping[str, str]:
        """The environment of a sandbox, with its Secrets."""
        return self._control.boxes[sandbox].environment

    def definition_of(self, sandbox: str) -> Any:
        """The definition that a sandbox was created with."""
        return self._control.boxes[sandbox].definition

    def reset(self) -> None:
        """Forget all Apps, sandboxes, faults and calls."""
        self.jobs.close()
        self.heal()
        self._control.clear()
        self.calls.clear()

    def _stop(self) -> None:
        self.jobs.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.run(self._listen())

    async def _listen(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        server = Server([service_of(api_grpc.ModalClientBase, self._handle)])
        transports = transports_of(server)
        await server.start("127.0.0.1", 0)
        listening: Any = vars(server)["_server"]  # grpclib shows its port nowhere else
        self.endpoint = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._closing.wait()
        for transport in transports:  # the SDK keeps its connections
            transport.close()
        server.close()
        await server.wait_closed()

    async def _handle(self, name: str, stream: Any) -> None:
        """Answer one call."""
        request = await stream.recv_message()
        looks = name == "AppGetOrCreate" and not request.object_creation_type
        operation = f"Get{name}" if looks or name.startswith(_READING) else name
        call = Call(service="modal", operation=operation, params={"request": request}, caller=WORKSPACE)
        number = self.calls.add(call)
        fault = self._faults.apply(call)
        if fault == "timeout":
            raise GRPCError(Status.UNAVAILABLE, "connection lost")
        if fault in {"deny", "throttle"}:
            status = Status.PERMISSION_DENIED if fault == "deny" else Status.UNAVAILABLE
            raise GRPCError(status, f"{name}: refused")
        answer = self._control.call(name)
        if answer is None:
            raise GRPCError(Status.UNIMPLEMENTED, f"{name} is not played")
        response = answer(request)
        if inspect.isawaitable(response):
            response = await response
        self.calls.answered(number, call, 200)
        if fault == "lost_reply":
            raise GRPCError(Status.UNAVAILABLE, "connection lost")
        await stream.send_message(response)


def _created_s(box: _Sandbox) -> float:
    # Two sandboxes of one millisecond keep their order.
    return box.run.created_ms / 1000 + int(box.id.partition("-")[2]) / 1e7


def _result(run: JobRun) -> Any:
    """The result of a sandbox; an unset one while it waits or runs."""
    kinds = api_pb2.GenericResult
    if not run.is_over:
        return kinds()
    end = None if run.last is None else run.last.end
    if run.stopping is not None:
        return kinds(status=kinds.GENERIC_STATUS_TERMINATED)
    if run.status_reason == TIMED_OUT:
        return kinds(status=kinds.GENERIC_STATUS_TIMEOUT)
    if end is None or end.exit_code is None:  # its machine was lost
        return kinds(status=kinds.GENERIC_STATUS_TERMINATED)
    status = kinds.GENERIC_STATUS_SUCCESS if end.exit_code == 0 else kinds.GENERIC_STATUS_FAILURE
    return kinds(status=status, exitcode=end.exit_code)


def _empty() -> Any:
    from google.protobuf.empty_pb2 import Empty  # noqa: PLC0415  the SDK's own

    return Empty()
