"""The operator's access to the clouds: the only place that opens sessions for a spec. Imports no SDK.

All commands, and the stores that they open, use these sessions. Jobs get nothing of them: each has a role of its own.
"""

from __future__ import annotations

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


class OperatorAccess:
    """One session for each cloud, with the login that the spec names. Makes no calls before the first use; thread-safe.

    environment: where credentials and endpoints are looked up. spec: None for a command without one, which uses the
    environment's login. written: the spec's document, for the places in errors. groups: without a spec.
    """

    def __init__(
        self,
        clock: Clock,
        environment: Mapping[str, str],
        spec: Spec | None = None,
        written: Document | None = None,
        *,
        groups: Sequence[Replicas] = (),
    ) -> None:
        self.clock: Final = clock
        self.environment: Final = environment
        self.groups: Final[Sequence[Replicas]] = groups if spec is None else spec.replicas
        self._written = written
        self.aws: Final = Aws(clock, environment, None if spec is None else self._login(spec))
        # The first group with a project sets it.
        named = (getattr(group.target, "project", None) for group in self.groups)
        self.google: Final = Google(
            clock,
            environment,
            project=next((project for project in named if isinstance(project, str) and project), None),
            impersonation=None if spec is None else self._impersonation(spec),
        )

    @classmethod
    def of(cls, file: SpecFile, clock: Clock, environment: Mapping[str, str]) -> Self:
        """The access of a command that is given this spec."""
        return cls(clock, environment, file.spec, file.written)

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
