"""Bucket bindings: the rules of one principal, each a role under a condition, in the bucket's only IAM policy.

The policy is shared with other users, so it is read, changed and written back with its etag, as version 3, and again if
it changed meanwhile. Bindings of other owners stay unchanged; ours have our name in the condition's title.
Sources: Cloud Storage, "Set and manage IAM policies on buckets"; IAM, "Policy" (REST), "Delete service accounts".
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias
from urllib.parse import quote

from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.google.replica_rules import MOST_PRINCIPALS, MOST_RULES, Rule, expression
from skerry.infra.clouds.google.session import delete_if_present
from skerry.infra.clouds.handler_helpers import VISIBLE_S, Absent, bucket_of, check_owner, of, text, wait_for
from skerry.infra.provision.graph import Resource, Text, as_json
from skerry.infra.provision.handler import Observed
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.graph import Json, Value
    from skerry.infra.provision.handler import Desired, StateRecord
    from skerry.runtime.clock import Clock

Change: TypeAlias = "Callable[[Mapping[str, Any]], dict[str, Any]]"
"""Returns a policy with what is to change in it."""
_VERSION: Final = 3
_BETWEEN: Final = ": "
# IAM's message for an account that is too new to be known everywhere.
_TOO_NEW: Final = "does not exist"


@dataclass(frozen=True, kw_only=True)
class BucketBinding(Resource):
    """The rules of one principal in a bucket. member: serviceAccount:..., or principalSet://... Outputs: name, bucket.

    The bucket is named by a text, not a reference: name one that is created in the same apply in `after`.
    """

    KIND: ClassVar[str] = "google_bucket_binding"
    FIXED: ClassVar[frozenset[str]] = frozenset({"bucket"})

    bucket: str
    member: Text
    rules: tuple[Rule, ...]

    @classmethod
    def rights(cls, name: str, settings: Mapping[str, Json], /) -> Mapping[str, Json]:
        """See Resource.rights."""
        del name
        bucket, member, rules = (settings.get(setting) for setting in ("bucket", "member", "rules"))
        if not isinstance(rules, Sequence) or isinstance(rules, str):
            return {}
        return {f"bucket {bucket}: {member}": [_as_binding(str(bucket), rule) for rule in rules]}


def bindings_of(desired: Desired) -> list[dict[str, Any]]:
    """The bindings of the resource in the policy. Raises Invalid for more rules of one role than IAM takes."""
    resource, member = of(BucketBinding, desired), text(desired.settings["member"])
    roles = [rule.role for rule in resource.rules]
    if any(roles.count(role) > MOST_RULES for role in roles):
        raise Invalid(f"{resource.address} has more than {MOST_RULES} rules of one role")
    return [
        {
            "role": rule.role,
            "members": [member],
            "condition": {
                "title": f"{desired.name}{_BETWEEN}{rule.title}",
                "description": owner_labels.description(replace(desired, resource=replace(resource, why=rule.title))),
                "expression": expression(resource.bucket, rule),
            },
        }
        for rule in resource.rules
    ]


def changed_policy(policy: Mapping[str, Any], name: str, ours: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The policy with the bindings of that name replaced by `ours`. Raises Invalid if it gets too long."""
    others = [binding for binding in policy.get("bindings", ()) if name_of(binding) != name]
    bindings = [*others, *ours]
    principals = sum(len(binding.get("members", ())) for binding in bindings)
    if principals > MOST_PRINCIPALS:
        raise Invalid(f"the policy would name {principals} principals, IAM takes {MOST_PRINCIPALS}; set `role: group`")
    about = {"etag": policy["etag"]} if "etag" in policy else {}
    return {"version": _VERSION, "bindings": bindings, **about}


class BucketBindings:
    """Writes rules into buckets' policies. See Handler."""

    def __init__(self, google: Google) -> None:
        self._google = google
        # One at a time: of concurrent writes the etag admits one, and Google takes one change a second.
        self._writing = threading.Lock()

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. One call for each bucket."""
        policies = {
            bucket: self._policy(bucket) for bucket in {of(BucketBinding, desired).bucket for desired in all_desired}
        }
        return [self._seen(desired, policies[of(BucketBinding, desired).bucket]) for desired in all_desired]

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        return self._write(desired)

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. All rules of the principal are written at once."""
        del changed
        return self._write(desired)

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete."""
        bucket = record.outputs.get("bucket") or str(record.settings.get("bucket", ""))
        delete_if_present(lambda: self._rewrite(bucket, lambda policy: changed_policy(policy, record.name, ())))

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Searches the run's own bucket; only a spec or a state names buckets with data."""
        del regions
        bucket = bucket_of(run, "gs") or ""
        policy = (self._policy(bucket) if bucket else None) or {}
        records: dict[str, StateRecord] = {}
        for binding in policy.get("bindings", ()):
            mark, name = mark_of(binding), name_of(binding)
            if mark is not None and mark.owner(run) == run:
                outputs = _outputs(name, bucket)
                records[name] = owner_labels.owned_record(BucketBinding, mark, name=name, region="", outputs=outputs)
        return records.values()

    def _write(self, desired: Desired) -> Mapping[str, str]:
        bucket, ours = of(BucketBinding, desired).bucket, bindings_of(desired)

        def change(policy: Mapping[str, Any]) -> dict[str, Any]:
            seen = self._seen(desired, policy)
            if seen is not None:
                check_owner(seen, desired, "binding", "delete it if it is not needed")
            return changed_policy(policy, desired.name, ours)

        self._rewrite(bucket, change)
        return _outputs(desired.name, bucket)

    def _rewrite(self, bucket: str, change: Change) -> None:
        with self._writing:
            rewrite_policy(self._google.clock, f"the bucket {bucket}", partial(self._call, bucket), change)

    def _seen(self, desired: Desired, policy: Mapping[str, Any] | None) -> Observed | None:
        resource = of(BucketBinding, desired)
        ours = [binding for binding in (policy or {}).get("bindings", ()) if name_of(binding) == desired.name]
        if not ours:
            return None
        mark = mark_of(ours[0])
        return Observed(
            outputs=_outputs(desired.name, resource.bucket),
            settings={
                "region": resource.region,
                "bucket": resource.bucket,
                "member": members_of(ours),
                "rules": _rules(desired.settings["rules"], resource, ours),
            },
            owner=None if mark is None else mark.owner(desired.run),
        )

    def _policy(self, bucket: str) -> dict[str, Any] | None:
        try:
            return self._call(bucket)
        except Absent:
            return None

    def _call(self, bucket: str, changed: Mapping[str, Json] | None = None) -> dict[str, Any]:
        path = f"storage/v1/b/{quote(bucket, safe='')}/iam"
        if changed is None:
            query = {"optionsRequestedPolicyVersion": str(_VERSION)}
            return self._google.call("storage", "GET", path, query=query)
        return self._google.call("storage", "PUT", path, body=changed)


def _as_binding(bucket: str, rule: Json) -> Json:
    """A rule in the form of the policy; one that was changed outside of skerry as it was read."""
    match rule:
        case {"role": str(role), "keys": [*keys], "title": str(title)}:
            written = Rule(title=title, role=role, keys=tuple(map(str, keys)), listing=rule.get("listing") is True)
            return {"role": role, "condition": expression(bucket, written)}
        case _:
            return rule


def _outputs(name: str, bucket: str) -> dict[str, str]:
    return {"name": name, "bucket": bucket}


def name_of(binding: Mapping[str, Any]) -> str:
    """The name of the resource of a binding; "" for a binding that is not ours."""
    if mark_of(binding) is None:
        return ""
    return str(binding["condition"].get("title", "")).partition(_BETWEEN)[0]


def mark_of(binding: Mapping[str, Any]) -> owner_labels.OwnerLabel | None:
    """The owner in a binding's condition; None for a binding that is not ours."""
    condition: Mapping[str, Any] = binding.get("condition") or {}
    return owner_labels.of_description(str(condition.get("description", "")))


def _rules(value: Value, resource: BucketBinding, ours: Sequence[Mapping[str, Any]]) -> Json:
    """The observed rules; the desired ones' own spelling if both mean the same."""
    seen = sorted((str(binding["role"]), str(binding["condition"]["expression"])) for binding in ours)
    if seen == sorted((rule.role, expression(resource.bucket, rule)) for rule in resource.rules):
        return as_json(value)
    return [{"role": role, "condition": condition} for role, condition in seen]


def members_of(bindings: Iterable[Mapping[str, Any]]) -> str:
    """The members of all these bindings, each once."""
    return ", ".join(sorted({str(member) for binding in bindings for member in binding.get("members", ())}))


def rewrite_policy(clock: Clock, of_what: str, call: Callable[..., dict[str, Any]], change: Change) -> None:
    """Read, change and write back, until no other write came between. What is not changed is not written.

    call: reads the policy, or writes the one that it gets.
    """

    def attempt() -> bool | None:
        policy = call()
        changed = change(policy)
        try:
            if not same_bindings(changed, policy):
                call(changed)
        except Conflict:
            return None
        except Invalid as error:
            if isinstance(error, Absent) or not _is_too_new(error):
                raise
            return None
        return True

    wait_for(clock, f"the policy of {of_what} can be changed", clock.now() + VISIBLE_S, attempt)


def _is_too_new(error: Invalid) -> bool:
    """True if a policy was refused because an account is too new for the service to know it."""
    return _TOO_NEW in str(error)


def same_bindings(changed: Mapping[str, Any], policy: Mapping[str, Any]) -> bool:
    """True if both policies have the same bindings."""

    def plain(bindings: Sequence[Mapping[str, Any]]) -> list[str]:
        return sorted(repr(sorted(binding.items(), key=lambda item: item[0])) for binding in bindings)

    return plain(changed["bindings"]) == plain(policy.get("bindings", ()))
