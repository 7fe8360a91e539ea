"""What a role may do, as statements: who, what, on what, when. Pure: a document is a tree that may hold references.

A replica may read its run and write what it is the author of; what all replicas share it may create and never
overwrite. The table of keys is that of `skerry.runtime.keys`.
Sources: S3 user guide, "Enforce conditional writes on Amazon S3 buckets", "Policy keys"; IAM user guide, "The confused
deputy problem".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from skerry.infra.graph import Grant, Ref
from skerry.runtime import keys
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skerry.infra.graph import Json, Text, Value

VERSION: Final = "2012-10-17"
INLINE_LIMIT: Final = 10_240
"""Characters of all inline policies of a role together, white space not counted (IAM quotas)."""

Conditions: TypeAlias = Mapping[str, Mapping[str, tuple["Text", ...]]]
Principal: TypeAlias = Mapping[str, tuple["Text", ...]]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One statement of a policy. sid: letters and digits. resources: empty in a trust document.

    principal: {"Service": (...)} or {"AWS": (...)}; None in a policy that belongs to a role.
    """

    effect: str = "Allow"
    sid: str = ""
    actions: tuple[str, ...]
    resources: tuple[Text, ...] = ()
    conditions: Conditions = field(default_factory=dict[str, Mapping[str, tuple["Text", ...]]])
    principal: Principal | None = None


# Services that say for which account they act when they assume a role; others never fulfil the condition.
_NAMES_ITS_ACCOUNT: Final = frozenset({"batch.amazonaws.com", "ecs-tasks.amazonaws.com", "sagemaker.amazonaws.com"})

# As keys.py writes numbers: eight digits of rounds, four of exchanges. "?" is one character, as in IAM.
_ROUND: Final = "?" * 8
_EXCHANGE: Final = f"{_ROUND}-????"
# Whoever gets there first writes these, all replicas to the same effect; who comes second is refused.
_ANYONES: Final = (keys.EXCHANGES, keys.COMMITS, keys.CHECKPOINTS, keys.PROBE)
# What garbage collection and the start-up check delete, whoever wrote it.
_COLLECTED: Final = (keys.PAYLOADS, keys.CHECKPOINTS, keys.PROBE)
# Nobody, not even an operator by mistake, overwrites what decides.
_DECISIVE: Final = (keys.COMMITS, keys.EXCHANGES, keys.CONTRIBUTIONS, keys.RECEIPTS)

_CREATES: Final[Conditions] = {"Null": {"s3:if-none-match": ("false",)}}
# A prefix is put into patterns as it is: these would mean something else there.
_MEANS_SOMETHING: Final = frozenset("*?$")


def document(statements: Sequence[Statement | Mapping[str, Value]]) -> dict[str, Value]:
    """The policy document of these statements, or of their settings; references stay in it."""
    return {"Version": VERSION, "Statement": [_written(statement) for statement in statements]}


def text_of(policy: Value) -> str:
    """A document as it is sent. Raises Invalid if something in it is not known yet."""
    return json.dumps(policy, sort_keys=True, separators=(",", ":"), default=_unknown)


def statements_of(policy: Json) -> list[dict[str, Json]]:
    """What a document says, as the settings of its statements. AWS gives a list of one as the one, now and then."""
    if not isinstance(policy, Mapping):
        return []
    found = policy.get("Statement")
    listed = [found] if isinstance(found, Mapping) else found
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return []
    return [_read(statement) for statement in listed if isinstance(statement, Mapping)]


def normal(statements: Value) -> str:
    """The same text for statements that say the same, whatever the order within them. For comparing, not for people."""
    return json.dumps(_sorted(statements), sort_keys=True, default=str)


def joined(start: Text, end: str) -> Text:
    """`start`, known or not, with `end` after it."""
    if isinstance(start, Ref):
        return Ref(address=start.address, output=start.output, before=start.before, after=start.after + end)
    return start + end


def trust_service(service: str, account: str) -> Statement:
    """A service may act as the role: for this account only, where the service tells for whom it acts."""
    told = service in _NAMES_ITS_ACCOUNT
    return Statement(
        actions=("sts:AssumeRole",),
        principal={"Service": (service,)},
        conditions={"StringEquals": {"aws:SourceAccount": (account,)}} if told else {},
    )


def replica_policy(*, bucket_arn: Text, prefix: str, slots: Sequence[str], group: str | None) -> tuple[Statement, ...]:
    """What replicas in these slots may do with their run: read it, write their own, create what all share.

    prefix: the run's, within the bucket. group: the slots are those of a group, and covered by what their names have in
    common; a group whose name goes on with "-" after this one's is then covered too.
    S3 tells a missing object from a forbidden one (404, 403) only to whom may list its key, which the run's prefix
    covers: a replica asks for much that is not there yet. Never run.json, code, pins or the state of an apply.
    """
    if not prefix or _MEANS_SOMETHING & set(prefix):
        raise Invalid(f"cannot write a policy for the prefix {prefix!r}: it must be there, without '*', '?' and '$'")
    names = (f"{group}-*",) if group is not None else tuple(keys.check_slot(slot) for slot in slots)
    if not names:
        raise Invalid("cannot write a policy for no slots")

    def on(*patterns: str) -> tuple[Text, ...]:
        return tuple(joined(bucket_arn, f"/{prefix}/{pattern}") for pattern in patterns)

    own = [pattern for name in names for pattern in _own(name)]
    heartbeats = [f"{keys.HEARTBEATS}{name}.json" for name in names]
    kept = [pattern for name in names for pattern in (f"{keys.PRIVATE}{name}/*", f"{keys.UNFINISHED}{name}/*")]
    shared = [f"{folder}*" for folder in _ANYONES]
    collected = [f"{folder}*" for folder in _COLLECTED]
    # What may be large enough for an upload in parts; records never are.
    bulk = [*(f"{keys.PAYLOADS}{_ROUND}/{name}/*" for name in names), *kept, f"{keys.CHECKPOINTS}*"]
    return (
        Statement(
            sid="ListRun",
            actions=("s3:ListBucket",),
            resources=(bucket_arn,),
            conditions={"StringLike": {"s3:prefix": (f"{prefix}/*",)}},
        ),
        Statement(sid="ReadRun", actions=("s3:GetObject",), resources=on("*")),
        Statement(sid="CreateOwn", actions=("s3:PutObject",), resources=on(*own, *kept), conditions=_CREATES),
        Statement(sid="ReplaceHeartbeat", actions=("s3:PutObject",), resources=on(*heartbeats)),
        Statement(sid="CreateShared", actions=("s3:PutObject",), resources=on(*shared), conditions=_CREATES),
        Statement(sid="AbortUploads", actions=("s3:AbortMultipartUpload",), resources=on(*bulk)),
        Statement(sid="CollectGarbage", actions=("s3:DeleteObject",), resources=on(*collected, *kept)),
    )


def decisive(prefix: str) -> tuple[str, ...]:
    """Patterns of the keys of a run that only a create may write."""
    return tuple(f"{prefix}/{folder}*" for folder in _DECISIVE)


def bucket_policy(bucket_arn: str, *, tls_only: bool, protected: Sequence[str]) -> tuple[Statement, ...]:
    """What nobody may do in a bucket: speak without TLS, or overwrite keys of the patterns in `protected`.

    Uploads in parts to those keys are refused altogether: no part carries the condition, and no record is that long.
    """
    everybody: Principal = {"AWS": ("*",)}
    plain = Statement(
        sid="OnlyTLS",
        effect="Deny",
        principal=everybody,
        actions=("s3:*",),
        resources=(bucket_arn, f"{bucket_arn}/*"),
        conditions={"Bool": {"aws:SecureTransport": ("false",)}},
    )
    overwriting = Statement(
        sid="OnlyCreates",
        effect="Deny",
        principal=everybody,
        actions=("s3:PutObject",),
        resources=tuple(f"{bucket_arn}/{pattern}" for pattern in protected),
        conditions={"Null": {"s3:if-none-match": ("true",)}},
    )
    return ((plain,) if tls_only else ()) + ((overwriting,) if protected else ())


def _own(name: str) -> tuple[str, ...]:
    return (
        f"{keys.MEMBERS}{name}/*",
        f"{keys.PAYLOADS}{_ROUND}/{name}/*",
        f"{keys.CONTRIBUTIONS}{_EXCHANGE}/{name}.json",
        f"{keys.RECEIPTS}{_ROUND}/{name}.json",
        f"{keys.OUTCOMES}{name}/*",
    )


def _written(statement: Statement | Mapping[str, Value]) -> dict[str, Value]:
    said: Mapping[str, Value]
    if isinstance(statement, Statement):
        said = {
            "sid": statement.sid,
            "effect": statement.effect,
            "principal": statement.principal,
            "actions": statement.actions,
            "resources": statement.resources,
            "conditions": statement.conditions,
        }
    else:
        said = statement
    named = {
        "Sid": said.get("sid"),
        "Effect": said.get("effect"),
        "Principal": said.get("principal"),
        "Action": said.get("actions"),
        "Resource": said.get("resources"),
        "Condition": said.get("conditions"),
    }
    return {name: value for name, value in named.items() if value}


def _read(statement: Mapping[str, Json]) -> dict[str, Json]:
    principal = statement.get("Principal")
    known: dict[str, Json] = {
        "effect": statement.get("Effect"),
        "sid": statement.get("Sid", ""),
        "actions": _listed(statement.get("Action")),
        "resources": _listed(statement.get("Resource")),
        "conditions": {operator: _lists(tests) for operator, tests in _mapping(statement.get("Condition")).items()},
        "principal": {"AWS": ["*"]} if principal == "*" else _lists(principal) or None,
    }
    # NotAction and its like are never ours; they must not read as if they were not there.
    further = {name: value for name, value in statement.items() if name.startswith("Not")}
    return known | further


def _lists(value: Json) -> dict[str, Json]:
    return {name: _listed(inner) for name, inner in _mapping(value).items()}


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else dict[str, "Json"]()


def _listed(value: Json) -> list[Json]:
    match value:
        case None:
            return []
        case bool():
            return [str(value).lower()]
        case str() | int() | float():
            return [str(value)]
        case Mapping():
            return [value]
        case _:
            return list(value)


def _sorted(value: Value) -> Value:
    match value:
        case Mapping():
            return {name: _sorted(inner) for name, inner in value.items()}
        case str() | None | bool() | int() | float() | Ref():
            return value
        case _:
            return sorted((_sorted(inner) for inner in value), key=lambda inner: json.dumps(inner, default=str))


def _unknown(value: object) -> str:
    raise Invalid(f"cannot send a policy that waits for {value}")


_IN_WORDS: Final = {
    "s3:ListBucket": "list",
    "s3:GetObject": "read",
    "s3:DeleteObject": "delete",
    "s3:AbortMultipartUpload": "give up uploads to",
    "logs:CreateLogStream": "begin a log in",
    "logs:PutLogEvents": "write logs to",
    "ecr:BatchGetImage": "pull images from",
    "iam:PassRole": "hand out",
}
_S3: Final = re.compile(r"arn:[^:]*:s3:::(.+)")


def told(who: str, statements: Iterable[Statement]) -> list[Grant]:
    """What these statements allow, in words."""
    return [
        Grant(who=who, may=_may(statement, action), on=_where(statement, resource))
        for statement in statements
        if statement.effect == "Allow"
        for resource in statement.resources or ("*",)
        for action in statement.actions
    ]


def _may(statement: Statement, action: str) -> str:
    if action == "s3:PutObject":
        return "create, never overwrite" if "s3:if-none-match" in statement.conditions.get("Null", {}) else "write"
    return _IN_WORDS.get(action, action)


def _where(statement: Statement, resource: Text) -> str:
    below = statement.conditions.get("StringLike", {}).get("s3:prefix", ())
    # A bucket that is not made yet has a reference for an ARN.
    plain = f"{resource.before}{resource.address}{resource.after}" if isinstance(resource, Ref) else resource
    bucket = found[1] if (found := _S3.fullmatch(plain)) else plain
    return f"{bucket}/{', '.join(map(str, below))}" if below else bucket
