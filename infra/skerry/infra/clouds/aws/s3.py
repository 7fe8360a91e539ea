"""The S3 bucket that holds a run, with all settings that make it safe; the only resource with valuable contents.

No public access, no ACLs, encrypted, TLS only; no principal can overwrite decisions, commits or receipts. Nothing of a
run expires by age: a run may be paused for months, and resumes with its payloads since the oldest kept checkpoint. The
replicas delete what no checkpoint needs. Only incomplete uploads, which no listing shows, and leftovers of start-up
checks expire by age. With `undelete_days` what replicas delete or replace stays for so many days as an old version,
which no replica can delete, and `undelete` brings it back.
Sources: S3 API reference; S3 user guide, "Enforce conditional writes", "Setting lifecycle configuration".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.aws.delete_and_undelete_s3_objects import S3Objects
from skerry.infra.clouds.aws.policies import bucket_policy, document, normal, partition_of, statements_of, text_of
from skerry.infra.clouds.aws.session import code_of
from skerry.infra.clouds.aws.tags import owned_record, owner_of, tag_list, tags_in
from skerry.infra.clouds.handler_helpers import (
    BUCKET_REMEDY,
    Absent,
    BucketLook,
    bucket_of,
    check_empty,
    check_owner,
    count_contents,
    differing,
    each,
    wait_deleted,
    wait_visible,
)
from skerry.infra.provision.graph import Life, Resource, as_json
from skerry.infra.provision.handler import Contents, Observed
from skerry.runtime.errors import Conflict, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from datetime import datetime

    from skerry.infra.clouds.aws.policies import Statement
    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Json, Value
    from skerry.infra.provision.handler import Desired, StateRecord

BLOCKED: Final = "blocked"
AES: Final = "AES256"
OWNER_ENFORCED: Final = "BucketOwnerEnforced"

_UNENCRYPTED: Final = "none"
# All principals of the account may use it through S3.
_KEY_OF_AWS: Final = "aws/s3"

_ABORT_RULE: Final = "skerry-incomplete-uploads"
_EXPIRE_RULE: Final = "skerry-expire-"
_UNDELETE_RULE: Final = "skerry-undelete"
_PUBLIC: Final = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")


@dataclass(frozen=True, kw_only=True)
class Bucket(Resource):
    """A bucket. Outputs: name, arn, region.

    protected: patterns of keys that can be created, but not overwritten. expire_days: prefixes with objects that expire
    by age. public, ownership, further_statements, further_rules: constant; they are settings so that a change by
    another user is found and reverted. encryption: AES256, or the ARN of a key of KMS; see `_encryption`.
    versioning: old versions stay, for undelete_days.
    """

    KIND: ClassVar[str] = "aws_bucket"
    LIFE: ClassVar[Life] = Life.DATA
    FIXED: ClassVar[frozenset[str]] = frozenset({"region"})
    PROTECTS: ClassVar[frozenset[str]] = frozenset({"tls_only", "protected"})
    DEMANDED: ClassVar[frozenset[str]] = frozenset({"encryption"})

    encryption: str = AES
    public: str = BLOCKED
    ownership: str = OWNER_ENFORCED
    tls_only: bool = True
    protected: tuple[str, ...] = ()
    further_statements: tuple[str, ...] = ()
    versioning: bool = False
    undelete_days: int = 0
    abort_uploads_days: int = 1
    expire_days: Mapping[str, int] = field(default_factory=dict[str, int])
    further_rules: tuple[str, ...] = ()

    @classmethod
    def refusal(cls, setting: str, before: Json, after: Json, /) -> str | None:
        """See Resource.refusal. Objects under a key stay under it, and replicas may use a bucket's present key only."""
        key = str(before)
        if setting != "encryption" or key in (AES, _UNENCRYPTED, _KEY_OF_AWS):
            return None
        return (
            f"is encrypted with the key {key}, and with {after} replicas could not read what it holds; "
            f'write `aws: {{kms_key: "{key}"}}`, or name another bucket'
        )

    @classmethod
    def rights(cls, name: str, settings: Mapping[str, Json], /) -> Mapping[str, Json]:
        """See Resource.rights."""
        arn, tls_only = arn_of(name, partition_of(str(settings.get("region")))), settings.get("tls_only") is True
        statements = bucket_policy(arn, tls_only=tls_only, protected=_texts(settings.get("protected")))
        # Of a statement that is not ours only the name is known.
        further = [{"Sid": sid} for sid in _texts(settings.get("further_statements"))]
        ours = document(statements)
        return {f"bucket {name}: policy": as_json({**ours, "Statement": [*_sequence(ours["Statement"]), *further]})}


# The parts of a bucket: the call that writes each, and the settings in it.
_PARTS: Final[Mapping[str, frozenset[str]]] = {
    "put_public_access_block": frozenset({"public"}),
    "put_bucket_ownership_controls": frozenset({"ownership"}),
    "put_bucket_encryption": frozenset({"encryption"}),
    "put_bucket_versioning": frozenset({"versioning"}),
    "put_bucket_policy": frozenset({"tls_only", "protected", "further_statements"}),
    "put_bucket_lifecycle_configuration": frozenset(
        {"abort_uploads_days", "expire_days", "undelete_days", "further_rules"}
    ),
}


def create_request(desired: Desired) -> dict[str, Any]:
    """Parameters of CreateBucket, with its tags. Only the region us-east-1 must not be named."""
    region = desired.resource.region
    configuration = {} if region == "us-east-1" else {"LocationConstraint": region}
    return {
        "Bucket": desired.name,
        "ObjectOwnership": OWNER_ENFORCED,
        "CreateBucketConfiguration": {**configuration, "Tags": tag_list(desired.tags)},
    }


def part_requests(desired: Desired, partition: str) -> dict[str, dict[str, Any]]:
    """Parameters of the calls that write its parts, by operation."""
    settings = desired.settings
    arn = arn_of(desired.name, partition)
    statements = bucket_policy(arn, tls_only=settings["tls_only"] is True, protected=_texts(settings["protected"]))
    return {
        "put_public_access_block": {
            "Bucket": desired.name,
            "PublicAccessBlockConfiguration": dict.fromkeys(_PUBLIC, settings["public"] == BLOCKED),
        },
        "put_bucket_ownership_controls": {
            "Bucket": desired.name,
            "OwnershipControls": {"Rules": [{"ObjectOwnership": settings["ownership"]}]},
        },
        "put_bucket_encryption": {
            "Bucket": desired.name,
            "ServerSideEncryptionConfiguration": {"Rules": [_encryption_rule(str(settings["encryption"]))]},
        },
        "put_bucket_versioning": {
            "Bucket": desired.name,
            # A bucket that has had versions can only suspend them.
            "VersioningConfiguration": {"Status": "Enabled" if settings["versioning"] else "Suspended"},
        },
        "put_bucket_policy": {"Bucket": desired.name, "Policy": text_of(document(statements))},
        "put_bucket_lifecycle_configuration": {
            "Bucket": desired.name,
            "LifecycleConfiguration": {"Rules": _rules(settings)},
        },
    }


def arn_of(bucket: str, partition: str) -> str:
    """A bucket's ARN."""
    return f"arn:{partition}:s3:::{bucket}"


class Buckets:
    """Creates buckets. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. The tags are in the call that creates it, so an untagged bucket is never the run's."""
        seen = self._read(desired)
        if seen is None:
            try:
                self._aws.call("s3", desired.resource.region, "create_bucket", **create_request(desired))
            except Conflict as error:
                if code_of(error) != "BucketAlreadyOwnedByYou":
                    text = f"the bucket name {desired.name} belongs to another account; {BUCKET_REMEDY}"
                    raise Conflict(text) from error
            seen = wait_visible(self._aws.clock, f"the bucket {desired.name}", lambda: self._read(desired))
        # In us-east-1 the call succeeds for a bucket that the account has already.
        check_owner(seen, desired, "bucket", BUCKET_REMEDY)
        return self.update(desired, differing(desired, seen))

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Writes only the parts with a changed setting."""
        for operation, request in part_requests(desired, self._aws.partition(desired.resource.region)).items():
            if _PARTS[operation] & set(changed):
                self._send(desired.resource.region, operation, request)
        return self._outputs(desired.name, desired.resource.region)

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete. Raises Conflict unless it is empty."""
        try:
            check_empty("bucket", record.name, self.contents(record))
            self._send(record.region, "delete_bucket", {"Bucket": record.name})
        except Absent:
            return
        name = record.name
        wait_deleted(self._aws.clock, f"the bucket {name}", lambda: self.region_of(name, record.region))

    def contents(self, record: StateRecord, prefix: str = "") -> Contents:
        """See DataHandler.contents."""
        return count_contents(self._objects(record, prefix).versions(), "Size")

    def key(self, record: StateRecord) -> str:
        """See BucketHandler.key. Only a key that is named by its ARN can be named in a policy."""
        region = self.region_of(record.name, record.region)
        response = {} if region is None else self._part(region, record.name, "get_bucket_encryption")
        key, _ = _encryption(response, any_key=False)
        return key if ":key/" in key else ""

    def empty(
        self, record: StateRecord, prefix: str = "", progress: Callable[[Contents], None] = lambda _deleted: None
    ) -> Contents:
        """See DataHandler.empty. Absent is success. The bucket stays. progress: called after every page."""
        return self._objects(record, prefix).delete(progress)

    def undelete(self, record: StateRecord, prefix: str, since: datetime) -> Contents:
        """See BucketHandler.undelete."""
        return self._objects(record, prefix).undelete(since)

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. The run's bucket is the one in its URI, in any region."""
        name = bucket_of(run, "s3")
        region = None if name is None else self.region_of(name, next(iter(sorted(regions)), ""))
        if name is None or region is None:
            return
        tags = self._tags(name, region)
        if owner_of(tags) == run:
            yield owned_record(Bucket, name=name, region=region, tags=tags, outputs=self._outputs(name, region))

    def look(self, name: str, region: str) -> BucketLook | None:
        """Owner and region of a bucket; None if it does not exist. region: of the call. Raises Unauthorized."""
        where = self.region_of(name, region)
        if where is None:
            return None
        return BucketLook(region=where, owner=owner_of(self._tags(name, where)))

    def _objects(self, record: StateRecord, prefix: str) -> S3Objects:
        return S3Objects(aws=self._aws, region=record.region, bucket=record.name, prefix=prefix)

    def _read(self, desired: Desired) -> Observed | None:
        name = desired.name
        look = self.look(name, desired.resource.region)
        if look is None:
            return None
        region = look.region
        arn = arn_of(name, self._aws.partition(region))

        def part(operation: str) -> dict[str, Any]:
            return self._part(region, name, operation)

        encryption, kept = _encryption(part("get_bucket_encryption"), any_key=desired.settings["encryption"] == AES)
        return Observed(
            outputs=self._outputs(name, region),
            settings={
                "region": region,
                "encryption": encryption,
                "versioning": part("get_bucket_versioning").get("Status") == "Enabled",
                "public": _public(part("get_public_access_block")),
                "ownership": _ownership(part("get_bucket_ownership_controls")),
                **_of_policy(part("get_bucket_policy"), arn, _texts(desired.settings["protected"])),
                **_of_rules(part("get_bucket_lifecycle_configuration")),
            },
            owner=look.owner,
            kept=kept,
        )

    def region_of(self, name: str, region: str) -> str | None:
        """See BucketHandler.region_of."""
        try:
            response = self._aws.call("s3", region, "head_bucket", Bucket=name)
        except Absent:
            return None
        except Unauthorized as error:
            raise Unauthorized(
                f"the bucket {name} exists, and these credentials cannot read it: it is in another account, or the "
                f"permission s3:ListBucket is missing; {BUCKET_REMEDY}"
            ) from error
        return str(response.get("BucketRegion") or region)

    def _tags(self, name: str, region: str) -> dict[str, str]:
        return tags_in(self._part(region, name, "get_bucket_tagging").get("TagSet", []))

    def _part(self, region: str, name: str, operation: str) -> dict[str, Any]:
        try:
            return self._aws.call("s3", region, operation, Bucket=name)
        except Absent:
            return {}

    def _send(self, region: str, operation: str, request: Mapping[str, Any]) -> None:
        # With the account, so that a bucket of that name in another account is never changed.
        self._aws.call("s3", region, operation, ExpectedBucketOwner=self._aws.identity().account, **request)

    def _outputs(self, name: str, region: str) -> dict[str, str]:
        return {"name": name, "arn": arn_of(name, self._aws.partition(region)), "region": region}


def _rules(settings: Mapping[str, Value]) -> list[dict[str, Any]]:
    days_by_prefix = settings["expire_days"]
    expiring = sorted(days_by_prefix.items()) if isinstance(days_by_prefix, Mapping) else []
    incomplete: dict[str, Any] = {
        "ID": _ABORT_RULE,
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": settings["abort_uploads_days"]},
    }
    return [
        incomplete,
        *(
            {
                "ID": f"{_EXPIRE_RULE}{number}",
                "Status": "Enabled",
                "Filter": {"Prefix": prefix},
                "Expiration": {"Days": days},
            }
            for number, (prefix, days) in enumerate(expiring)
        ),
        *([_undelete_rule(settings["undelete_days"])] if settings["undelete_days"] else ()),
    ]


def _undelete_rule(days: Value) -> dict[str, Any]:
    return {
        "ID": _UNDELETE_RULE,
        "Status": "Enabled",
        "Filter": {"Prefix": ""},
        "NoncurrentVersionExpiration": {"NoncurrentDays": days},
        # A marker of a deletion, once no version is left behind it.
        "Expiration": {"ExpiredObjectDeleteMarker": True},
    }


def _of_rules(lifecycle: Mapping[str, Any]) -> dict[str, Json]:
    """The settings in a lifecycle configuration; a rule that differs from ours is a further one."""
    abort_days = undelete_days = 0
    expire_days: dict[str, Json] = {}
    further: list[Json] = []
    for rule in lifecycle.get("Rules", []):
        name = str(rule.get("ID", ""))
        prefix = rule.get("Filter", {}).get("Prefix", rule.get("Prefix", ""))
        days = rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
        expires = rule.get("Expiration", {}).get("Days")
        enabled = rule.get("Status") == "Enabled" and not set(rule) & {"Transitions", "NoncurrentVersionExpiration"}
        if enabled and name == _ABORT_RULE and days and expires is None and not prefix:
            abort_days = int(days)
        elif enabled and name.startswith(_EXPIRE_RULE) and expires and days is None and prefix:
            expire_days[str(prefix)] = int(expires)
        elif name == _UNDELETE_RULE and rule == _undelete_rule(kept := _noncurrent_days(rule)):
            undelete_days = kept
        else:
            further.append(name)
    return {
        "abort_uploads_days": abort_days,
        "expire_days": expire_days,
        "undelete_days": undelete_days,
        "further_rules": further,
    }


def _noncurrent_days(rule: Mapping[str, Any]) -> int:
    return int(rule.get("NoncurrentVersionExpiration", {}).get("NoncurrentDays", 0))


def _of_policy(response: Mapping[str, Any], arn: str, desired: Sequence[str]) -> dict[str, Json]:
    """The settings in a bucket policy; a statement that differs from ours is a further one."""
    tls_only, protected = False, list[str]()
    further: list[Json] = []
    for statement in statements_of(json.loads(response["Policy"]) if "Policy" in response else None):
        resources = statement.get("resources")
        patterns = [pattern.removeprefix(f"{arn}/") for pattern in _texts(resources)]
        if _matches(statement, bucket_policy(arn, tls_only=True, protected=())):
            tls_only = True
        elif patterns and _matches(statement, bucket_policy(arn, tls_only=False, protected=patterns)):
            protected = patterns
        else:
            further.append(str(statement.get("sid") or statement.get("effect")))
    same = sorted(protected) == sorted(desired)
    return {
        "tls_only": tls_only,
        "protected": list(desired if same else sorted(protected)),
        "further_statements": further,
    }


def _matches(statement: Json, ours: Sequence[Statement]) -> bool:
    return normal([statement]) == normal(statements_of(as_json(document(ours))))


def _encryption_rule(encryption: str) -> dict[str, Any]:
    if encryption == AES:
        return {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": AES}}
    # A bucket key spares a request to KMS, and its price, for each object.
    by_key = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": encryption}
    return {"ApplyServerSideEncryptionByDefault": by_key, "BucketKeyEnabled": True}


def _encryption(response: Mapping[str, Any], *, any_key: bool) -> tuple[str, tuple[str, ...]]:
    """The setting; with `any_key` a note for a key: its owner may demand it, so it is never put back to AES256."""
    rules = response.get("ServerSideEncryptionConfiguration", {}).get("Rules", [])
    default: Mapping[str, Any] = rules[0].get("ApplyServerSideEncryptionByDefault", {}) if rules else {}
    algorithm = str(default.get("SSEAlgorithm", _UNENCRYPTED))
    if not algorithm.startswith("aws:kms"):
        return algorithm, ()
    key = str(default.get("KMSMasterKeyID", _KEY_OF_AWS))
    if not any_key:
        return key, ()
    remedy = "replicas may use it" if ":key/" in key else "set the key by its ARN, so that replicas may use it"
    text = f"it is encrypted with {algorithm} and the key {key}, which the spec does not name; this stays, because"
    return AES, (f"{text} objects are encrypted with it, and its owner may demand it; {remedy}",)


def _public(response: Mapping[str, Any]) -> str:
    block: Mapping[str, Any] = response.get("PublicAccessBlockConfiguration", {})
    missing = [name for name in _PUBLIC if not block.get(name)]
    return f"not blocked: {', '.join(missing)}" if missing else BLOCKED


def _ownership(response: Mapping[str, Any]) -> str:
    rules = response.get("OwnershipControls", {}).get("Rules", [])
    return str(rules[0].get("ObjectOwnership")) if rules else "ObjectWriter"


def _sequence(value: Value) -> Sequence[Value]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _texts(value: Value) -> list[str]:
    return [str(item) for item in _sequence(value)]
