"""AWS credentials for a replica on Google Cloud with its store in S3.

The machine's Google identity token is exchanged at AWS STS for one hour as a role that trusts the token's claims.
Sources: IAM user guide, "Available keys for AWS OIDC federation"; Compute Engine, "Verify VM identity".
"""

from __future__ import annotations

import http.client
import re
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from skerry.runtime.clock import SystemClock
from skerry.runtime.contract import AWS_AUDIENCE, AWS_ROLE
from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.store.credentials.aws_web_identity import AwsWebIdentity
from skerry.runtime.store.credentials.http import send_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.clock import Clock

_METADATA_HOST: Final = "metadata.google.internal"
IDENTITY_PATH: Final = "/computeMetadata/v1/instance/service-accounts/default/identity"

_ROLE: Final = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/\S+")


def aws_from_google(environment: Mapping[str, str], clock: Clock | None = None) -> AwsFromGoogle | None:
    """The provider that the launcher's variables select; None without them. Raises Invalid if they are incomplete."""
    role = environment.get(AWS_ROLE)
    if not role:
        return None
    if _ROLE.fullmatch(role) is None:
        raise Invalid(f"not the ARN of a role: {AWS_ROLE}={role!r}; write arn:aws:iam::ACCOUNT:role/NAME")
    audience, region = environment.get(AWS_AUDIENCE), environment.get("AWS_REGION")
    for name, value in {AWS_AUDIENCE: audience, "AWS_REGION": region}.items():
        if not value:
            raise Invalid(f"{AWS_ROLE} is set and {name} is not; set both for a role of another cloud")
    return AwsFromGoogle(role, audience or "", region or "", environment, clock or SystemClock())


class AwsFromGoogle(AwsWebIdentity):
    """An obstore credential provider: keys of a role that trusts this machine's service account."""

    def __init__(self, role: str, audience: str, region: str, environment: Mapping[str, str], clock: Clock) -> None:
        super().__init__(role, region, environment, clock)
        self._audience = audience
        self._metadata_host = environment.get("GCE_METADATA_HOST") or _METADATA_HOST

    def _fetch_identity_token(self) -> str:
        url = f"http://{self._metadata_host}{IDENTITY_PATH}?audience={quote(self._audience, safe='')}&format=standard"
        response = send_request("GET", url, {"Metadata-Flavor": "Google"}, None, use_proxy=False)
        token = response.body.decode("ascii", errors="replace").strip()
        if response.status != http.client.OK or token.count(".") != 2:
            raise Unauthorized(
                f"no identity token from {self._metadata_host}: status={response.status}; {AWS_ROLE} is for a job on "
                "Google Cloud; give the job a service account"
            )
        return token

    def _facts(self) -> str:
        return f"audience={self._audience}"

    def _trust(self, claims: Mapping[str, str]) -> str:
        return (
            "federated principal accounts.google.com with the claims of this job's token: "
            f"accounts.google.com:sub={claims['sub']}, :oaud={claims['aud']}, :aud={claims['azp']}"
        )
