"""Both sandboxes at once, for runs that cross clouds: each is where the other's identities are looked up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.testing.google.sandbox import GoogleSandbox
    from skerry.infra.testing.sandbox import Sandbox


@dataclass(frozen=True, kw_only=True)
class Clouds:
    """An AWS account and a Google project. Making one tells each of the other; closing them is their owners' part.

    Google's STS asks this account who signed a request. Containers of each find the other by the usual variables,
    without any key or token: those are to be earned with an identity of their own.
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
        """What makes a client talk to both as their operator."""
        return {**self.aws.environment, **self.google.environment}
