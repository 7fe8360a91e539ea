"""Bucket bindings: ours are written and deleted, those of other owners are kept."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.clouds.google.handlers import GoogleHandlerSuite
from tests.infra.clouds.google.kit import RUN, check_golden, check_request, wanted
from tests.infra.clouds.google.test_gcs import ONE as BUCKET
from tests.infra.clouds.google.test_service_accounts import ACCOUNT
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.bucket_bindings import BucketBinding, BucketBindings, bindings_of, changed_policy
from skerry.infra.clouds.google.gcs import Buckets
from skerry.infra.clouds.google.replica_rules import CREATOR, MOST_PRINCIPALS, Rule, replica_rules
from skerry.infra.clouds.google.service_accounts import ServiceAccounts, email_of
from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.handler_helpers import NotYetVisible
from skerry.infra.provision.graph import as_json
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.infra.kit import Listener

    from skerry.testing.google import GoogleSandbox

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


def write(google: Google, etag: str, bindings: Sequence[dict[str, Any]]) -> None:
    google.call("storage", "PUT", PATH, body={"version": 3, "etag": etag, "bindings": bindings})


class TestBucketBindings(GoogleHandlerSuite):
    HANDLER = BucketBindings
    CHANGE = ("rules", RULES[:2])

    def resource(self, google: Google) -> BucketBinding:
        Buckets(google).create(BUCKET)
        ServiceAccounts(google).create(wanted(ACCOUNT))
        return BINDING

    def test_bindings_of_other_owners_are_kept(self, google: Google) -> None:
        self.resource(google)
        condition = {"title": "skerry-tiny-gpt-vertex: mine", "expression": 'resource.name == "x"'}
        others = {"role": "roles/storage.objectViewer", "members": ["user:a@example.com"], "condition": condition}
        admin = {"role": "roles/storage.admin", "members": ["user:b@example.com"]}
        current = policy(google)
        write(google, current["etag"], [*current.get("bindings", ()), others, admin])
        before = policy(google)["bindings"]
        record = self.created(google, ONE)
        assert len(policy(google)["bindings"]) == len(before) + len(RULES)
        BucketBindings(google).delete(record)
        assert policy(google)["bindings"] == before

    def test_new_account_is_waited_for(self, google: Google, sandbox: GoogleSandbox) -> None:
        Buckets(google).create(BUCKET)
        sandbox.settling = 6
        body = {"accountId": ACCOUNT.name, "serviceAccount": {}}
        google.call("iam", "POST", f"v1/projects/{sandbox.project}/serviceAccounts", body=body)
        sandbox.settling = 0
        BucketBindings(google).create(ONE)
        self.assert_as_desired(ONE, self.seen(google, ONE))

    def test_missing_account_times_out(self, google: Google) -> None:
        Buckets(google).create(BUCKET)
        with pytest.raises(
            NotYetVisible, match="timed out after 60 s, waiting until the policy of the bucket acme-runs can be changed"
        ):
            BucketBindings(google).create(ONE)

    def test_concurrent_writers_lose_no_bindings(self, sandbox: GoogleSandbox, google: Google) -> None:
        self.resource(google)
        created: list[str] = []

        def bind(number: int) -> None:
            desired = wanted(replace(BINDING, name=f"skerry-tiny-gpt-{number}", key=f"vertex-{number}"))
            # Each as another operator: what one process does is one after the other anyway.
            created.append(BucketBindings(Google(FakeClock(number), sandbox.environment)).create(desired)["name"])

        threads = [threading.Thread(target=bind, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(desired.name for desired in BucketBindings(google).list_owned(RUN, [])) == sorted(created)
        assert len(created) == 6

    def test_recreated_account_is_bound_again(self, google: Google) -> None:
        self.resource(google)
        BucketBindings(google).create(ONE)
        accounts, account = ServiceAccounts(google), wanted(ACCOUNT)
        accounts.delete(account.to_record(accounts.create(account)))
        accounts.create(account)
        dead = self.assert_restored(google, ONE, "member")
        assert str(dead.settings["member"]).startswith("deleted:serviceAccount:")

    def test_unchanged_policy_is_not_written(self, google: Google, listener: Listener) -> None:
        self.resource(google)
        BucketBindings(google).create(ONE)
        listener.calls.clear()
        BucketBindings(google).create(ONE)
        assert listener.calls == [f"storage GET {PATH}"]

    @pytest.mark.parametrize("widened", ["true", 'resource.name.startsWith("projects/_/buckets/acme-runs")'])
    def test_widened_condition_is_reported_and_restored(self, google: Google, widened: str) -> None:
        self.resource(google)
        BucketBindings(google).create(ONE)
        current = policy(google)
        for binding in current["bindings"]:
            if binding["role"] == CREATOR:
                binding["condition"]["expression"] = widened
        write(google, current["etag"], current["bindings"])
        assert widened in str(self.assert_restored(google, ONE, "rules").settings["rules"])

    def test_missing_bucket_has_no_bindings(self, google: Google) -> None:
        assert list(BucketBindings(google).read([ONE])) == [None]
        assert list(BucketBindings(google).list_owned(RUN, [])) == []
        assert list(BucketBindings(google).list_owned("s3://acme-runs/x", [])) == []
        BucketBindings(google).delete(ONE.to_record({"name": ONE.name, "bucket": "acme-runs"}))


def test_policy_equals_the_golden_file() -> None:
    policy = changed_policy({"etag": "CAE="}, BINDING.name, bindings_of(ONE))
    check_request("storage", "PUT", PATH, policy)
    check_golden("bucket_binding", policy)
    for binding in policy["bindings"]:
        assert len(binding["condition"]["title"]) <= 100
        assert len(binding["condition"]["description"]) <= 256


def test_rights_are_the_bindings_of_the_policy() -> None:
    settings = {name: as_json(value) for name, value in ONE.settings.items()}
    ((title, rights),) = BucketBinding.rights(BINDING.name, settings).items()
    assert title == f"bucket {BINDING.bucket}: {BINDING.member}"
    sent = [{"role": row["role"], "condition": row["condition"]["expression"]} for row in bindings_of(ONE)]
    assert rights == sent
    # A rule that was changed outside of skerry is shown as it was read.
    assert [*BucketBinding.rights("x", {**settings, "rules": [{"role": "x"}]}).values()] == [[{"role": "x"}]]


def test_limits_of_iam_are_checked_before_writing() -> None:
    rules: Sequence[Rule] = [Rule(title=str(number), role=CREATOR, keys=(f"{number}/",)) for number in range(21)]
    with pytest.raises(Invalid, match="more than 20 rules of one role"):
        bindings_of(wanted(replace(BINDING, rules=tuple(rules))))
    many = {"role": "x", "members": [f"user:{number}@example.com" for number in range(MOST_PRINCIPALS - 3)]}
    with pytest.raises(Invalid, match=r"1501 principals, IAM takes 1500; set `role: group`"):
        changed_policy({"etag": "CAE=", "bindings": [many]}, BINDING.name, bindings_of(ONE))
