"""Who trusts whom across clouds, claim by claim: nobody else, for nothing else, and no key that lasts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.aws.account import check_model
from tests.infra.google.ground import wanted
from tests.infra.ground import check_golden, ground_from, plain, write_spec

from skerry.infra.clouds.aws.identity import Role, role_request
from skerry.infra.clouds.aws.policies import document
from skerry.infra.clouds.crossing import (
    LONGEST_SESSION_S,
    MOST_VISITORS,
    Guest,
    aws_into_google,
    google_into_aws,
    trust_google,
    visitor_name,
)
from skerry.infra.clouds.google.bindings import BucketBinding, bindings_of
from skerry.infra.clouds.google.federation import MOST_SUBJECT_BYTES, Pool, Provider, provider_body
from skerry.infra.clouds.google.identity import ServiceAccount
from skerry.infra.clouds.google.policies import replica_rules
from skerry.infra.clouds.google.storage import Bucket
from skerry.infra.graph import Graph, generation_name, resolved
from skerry.infra.testing.google import cel
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.clouds.crossing import Crossing
    from skerry.infra.graph import Ref, Resource, Value
    from skerry.infra.handler import Wanted
    from skerry.infra.target import Ground

GOLDEN: Final = Path(__file__).parent / "golden"
ACCOUNT: Final = "123456789012"
NUMBER: Final = "415104041262"
UNIQUE_ID: Final = "108765432109876543210"
EMAIL: Final = "skerry-tiny-gpt-vertex@acme.iam.gserviceaccount.com"
GROUP: Final = """\
  - {name: batch, count: 2, target: {kind: aws_batch, region: eu-central-1, instance_types: [c6i.xlarge]}}
"""
PREFIX: Final = "teams/tiny-gpt"
BATCH: Final = Guest(key="batch-0", part="batch-0", slots=("batch-0",), group=None)
VERTEX: Final = Guest(key="vertex-all", part="vertex-all", slots=("vertex-0", "vertex-1"), group="vertex")


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    path = write_spec(tmp_path, GROUP, run="tiny-gpt", store="s3://acme-runs/teams", image="ghcr.io/acme/train:1")
    return replace(ground_from(path), run_uri=f"gs://acme-runs/{PREFIX}")


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


def role_of(name: str, key: str = "batch-0", **more: Any) -> Role:
    return Role(key=key, name=name, region="", trust=(), **more)


def batch_in_gcs(
    ground: Ground, visitors: Sequence[tuple[Role, Guest]] | None = None, partition: str = "aws"
) -> Crossing:
    usual = [
        (
            role_of(f"skerry-tiny-gpt-batch-{number}", f"batch-{number}"),
            replace(BATCH, key=f"batch-{number}", part=f"batch-{number}", slots=(f"batch-{number}",)),
        )
        for number in range(2)
    ]
    return aws_into_google(
        ground,
        usual if visitors is None else visitors,
        group="batch",
        own="byo.job_role",
        account=ACCOUNT,
        partition=partition,
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
        one, other = (
            batch_in_gcs(ground),
            batch_in_gcs(ground, [(role_of("theirs"), replace(BATCH, key="sm", part="sm"))]),
        )
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
            # The path of a user may hold whatever there is in ASCII.
            (ACCOUNT, f"arn:aws:iam::{ACCOUNT}:user/assumed-role/skerry-batch-0/mallory", False),
            (ACCOUNT, f"arn:aws:iam::{ACCOUNT}:user/arn:aws:sts::{ACCOUNT}:assumed-role/skerry-batch-0/mallory", False),
            (ACCOUNT, f"arn:aws:sts::{ACCOUNT}:federated-user/skerry-batch-0", False),
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

    def test_roles_are_of_their_own_part_of_aws(self, ground: Ground) -> None:
        provider = next(
            one for one in batch_in_gcs(ground, partition="aws-us-gov").resources if isinstance(one, Provider)
        )
        told = provider_body(known(provider))["attributeCondition"]
        for partition, let_in in (("aws-us-gov", True), ("aws", False)):
            arn = f"arn:{partition}:sts::{ACCOUNT}:assumed-role/skerry-batch-0/0123"
            assert cel.holds(told, {"assertion.arn": arn, "attribute.aws_role": "skerry-batch-0"}) is let_in

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
        theirs = role_of("their-role", "batch-replicas", brought=True)
        (binding,) = [
            one for one in batch_in_gcs(ground, [(theirs, BATCH)]).resources if isinstance(one, BucketBinding)
        ]
        assert str(binding.member).endswith("/attribute.aws_role/${aws_role.batch-replicas.name}")

    def test_what_google_would_refuse_is_said_before(self, ground: Ground) -> None:
        many = [(role_of(f"role-{number}"), BATCH) for number in range(MOST_VISITORS + 1)]
        with pytest.raises(Invalid, match=r"batch has 101 roles, .* room for 100 of a group; say `role: group`"):
            batch_in_gcs(ground, many)
        long = [(role_of(f"{'r' * 48}-{number}"), BATCH) for number in range(MOST_VISITORS)]
        with pytest.raises(Invalid, match=r"100 roles have no room in the 4096 characters of a condition; say `role: "):
            batch_in_gcs(ground, long)
        longest = MOST_SUBJECT_BYTES - len(f"arn:aws:sts::{ACCOUNT}:assumed-role//") - 32
        assert longest == 55
        batch_in_gcs(ground, [(role_of("r" * longest), BATCH)])
        said = rf"role r{{56}} of replicas batch has too long .* {longest} characters at most; .* `byo\.job_role`"
        with pytest.raises(Invalid, match=said):
            batch_in_gcs(ground, [(role_of("r" * (longest + 1)), BATCH)])
        with pytest.raises(Invalid, match=f" {longest - len('-us-gov')} characters at most"):
            batch_in_gcs(ground, [(role_of("r" * longest), BATCH)], partition="aws-us-gov")

    @pytest.mark.parametrize("partition", ["aws", "aws-us-gov"])
    def test_names_of_our_own_roles_are_short_enough_in_every_generation(self, partition: str) -> None:
        long = f"skerry-{'n' * 20}-0123ab-{'p' * 16}-100"
        name = visitor_name(long, ACCOUNT, partition)
        arn = f"arn:{partition}:sts::{ACCOUNT}:assumed-role/{generation_name(name, 99)}/{'0' * 32}"
        assert len(arn) <= MOST_SUBJECT_BYTES
        assert name != visitor_name(long[:-1] + "1", ACCOUNT, partition)
        assert visitor_name("skerry-tiny-batch-0", ACCOUNT, partition) == "skerry-tiny-batch-0"


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
        check_golden(GOLDEN, name, {"resources": told, "environment": environment}, sort_keys=True)
