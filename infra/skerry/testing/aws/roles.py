"""What a container of a job may do: temporary keys of its role, as the sandbox's account gives them."""
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

from skerry.infra.testing.conditions import Context, holds
from skerry.infra.testing.jobs import Refused

_SERVICE: Final = "ecs-tasks.amazonaws.com"
_HOUR_S: Final = 3600


def keys_of(role_arn: str, session: str, region: str, *, service: str = _SERVICE) -> dict[str, str]:
    """The environment that makes every client use the role. Raises Refused if `service` could not assume it."""
    _check_trust(role_arn, service, region)
    made = sts_backends[DEFAULT_ACCOUNT_ID]["aws"].assume_role(
        region_name=region,
        role_session_name=session,
        role_arn=role_arn,
        policy="",
        duration=_HOUR_S,
        external_id="",
    )
    return {
        "AWS_ACCESS_KEY_ID": str(made.access_key_id),
        "AWS_SECRET_ACCESS_KEY": str(made.secret_access_key),
        "AWS_SESSION_TOKEN": str(made.session_token),
    }


def role_of_profile(profile: str) -> str | None:
    """The role of an instance profile, named by name or ARN; None without one."""
    backend = iam_backends[DEFAULT_ACCOUNT_ID]["aws"]
    try:
        found = backend.get_instance_profile(profile.rpartition("/")[2])
    except NotFoundException:
        return None
    return str(found.roles[0].arn) if found.roles else None


def trusts(role: Any, action: str, principal: tuple[str, str], context: Context) -> bool:
    """Whether the trust of moto's role lets somebody do this with it. principal: as ("Service", "x.amazonaws.com")."""
    document = role.assume_role_policy_document
    if isinstance(document, str):
        document = json.loads(document or "{}")
    kind, name = principal
    effects: set[str] = set()
    for statement in _each(document.get("Statement", [])):
        named = statement.get("Principal", {})
        if (
            isinstance(named, Mapping)
            and name in _each(named.get(kind, []))
            and action in _each(statement["Action"])
            and holds(statement.get("Condition", {}), context)
        ):
            effects.add(str(statement["Effect"]))
    return effects == {"Allow"}


def _check_trust(role_arn: str, service: str, region: str) -> None:
    try:
        role = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].get_role_by_arn(role_arn)
    except NotFoundException as error:
        raise Refused(f"ECS was unable to assume the role '{role_arn}': there is none") from error
    context = {
        "aws:sourceaccount": DEFAULT_ACCOUNT_ID,
        "aws:sourcearn": f"arn:aws:ecs:{region}:{DEFAULT_ACCOUNT_ID}:task/sandbox",
    }
    if not trusts(role, "sts:AssumeRole", ("Service", service), context):
        raise Refused(f"ECS was unable to assume the role '{role_arn}': its trust does not let {service}")


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
