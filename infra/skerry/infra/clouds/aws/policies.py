"""IAM and bucket policies as statements, and the statements in words. Pure: a document may contain references.

A replica may read its run and write its own objects; objects that all replicas share it may create, never overwrite.
The keys are those of `skerry.runtime.log.keys`.
Sources: S3 user guide, "Enforce conditional writes on Amazon S3 buckets", "Policy keys"; IAM user guide, "The confused
deputy problem".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from skerry.infra.provision.graph import Ref, in_words
from skerry.runtime.contract import check_slot
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from skerry.infra.provision.graph import Json, Text, Value

VERSION: Final = "2012-10-17"
INLINE_LIMIT: Final = 10_240
"""Characters of all inline policies of a role together, without white space (IAM quotas)."""

_PARTITIONS: Final = {"us-gov-": "aws-us-gov", "cn-": "aws-cn", "eusc-": "aws-eusc"}
# Services that act in China under another name than elsewhere. Batch, ECS tasks and SageMaker have one name everywhere.
_OTHER_IN_CHINA: Final = frozenset({"ec2"})

_DOMAINS: Final = {"aws-cn": "amazonaws.com.cn", "aws-eusc": "amazonaws.eu"}

Conditions: TypeAlias = Mapping[str, Mapping[str, tuple["Text", ...]]]
Principal: TypeAlias = Mapping[str, tuple["Text", ...]]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One statement of a policy. sid: letters and digits. resources: empty in a trust policy.

    principal: {"Service": (...)} or {"AWS": (...)}; None in a policy that belongs to a role.
    """

    effect: str = "Allow"
    sid: str = ""
    actions: tuple[str, ...]
    resources: tuple[Text, ...] = ()
    conditions: Conditions = field(default_factory=dict[str, Mapping[str, tuple["Text", ...]]])
    principal: Principal | None = None


# Services that send the account for which they assume a role; others never fulfil the condition.
_SENDS_ACCOUNT: Final = frozenset({"batch.amazonaws.com", "ecs-tasks.amazonaws.com", "sagemaker.amazonaws.com"})

# As keys.py writes numbers: eight digits of rounds, four of exchanges. "?" is one character, as in IAM.
_ROUND: Final = "?" * 8
_EXCHANGE: Final = f"{_ROUND}-????"
# Every replica may create these, all with the same effect; the second create is refused.
_SHARED: Final = (keys.EXCHANGES, keys.COMMITS, keys.CHECKPOINTS, keys.ROLL_UPS, keys.PROBE)
# Garbage collection and the start-up check delete these, also those of other replicas: their keys have no slot.
_COLLECTED: Final = (keys.CHECKPOINTS, keys.PROBE)
MIRROR_SPENT: Final = "spent/"
"""Counts of the bytes that each slot has copied: the only objects of a mirror that are replaced."""
MIRROR_COLLECTED: Final = (keys.PAYLOADS, keys.CHECKPOINTS, keys.PRIVATE)
"""Objects that a mirror deletes when two newer checkpoints are complete in it."""
# These decide the course of a run: nothing overwrites them, not even an operator by mistake.
_DECISIVE: Final = (keys.COMMITS, keys.EXCHANGES, keys.CONTRIBUTIONS, keys.RECEIPTS, keys.FAILOVER)

_CREATES: Final[Conditions] = {"Null": {"s3:if-none-match": ("false",)}}
# A prefix is put into patterns unchanged: these characters have a meaning there.
_SPECIAL: Final = frozenset("*?$")


def document(statements: Sequence[Statement | Mapping[str, Value]]) -> dict[str, Value]:
    """The policy document of these statements, or of their settings, with references unresolved."""
    return {"Version": VERSION, "Statement": [_written(statement) for statement in statements]}


def text_of(policy: Value) -> str:
    """A document as it is sent. Raises Invalid if it contains an unresolved reference."""
    return json.dumps(policy, sort_keys=True, separators=(",", ":"), default=_unknown)


def statements_of(policy: Json) -> list[dict[str, Json]]:
    """The settings of a document's statements. AWS sometimes returns a list of one element as the element."""
    if not isinstance(policy, Mapping):
        return []
    listed = policy.get("Statement")
    if isinstance(listed, Mapping):
        listed = [listed]
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        return []
    return [_read(statement) for statement in listed if isinstance(statement, Mapping)]


def normal(statements: Value) -> str:
    """A text that is equal for statements of equal meaning, in any order. For comparison only."""
    return json.dumps(_sorted(statements), sort_keys=True, default=str)


def partition_of(region: str) -> str:
    """The AWS partition of a region, by its name alone: for plans. Calls use that of the SDK, see `Aws.partition`."""
    return next((known for start, known in _PARTITIONS.items() if region.startswith(start)), "aws")


def service_name(service: str, region: str, partition: str) -> str:
    """The name of a service in conditions on `kms:ViaService`."""
    return f"{service}.{region}.{_DOMAINS.get(partition, 'amazonaws.com')}"


def service_principal(service: str, partition: str) -> str:
    """The name under which a service assumes roles. Source: IAM user guide for China, "AWS service principals"."""
    in_china = partition == "aws-cn" and service in _OTHER_IN_CHINA
    return f"{service}.{_DOMAINS['aws-cn'] if in_china else 'amazonaws.com'}"


def joined(start: Text, end: str) -> Text:
    """`start`, a text or a reference, followed by `end`."""
    if isinstance(start, Ref):
        return Ref(address=start.address, output=start.output, before=start.before, after=start.after + end)
    return start + end


def trust_service(service: str, account: str) -> Statement:
    """Lets a service act as the role; for this account only, if the service sends the account."""
    return Statement(
        actions=("sts:AssumeRole",),
        principal={"Service": (service,)},
        conditions={"StringEquals": {"aws:SourceAccount": (account,)}} if service in _SENDS_ACCOUNT else {},
    )


def replica_policy(*, bucket_arn: Text, prefix: str, slots: Sequence[str], group: str | None) -> tuple[Statement, ...]:
    """The permissions of replicas in these slots: read the run, write their own objects, create shared ones.

    Never run.json, code, pins or the state of an apply. prefix: the run's, within the bucket. group: all its slots are
    covered by their common prefix; this includes a group with a name that continues after this one's with "-".
    S3 returns 404 for a missing object, instead of 403, only if the caller may list its key; replicas read many objects
    that do not exist yet, so they may list the run's prefix.
    """
    _check_prefix(prefix)
    names = (f"{group}-*",) if group is not None else tuple(check_slot(slot) for slot in slots)
    if not names:
        raise Invalid("cannot write a policy for no slots")

    def on(*patterns: str) -> tuple[Text, ...]:
        return tuple(joined(bucket_arn, f"/{prefix}/{pattern}") for pattern in patterns)

    own = [pattern for name in names for pattern in _own(name)]
    heartbeats = [f"{keys.HEARTBEATS}{name}.json" for name in names]
    saves = [pattern for name in names for pattern in (f"{keys.PRIVATE}{name}/*", f"{keys.UNFINISHED}{name}/*")]
    shared = [f"{folder}*" for folder in _SHARED]
    collected = [f"{folder}*" for folder in _COLLECTED]
    # Objects that may be large enough for a multipart upload; records never are.
    payloads = [f"{keys.PAYLOADS}{_ROUND}/{name}/*" for name in names]
    bulk = [*payloads, *saves, *(f"{keys.ARTIFACTS}{name}/*" for name in names), f"{keys.CHECKPOINTS}*"]
    return (
        Statement(
            sid="ListRun",
            actions=("s3:ListBucket",),
            resources=(bucket_arn,),
            conditions={"StringLike": {"s3:prefix": (f"{prefix}/*",)}},
        ),
        Statement(sid="ReadRun", actions=("s3:GetObject",), resources=on("*")),
        Statement(sid="CreateOwn", actions=("s3:PutObject",), resources=on(*own, *saves), conditions=_CREATES),
        Statement(sid="ReplaceHeartbeat", actions=("s3:PutObject",), resources=on(*heartbeats)),
        Statement(sid="CreateShared", actions=("s3:PutObject",), resources=on(*shared), conditions=_CREATES),
        Statement(sid="AbortUploads", actions=("s3:AbortMultipartUpload",), resources=on(*bulk)),
        Statement(sid="CollectGarbage", actions=("s3:DeleteObject",), resources=on(*collected, *payloads, *saves)),
    )


def mirror_policy(*, bucket_arn: Text, prefix: str, number: int = 0, goes_on: bool = False) -> tuple[Statement, ...]:
    """The permissions of replicas on a mirror, which every one of them keeps: create all, delete what is not needed.

    prefix: the mirror's, within the bucket. number: of the mirror, so that several fit into one policy. goes_on:
    also on the run that goes on beside it, which the replicas create. Raises Invalid for a prefix that cannot be in a
    policy.
    """
    _check_prefix(prefix)

    def on(*folders: str) -> tuple[Text, ...]:
        return tuple(joined(bucket_arn, f"/{root}/{folder}*") for root in roots for folder in folders)

    roots = (prefix, prefix + keys.GOES_ON) if goes_on else (prefix,)
    below: Conditions = {"StringLike": {"s3:prefix": tuple(f"{root}/*" for root in roots)}}
    replaced = (MIRROR_SPENT, keys.HEARTBEATS) if goes_on else (MIRROR_SPENT,)
    collected = (*MIRROR_COLLECTED, keys.UNFINISHED, keys.PROBE) if goes_on else MIRROR_COLLECTED
    return (
        Statement(sid=f"ListMirror{number}", actions=("s3:ListBucket",), resources=(bucket_arn,), conditions=below),
        Statement(sid=f"ReadMirror{number}", actions=("s3:GetObject",), resources=on("")),
        Statement(sid=f"CreateMirror{number}", actions=("s3:PutObject",), resources=on(""), conditions=_CREATES),
        Statement(sid=f"CountMirror{number}", actions=("s3:PutObject",), resources=on(*replaced)),
        Statement(sid=f"AbortMirror{number}", actions=("s3:AbortMultipartUpload",), resources=on("")),
        Statement(sid=f"CollectMirror{number}", actions=("s3:DeleteObject",), resources=on(*collected)),
    )


DECISIVE: Final = tuple(f"*/{folder}*" for folder in _DECISIVE)
"""Patterns of the keys that can be created, but not overwritten: of every run in a bucket, whichever created it."""


def bucket_policy(bucket_arn: str, *, tls_only: bool, protected: Sequence[str]) -> tuple[Statement, ...]:
    """Denies every principal requests without TLS, and overwriting keys of the patterns in `protected`.

    Multipart uploads to those keys are denied altogether: no part carries the condition, and no record is that long.
    """
    everyone: Principal = {"AWS": ("*",)}
    plain = Statement(
        sid="OnlyTLS",
        effect="Deny",
        principal=everyone,
        actions=("s3:*",),
        resources=(bucket_arn, f"{bucket_arn}/*"),
        conditions={"Bool": {"aws:SecureTransport": ("false",)}},
    )
    overwriting = Statement(
        sid="OnlyCreates",
        effect="Deny",
        principal=everyone,
        actions=("s3:PutObject",),
        resources=tuple(f"{bucket_arn}/{pattern}" for pattern in protected),
        conditions={"Null": {"s3:if-none-match": ("true",)}},
    )
    return ((plain,) if tls_only else ()) + ((overwriting,) if protected else ())


def _check_prefix(prefix: str) -> None:
    if not prefix or _SPECIAL & set(prefix):
        raise Invalid(
            f"cannot write a policy for the prefix {prefix!r}: it must not be empty or contain '*', '?' or '$'"
        )


def _own(name: str) -> tuple[str, ...]:
    return (
        f"{keys.MEMBERS}{name}/*",
        f"{keys.PAYLOADS}{_ROUND}/{name}/*",
        f"{keys.CONTRIBUTIONS}{_EXCHANGE}/{name}.json",
        f"{keys.RECEIPTS}{_ROUND}/{name}.json",
        f"{keys.OUTCOMES}{name}/*",
        f"{keys.ARTIFACTS}{name}/*",
    )


def _written(statement: Statement | Mapping[str, Value]) -> dict[str, Value]:
    settings: Mapping[str, Value]
    if isinstance(statement, Statement):
        settings = {
            "sid": statement.sid,
            "effect": statement.effect,
            "principal": statement.principal,
            "actions": statement.actions,
            "resources": statement.resources,
            "conditions": statement.conditions,
        }
    else:
        settings = statement
    named = {
        "Sid": settings.get("sid"),
        "Effect": settings.get("effect"),
        "Principal": settings.get("principal"),
        "Action": settings.get("actions"),
        "Resource": settings.get("resources"),
        "Condition": settings.get("conditions"),
    }
    # Never ours; a statement that was changed outside of skerry may have them.
    named |= {name: value for name, value in settings.items() if name.startswith("Not")}
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
    # NotAction and similar fields are never ours; they must not be dropped silently.
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
    raise Invalid(f"cannot send a policy before this is known: {in_words(str(value))}")
