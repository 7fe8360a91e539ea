"""Who trusts whom across clouds, claim by claim: nobody else, for nothing else, and no key that lasts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.aws.account import check_model
from tests.infra.google.ground import check_golden, plain, wanted

from skerry.infra import spec
from skerry.infra.clouds.aws.identity import Role, role_request
from skerry.infra.clouds.aws.policies import document
from skerry.infra.clouds.crossing import (
    LONGEST_SESSION_S,
    MOST_VISITORS,
    Guest,
    aws_into_google,
    google_into_aws,
    trust_google,
)
from skerry.infra.clouds.google.bindings import BucketBinding, bindings_of
from skerry.infra.clouds.google.federation import MOST_SUBJECT_BYTES, Pool, Provider, provider_body
from skerry.infra.clouds.google.identity import ServiceAccount
from skerry.infra.clouds.google.policies import replica_rules
from skerry.infra.clouds.google.storage import Bucket
from skerry.infra.graph import Graph, Ref, resolved
from skerry.infra.target import Ground
from skerry.infra.testing.google import cel
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.crossing import Crossing
    from skerry.infra.graph import Resource, Value
    from skerry.infra.handler import Wanted

GOLDEN: Final = Path(__file__).parent / "golden"
ACCOUNT: Final = "123456789012"
NUMBER: Final = "415104041262"
UNIQUE_ID: Final = "108765432109876543210"
EMAIL: Final = "skerry-tiny-gpt-vertex@acme.iam.gserviceaccount.com"
SPEC: Final = """
run: tiny-gpt
store: STORE
image: ghcr.io/acme/train:1
code: {path: ., command: [python, train.py]}
outer: {rounds: 4}
replicas:
  - {name: batch, count: 2, target: {kind: aws_batch, region: eu-central-1, instance_types: [c6i.xlarge]}}
"""
PREFIX: Final = "teams/tiny-gpt"
BATCH: Final = Guest(key="batch-0", part="batch-0", slots=("batch-0",), group=None)
VERTEX: Final = Guest(key="vertex-all", part="vertex-all", slots=("vertex-0", "vertex-1"), group="vertex")


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    path = tmp_path / "skerry.yaml"
    path.write_text(SPEC.replace("STORE", "s3://acme-runs/teams"))
    written = spec.load(path)
    return Ground(spec=written.spec, run_uri=f"gs://acme-runs/{PREFIX}", image="x", code="0" * 64, seats=written.seats)


def vertex_in_s3(ground: Ground) -> Crossing:
    account = ServiceAccount(key="vertex-all", name="skerry-tiny-gpt-vertex", region="")
    return google_into_aws(
        ground,
        VERTEX,
        account=ACCOUNT,
        bucket_arn="arn:aws:s3:::acme-runs",
        prefix=PREFIX,
        region="eu-central-1",
        email=account.ref("email"),
        unique_id=account.ref("unique_id"),
    )


def batch_in_gcs(ground: Ground, visitors: Mapping[Any, Guest] | None = None) -> Crossing:
    roles = {
        Ref(address=f"aws_role.batch-{number}", output="name"): replace(
            BATCH, key=f"batch-{number}", part=f"batch-{number}", slots=(f"batch-{number}",)
        )
        for number in range(2)
    }
    return aws_into_google(
        ground,
        roles if visitors is None else visitors,
        group="batch",
        account=ACCOUNT,
        number=NUMBER,
        bucket=Bucket(key="store", name="acme-runs", region="europe-west4"),
        prefix=PREFIX,
    )


def known(resource: Resource) -> Wanted:
    """As it is when all that it refers to exists."""

    def look_up(ref: Ref) -> str:
        told = {"email": EMAIL, "unique_id": UNIQUE_ID, "name": f"skerry-{ref.address.rpartition('.')[2]}"}
        return told[ref.output]

    settings: dict[str, Value] = {name: resolved(value, look_up) for name, value in resource.settings().items()}
    return replace(wanted(resource), settings=settings)


class TestGoogleIntoAws:
    def test_the_trust_is_of_one_account_for_one_audience(self, ground: Ground) -> None:
        (role,) = vertex_in_s3(ground).resources
        trust = json.loads(role_request(known(role))["AssumeRolePolicyDocument"])
        (statement,) = trust["Statement"]
        assert statement == {
            "Effect": "Allow",
            "Principal": {"Federated": ["accounts.google.com"]},
            "Action": ["sts:AssumeRoleWithWebIdentity"],
            "Condition": {
                "StringEquals": {
                    "accounts.google.com:sub": [UNIQUE_ID],
                    "accounts.google.com:oaud": [f"skerry/{ACCOUNT}/{ground.stem}"],
                    "accounts.google.com:aud": [UNIQUE_ID, EMAIL],
                }
            },
        }

    @pytest.mark.parametrize(
        ("claims", "let_in"),
        [
            ({}, True),
            ({"azp": EMAIL}, True),
            ({"sub": "1", "azp": "1"}, False),
            ({"sub": "1"}, False),
            ({"azp": "1"}, False),
            ({"aud": "skerry/123456789012/skerry-other-000000"}, False),
            ({"aud": "https://example.com"}, False),
            ({"azp": "evil@acme.iam.gserviceaccount.com"}, False),
        ],
    )
    def test_a_token_is_let_in_if_every_claim_is_right(self, claims: dict[str, str], let_in: bool) -> None:  # noqa: FBT001
        token = {"sub": UNIQUE_ID, "azp": UNIQUE_ID, "aud": "skerry/1/x", **claims}
        trust = trust_google(email=EMAIL, unique_id=UNIQUE_ID, audience="skerry/1/x")
        # AWS compares its key aud with the token's azp, and its key oaud with the token's aud.
        keys = {"sub": token["sub"], "aud": token["azp"], "oaud": token["aud"]}
        (operator,) = trust.conditions
        assert operator == "StringEquals"
        conditions = trust.conditions[operator]
        assert set(conditions) == {f"accounts.google.com:{key}" for key in keys}
        assert all(value in conditions[f"accounts.google.com:{key}"] for key, value in keys.items()) is let_in

    def test_the_role_may_do_what_any_replica_of_the_group_may(self, ground: Ground) -> None:
        (role,) = vertex_in_s3(ground).resources
        assert isinstance(role, Role)
        from tests.infra.aws.test_policies import policy  # noqa: PLC0415  parametrized tests of its own

        expected = policy(slots=["vertex-0", "vertex-1"], group="vertex")
        assert plain(document(role.policies["replica"])) == plain(document(expected))
        assert role.managed == ()

    def test_its_sessions_are_as_long_as_iam_gives(self, ground: Ground) -> None:
        (role,) = vertex_in_s3(ground).resources
        request = role_request(known(role))
        assert request["MaxSessionDuration"] == LONGEST_SESSION_S == 12 * 3600
        check_model("iam", "CreateRole", request)

    def test_names_of_any_length_fit(self, ground: Ground) -> None:
        long = replace(VERTEX, part="A group of a very long name, " * 3)
        account = {"account": ACCOUNT, "bucket_arn": "arn:aws:s3:::b", "prefix": PREFIX, "region": "eu-west-1"}
        (role,) = google_into_aws(ground, long, email=EMAIL, unique_id=UNIQUE_ID, **account).resources
        assert len(role.name) + len("-g99") <= 64
        check_model("iam", "CreateRole", role_request(known(role)))

    def test_a_job_is_told_the_role_and_the_audience(self, ground: Ground) -> None:
        crossing = vertex_in_s3(ground)
        (role,) = crossing.resources
        assert dict(crossing.environment) == {
            "SKERRY_AWS_ROLE": role.ref("arn"),
            "SKERRY_AWS_AUDIENCE": f"skerry/{ACCOUNT}/{ground.stem}",
            "AWS_REGION": "eu-central-1",
        }

    def test_an_account_that_is_made_anew_is_trusted_anew(self, ground: Ground) -> None:
        """Its number is in the trust by reference, so that the plan of another number changes the role."""
        (role,) = vertex_in_s3(ground).resources
        assert "google_service_account.vertex-all" in role.needs()

    def test_a_plan_says_who_may_act_as_the_role(self, ground: Ground) -> None:
        (role,) = vertex_in_s3(ground).resources
        first = role.grants()[0]
        assert (first.who, first.may) == ("accounts.google.com", "act as")


class TestAwsIntoGoogle:
    def test_all_that_is_made_can_be_made_in_order(self, ground: Ground) -> None:
        bucket = Bucket(key="store", name="acme-runs", region="europe-west4")
        roles = [Role(key=f"batch-{number}", name=f"r{number}", region="", trust=()) for number in range(2)]
        graph = Graph([bucket, *roles, *batch_in_gcs(ground).resources])
        order = [resource.address for resource in graph]
        assert order.index("google_service.sts") < order.index("google_pool.aws")
        assert order.index("google_pool.aws") < order.index("google_pool_provider.batch")
        assert order.index("google_pool.aws") < order.index("google_bucket_binding.batch-0")
        assert order.index("google_bucket.store") < order.index("google_bucket_binding.batch-1")

    def test_another_group_shares_the_pool(self, ground: Ground) -> None:
        one, other = batch_in_gcs(ground), batch_in_gcs(ground, {"theirs": replace(BATCH, key="sm", part="sm")})
        shared = {resource.address: resource for resource in one.resources}
        assert [resource == shared[resource.address] for resource in other.resources[:3]] == [True] * 3
        assert [resource.KIND for resource in other.resources[:3]] == ["google_service", "google_service", Pool.KIND]

    @pytest.mark.parametrize(
        ("account", "arn", "let_in"),
        [
            (ACCOUNT, f"arn:aws:sts::{ACCOUNT}:assumed-role/skerry-batch-0/0123", True),
            (ACCOUNT, f"arn:aws:sts::{ACCOUNT}:assumed-role/skerry-batch-1/0123", True),
            (ACCOUNT, f"arn:aws:sts::{ACCOUNT}:assumed-role/skerry-batch-10/0123", False),
            (ACCOUNT, f"arn:aws:sts::{ACCOUNT}:assumed-role/admin/skerry-batch-0", False),
            (ACCOUNT, f"arn:aws:sts::{ACCOUNT}:assumed-role/admin/assumed-role/skerry-batch-0/x", False),
            (ACCOUNT, f"arn:aws:iam::{ACCOUNT}:user/skerry-batch-0", False),
            ("999999999999", "arn:aws:sts::999999999999:assumed-role/skerry-batch-0/0123", False),
        ],
    )
    def test_only_these_roles_of_this_account_are_let_in(
        self,
        ground: Ground,
        account: str,
        arn: str,
        let_in: bool,  # noqa: FBT001
    ) -> None:
        provider = next(one for one in batch_in_gcs(ground).resources if isinstance(one, Provider))
        body = provider_body(known(provider))
        context = {"assertion.arn": arn, "assertion.account": account}
        mapped = {name: cel.evaluated(text, context) for name, text in body["attributeMapping"].items()}
        passes = cel.holds(body["attributeCondition"], {**context, **mapped})
        assert (passes and body["aws"]["accountId"] == account) is let_in
        assert mapped["google.subject"] == arn

    def test_each_role_has_its_own_keys_in_the_bucket(self, ground: Ground) -> None:
        bindings = [one for one in batch_in_gcs(ground).resources if isinstance(one, BucketBinding)]
        members = "principalSet://iam.googleapis.com/projects/415104041262/locations/global/workloadIdentityPools"
        pool = next(one for one in batch_in_gcs(ground).resources if isinstance(one, Pool))
        for number, binding in enumerate(bindings):
            assert binding.rules == replica_rules(prefix=PREFIX, slots=[f"batch-{number}"], group=None)
            told = bindings_of(known(binding))
            assert {member for one in told for member in one["members"]} == {
                f"{members}/{pool.name}/attribute.aws_role/skerry-batch-{number}"
            }
        assert len(bindings) == 2

    def test_a_job_is_told_the_provider(self, ground: Ground) -> None:
        crossing = batch_in_gcs(ground)
        provider = next(one for one in crossing.resources if isinstance(one, Provider))
        assert dict(crossing.environment) == {"SKERRY_GOOGLE_AUDIENCE": provider.ref("audience")}
        assert provider.account == ACCOUNT

    def test_a_role_that_is_the_users_goes_by_its_name(self, ground: Ground) -> None:
        crossing = batch_in_gcs(ground, {"their-role": BATCH})
        (binding,) = [one for one in crossing.resources if isinstance(one, BucketBinding)]
        assert str(binding.member).endswith("/attribute.aws_role/their-role")

    def test_what_google_would_refuse_is_said_before(self, ground: Ground) -> None:
        many = {f"role-{number}": BATCH for number in range(MOST_VISITORS + 1)}
        with pytest.raises(Invalid, match=r"batch has 101 roles, .* room for 100 of a group; say `role: group`"):
            batch_in_gcs(ground, many)
        longest = MOST_SUBJECT_BYTES - len(f"arn:aws:sts::{ACCOUNT}:assumed-role//") - 32
        batch_in_gcs(ground, {"r" * longest: BATCH})
        with pytest.raises(Invalid, match=f"Google takes {longest} characters"):
            batch_in_gcs(ground, {"r" * (longest + 1): BATCH})

    def test_names_of_our_own_roles_are_short_enough(self, ground: Ground) -> None:
        """As Batch names them: the run's stem, a part of 16 letters, and a generation."""
        longest = MOST_SUBJECT_BYTES - len(f"arn:aws:sts::{ACCOUNT}:assumed-role//") - 32
        stem = len(ground.stem.replace("tiny-gpt", "n" * 20))
        assert stem + len("-") + 16 + len("-g9") <= longest


def test_what_is_made_is_that_of_the_golden_files(ground: Ground) -> None:
    for name, crossing in (("google_into_aws", vertex_in_s3(ground)), ("aws_into_google", batch_in_gcs(ground))):
        told: dict[str, Any] = {
            resource.address: {
                "name": resource.name,
                "settings": plain(resolved(resource.settings(), lambda ref: f"${{{ref.address}.{ref.output}}}")),
                "after": list(resource.after),
                "grants": [f"{grant.who} may {grant.may}: {grant.on}" for grant in resource.grants()],
            }
            for resource in crossing.resources
        }
        environment = {variable: str(value) for variable, value in crossing.environment.items()}
        check_golden(name, {"resources": told, "environment": environment}, GOLDEN)
