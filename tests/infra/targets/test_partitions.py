"""Runs in China and in GovCloud: ARNs, names of services and endpoints are those of the partition, in every target."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.targets import aws
from tests.infra.targets.aws_batch import kit as batch
from tests.infra.targets.kubernetes import kit as kubernetes
from tests.infra.targets.modal import kit as modal
from tests.infra.targets.sagemaker import kit as sagemaker
from tests.infra.targets.vertex import kit as vertex

from skerry.infra.clouds import under_rules
from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import partition_of, service_name, service_principal
from skerry.infra.clouds.aws.s3 import Bucket
from skerry.infra.clouds.aws.session import Account
from skerry.infra.provision.graph import as_json
from skerry.infra.spec.company_rules import AwsRules
from skerry.infra.targets.kubernetes.store_identity import AwsTrust

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.infra.provision.graph import Graph, Resource
    from skerry.infra.provision.target_and_store_interfaces import RunContext

    Built = tuple[RunContext, Graph]

DATA: Final = "data: {corpus: 's3://acme-data/corpus'}\nlimits: {max_hours: 24}\n"
PLACES: Final = pytest.mark.parametrize(
    ("partition", "region", "domain"),
    [("aws-us-gov", "us-gov-west-1", "amazonaws.com"), ("aws-cn", "cn-north-1", "amazonaws.com.cn")],
)


def build_batch(folder: Path) -> Built:
    context = batch.context_of(folder, "instance_types: [c7i.large]", more=DATA)
    return context, batch.graph_of(context)


def build_sagemaker(folder: Path) -> Built:
    options = "output: 's3://mine/artifacts', byo: {subnets: [subnet-0a], security_groups: [sg-0a]}, kms_key: 1234abcd"
    context = sagemaker.context_of(folder, f"{options}, role: group, revive: peers", more=DATA)
    return context, sagemaker.graph_of(context)


def build_modal(folder: Path) -> Built:
    context = modal.context_of(folder, "workspace: ac-0a", more=DATA)
    return context, modal.graph_of(context)


def build_kubernetes(folder: Path) -> Built:
    trust = AwsTrust(account=aws.ACCOUNT, issuer="https://oidc.example/id/1")
    context = kubernetes.context_of(folder, more=DATA)
    spec = context.spec.replicas[0]
    group = spec.model_copy(update={"target": spec.target.model_copy(update={"secret": None})})
    context = replace(context, spec=context.spec.model_copy(update={"replicas": [group]}))
    identified = lambda run, group, account: trust.identity(run, account, run.inputs(group))  # noqa: E731
    return context, kubernetes.graph_of(context, identified)


def build_vertex(folder: Path) -> Built:
    context = vertex.context_of(folder, store="s3://acme/runs")
    return context, vertex.graph_of(context)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, partition: str, region: str) -> None:
    """The account, and the bucket of the run, are in another partition."""
    bucket = Bucket(key="store", name="acme", region=region)
    account = Account(number="123456789012", partition=partition)
    for module in (aws, modal, kubernetes, vertex):
        for name, value in (("ACCOUNT", account), ("S3_STORE", bucket)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def plain(resource: Resource) -> dict[str, Any]:
    return {setting: as_json(value) for setting, value in resource.settings().items()}


@PLACES
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("build", [build_batch, build_sagemaker, build_modal, build_kubernetes, build_vertex])
def test_run_of_another_partition_names_nothing_of_aws(
    build: Callable[[Path], Built], tmp_path: Path, partition: str, region: str, domain: str
) -> None:
    context, graph = build(tmp_path)
    key = f"arn:{partition}:kms:{region}:123456789012:key/1234abcd"
    ruled = context.spec.model_copy(update={"aws": AwsRules(kms_key=key)})
    resources = under_rules(graph, ruled)
    assert any(isinstance(resource, Role) for resource in resources)
    text = json.dumps([[plain(each), type(each).rights(each.name, plain(each))] for each in resources])
    assert "arn:aws:" not in text
    assert f'"kms:ViaService": ["s3.{region}.{domain}"]' in text
    if build is not build_vertex:
        assert f"arn:{partition}:s3:::acme-data/corpus" in text


@PLACES
@pytest.mark.usefixtures("elsewhere")
def test_machines_of_batch_trust_the_name_of_ec2(tmp_path: Path, partition: str, region: str, domain: str) -> None:
    del region
    _, graph = build_batch(tmp_path)
    principals = {
        name: [service for statement in role.trust for service in (statement.principal or {}).get("Service", ())]
        for role in graph
        if isinstance(role, Role) and not role.brought
        for name in [role.key]
    }
    assert principals["machines"] == [f"ec2.{domain}"]
    assert principals["batch-0"] == ["ecs-tasks.amazonaws.com"]
    assert service_principal("sagemaker", partition) == "sagemaker.amazonaws.com"


def test_region_has_its_partition_and_domain() -> None:
    for region, partition, name in (
        ("us-east-1", "aws", "s3.us-east-1.amazonaws.com"),
        ("us-gov-west-1", "aws-us-gov", "s3.us-gov-west-1.amazonaws.com"),
        ("cn-northwest-1", "aws-cn", "s3.cn-northwest-1.amazonaws.com.cn"),
        ("eusc-de-east-1", "aws-eusc", "s3.eusc-de-east-1.amazonaws.eu"),
    ):
        assert (partition_of(region), service_name("s3", region, partition)) == (partition, name)
