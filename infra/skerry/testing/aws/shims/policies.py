"""moto 5.2.5 evaluates no condition of a policy and hardly a principal.

A Deny with a Condition denies everything: the usual TLS-only bucket policy locks everybody out. An Allow with one
allows everything: a ListBucket that is limited to a prefix is not. A Deny for a single role hits every role. Here
conditions are evaluated on the request's headers and query, so that `Null: s3:if-none-match` denies exactly the
unconditional put; requests count as TLS 1.3, as they are in production. moto knows resources of S3 alone; elsewhere
an Allow is judged by its actions.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# moto's policies have no types.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from flask import has_request_context, request
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.iam.access_control import IAMPolicyStatement, PermissionResult

from skerry.infra.testing.callers import caller
from skerry.infra.testing.conditions import Context, glob, holds, resolved

if TYPE_CHECKING:
    from skerry.infra.testing.shims.patches import Patches

_FROM_QUERY: Final = {"s3:prefix": "prefix", "s3:delimiter": "delimiter", "s3:max-keys": "max-keys"}
_FROM_HEADERS: Final = (
    "if-none-match",
    "if-match",
    "x-amz-server-side-encryption",
    "x-amz-acl",
    "x-amz-storage-class",
    "x-amz-content-sha256",
)


def install(patches: Patches) -> None:
    """Judge statements here."""

    def is_action_permitted(
        self: Any, action: str, resource: str = "*", principal: str | None = None, incoming: Any = None
    ) -> PermissionResult:
        if not has_request_context():
            return moto_s(self, action, resource, principal, incoming)
        told = {str(key).lower(): str(value) for key, value in (incoming or {}).items()}
        return _judge(self._statement, action, resource, {**_context(), **told})

    moto_s: Any = patches.replace(IAMPolicyStatement, "is_action_permitted", is_action_permitted)


def _judge(statement: Mapping[str, Any], action: str, resource: str, context: Context) -> PermissionResult:
    allows = statement["Effect"] == "Allow"
    fits = (
        _is_meant(statement, "Action", lambda pattern: glob(pattern.lower(), action.lower()))
        and _is_principal(statement, context)
        and (
            (resource == "*" and allows)
            or not statement.keys() & {"Resource", "NotResource"}  # a role's trust
            or _is_meant(statement, "Resource", lambda pattern: glob(resolved(pattern, context), resource))
        )
        and holds(statement.get("Condition", {}), context)
    )
    if not fits:
        return PermissionResult.NEUTRAL
    return PermissionResult.PERMITTED if allows else PermissionResult.DENIED


def _is_meant(statement: Mapping[str, Any], element: str, matches: Callable[[str], bool]) -> bool:
    if f"Not{element}" in statement:
        return not any(matches(one) for one in _each(statement[f"Not{element}"]))
    return any(matches(one) for one in _each(statement[element]))


def _is_principal(statement: Mapping[str, Any], context: Context) -> bool:
    for element in ("Principal", "NotPrincipal"):
        if element in statement:
            told = statement[element]
            names = _each(told.get("AWS", [])) if isinstance(told, Mapping) else _each(told)
            whole = {"*", DEFAULT_ACCOUNT_ID, f"arn:aws:iam::{DEFAULT_ACCOUNT_ID}:root"}
            is_named = any(name in whole or name == context["aws:principalarn"] for name in names)
            return is_named is (element == "Principal")
    return True  # an identity's policy


def _context() -> Context:
    """What AWS would know of the request that is being answered."""
    headers = request.headers
    arn = caller(headers.get("Authorization", "")).arn
    is_part = "partNumber" in request.args or ("uploads" in request.args and request.method == "POST")
    return {
        "aws:securetransport": "true",
        "s3:tlsversion": "1.3",
        "s3:signatureversion": "AWS4-HMAC-SHA256",
        "aws:principalarn": arn,
        "aws:principalaccount": DEFAULT_ACCOUNT_ID,
        "aws:resourceaccount": DEFAULT_ACCOUNT_ID,
        "s3:resourceaccount": DEFAULT_ACCOUNT_ID,
        "aws:principalisawsservice": "false",
        "aws:viaawsservice": "false",
        "aws:username": arn.rpartition("/")[2] if ":user/" in arn else "",
        "aws:sourceip": request.remote_addr or "",
        "aws:useragent": headers.get("User-Agent", ""),
        "s3:objectcreationoperation": "" if request.method not in {"PUT", "POST"} else str(not is_part).lower(),
        **{key: request.args.get(name, "") for key, name in _FROM_QUERY.items()},
        **{f"s3:{name}": headers.get(name, "") for name in _FROM_HEADERS},
    }


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
