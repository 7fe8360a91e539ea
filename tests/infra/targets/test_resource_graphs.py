"""The graphs of all targets: the example's, and the roles of replicas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.infra.kit import document_of, ground_from, of_kind
from tests.infra.targets.aws import in_cloud_storage
from tests.infra.targets.aws_batch import kit as batch
from tests.infra.targets.hf_jobs import kit as hf_jobs
from tests.infra.targets.kubernetes import kit as kubernetes
from tests.infra.targets.modal import kit as modal
from tests.infra.targets.sagemaker import kit as sagemaker
from tests.infra.targets.slurm import kit as slurm
from tests.infra.targets.vertex import kit as vertex

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import document, text_of
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.workload_identity import Provider
from skerry.infra.provision.graph import Graph, Life, resolved, short_name
from skerry.infra.targets.aws_batch.machine_sizing import Machine
from skerry.infra.targets.aws_batch.region_offer import RegionOffer
from skerry.infra.targets.shared.aws_replica_roles import name_of
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

WEST = RegionOffer(
    vpc="vpc-2", subnets=("subnet-3",), machines=(Machine(type="c7i.2xlarge", vcpus=8, memory_mib=16384, gpus=0),)
)
# The targets on AWS, and the option that names the user's own role.
ON_AWS = pytest.mark.parametrize(
    ("graph_of", "context_of", "own_role"),
    [
        (batch.graph_of, batch.context_of, "instance_types: [c7i.large], byo: {{job_role: '{}'}}"),
        (sagemaker.graph_of, sagemaker.context_of, "output: s3://mine/artifacts, byo: {{role: '{}'}}"),
    ],
    ids=["aws_batch", "sagemaker"],
)
OPTIONS = {batch.context_of: "instance_types: [c7i.large]", sagemaker.context_of: "output: s3://mine/artifacts"}


@pytest.mark.parametrize(
    ("kit", "offers"),
    [
        (batch, (batch.OFFER, WEST)),
        (sagemaker, (sagemaker.SMALL, sagemaker.DISKLESS)),
        *((kit, ()) for kit in (vertex, kubernetes, slurm, hf_jobs, modal)),
    ],
    ids=["aws_batch", "sagemaker", "vertex", "kubernetes", "slurm", "hf_jobs", "modal"],
)
def test_graph_of_the_example_is_frozen(kit: Any, offers: tuple[object, ...]) -> None:
    graph = kit.graph_of(ground_from(kit.EXAMPLE), *offers)
    resources = sorted((each for each in graph if each.key != "store"), key=lambda resource: resource.address)
    kit.check_golden("example", [document_of(resource) for resource in resources])
    assert all(resource.why for resource in resources)


@pytest.mark.parametrize("kit", [kubernetes, hf_jobs, modal, slurm], ids=lambda kit: kit.__name__.split(".")[-2])
def test_job_has_the_variables_references_and_data_of_the_spec(kit: Any, tmp_path: Path) -> None:
    """Jobs of the other clouds run, and print them: test_inputs_reach_jobs.py."""
    secret, corpus = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf", "s3://acme-data/corpus"
    more = (
        f"limits: {{max_hours: 24}}\nenv: {{COLOUR: green}}\nsecrets: {{TOKEN: {{aws_secretsmanager: '{secret}'}}}}\n"
    )
    options: dict[str, Any] = {"count": 1, "more": f"{more}data: {{corpus: {corpus}}}\n"}
    if kit is slurm:
        resources = [job.resource for job in slurm.jobs_of(tmp_path, **options)]
    else:
        resources = [*kit.graph_of(kit.context_of(tmp_path, **options))]
    (environment,) = [each.environment for each in resources if hasattr(each, "environment")]
    reference = {"SKERRY_SECRET_TOKEN": f"aws_secretsmanager:{secret}"}
    assert {"COLOUR": "green", "SKERRY_DATA_CORPUS": corpus, **reference}.items() <= dict(environment).items()


@pytest.mark.parametrize(
    ("kit", "offers"),
    [
        (batch, (batch.OFFER, WEST)),
        (sagemaker, (sagemaker.SMALL, sagemaker.DISKLESS)),
        *((kit, ()) for kit in (vertex, kubernetes, slurm, hf_jobs, modal)),
    ],
    ids=["aws_batch", "sagemaker", "vertex", "kubernetes", "slurm", "hf_jobs", "modal"],
)
def test_replica_that_is_added_changes_no_other_job(kit: Any, offers: tuple[object, ...]) -> None:
    before, after = (
        {
            resource.address: document_of(resource)["settings"]
            for resource in kit.graph_of(ground_from(kit.EXAMPLE, override), *offers)
            if resource.LIFE is Life.JOB
        }
        for override in ("replicas[0].count=2", "replicas[0].count=3")
    )
    assert len(after) == len(before) + 1
    assert {address: after[address] for address in before} == before


def replica_roles(graph: Graph) -> dict[str, Role]:
    return {role.key: role for role in of_kind(graph, Role) if role.key not in {"machines", "execution"}}


def written_keys(role: Role) -> list[str]:
    """The patterns of the objects that a role may write."""
    policy = json.loads(text_of(resolved(document(role.policies["run"]), lambda _: "BUCKET")))
    patterns = [
        pattern
        for statement in policy["Statement"]
        if "s3:PutObject" in statement["Action"]
        for pattern in statement["Resource"]
    ]
    assert all("BUCKET/runs/tiny/" in pattern for pattern in patterns)
    return patterns


@ON_AWS
def test_role_reaches_the_slots_of_its_replicas_only(
    tmp_path: Path, graph_of: Any, context_of: Any, own_role: str
) -> None:
    del own_role
    single = replica_roles(graph_of(context_of(tmp_path, f"{OPTIONS[context_of]}, role: replica", count=12)))
    assert len(single) == 12
    (slot,) = [key for key in single if key.endswith("-1")]
    written = written_keys(single[slot])
    assert any(f"{slot}/" in pattern for pattern in written)
    assert not any(f"{slot}0" in pattern or f"{slot[:-1]}*" in pattern for pattern in written)
    (shared,) = replica_roles(graph_of(context_of(tmp_path, f"{OPTIONS[context_of]}, role: group", count=12))).values()
    assert any(f"/heartbeats/{slot[:-1]}*" in pattern for pattern in written_keys(shared))


@ON_AWS
@pytest.mark.parametrize("role", ["group", "replica"])
def test_store_in_cloud_storage_trusts_the_roles(
    tmp_path: Path, graph_of: Any, context_of: Any, own_role: str, role: str
) -> None:
    del own_role
    graph = graph_of(in_cloud_storage(context_of(tmp_path, f"{OPTIONS[context_of]}, role: {role}")))
    roles = replica_roles(graph)
    assert len(roles) == (1 if role == "group" else 2)
    (provider,) = of_kind(graph, Provider)
    assert [str(name) for name in provider.roles] == [f"${{aws_role.{key}.name}}" for key in roles]
    assert [binding.key for binding in of_kind(graph, BucketBinding)] == list(roles)
    assert not any("run" in each.policies for each in roles.values())
    jobs = [resource for resource in graph if resource.LIFE is Life.JOB]
    assert len(jobs) == 2
    for job in jobs:
        key = next(iter(roles)) if role == "group" else job.key
        assert f"google_bucket_binding.{key}" in job.needs()


@ON_AWS
def test_byo_role_is_used_by_name_unless_google_cannot_read_it(
    tmp_path: Path, graph_of: Any, context_of: Any, own_role: str
) -> None:
    fitting, long = (context_of(tmp_path, own_role.format(f"arn:aws:iam::1:role/team/{'r' * n}")) for n in (55, 56))
    (role,) = replica_roles(graph_of(in_cloud_storage(fitting))).values()
    assert (role.name, role.brought) == ("r" * 55, True)
    with pytest.raises(Invalid, match=r"role r{56} of replicas \w+ .*at most 55 characters; .* `byo\.(job_)?role`"):
        graph_of(in_cloud_storage(long))
    # With a store in S3, Google does not read the name.
    graph_of(long)


@given(st.text("abcXY.-_0129", min_size=1, max_size=63), st.text("abcXY.-_0129", min_size=1, max_size=63))
def test_name_part_is_short_valid_and_unique(first: str, second: str) -> None:
    for length in (11, 16):
        part = short_name(first, length)
        assert len(part) <= length
        assert set(part) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert part == part.strip("-")
        assert (part == short_name(second, length)) is (first == second)


def test_name_is_the_end_of_an_arn() -> None:
    assert name_of("arn:aws:iam::1:role/a/b") == "b"
    assert name_of("plain/name") == "plain/name"
