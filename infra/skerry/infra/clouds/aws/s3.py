"""The bucket that holds a run: one resource with all that makes it safe, and the only one whose content matters.

Nobody from outside, no ACLs, encrypted, TLS only, and the run's deciding records cannot be overwritten by anyone.
Nothing of a run expires by age: a run may be paused for months, and its payloads since the oldest kept checkpoint are
what it goes on with. The replicas collect what no checkpoint needs; age knows nothing of that. Only incomplete uploads,
which no listing shows, and what start-up checks leave behind go by age.
Sources: S3 API reference; S3 user guide, "Enforce conditional writes", "Setting lifecycle configuration".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.aws.handling import found, owner_of, tag_list, tags_in
from skerry.infra.clouds.aws.policies import bucket_policy, document, normal, statements_of, text_of
from skerry.infra.clouds.aws.session import code_of
from skerry.infra.clouds.handling import VISIBLE_S, Absent, check_owner, differing, each, waited
from skerry.infra.graph import Life, Resource, as_json
from skerry.infra.handler import Held, Seen
from skerry.runtime.errors import Conflict, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from skerry.infra.clouds.aws.policies import Statement
    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.graph import Json, Value
    from skerry.infra.handler import Made, Wanted

BLOCKED: Final = "blocked"
OWNER_ENFORCED: Final = "BucketOwnerEnforced"

_REMEDY: Final = "if it is yours, say `byo: {bucket: true}`, else write another bucket at `store`"
# Ten listings, 10,000 objects: enough to say that there is much.
_COUNTED_PAGES: Final = 10
# As many as one request deletes.
_AT_ONCE: Final = 1000
_ABORT_RULE: Final = "skerry-incomplete-uploads"
_EXPIRE_RULE: Final = "skerry-expire-"
_PUBLIC: Final = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")


@dataclass(frozen=True, kw_only=True)
class Bucket(Resource):
    """A bucket. Outputs: name, arn, region.

    protected: patterns of keys that only a create may write. expire_days: prefixes whose objects go by age. public,
    ownership, further_statements, further_rules: always as they are here; they are settings so that a change by
    somebody else is seen, and undone.
    """

    KIND: ClassVar[str] = "aws_bucket"
    LIFE: ClassVar[Life] = Life.DATA
    FIXED: ClassVar[frozenset[str]] = frozenset({"region"})

    encryption: str = "AES256"
    public: str = BLOCKED
    ownership: str = OWNER_ENFORCED
    tls_only: bool = True
    protected: tuple[str, ...] = ()
    further_statements: tuple[str, ...] = ()
    abort_uploads_days: int = 1
    expire_days: Mapping[str, int] = field(default_factory=dict[str, int])
    further_rules: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Look:
    """A bucket at a glance. bare: as a create leaves it that was cut short: no tags, no policy, no objects."""

    region: str
    owner: str | None
    bare: bool


# Each part of a bucket: the call that writes it, and the settings that are in it.
_PARTS: Final[Mapping[str, frozenset[str]]] = {
    "put_public_access_block": frozenset({"public"}),
    "put_bucket_ownership_controls": frozenset({"ownership"}),
    "put_bucket_encryption": frozenset({"encryption"}),
    "put_bucket_policy": frozenset({"tls_only", "protected", "further_statements"}),
    "put_bucket_lifecycle_configuration": frozenset({"abort_uploads_days", "expire_days", "further_rules"}),
}


def create_request(wanted: Wanted) -> dict[str, Any]:
    """Parameters of CreateBucket. us-east-1 is the one region that must not be named."""
    region = wanted.resource.region
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    return {"Bucket": wanted.name, "ObjectOwnership": OWNER_ENFORCED, **where}


def tagging_request(wanted: Wanted) -> dict[str, Any]:
    """Parameters of PutBucketTagging."""
    return {"Bucket": wanted.name, "Tagging": {"TagSet": tag_list(wanted.tags)}}


def part_requests(wanted: Wanted, partition: str) -> dict[str, dict[str, Any]]:
    """Parameters of each call that writes a part of it, by operation."""
    settings = wanted.settings
    arn = arn_of(wanted.name, partition)
    statements = bucket_policy(arn, tls_only=settings["tls_only"] is True, protected=_texts(settings["protected"]))
    return {
        "put_public_access_block": {
            "Bucket": wanted.name,
            "PublicAccessBlockConfiguration": dict.fromkeys(_PUBLIC, settings["public"] == BLOCKED),
        },
        "put_bucket_ownership_controls": {
            "Bucket": wanted.name,
            "OwnershipControls": {"Rules": [{"ObjectOwnership": settings["ownership"]}]},
        },
        "put_bucket_encryption": {
            "Bucket": wanted.name,
            "ServerSideEncryptionConfiguration": {
                "Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": settings["encryption"]}}]
            },
        },
        "put_bucket_policy": {"Bucket": wanted.name, "Policy": text_of(document(statements))},
        "put_bucket_lifecycle_configuration": {
            "Bucket": wanted.name,
            "LifecycleConfiguration": {"Rules": _rules(settings)},
        },
    }


def arn_of(bucket: str, partition: str) -> str:
    """A bucket's ARN, which follows from its name and from which of AWS's separate clouds it is in."""
    return f"arn:{partition}:s3:::{bucket}"


class Buckets:
    """Makes buckets. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. A bucket without tags, policy and objects is one whose making was cut short: not there."""
        return each(self._read, wanted)

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create. Tags come second, because a create of S3 carries none."""
        seen = self._read(wanted)
        if seen is not None:
            check_owner(seen, wanted, "bucket", _REMEDY)
            return self.update(wanted, differing(wanted, seen))
        try:
            self._aws.call("s3", wanted.resource.region, "create_bucket", **create_request(wanted))
        except Conflict as error:
            if code_of(error) != "BucketAlreadyOwnedByYou":
                raise Conflict(f"the bucket name {wanted.name} is taken by another account; {_REMEDY}") from error
        region = wanted.resource.region
        deadline = self._aws.clock.now() + VISIBLE_S
        what = f"the bucket {wanted.name} can be seen"
        waited(self._aws.clock, what, deadline, lambda: self._head(wanted.name, region))
        self._send(region, "put_bucket_tagging", tagging_request(wanted))
        return self.update(wanted, frozenset[str]().union(*_PARTS.values()))

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Only the parts that hold a changed setting are written."""
        for operation, request in part_requests(wanted, self._aws.partition(wanted.resource.region)).items():
            if _PARTS[operation] & set(changed):
                self._send(wanted.resource.region, operation, request)
        return self._outputs(wanted.name, wanted.resource.region)

    def delete(self, made: Made) -> None:
        """See Handler.delete. Raises Conflict while there is anything in it."""
        try:
            held = self.held(made)
            if held.objects:
                raise Conflict(
                    f"the bucket {made.name} holds {held}: it is left; `skerry destroy --data` deletes them and it"
                )
            self._send(made.region, "delete_bucket", {"Bucket": made.name})
        except Absent:
            return
        what, deadline = f"the bucket {made.name} is gone", self._aws.clock.now() + VISIBLE_S
        waited(self._aws.clock, what, deadline, lambda: True if self._head(made.name, made.region) is None else None)

    def held(self, made: Made, prefix: str = "") -> Held:
        """What is in it, counted up to some 10,000 objects."""
        count, size = 0, 0
        with suppress(Absent):
            for number, page in enumerate(self._versions(made, prefix)):
                if number == _COUNTED_PAGES:
                    return Held(objects=count, size_bytes=size, more=True)
                count += len(page)
                size += sum(int(entry.get("Size", 0)) for entry in page)
        return Held(objects=count, size_bytes=size)

    def empty(self, made: Made, prefix: str = "", progress: Callable[[Held], None] = lambda _held: None) -> Held:
        """Delete all objects, their versions, and uploads in parts; gone already is success. The bucket stays.

        prefix: only what begins with it. progress: told after every thousand.
        """
        count, size = 0, 0
        try:
            # From the start every time: what was listed is gone when the next page is asked for.
            while page := next(self._versions(made, prefix), None):
                self._delete_all(made, page)
                count += len(page)
                size += sum(int(entry.get("Size", 0)) for entry in page)
                progress(Held(objects=count, size_bytes=size))
            uploads = list(
                self._aws.pages("s3", made.region, "list_multipart_uploads", "Uploads", Bucket=made.name, Prefix=prefix)
            )
            for upload in uploads:
                self._abort(made, str(upload["Key"]), str(upload["UploadId"]))
        except Absent:
            pass
        return Held(objects=count, size_bytes=size)

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. A run's bucket is the one that its URI names, wherever it is."""
        scheme, _, rest = run.partition("://")
        name = rest.partition("/")[0]
        if scheme != "s3" or not name:
            return
        region = self._head(name, next(iter(sorted(regions)), ""))
        if region is None:
            return
        tags = self._tags(name, region)
        if owner_of(tags) == run:
            yield found(Bucket, name=name, region=region, tags=tags, outputs=self._outputs(name, region))

    def look(self, name: str, region: str) -> Look | None:
        """Whose it is and where; None if nobody has it. region: where to ask. Raises Unauthorized if it is hidden."""
        where = self._head(name, region)
        if where is None:
            return None
        tags = self._tags(name, where)
        return Look(region=where, owner=owner_of(tags), bare=not tags and self._is_bare(name, where))

    def _is_bare(self, name: str, region: str) -> bool:
        if self._part(region, name, "get_bucket_policy"):
            return False
        return not self._aws.call("s3", region, "list_objects_v2", Bucket=name, MaxKeys=1).get("KeyCount", 0)

    def _read(self, wanted: Wanted) -> Seen | None:
        name = wanted.name
        look = self.look(name, wanted.resource.region)
        if look is None or (look.bare and not wanted.resource.brought):
            return None
        region = look.region
        arn = arn_of(name, self._aws.partition(region))

        def part(operation: str) -> dict[str, Any]:
            return self._part(region, name, operation)

        return Seen(
            outputs=self._outputs(name, region),
            settings={
                "region": region,
                "encryption": _encryption(part("get_bucket_encryption")),
                "public": _public(part("get_public_access_block")),
                "ownership": _ownership(part("get_bucket_ownership_controls")),
                **_of_policy(part("get_bucket_policy"), arn, _texts(wanted.settings["protected"])),
                **_of_rules(part("get_bucket_lifecycle_configuration")),
            },
            owner=look.owner,
        )

    def _head(self, name: str, region: str) -> str | None:
        """The region it is in; None if nobody has such a bucket."""
        try:
            told = self._aws.call("s3", region, "head_bucket", Bucket=name)
        except Absent:
            return None
        except Unauthorized as error:
            raise Unauthorized(
                f"the bucket {name} exists, and these credentials may not look at it: it is another account's, or the "
                f"right s3:ListBucket is missing; {_REMEDY}"
            ) from error
        return str(told.get("BucketRegion") or region)

    def _tags(self, name: str, region: str) -> dict[str, str]:
        return tags_in(self._part(region, name, "get_bucket_tagging").get("TagSet", []))

    def _part(self, region: str, name: str, operation: str) -> dict[str, Any]:
        try:
            return self._aws.call("s3", region, operation, Bucket=name)
        except Absent:
            return {}

    def _send(self, region: str, operation: str, request: Mapping[str, Any]) -> None:
        # The account is named, so that nobody's bucket of that name is meant if ours is gone meanwhile.
        self._aws.call("s3", region, operation, ExpectedBucketOwner=self._aws.identity().account, **request)

    def _versions(self, made: Made, prefix: str) -> Iterator[list[dict[str, Any]]]:
        """Objects, or their versions and what marks them deleted, a thousand at a time."""
        following: dict[str, Any] = {}
        while True:
            page = self._aws.call(
                "s3",
                made.region,
                "list_object_versions",
                Bucket=made.name,
                Prefix=prefix,
                MaxKeys=_AT_ONCE,
                **following,
            )
            entries: list[dict[str, Any]] = [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
            if entries:
                yield entries
            if not page.get("IsTruncated"):
                return
            following = {"KeyMarker": page["NextKeyMarker"]}
            if page.get("NextVersionIdMarker"):
                following["VersionIdMarker"] = page["NextVersionIdMarker"]

    def _delete_all(self, made: Made, entries: Sequence[dict[str, Any]]) -> None:
        objects = [{"Key": str(entry["Key"]), "VersionId": str(entry["VersionId"])} for entry in entries]
        some = {"Objects": objects, "Quiet": True}
        told = self._aws.call("s3", made.region, "delete_objects", Bucket=made.name, Delete=some)
        for error in told.get("Errors", []):
            said = f"cannot delete s3://{made.name}/{error.get('Key')}: {error.get('Code')}: {error.get('Message')}"
            raise (Unauthorized if error.get("Code") == "AccessDenied" else Retryable)(said)

    def _outputs(self, name: str, region: str) -> dict[str, str]:
        return {"name": name, "arn": arn_of(name, self._aws.partition(region)), "region": region}

    def _abort(self, made: Made, key: str, upload: str) -> None:
        try:
            self._aws.call("s3", made.region, "abort_multipart_upload", Bucket=made.name, Key=key, UploadId=upload)
        except Absent:
            return


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
    ]


def _of_rules(told: Mapping[str, Any]) -> dict[str, Json]:
    """The settings that a lifecycle tells; whatever a rule does beyond ours makes it a further one."""
    abort_days = 0
    expire_days: dict[str, Json] = {}
    further: list[Json] = []
    for rule in told.get("Rules", []):
        name = str(rule.get("ID", ""))
        prefix = rule.get("Filter", {}).get("Prefix", rule.get("Prefix", ""))
        days = rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation")
        expires = rule.get("Expiration", {}).get("Days")
        enabled = rule.get("Status") == "Enabled" and not set(rule) & {"Transitions", "NoncurrentVersionExpiration"}
        if enabled and name == _ABORT_RULE and days and expires is None and not prefix:
            abort_days = int(days)
        elif enabled and name.startswith(_EXPIRE_RULE) and expires and days is None and prefix:
            expire_days[str(prefix)] = int(expires)
        else:
            further.append(name)
    return {"abort_uploads_days": abort_days, "expire_days": expire_days, "further_rules": further}


def _of_policy(told: Mapping[str, Any], arn: str, wanted: Sequence[str]) -> dict[str, Json]:
    """The settings that a policy tells; what is not exactly a statement of ours is a further one."""
    tls_only, protected = False, list[str]()
    further: list[Json] = []
    for statement in statements_of(json.loads(told["Policy"]) if "Policy" in told else None):
        resources = statement.get("resources")
        patterns = [pattern.removeprefix(f"{arn}/") for pattern in _texts(resources)]
        if _says(statement, bucket_policy(arn, tls_only=True, protected=())):
            tls_only = True
        elif patterns and _says(statement, bucket_policy(arn, tls_only=False, protected=patterns)):
            protected = patterns
        else:
            further.append(str(statement.get("sid") or statement.get("effect")))
    same = sorted(protected) == sorted(wanted)
    return {
        "tls_only": tls_only,
        "protected": list(wanted if same else sorted(protected)),
        "further_statements": further,
    }


def _says(statement: Json, ours: Sequence[Statement]) -> bool:
    return normal([statement]) == normal(statements_of(as_json(document(ours))))


def _encryption(told: Mapping[str, Any]) -> str:
    rules = told.get("ServerSideEncryptionConfiguration", {}).get("Rules", [])
    default: Mapping[str, Any] = rules[0].get("ApplyServerSideEncryptionByDefault", {}) if rules else {}
    return str(default.get("SSEAlgorithm", "none"))


def _public(told: Mapping[str, Any]) -> str:
    block: Mapping[str, Any] = told.get("PublicAccessBlockConfiguration", {})
    missing = [name for name in _PUBLIC if not block.get(name)]
    return f"not blocked: {', '.join(missing)}" if missing else BLOCKED


def _ownership(told: Mapping[str, Any]) -> str:
    rules = told.get("OwnershipControls", {}).get("Rules", [])
    return str(rules[0].get("ObjectOwnership")) if rules else "ObjectWriter"


def _texts(value: Value) -> list[str]:
    return [str(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else []
