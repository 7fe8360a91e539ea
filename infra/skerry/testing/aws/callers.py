"""Finds the user or role of a signed request by its access key."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's backends have few types.

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends
from moto.sts.models import sts_backends

_CREDENTIAL: Final = re.compile(r"Credential=([^/,]+)/(\d+)/([^/]+)/([^/]+)/")


@dataclass(frozen=True, kw_only=True)
class Caller:
    """An identity. name: "user/operator", "role/x" or "anonymous". arn: of the user or role, not of the session."""

    name: str
    arn: str


ANONYMOUS: Final = Caller(name="anonymous", arn="")
"""An unsigned request, or one that is signed with an unknown key. It is recorded like
any other, and because it is not a job its writes are in `calls.writes`. With `enforce_iam` it is denied, except for the
exchange of a web identity token, which clients never sign.
"""


def caller(authorization: str) -> Caller:
    """Return the caller by the Authorization header; ANONYMOUS for a key that is not of this account."""
    key = signed_by(authorization)
    if key is None:
        return ANONYMOUS
    for session in sts_backends[DEFAULT_ACCOUNT_ID]["aws"].assumed_roles:
        if session.access_key_id == key:
            return Caller(name=f"role/{session.role_arn.rpartition('/')[2]}", arn=session.role_arn)
    for user in iam_backends[DEFAULT_ACCOUNT_ID]["aws"].users.values():
        if any(access_key.access_key_id == key for access_key in user.access_keys):
            return Caller(name=f"user/{user.name}", arn=user.arn)
    return ANONYMOUS


def signed_by(authorization: str) -> str | None:
    """Return the access key of a signature; None without a signature."""
    match = _CREDENTIAL.search(authorization)
    return None if match is None else match[1]


def signed_for(authorization: str) -> str | None:
    """Return the signing name of the service that a signature is for; None without a signature."""
    match = _CREDENTIAL.search(authorization)
    return None if match is None else match[4].lower()
