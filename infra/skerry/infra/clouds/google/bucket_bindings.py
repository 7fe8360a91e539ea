"""What one principal may do in a bucket: its rules, each a role under a condition, in the bucket's one policy.

The policy is everybody's, so it is read, changed and written back with its etag, as version 3, and again if somebody
else was faster; what is not ours in it stays as it is. Ours is what has our name in the condition's title.
Sources: Cloud Storage, "Set and manage IAM policies on buckets"; IAM, "Policy" (REST), "Delete service accounts".
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from skerry.infra.clouds.google import marks
from skerry.infra.clouds.google.handling import gone
from skerry.infra.clouds.google.policies import MOST_PRINCIPALS, MOST_RULES, Rule, expression, told
from skerry.infra.clouds.google.session import Absent, waited
from skerry.infra.clouds.handling import VISIBLE_S, check_owner, of, text
from skerry.infra.graph import Grant, Resource, Text, as_json
from skerry.infra.handler import Seen
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.graph import Json, Value
    from skerry.infra.handler import Made, Wanted

_VERSION: Final = 3
_BETWEEN: Final = ": "
# What IAM says of an account that is too new to be known everywhere.
_TOO_NEW: Final = "does not exist"


@dataclass(frozen=True, kw_only=True)
class BucketBinding(Resource):
    """The rules of one principal in a bucket. member: serviceAccount:..., or principalSet://... Outputs: name, bucket.

    The bucket goes by its name: whoever gives rights in one that is made in the same apply says `after`.
    """

    KIND: ClassVar[str] = "google_bucket_binding"
    FIXED: ClassVar[frozenset[str]] = frozenset({"bucket"})

    bucket: str
    member: Text
    rules: tuple[Rule, ...]

    def grants(self) -> tuple[Grant, ...]:
        """All that the principal may do."""
        return tuple(told(_who(self.member), self.bucket, self.rules))


def bindings_of(wanted: Wanted) -> list[dict[str, Any]]:
    """What the policy has to hold. Raises Invalid for more rules of one role than IAM takes."""
    resource, member = of(BucketBinding, wanted), text(wanted.settings["member"])
    roles = [rule.role for rule in resource.rules]
    if any(roles.count(role) > MOST_RULES for role in roles):
        raise Invalid(f"{resource.address} has more than {MOST_RULES} rules of one role")
    return [
        {
            "role": rule.role,
            "members": [member],
            "condition": {
                "title": f"{wanted.name}{_BETWEEN}{rule.title}",
                "description": marks.description(replace(wanted, resource=replace(resource, why=rule.title))),
                "expression": expression(resource.bucket, rule),
            },
        }
        for rule in resource.rules
    ]


def changed_policy(policy: Mapping[str, Any], name: str, ours: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The policy with `ours` in the place of whatever has that name. Raises Invalid if it gets too long."""
    others = [binding for binding in policy.get("bindings", ()) if _name_of(binding) != name]
    bindings = [*others, *ours]
    principals = sum(len(binding.get("members", ())) for binding in bindings)
    if principals > MOST_PRINCIPALS:
        raise Invalid(
            f"the bucket's policy would name {principals} principals, IAM takes {MOST_PRINCIPALS}; say `role: group`"
        )
    about = {"etag": policy["etag"]} if "etag" in policy else {}
    return {"version": _VERSION, "bindings": bindings, **about}


class BucketBindings:
    """Writes rules into buckets' policies. See Handler."""

    def __init__(self, google: Google) -> None:
        self._google = google
        # One after the other: the etag would turn back all but one, and Google takes one change a second.
        self._alone = threading.Lock()

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. One call for each bucket."""
        policies = {bucket: self._policy(bucket) for bucket in {of(BucketBinding, one).bucket for one in wanted}}
        return [self._seen(one, policies[of(BucketBinding, one).bucket]) for one in wanted]

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create."""
        return self._write(wanted)

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. All rules of the principal are written at once."""
        del changed
        return self._write(wanted)

    def delete(self, made: Made) -> None:
        """See Handler.delete."""
        bucket = made.outputs.get("bucket") or str(made.settings.get("bucket", ""))
        gone(lambda: self._rewrite(bucket, lambda policy: self._without(policy, made.name)))

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. Rights are given in the run's own bucket alone, which its URI names."""
        del regions
        scheme, _, rest = run.partition("://")
        bucket = rest.partition("/")[0]
        policy = self._policy(bucket) if scheme == "gs" and bucket else None
        found: dict[str, Made] = {}
        for binding in () if policy is None else policy.get("bindings", ()):
            mark, name = _mark_of(binding), _name_of(binding)
            if mark is not None and mark.owner(run) == run:
                outputs = _outputs(name, bucket)
                found[name] = marks.found(BucketBinding, mark, name=name, region="", outputs=outputs)
        return found.values()

    def _write(self, wanted: Wanted) -> Mapping[str, str]:
        bucket, ours = of(BucketBinding, wanted).bucket, bindings_of(wanted)

        def change(policy: Mapping[str, Any]) -> dict[str, Any] | None:
            seen = self._seen(wanted, policy)
            if seen is not None:
                check_owner(seen, wanted, "binding", "delete it if it is not needed")
            changed = changed_policy(policy, wanted.name, ours)
            return None if _same(changed, policy) else changed

        self._rewrite(bucket, change)
        return _outputs(wanted.name, bucket)

    def _rewrite(self, bucket: str, change: Callable[[Mapping[str, Any]], dict[str, Any] | None]) -> None:
        """Read, change and write back, until nobody was faster. change: None leaves it as it is."""

        def attempt() -> bool | None:
            changed = change(self._call("GET", bucket))
            try:
                if changed is not None:
                    self._call("PUT", bucket, changed)
            except Conflict:
                return None
            except Invalid as error:
                # The account may be too new for the bucket's service to know it.
                if isinstance(error, Absent) or _TOO_NEW not in str(error):
                    raise
                return None
            return True

        with self._alone:
            deadline = self._google.clock.now() + VISIBLE_S
            waited(self._google.clock, f"the policy of the bucket {bucket} can be changed", deadline, attempt)

    @staticmethod
    def _without(policy: Mapping[str, Any], name: str) -> dict[str, Any] | None:
        changed = changed_policy(policy, name, ())
        return None if _same(changed, policy) else changed

    def _seen(self, wanted: Wanted, policy: Mapping[str, Any] | None) -> Seen | None:
        resource = of(BucketBinding, wanted)
        ours = [one for one in (policy or {}).get("bindings", ()) if _name_of(one) == wanted.name]
        if not ours:
            return None
        members = sorted({str(member) for one in ours for member in one.get("members", ())})
        mark = _mark_of(ours[0])
        return Seen(
            outputs=_outputs(wanted.name, resource.bucket),
            settings={
                "region": resource.region,
                "bucket": resource.bucket,
                "member": ", ".join(members),
                "rules": _rules(wanted.settings["rules"], resource, ours),
            },
            owner=None if mark is None else mark.owner(wanted.run),
        )

    def _policy(self, bucket: str) -> dict[str, Any] | None:
        try:
            return self._call("GET", bucket)
        except Absent:
            return None

    def _call(self, method: str, bucket: str, body: Mapping[str, Json] | None = None) -> dict[str, Any]:
        query = {"optionsRequestedPolicyVersion": str(_VERSION)} if body is None else None
        path = f"storage/v1/b/{quote(bucket, safe='')}/iam"
        return self._google.call("storage", method, path, body=body, query=query)


def _who(member: Text) -> str:
    """The principal, as people call it: a role of AWS by its name, an account by its address."""
    kind, role, name = str(member).rpartition("/attribute.aws_role/")
    return f"AWS role {name}" if role else f"service account {kind}{name.removeprefix('serviceAccount:')}"


def _outputs(name: str, bucket: str) -> dict[str, str]:
    return {"name": name, "bucket": bucket}


def _name_of(binding: Mapping[str, Any]) -> str:
    """Which resource a binding is of; "" for one that is not ours."""
    if _mark_of(binding) is None:
        return ""
    return str(binding["condition"].get("title", "")).partition(_BETWEEN)[0]


def _mark_of(binding: Mapping[str, Any]) -> marks.Mark | None:
    condition: Mapping[str, Any] = binding.get("condition") or {}
    return marks.of_description(str(condition.get("description", "")))


def _rules(wanted: Value, resource: BucketBinding, ours: Sequence[Mapping[str, Any]]) -> Json:
    """What was seen, in the words of what was wanted if it says the same."""
    seen = sorted((str(one["role"]), str(one["condition"]["expression"])) for one in ours)
    if seen == sorted((rule.role, expression(resource.bucket, rule)) for rule in resource.rules):
        return as_json(wanted)
    return [{"role": role, "condition": condition} for role, condition in seen]


def _same(changed: Mapping[str, Any], policy: Mapping[str, Any]) -> bool:
    def plain(bindings: Sequence[Mapping[str, Any]]) -> list[str]:
        return sorted(repr(sorted(binding.items(), key=lambda item: item[0])) for binding in bindings)

    return plain(changed["bindings"]) == plain(policy.get("bindings", ()))
