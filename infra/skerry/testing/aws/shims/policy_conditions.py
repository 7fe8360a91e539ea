"""moto 5.2.5 ignores the conditions of policies and most principals.

There a Deny with a Condition denies every request: the usual TLS-only bucket policy blocks all callers. An Allow with a
Condition allows every request, so a ListBucket limited to a prefix is unlimited. A Deny for one role denies all roles.
This shim evaluates conditions on the request's headers and query, so that `Null: s3:if-none-match` denies exactly the
unconditional put, and on requests for jobs of SageMaker. Requests count as TLS 1.3, as in production. moto has
resources only for S3; elsewhere an Allow is evaluated by its actions.
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

from skerry.testing.aws.callers import caller
from skerry.testing.aws.conditions import Context, as_list, glob, holds, resolved, training_job_context

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches

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
    """Install the shim: evaluate statements here."""

    def is_action_permitted(
        self: Any, action: str, resource: str = "*", principal: str | None = None, incoming: Any = None
    ) -> PermissionResult:
        if not has_request_context():
            return moto_evaluate(self, action, resource, principal, incoming)
        extra = {str(key).lower(): str(value) for key, value in (incoming or {}).items()}
        return _evaluate(self._statement, action, resource, {**_context(), **extra})

    moto_evaluate: Any = patches.replace(IAMPolicyStatement, "is_action_permitted", is_action_permitted)


def _evaluate(statement: Mapping[str, Any], action: str, resource: str, context: Context) -> PermissionResult:
    allows = statement["Effect"] == "Allow"
    fits = (
        _element_matches(statement, "Action", lambda pattern: glob(pattern.lower(), action.lower()))
        and _is_principal(statement, context)
        and (
            (resource == "*" and allows)
            or not statement.keys() & {"Resource", "NotResource"}  # a role's trust
            or _element_matches(statement, "Resource", lambda pattern: glob(resolved(pattern, context), resource))
        )
        and holds(statement.get("Condition", {}), context)
    )
    if not fits:
        return PermissionResult.NEUTRAL
    return PermissionResult.PERMITTED if allows else PermissionResult.DENIED


def _element_matches(statement: Mapping[str, Any], element: str, matches: Callable[[str], bool]) -> bool:
    if f"Not{element}" in statement:
        return not any(matches(pattern) for pattern in as_list(statement[f"Not{element}"]))
    return any(matches(pattern) for pattern in as_list(statement[element]))


def _is_principal(statement: Mapping[str, Any], context: Context) -> bool:
    for element in ("Principal", "NotPrincipal"):
        if element in statement:
            principals = statement[element]
            names = as_list(principals.get("AWS", [])) if isinstance(principals, Mapping) else as_list(principals)
            whole = {"*", DEFAULT_ACCOUNT_ID, f"arn:aws:iam::{DEFAULT_ACCOUNT_ID}:root"}
            is_named = any(name in whole or name == context["aws:principalarn"] for name in names)
            return is_named is (element == "Principal")
    return True  # a policy of an identity


def _context() -> Context:
    """Return the condition keys of the current request."""
    headers = request.headers
    arn = caller(headers.get("Authorization", "")).arn
    is_training = headers.get("X-Amz-Target", "").startswith("SageMaker.")
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
        **(training_job_context(request.get_json(force=True)) if is_training else {}),
        **{key: request.args.get(name, "") for key, name in _FROM_QUERY.items()},
        **{f"s3:{name}": headers.get(name, "") for name in _FROM_HEADERS},
    }
