"""Sandboxes of a played Modal: what is sent, what is read, checks, prices."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.infra.kit import of_kind, wanted
from tests.infra.targets.modal.kit import ACCOUNT, LIMITS, context_of, graph_of
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import document
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.cost import prices
from skerry.infra.provision.graph import Ref, resolved
from skerry.infra.provision.handler import Condition
from skerry.infra.targets.modal import checks, costs
from skerry.infra.targets.modal.labelled_jobs_service import Apps, ModalSandboxes
from skerry.infra.targets.modal.modal_client import ModalWorkspace
from skerry.infra.targets.modal.resource_graph import build_resources
from skerry.infra.targets.modal.resource_types import App, Job
from skerry.infra.targets.shared import labelled_jobs
from skerry.infra.targets.shared.labelled_jobs import LabelledJobs
from skerry.runtime.errors import Invalid, Retryable, Unauthorized
from skerry.testing.modal_cloud import TOKEN

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.handler import Desired
    from skerry.testing.modal_cloud import ModalSandbox


@pytest.fixture
def workspace(modal: ModalSandbox) -> ModalWorkspace:
    return ModalWorkspace(FakeClock(), modal.environment)


@pytest.fixture
def service(workspace: ModalWorkspace) -> ModalSandboxes:
    return ModalSandboxes(workspace)


@pytest.fixture
def handler(service: ModalSandboxes) -> LabelledJobs:
    return LabelledJobs(service, Job)


def jobs_of(folder: Path, target: str = "secrets: [store-keys]", count: int = 1) -> list[Desired]:
    context = context_of(folder, target, count=count)
    return [wanted(job, context.run_uri) for job in of_kind(graph_of(context), Job)]


@pytest.mark.parametrize(("gpu", "call"), [("", "SandboxCreateV2"), (", gpu: H100, gpus: 2", "SandboxCreate")])
def test_both_backends_get_the_whole_definition(
    handler: LabelledJobs, modal: ModalSandbox, tmp_path: Path, gpu: str, call: str
) -> None:
    (job,) = jobs_of(tmp_path, f"secrets: [store-keys], cpu: 2, memory: 8GiB, max_runtime: 6h{gpu}")
    sandbox = handler.create(job)["id"]
    assert [each.operation for each in modal.calls if "SandboxCreate" in each.operation] == [call]
    definition = modal.definition_of(sandbox)
    assert list(definition.entrypoint_args) == ["skerry-replica", "run"]
    assert (definition.name, definition.timeout_secs) == (job.resource.name, 6 * 3600)
    resources = definition.resources
    assert (resources.milli_cpu, resources.memory_mb) == (2000, 8192)
    assert (resources.gpu_config.gpu_type, resources.gpu_config.count) == (("H100", 2) if gpu else ("", 0))
    variables = modal.variables_of(sandbox)
    assert {name: variables[name] for name in job.settings["environment"]} == job.settings["environment"]  # type: ignore[attr-defined, union-attr]
    assert modal.jobs.containers is None
    assert "MODAL_IDENTITY_TOKEN" not in variables


def test_sandbox_of_a_workspace_gets_a_token_and_its_role_trusts_the_app(
    handler: LabelledJobs, modal: ModalSandbox, tmp_path: Path
) -> None:
    context = context_of(tmp_path, "workspace: ac-1a2b", count=1)
    graph = graph_of(context)
    (role,) = of_kind(graph, Role)
    trust = json.loads(json.dumps(resolved(document(role.trust), str)))["Statement"][0]
    assert trust["Principal"] == {"Federated": ["arn:aws:iam::123456789012:oidc-provider/oidc.modal.com"]}
    subject = f"modal:workspace_id:ac-1a2b:environment_name:main:app_name:{context.stem}:*"
    assert trust["Condition"] == {
        "StringEquals": {"oidc.modal.com:aud": ["oidc.modal.com"]},
        "StringLike": {"oidc.modal.com:sub": [subject]},
    }
    (job,) = of_kind(graph, Job)
    ready = {**job.settings(), "environment": {**job.environment, "AWS_ROLE_ARN": "arn:aws:iam::1:role/r"}}
    desired = wanted(job, context.run_uri)
    sandbox = handler.create(type(desired)(resource=job, generation=0, run=desired.run, settings=ready))["id"]
    variables = modal.variables_of(sandbox)
    assert variables[variables["SKERRY_TOKEN_VARIABLE"]] == TOKEN
    assert role.address in job.needs()


def test_sandboxes_may_write_a_mirror_in_its_region(tmp_path: Path) -> None:
    mirror = "replication: [{to: s3://acme-west/runs, region: us-west-2}]\n"
    context = context_of(tmp_path, "workspace: ac-1a2b", more=f"{LIMITS}{mirror}")
    resources = build_resources(context, context.spec.replicas, {}, ACCOUNT)
    (role,) = [resource for resource in resources if isinstance(resource, Role)]
    assert "aws_bucket.mirror-acme-west.arn}/runs/tiny/*" in json.dumps(
        resolved(document(role.policies["mirrors"]), str)
    )
    region = {job.environment["SKERRY_BUCKET_REGION_0"] for job in resources if isinstance(job, Job)}
    assert region == {Ref(address="aws_bucket.mirror-acme-west", output="region", before="acme-west=")}


@pytest.mark.parametrize("how", ["lost_reply", "timeout"])
def test_creation_without_an_answer_makes_one_sandbox(
    handler: LabelledJobs, modal: ModalSandbox, tmp_path: Path, how: str
) -> None:
    """The SDK repeats such a call; the name in the App prevents a second sandbox."""
    (job,) = jobs_of(tmp_path)
    modal.fail(how=how, on="modal:SandboxCreateV2")  # type: ignore[arg-type]
    first = handler.create(job)
    assert handler.create(job) == first
    assert len(modal.inventory()["job"]) == 1


def test_another_sandbox_of_the_name_is_never_doubled(
    handler: LabelledJobs, workspace: ModalWorkspace, modal: ModalSandbox, tmp_path: Path
) -> None:
    (job,) = jobs_of(tmp_path)
    workspace.create(dict(job.settings), job.resource.name, {"of": "another"})
    with pytest.raises(Retryable, match="already exists"):
        handler.create(job)
    assert len(modal.inventory()["job"]) == 1


@pytest.mark.parametrize(
    ("code", "condition", "why"),
    [
        (0, Condition.DONE, "done"),
        (10, Condition.LOST, "exit code 10: an outside failure; `skerry apply` starts another"),
        (20, Condition.LOST, "exit code 20: the options, the code or the rights are wrong; see its logs"),
        (137, Condition.LOST, "terminated, preempted or killed; exit code 137: killed, often because memory"),
        (124, Condition.LOST, "its time limit was reached: max_runtime, or Modal's 24 hours"),
    ],
)
def test_ended_sandbox_is_found_by_its_id(
    handler: LabelledJobs,
    service: ModalSandboxes,
    modal: ModalSandbox,
    tmp_path: Path,
    code: int,
    condition: Condition,
    why: str,
) -> None:
    (job,) = jobs_of(tmp_path)
    record = job.to_record(handler.create(job))
    (view,) = labelled_jobs.views(service, [record])
    assert (view.state, view.condition, view.again, view.attempt) == ("LIVE", Condition.READY, False, 0)
    modal.jobs.finish(record.outputs["id"], code)
    (view,) = labelled_jobs.views(service, [record])
    assert (view.condition, view.again) == (condition, code in {10, 124, 137})
    # The time limit is no code of the replica.
    assert view.attempt == (0 if code == 124 else 1)
    assert view.why.startswith(why)
    assert list(handler.list_owned(job.run, ["main"])) == []


def test_stopped_sandbox_is_not_started_again(handler: LabelledJobs, service: ModalSandboxes, tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path)
    record = job.to_record(handler.create(job))
    handler.delete(record)
    (view,) = labelled_jobs.views(service, [record])
    assert (view.state, view.condition, view.again, view.stopped) == ("TERMINATED", Condition.LOST, False, True)


def test_other_settings_show_in_a_plan_although_modal_shows_none(handler: LabelledJobs, tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path)
    outputs = handler.create(job)
    (other,) = jobs_of(tmp_path, "secrets: [store-keys], cpu: 4")
    known = type(other)(resource=other.resource, generation=0, run=other.run, settings=other.settings, outputs=outputs)
    same = type(job)(resource=job.resource, generation=0, run=job.run, settings=job.settings, outputs=outputs)
    (seen, changed) = handler.read([same, known])
    assert seen is not None
    assert changed is not None
    assert ("environment" in seen.settings, "environment" in changed.settings) == (False, True)


def test_listing_of_apps_has_the_addresses_of_the_graph(workspace: ModalWorkspace, tmp_path: Path) -> None:
    """After a lost state, an App under another address would be deleted with all its sandboxes."""
    other = "  - {name: n, count: 1, target: {kind: modal, secrets: [store-keys], environment: dev}}\n"
    context = context_of(tmp_path, "secrets: [store-keys], environment: main", groups=other)
    apps = of_kind(graph_of(context), App)
    handler = Apps(workspace)
    for app in apps:
        handler.create(wanted(app, context.run_uri))
    listed = {record.address: record.region for record in handler.list_owned(context.run_uri, ["main", "dev"])}
    assert listed == {app.address: app.region for app in apps}


def test_checks_name_a_missing_secret_and_provider(
    workspace: ModalWorkspace, modal: ModalSandbox, aws_sandbox: object, tmp_path: Path
) -> None:
    aws = Aws(FakeClock(), aws_sandbox.environment)  # type: ignore[attr-defined]
    groups = context_of(tmp_path, "secrets: [store-keys, other], workspace: ac-1a2b").spec.replicas
    results = {check.name: check.ok for check in checks.checks(workspace, aws, groups)}
    assert results == {"Modal": True, "Secret store-keys": True, "Secret other": False, "OIDC provider of Modal": False}
    assert [call for call in modal.calls.writes if call.operation.startswith("Sandbox")] == []


def test_refusal_names_the_next_step(workspace: ModalWorkspace, modal: ModalSandbox) -> None:
    modal.fail(how="deny", on="modal:GetWorkspaceNameLookup")
    with pytest.raises(Unauthorized, match=r"Modal refuses: .*run `modal token new`"):
        workspace.name()


def test_price_is_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "prices.json"
    machines = {"H100": 3.95, "cpu": 0.1, "memory": 0.01}
    own.write_text(json.dumps({"format": 1, "cloud": "modal", "regions": {"modal": {"machines": machines}}}))
    context = context_of(tmp_path, "secrets: [a], gpu: H100, gpus: 2, cpu: 4, memory: 10GiB")
    (rate,) = costs.rates(prices.load("modal", own), context.spec.limits, context.spec.replicas)
    assert (rate.per_hour, rate.cap_hours) == (pytest.approx(2 * (7.9 + 0.4 + 0.1)), 24.0)
    kept = context_of(tmp_path, "secrets: [a], gpu: H100!, gpus: 2, cpu: 4, memory: 10GiB")
    assert costs.rates(prices.load("modal", own), kept.spec.limits, kept.spec.replicas)[0].per_hour == rate.per_hour
    (rate,) = costs.rates(prices.load("modal", None), context.spec.limits, context.spec.replicas)
    assert (rate.per_hour, rate.source) == (None, "no price of H100 and cpu and memory at Modal")


def test_log_of_another_place_is_refused(service: ModalSandboxes, handler: LabelledJobs, tmp_path: Path) -> None:
    (job,) = jobs_of(tmp_path)
    record = job.to_record(handler.create(job))
    assert list(labelled_jobs.lines(service, record, None)) == []
    with pytest.raises(Invalid, match="not a place in a job's log"):
        list(labelled_jobs.lines(service, record, "x"))
