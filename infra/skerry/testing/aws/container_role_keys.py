"""Issues temporary keys of a role to a job's container, if the role's trust policy allows the service."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's backends have few types.

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.iam.exceptions import NotFoundException
from moto.iam.models import iam_backends
from moto.sts.models import sts_backends

from skerry.testing.aws.conditions import Context, as_list, holds
from skerry.testing.job_runner import StartRefused

_SERVICE: Final = "ecs-tasks.amazonaws.com"
_HOUR_S: Final = 3600


def role_keys(role_arn: str, session: str, region: str, *, service: str = _SERVICE) -> dict[str, str]:
    """Return environment variables with keys of the role. Raises StartRefused if `service` cannot assume it."""
    _check_trust(role_arn, service, region)
    credentials = sts_backends[DEFAULT_ACCOUNT_ID]["aws"].assume_role(
        region_name=region,
        role_session_name=session,
        role_arn=role_arn,
        policy="",
        duration=_HOUR_S,
        external_id="",
    )
    return {
        "AWS_ACCESS_KEY_ID": str(credentials.access_key_id),
        "AWS_SECRET_ACCESS_KEY": str(credentials.secret_access_key),
        "AWS_SESSION_TOKEN": str(credentials.session_token),
    }


def role_of_profile(profile: str) -> str | None:
    """Return the role's ARN of an instance profile, given by name or ARN; None without a role."""
    backend = iam_backends[DEFAULT_ACCOUNT_ID]["aws"]
    try:
        instance_profile = backend.get_instance_profile(profile.rpartition("/")[2])
    except NotFoundException:
        return None
    return str(instance_profile.roles[0].arn) if instance_profile.roles else None


def trusts(role: Any, action: str, principal: tuple[str, str], context: Context) -> bool:
    """Return True if the trust policy of moto's role allows this. principal: such as ("Service", "x.amazonaws.com")."""
    document = role.assume_role_policy_document
    if isinstance(document, str):
        document = json.loads(document or "{}")
    kind, name = principal
    effects: set[str] = set()
    for statement in as_list(document.get("Statement", [])):
        principals = statement.get("Principal", {})
        if (
            isinstance(principals, Mapping)
            and name in as_list(principals.get(kind, []))
            and action in as_list(statement["Action"])
            and holds(statement.get("Condition", {}), context)
        ):
            effects.add(str(statement["Effect"]))
    return effects == {"Allow"}


def _check_trust(role_arn: str, service: str, region: str) -> None:
    try:
        role = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].get_role_by_arn(role_arn)
    except NotFoundException as error:
        raise StartRefused(f"ECS was unable to assume the role '{role_arn}': it does not exist") from error
    context = {
        "aws:sourceaccount": DEFAULT_ACCOUNT_ID,
        "aws:sourcearn": f"arn:aws:ecs:{region}:{DEFAULT_ACCOUNT_ID}:task/sandbox",
    }
    if not trusts(role, "sts:AssumeRole", ("Service", service), context):
        raise StartRefused(f"ECS was unable to assume the role '{role_arn}': its trust policy does not allow {service}")
