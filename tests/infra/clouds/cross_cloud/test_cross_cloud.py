"""Trust between clouds: each claim of a token is checked, and there are no long-lived keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.clouds.aws.account import check_model
from tests.infra.clouds.google.kit import wanted
from tests.infra.kit import check_golden, ground_from, plain, write_spec

from skerry.infra.clouds.aws.iam import Role, role_request
from skerry.infra.clouds.cross_cloud import (
    MOST_VISITORS,
    ForeignReplica,
    GoogleStore,
    aws_into_google,
    google_into_aws,
    trust_google,
    visitor_name,
)
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.gcs import Bucket
from skerry.infra.clouds.google.service_accounts import ServiceAccount
from skerry.infra.clouds.google.workload_identity import MOST_SUBJECT_BYTES, Pool, Provider, provider_body
from skerry.infra.provision.graph import Graph, generation_name, resolved
from skerry.runtime.errors import Invalid
from skerry.testing.google import cel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.clouds.cross_cloud import CrossCloudAccess
    from skerry.infra.provision.graph import Ref, Resource, Value
    from skerry.infra.provision.handler import Desired
    from skerry.infra.provision.target_and_store_interfaces import RunContext

GOLDEN: Final = Path(__file__).parent / "golden"
ACCOUNT: Final = "123456789012"
NUMBER: Final = "415104041262"
UNIQUE_ID: Final = "108765432109876543210"
EMAIL: Final = "skerry-tiny-gpt-vertex@acme.iam.gserviceaccount.com"
GROUP: Final = """\
  - {name: batch, count: 2, target: {kind: aws_batch, region: eu-central-1, instance_types: [c6i.xlarge]}}
"""
PREFIX: Final = "teams/tiny-gpt"
BUCKET: Final = Bucket(key="store", name="acme-runs", region="europe-west4")
BATCH: Final = ForeignReplica(key="batch-0", part="batch-0", slots=("batch-0",), group=None)
VERTEX: Final = ForeignReplica(key="vertex-all", part="vertex-all", slots=("vertex-0", "vertex-1"), group="vertex")


@pytest.fixture
def ground(tmp_path: Path) -> RunContext:
    path = write_spec(tmp_path, GROUP, run="tiny-gpt", store="s3://acme-runs/teams", image="ghcr.io/acme/train:1")
    return replace(ground_from(path), run_uri=f"gs://acme-runs/{PREFIX}")


def vertex_in_s3(ground: RunContext) -> CrossCloudAccess:
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
    ground: RunContext, visitors: Sequence[tuple[Role, ForeignReplica]] | None = None, partition: str = "aws"
) -> CrossCloudAccess:
    usual = [
        (role_of(f"skerry-tiny-gpt-{slot}", slot), replace(BATCH, key=slot, part=slot, slots=(slot,)))
        for slot in ("batch-0", "batch-1")
    ]
    return aws_into_google(
        ground,
        usual if visitors is None else visitors,
        group="batch",
        own="byo.job_role",
        account=ACCOUNT,
        partition=partition,
        store=GoogleStore(number=NUMBER, bucket=BUCKET, prefix=PREFIX),
    )


def provider_of(crossing: CrossCloudAccess) -> dict[str, Any]:
    """The request for its provider."""
    (provider,) = [resource for resource in crossing.resources if isinstance(resource, Provider)]
    return provider_body(known(provider))


def known(resource: Resource) -> Desired:
    """As it is when all that it refers to exists."""

    def look_up(ref: Ref) -> str:
        values = {"email": EMAIL, "unique_id": UNIQUE_ID, "name": f"skerry-{ref.address.rpartition('.')[2]}"}
        return values[ref.output]

    settings: dict[str, Value] = {name: resolved(value, look_up) for name, value in resource.settings().items()}
    return replace(wanted(resource), settings=settings)


class TestGoogleIntoAws:
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
    def test_token_is_accepted_only_with_all_claims(self, claims: dict[str, str], let_in: bool) -> None:  # noqa: FBT001
        token = {"sub": UNIQUE_ID, "azp": UNIQUE_ID, "aud": "skerry/1/x", **claims}
        trust = trust_google(email=EMAIL, unique_id=UNIQUE_ID, audience="skerry/1/x")
        # AWS compares its key aud with the token's azp, and its key oaud with the token's aud.
        keys = {"sub": token["sub"], "aud": token["azp"], "oaud": token["aud"]}
        (operator,) = trust.conditions
        assert operator == "StringEquals"
        conditions = trust.conditions[operator]
        assert set(conditions) == {f"accounts.google.com:{key}" for key in keys}
        assert all(value in conditions[f"accounts.google.com:{key}"] for key, value in keys.items()) is let_in

    def test_long_names_and_sessions_fit_iam(self, ground: RunContext) -> None:
        long = replace(VERTEX, part="A group of a very long name, " * 3)
        account = {"account": ACCOUNT, "bucket_arn": "arn:aws:s3:::b", "prefix": PREFIX, "region": "eu-west-1"}
        (role,) = google_into_aws(ground, long, email=EMAIL, unique_id=UNIQUE_ID, **account).resources
        assert len(role.name) + len("-g99") <= 64
        check_model("iam", "CreateRole", role_request(known(role)))

    def test_trust_references_the_service_account(self, ground: RunContext) -> None:
        """Its number is in the trust by reference, so that the plan of another number changes the role."""
        (role,) = vertex_in_s3(ground).resources
        assert "google_service_account.vertex-all" in role.needs()


class TestAwsIntoGoogle:
    def test_resources_have_a_creation_order(self, ground: RunContext) -> None:
        roles = [role_of(f"r{number}", f"batch-{number}") for number in range(2)]
        order = [resource.address for resource in Graph([BUCKET, *roles, *batch_in_gcs(ground).resources])]
        for first, second in (
            ("google_service.sts", "google_pool.aws"),
            ("google_pool.aws", "google_pool_provider.batch"),
            ("google_pool.aws", "google_bucket_binding.batch-0"),
            ("google_bucket.store", "google_bucket_binding.batch-1"),
        ):
            assert order.index(first) < order.index(second)

    def test_groups_share_the_pool(self, ground: RunContext) -> None:
        other = batch_in_gcs(ground, [(role_of("theirs"), replace(BATCH, key="sm", part="sm"))])
        assert other.resources[:3] == batch_in_gcs(ground).resources[:3]
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
    def test_only_roles_of_the_account_are_admitted(
        self,
        ground: RunContext,
        account: str,
        arn: str,
        let_in: bool,  # noqa: FBT001
    ) -> None:
        body = provider_of(batch_in_gcs(ground))
        context = {"assertion.arn": arn, "assertion.account": account}
        mapped = {name: cel.evaluate(text, context) for name, text in body["attributeMapping"].items()}
        passes = cel.holds(body["attributeCondition"], {**context, **mapped})
        assert (passes and body["aws"]["accountId"] == account) is let_in
        assert mapped["google.subject"] == arn

    def test_only_roles_of_the_partition_are_admitted(self, ground: RunContext) -> None:
        condition = provider_of(batch_in_gcs(ground, partition="aws-us-gov"))["attributeCondition"]
        for partition, let_in in (("aws-us-gov", True), ("aws", False)):
            arn = f"arn:{partition}:sts::{ACCOUNT}:assumed-role/skerry-batch-0/0123"
            assert cel.holds(condition, {"assertion.arn": arn, "attribute.aws_role": "skerry-batch-0"}) is let_in

    def test_brought_role_is_bound_by_name(self, ground: RunContext) -> None:
        brought = role_of("their-role", "batch-replicas", brought=True)
        resources = batch_in_gcs(ground, [(brought, BATCH)]).resources
        (binding,) = [resource for resource in resources if isinstance(resource, BucketBinding)]
        assert str(binding.member).endswith("/attribute.aws_role/${aws_role.batch-replicas.name}")

    def test_limits_of_google_are_checked_before_an_apply(self, ground: RunContext) -> None:
        many = [(role_of(f"role-{number}"), BATCH) for number in range(MOST_VISITORS + 1)]
        with pytest.raises(Invalid, match=r"batch has 101 roles, .* takes 100 of a group; set `role: group`"):
            batch_in_gcs(ground, many)
        long = [(role_of(f"{'r' * 48}-{number}"), BATCH) for number in range(MOST_VISITORS)]
        with pytest.raises(Invalid, match=r"100 roles do not fit into the 4096 characters of a condition; set `role: "):
            batch_in_gcs(ground, long)
        longest = MOST_SUBJECT_BYTES - len(f"arn:aws:sts::{ACCOUNT}:assumed-role//") - 32
        assert longest == 55
        batch_in_gcs(ground, [(role_of("r" * longest), BATCH)])
        message = rf"role r{{56}} of replicas batch is too long .* at most {longest} characters; .* `byo\.job_role`"
        with pytest.raises(Invalid, match=message):
            batch_in_gcs(ground, [(role_of("r" * (longest + 1)), BATCH)])
        with pytest.raises(Invalid, match=f"at most {longest - len('-us-gov')} characters"):
            batch_in_gcs(ground, [(role_of("r" * longest), BATCH)], partition="aws-us-gov")

    @pytest.mark.parametrize("partition", ["aws", "aws-us-gov"])
    def test_names_of_our_own_roles_are_short_enough_in_every_generation(self, partition: str) -> None:
        long = f"skerry-{'n' * 20}-0123ab-{'p' * 16}-100"
        name = visitor_name(long, ACCOUNT, partition)
        arn = f"arn:{partition}:sts::{ACCOUNT}:assumed-role/{generation_name(name, 99)}/{'0' * 32}"
        assert len(arn) <= MOST_SUBJECT_BYTES
        assert name != visitor_name(long[:-1] + "1", ACCOUNT, partition)
        assert visitor_name("skerry-tiny-batch-0", ACCOUNT, partition) == "skerry-tiny-batch-0"


def test_resources_equal_the_golden_files(ground: RunContext) -> None:
    for name, crossing in (("google_into_aws", vertex_in_s3(ground)), ("aws_into_google", batch_in_gcs(ground))):
        values: dict[str, Any] = {
            resource.address: {
                "name": resource.name,
                "settings": plain(resolved(resource.settings(), lambda ref: f"${{{ref.address}.{ref.output}}}")),
                "after": list(resource.after),
            }
            for resource in crossing.resources
        }
        environment = {variable: str(value) for variable, value in crossing.environment.items()}
        check_golden(GOLDEN, name, {"resources": values, "environment": environment}, sort_keys=True)
