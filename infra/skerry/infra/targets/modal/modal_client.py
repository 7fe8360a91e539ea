"""Calls Modal through its SDK: Apps, sandboxes, Secrets. Errors are translated.

The SDK, imported with the first call, finds the service and the user by MODAL_* variables and its own file; a token in
`environment` takes precedence. It repeats calls that had no answer.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false
# The SDK builds its classes when it is imported.

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.handler_helpers import NO_LIMIT, Absent, Event
from skerry.runtime.errors import Conflict, Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from contextlib import AbstractContextManager

    from skerry.runtime.clock import Clock

# A sandbox lives a day; its log is read a month later at most.
_LOGS: Final = dt.timedelta(days=30)


class ModalWorkspace:
    """The workspace of the user's token. Thread-safe. calls: held during each call."""

    def __init__(
        self,
        clock: Clock,
        environment: Mapping[str, str],
        calls: AbstractContextManager[object] = NO_LIMIT,
    ) -> None:
        self.clock = clock
        self._calls = calls
        self._environment = environment
        self._lock = threading.Lock()
        self._client: Any = None

    def name(self) -> str:
        """The name of the workspace."""
        with self._translated() as modal:
            workspace = modal.Workspace.from_context(client=self._open(modal))
            workspace.hydrate()
            return str(workspace.name)

    def app(self, name: str, environment: str, *, create: bool = False) -> Any:
        """An App. Raises Absent if there is none and `create` is false."""
        with self._translated() as modal:
            client = self._open(modal)
            return modal.App.lookup(name, client=client, environment_name=environment, create_if_missing=create)

    def stop_app(self, name: str, environment: str) -> None:
        """Stop an App with all its sandboxes. Raises Absent if there is none."""
        app = self.app(name, environment)
        with self._translated() as modal:
            app.stop(client=self._open(modal))

    def notes(self, name: str, environment: str) -> dict[str, str]:
        """The tags of an App; empty without one."""
        with contextlib.suppress(Absent):
            app = self.app(name, environment)
            with self._translated() as modal:
                return dict(app.get_tags(client=self._open(modal)))
        return {}

    def note(self, name: str, environment: str, key: str, value: str) -> None:
        """Add a tag to an App, which is made if it is missing."""
        app = self.app(name, environment, create=True)
        with self._translated() as modal, self._lock:
            client = self._client
            app.set_tags({**app.get_tags(client=client), key: value}, client=client)
            del modal

    def check_secret(self, name: str, environment: str) -> None:
        """Raises Absent if there is no such Secret."""
        with self._translated() as modal:
            modal.Secret.from_name(name, environment_name=environment, client=self._open(modal)).hydrate()

    def create(self, settings: Mapping[str, Any], name: str, tags: Mapping[str, str]) -> str:
        """Create a sandbox and return its id. settings: of a Job, without references.

        Raises Retryable if there was no answer, or no machine; Conflict if a sandbox of the name runs.
        """
        app = self.app(str(settings["app"]), str(settings["region"]), create=True)
        with self._translated() as modal:
            client = self._open(modal)
            environment = str(settings["region"])
            secrets = [
                modal.Secret.from_name(secret, environment_name=environment, client=client)
                for secret in settings["secrets"]
            ]
            sandbox = modal.Sandbox.create(
                *settings["command"],
                app=app,
                name=name,
                tags=dict(tags),
                # Without the image's own entrypoint, whose argument the command would be.
                image=modal.Image.from_registry(settings["image"]).entrypoint([]),
                env=dict(settings["environment"]),
                secrets=secrets,
                timeout=settings["timeout_s"],
                gpu=settings["gpu"],
                cpu=float(settings["cpu"]),
                memory=settings["memory_mib"],
                include_oidc_identity_token=settings["identity"],
                client=client,
            )
            return str(sandbox.object_id)

    def sandboxes(self, app: str, environment: str) -> list[tuple[str, int | None, dict[str, str]]]:
        """The live sandboxes of an App: id, exit code and tags of each."""
        try:
            app_id = self.app(app, environment).app_id
        except Absent:
            return []
        with self._translated() as modal:
            rows = list(modal.Sandbox.list(app_id=app_id, client=self._open(modal)))
            return [(str(each.object_id), each.returncode, dict(each.get_tags())) for each in rows]

    def sandbox(self, sandbox: str) -> tuple[int | None, dict[str, str]]:
        """The exit code and the tags of a sandbox. Raises Absent if there is none."""
        with self._translated() as modal:
            handle = modal.Sandbox.from_id(sandbox, client=self._open(modal))
            return handle.returncode, dict(handle.get_tags())

    def stop(self, sandbox: str, tag: str) -> None:
        """Mark a sandbox by a tag and terminate it. Raises Absent if there is none."""
        with self._translated() as modal:
            handle = modal.Sandbox.from_id(sandbox, client=self._open(modal))
            handle.set_tags({**handle.get_tags(), tag: "true"})
            handle.terminate()

    def events(self, sandbox: str) -> Iterator[Event]:
        """The lines of a sandbox so far. Raises Absent if there is none."""
        with self._translated() as modal:
            handle = modal.Sandbox.from_id(sandbox, client=self._open(modal))
            since = dt.datetime.now(dt.UTC) - _LOGS
            try:
                entries = list(handle.logs.fetch(since=since))
            except modal.exception.ExecutionError:  # it has not been scheduled
                entries = []
        for entry in entries:
            for line in entry.message.splitlines():
                yield Event(at_s=entry.timestamp.timestamp(), text=line, cursor="")

    def _open(self, modal: Any) -> Any:
        with self._lock:
            if self._client is None:
                token = [self._environment.get(f"MODAL_TOKEN_{part}") for part in ("ID", "SECRET")]
                self._client = modal.Client.from_credentials(*token) if all(token) else modal.Client.from_env()
            return self._client

    @contextlib.contextmanager
    def _translated(self) -> Generator[Any]:
        """The SDK, whose errors inside become ours."""
        try:
            import modal  # noqa: PLC0415  see the module
        except ModuleNotFoundError as error:
            raise Invalid(f"Modal needs {error.name}: pip install 'skerry[modal]'") from error
        errors = modal.exception
        try:
            with self._calls:
                yield modal
        except errors.NotFoundError as error:
            raise Absent(f"Modal has no such thing: {error}") from error
        except errors.AlreadyExistsError as error:
            raise Conflict(f"Modal: {error}") from error
        except (errors.AuthError, errors.PermissionDeniedError) as error:
            raise Unauthorized(f"Modal refuses: {error}; run `modal token new`, or set MODAL_TOKEN_ID") from error
        except errors.ResourceExhaustedError as error:
            raise Retryable(f"Modal has no machine for it now: {error}") from error
        except (errors.ConnectionError, errors.ServiceError, errors.InternalError, errors.TimeoutError) as error:
            raise Retryable(f"no answer from Modal: {error}") from error
        except errors.Error as error:
            raise Invalid(f"Modal refuses it: {type(error).__name__}: {error}") from error
