"""Rules in a bucket's policy: ours are written and taken away, others' stay, whoever writes at the same time."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.google.ground import RUN, check_golden, check_request, wanted
from tests.infra.google.handlers import GoogleHandlerSuite
from tests.infra.google.test_identity import ACCOUNT
from tests.infra.google.test_storage import ONE as BUCKET
from tests.infra.ground import Listener, made
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.bindings import BucketBinding, BucketBindings, bindings_of, changed_policy
from skerry.infra.clouds.google.identity import ServiceAccounts, email_of
from skerry.infra.clouds.google.policies import CREATOR, MOST_PRINCIPALS, Rule, replica_rules
from skerry.infra.clouds.google.session import Google, Late
from skerry.infra.clouds.google.storage import Buckets
from skerry.infra.graph import Grant, Ref
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.graph import Resource
    from skerry.infra.testing.google import GoogleSandbox

MEMBER = f"serviceAccount:{email_of(ACCOUNT.name, 'skerry-sandbox')}"
RULES = replica_rules(prefix="teams/tiny-gpt", slots=["vertex-0", "vertex-1"], group="vertex")
BINDING = BucketBinding(
    key="vertex-replicas",
    name="skerry-tiny-gpt-vertex",
    region="",
    bucket="acme-runs",
    member=MEMBER,
    rules=RULES,
)
ONE = wanted(BINDING)
PATH = "storage/v1/b/acme-runs/iam"


def policy(google: Google) -> dict[str, Any]:
    return google.call("storage", "GET", PATH, query={"optionsRequestedPolicyVersion": "3"})


def add(google: Google, *bindings: dict[str, Any]) -> None:
    told = policy(google)
    body = {"version": 3, "etag": told["etag"], "bindings": [*told.get("bindings", ()), *bindings]}
    google.call("storage", "PUT", PATH, body=body)


class TestBucketBindings(GoogleHandlerSuite):
    def handler(self, google: Google) -> BucketBindings:
        return BucketBindings(google)

    def resource(self, google: Google) -> BucketBinding:
        Buckets(google).create(BUCKET)
        ServiceAccounts(google).create(wanted(ACCOUNT))
        return BINDING

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        assert isinstance(resource, BucketBinding)
        return replace(resource, rules=resource.rules[:2]), "rules"

    def test_what_is_not_ours_stays(self, google: Google) -> None:
        self.resource(google)
        condition = {"title": "skerry-tiny-gpt-vertex: mine", "expression": 'resource.name == "x"'}
        others = {"role": "roles/storage.objectViewer", "members": ["user:a@example.com"], "condition": condition}
        add(google, others, {"role": "roles/storage.admin", "members": ["user:b@example.com"]})
        before = policy(google)["bindings"]
        outputs = BucketBindings(google).create(ONE)
        assert len(policy(google)["bindings"]) == len(before) + len(RULES)
        BucketBindings(google).delete(made(ONE, outputs))
        assert policy(google)["bindings"] == before

    def test_an_account_that_is_not_known_yet_is_waited_for(self, google: Google, sandbox: GoogleSandbox) -> None:
        Buckets(google).create(BUCKET)
        sandbox.settling = 6
        ServiceAccounts(google)._call(
            "POST", f"v1/projects/{sandbox.project}/serviceAccounts", {"accountId": ACCOUNT.name, "serviceAccount": {}}
        )
        sandbox.settling = 0
        BucketBindings(google).create(ONE)
        self.assert_as_wanted(ONE, self.seen(google, ONE))

    def test_an_account_that_is_not_there_is_not_waited_for_long(self, google: Google) -> None:
        Buckets(google).create(BUCKET)
        with pytest.raises(Late, match="waited 60 s in vain until the policy of the bucket acme-runs can be changed"):
            BucketBindings(google).create(ONE)

    def test_who_writes_at_the_same_time_loses_nothing(self, sandbox: GoogleSandbox, google: Google) -> None:
        self.resource(google)
        made_: list[str] = []

        def write(number: int) -> None:
            one = wanted(replace(BINDING, name=f"skerry-tiny-gpt-{number}", key=f"vertex-{number}"))
            # Each as another operator: what one process does is one after the other anyway.
            made_.append(BucketBindings(Google(FakeClock(number), sandbox.environment)).create(one)["name"])

        threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(one.name for one in BucketBindings(google).owned(RUN, [])) == sorted(made_)
        assert len(made_) == 6

    def test_an_account_that_was_made_again_gets_its_rights_again(self, google: Google) -> None:
        self.resource(google)
        BucketBindings(google).create(ONE)
        accounts = ServiceAccounts(google)
        (seen,) = accounts.read([wanted(ACCOUNT)])
        assert seen is not None
        accounts.delete(made(wanted(ACCOUNT), seen.outputs))
        accounts.create(wanted(ACCOUNT))
        dead = self.seen(google, ONE)
        assert self.differing(ONE, dead) == {"member"}
        assert str(dead.settings["member"]).startswith("deleted:serviceAccount:")
        BucketBindings(google).update(ONE, {"member"})
        self.assert_as_wanted(ONE, self.seen(google, ONE))

    def test_what_is_as_it_shall_be_is_not_written(self, google: Google, listener: Listener) -> None:
        self.resource(google)
        BucketBindings(google).create(ONE)
        listener.calls.clear()
        BucketBindings(google).create(ONE)
        assert listener.calls == [f"storage GET {PATH}"]

    @pytest.mark.parametrize("widened", ["true", 'resource.name.startsWith("projects/_/buckets/acme-runs")'])
    def test_a_condition_that_somebody_widened_is_seen(self, google: Google, widened: str) -> None:
        self.resource(google)
        BucketBindings(google).create(ONE)
        told = policy(google)
        for binding in told["bindings"]:
            if binding["role"] == CREATOR:
                binding["condition"]["expression"] = widened
        google.call("storage", "PUT", PATH, body={"version": 3, "etag": told["etag"], "bindings": told["bindings"]})
        seen = self.seen(google, ONE)
        assert self.differing(ONE, seen) == {"rules"}
        assert widened in str(seen.settings["rules"])
        BucketBindings(google).update(ONE, {"rules"})
        self.assert_as_wanted(ONE, self.seen(google, ONE))

    def test_without_its_bucket_there_is_none(self, google: Google) -> None:
        assert list(BucketBindings(google).read([ONE])) == [None]
        assert list(BucketBindings(google).owned(RUN, [])) == []
        assert list(BucketBindings(google).owned("s3://acme-runs/x", [])) == []
        BucketBindings(google).delete(made(ONE, {"name": ONE.name, "bucket": "acme-runs"}))


def test_the_policy_is_that_of_the_golden_file() -> None:
    policy = changed_policy({"etag": "CAE="}, BINDING.name, bindings_of(ONE))
    check_request("storage", "PUT", PATH, policy)
    check_golden("bucket_binding", policy)
    for binding in policy["bindings"]:
        assert len(binding["condition"]["title"]) <= 100
        assert len(binding["condition"]["description"]) <= 256


def test_a_plan_says_what_it_gives() -> None:
    account = Ref(address=ACCOUNT.address, output="email", before="serviceAccount:")
    grants = replace(BINDING, member=account).grants()
    who = "service account ${google_service_account.vertex-replicas.email}"
    assert grants[0] == Grant(who=who, may="read and list", on="acme-runs/teams/tiny-gpt/*")
    said = {(grant.may, grant.on.removeprefix("acme-runs/teams/tiny-gpt/")) for grant in grants[1:]}
    assert ("create, never overwrite", "commits/*") in said
    assert ("create, never overwrite", "contributions/*/vertex-*") in said
    assert ("write and delete", "heartbeats/vertex-*") in said


def test_what_the_service_would_refuse_is_said_before() -> None:
    rules: Sequence[Rule] = [Rule(title=str(number), role=CREATOR, keys=(f"{number}/",)) for number in range(21)]
    with pytest.raises(Invalid, match="more than 20 rules of one role"):
        bindings_of(wanted(replace(BINDING, rules=tuple(rules))))
    many = {"role": "x", "members": [f"user:{number}@example.com" for number in range(MOST_PRINCIPALS - 2)]}
    with pytest.raises(Invalid, match=r"1501 principals, IAM takes 1500; say `role: group`"):
        changed_policy({"etag": "CAE=", "bindings": [many]}, BINDING.name, bindings_of(ONE))
