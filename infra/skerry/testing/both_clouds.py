"""Connects an AWS sandbox and a Google sandbox for runs across clouds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.aws.sandbox import Sandbox
    from skerry.testing.google.sandbox import GoogleSandbox


@dataclass(frozen=True, kw_only=True)
class Clouds:
    """An AWS account and a Google project that know each other's endpoints. Their owners close them.

    Google's STS verifies AWS identities with this account. Containers of each cloud find the other by the usual
    variables, without keys or tokens; they get these with their own identity.
    """

    aws: Sandbox
    google: GoogleSandbox

    def __post_init__(self) -> None:
        self.google.exchange.aws = self.aws.endpoint
        self.google.variables.update(
            AWS_ENDPOINT_URL=self.google.within(self.aws.endpoint),
            AWS_ALLOW_HTTP="true",
            AWS_EC2_METADATA_DISABLED="true",
        )
        self.aws.variables.update(self.google.abroad)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that make a client use both as their operator."""
        return {**self.aws.environment, **self.google.environment}
