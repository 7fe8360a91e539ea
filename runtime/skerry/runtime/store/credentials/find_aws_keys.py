"""Finds the AWS keys of this job, in the order of AWS's own clients.

Source: SDK reference, "Standardized credential providers".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime.errors import Retryable
from skerry.runtime.store.credentials.aws_container import container_credentials
from skerry.runtime.store.credentials.aws_signature import AwsKeys
from skerry.runtime.store.credentials.aws_web_identity import aws_from_token_file

if TYPE_CHECKING:
    from collections.abc import Mapping


def keys_of_job(environment: Mapping[str, str]) -> AwsKeys | None:
    """The keys in the environment, else those of the token's role, else of the container's; None without all.

    Raises Retryable if the platform returns none, Unauthorized if AWS does, Invalid for an unsafe address.
    """
    if environment.get("AWS_ACCESS_KEY_ID"):
        return AwsKeys(
            name=environment["AWS_ACCESS_KEY_ID"],
            secret=environment.get("AWS_SECRET_ACCESS_KEY", ""),
            session=environment.get("AWS_SESSION_TOKEN") or None,
        )
    if (provider := aws_from_token_file(environment) or container_credentials(environment)) is None:
        return None
    try:
        credentials = provider()
    except OSError as error:  # its text contains no secret
        raise Retryable(str(error)) from None
    return AwsKeys(
        name=credentials["access_key_id"],
        secret=credentials.get("secret_access_key") or "",
        session=credentials.get("token") or None,
    )
