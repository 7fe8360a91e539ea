"""Whose request it is: the name behind an access key, as the sandbox's accounts know it."""
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
    """Who asks. name: "user/operator", "role/x" or "nobody". arn: the user's, or the role's, never a session's."""

    name: str
    arn: str


NOBODY: Final = Caller(name="nobody", arn="")


def caller(authorization: str) -> Caller:
    """Who signed a request, by that header; nobody if the key is not one of this account."""
    key = signed_by(authorization)
    if key is None:
        return NOBODY
    for session in sts_backends[DEFAULT_ACCOUNT_ID]["aws"].assumed_roles:
        if session.access_key_id == key:
            return Caller(name=f"role/{session.role_arn.rpartition('/')[2]}", arn=session.role_arn)
    for user in iam_backends[DEFAULT_ACCOUNT_ID]["aws"].users.values():
        if any(one.access_key_id == key for one in user.access_keys):
            return Caller(name=f"user/{user.name}", arn=user.arn)
    return NOBODY


def signed_by(authorization: str) -> str | None:
    """The access key in a signature; None without one."""
    found = _CREDENTIAL.search(authorization)
    return None if found is None else found[1]


def signed_for(authorization: str) -> str | None:
    """The service a signature is meant for, by its signing name; None without one."""
    found = _CREDENTIAL.search(authorization)
    return None if found is None else found[4].lower()
