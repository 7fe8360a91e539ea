"""The operator's access to the clouds: the only place that opens sessions for a spec. Imports no SDK.

All commands, and the stores that they open, use these sessions. Jobs get nothing of them: each has a role of its own.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, Self

from skerry.infra.clouds.aws.session import Aws, Login
from skerry.infra.clouds.google.login import Impersonation
from skerry.infra.clouds.google.session import Google
from skerry.infra.local.workspace import operator_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.spec.model import Replicas, Spec, SpecFile
    from skerry.infra.spec.yaml_document import Document
    from skerry.runtime.clock import Clock


class CallLimit:
    """Bounds the calls in flight of all sessions together. Thread-safe; a call within a call of its thread is free."""

    def __init__(self, most: int) -> None:
        self._free = threading.BoundedSemaphore(most)
        self._mine = threading.local()

    def __enter__(self) -> None:
        depth = getattr(self._mine, "depth", 0)
        if depth == 0:
            self._free.acquire()
        self._mine.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        self._mine.depth -= 1
        if self._mine.depth == 0:
            self._free.release()


class OperatorAccess:
    """One session for each cloud, with the login that the spec names. Makes no calls before the first use; thread-safe.

    environment: where credentials and endpoints are looked up. spec: None for a command without one, which uses the
    environment's login. written: the spec's document, for the places in errors. groups: without a spec. at_once: the
    most calls in flight, of all clouds together; objects are read and written beside them. None is no limit.
    """

    def __init__(
        self,
        clock: Clock,
        environment: Mapping[str, str],
        spec: Spec | None = None,
        written: Document | None = None,
        *,
        groups: Sequence[Replicas] = (),
        at_once: int | None = None,
    ) -> None:
        self.clock: Final = clock
        self.environment: Final = environment
        self.groups: Final[Sequence[Replicas]] = groups if spec is None else spec.replicas
        self._written = written
        self.calls: Final[AbstractContextManager[object]] = nullcontext() if at_once is None else CallLimit(at_once)
        self.aws: Final = Aws(clock, environment, None if spec is None else self._login(spec), calls=self.calls)
        # The first group with a project sets it.
        named = (getattr(group.target, "project", None) for group in self.groups)
        self.google: Final = Google(
            clock,
            environment,
            project=next((project for project in named if isinstance(project, str) and project), None),
            impersonation=None if spec is None else self._impersonation(spec),
            calls=self.calls,
        )

    @classmethod
    def of(cls, file: SpecFile, clock: Clock, environment: Mapping[str, str], at_once: int | None = None) -> Self:
        """The access of a command that is given this spec. at_once: see the class."""
        return cls(clock, environment, file.spec, file.written, at_once=at_once)

    def log_in(self, cloud: str) -> None:
        """Try the login that the spec names for this cloud, if it names one. Raises Unauthorized or Invalid."""
        if cloud == "aws" and self.aws.login is not None:
            self.aws.identity()
        if cloud == "google" and self.google.login.impersonation is not None:
            self.google.login.access_token()

    def principal(self, cloud: str) -> str:
        """The name behind the credentials; "" for a cloud without a session. Raises as the session's `identity`."""
        if cloud == "aws":
            return self.aws.identity().arn
        return self.google.identity().principal if cloud == "google" else ""

    def _login(self, spec: Spec) -> Login | None:
        profile, role = spec.aws.profile, spec.aws.assume_role
        if profile is None and role is None:
            return None
        return Login(
            profile=profile,
            role=role,
            name=f"skerry-{operator_name()}",
            profile_place=self._place("aws", "profile"),
            role_place=self._place("aws", "assume_role"),
        )

    def _impersonation(self, spec: Spec) -> Impersonation | None:
        account = spec.google.impersonate
        return None if account is None else Impersonation(account=account, place=self._place("google", "impersonate"))

    def _place(self, section: str, field: str) -> str:
        name = f"{section}.{field}"
        return name if self._written is None else f"{name} ({self._written.place((section, field))})"
