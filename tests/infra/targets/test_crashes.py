"""Applies and destroys are killed after each of their calls in turn; the next one continues the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.crashes import Mortality, call_name, kill_in_turn, mortality_on_aws
from tests.infra.kit import Killed
from tests.infra.targets.runs import (
    BatchRun,
    HfJobsRun,
    KubernetesRun,
    ModalRun,
    SageMakerRun,
    TargetRun,
    VertexRun,
    begin_deletions,
)

from skerry.infra.clouds.google.session import Google
from skerry.infra.targets.hf_jobs.jobs_api import Hub
from skerry.infra.targets.kubernetes.cluster import Cluster
from skerry.infra.targets.modal.modal_client import ModalWorkspace
from skerry.infra.targets.vertex.sdk_create import Creator
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.infra.deploy.account import Operator

    from skerry.testing.google.sandbox import GoogleSandbox

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]
# A POST that changes nothing.
READING = (":testIamPermissions", "entries:list", ":getIamPolicy")
# A run on AWS Batch has these resources, too, and a command is killed there after each of their calls.
SHARED = ("s3", "ecr", "iam")
# The replicas of a run, and the fewest calls of an apply and of a destroy.
SIZES: dict[type[TargetRun], tuple[int, int, int]] = {
    BatchRun: (1, 21, 11),
    SageMakerRun: (2, 2, 2),
    VertexRun: (1, 5, 4),
    KubernetesRun: (2, 4, 4),
    HfJobsRun: (2, 2, 2),
    ModalRun: (2, 3, 3),
}


def mortality_on_google(sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    """A Mortality that kills calls to Google."""
    mortality, created = Mortality(sandbox, monkeypatch), Creator.create

    def mortal(send: Callable[..., Any]) -> Callable[..., Any]:
        def ask(self: Google, service: str, method: str, path: str, **more: Any) -> Any:
            writes = method != "GET" and not path.endswith(READING)
            call = call_name(method, path, *(more.get("body") or {}).values()) if writes else None
            return mortality.call(lambda: send(self, service, method, path, **more), call)

        return ask

    def create(self: Creator, project: str, region: str, body: Mapping[str, Any]) -> str:
        call = call_name("create", body["displayName"])
        return mortality.call(lambda: created(self, project, region, body), call)

    monkeypatch.setattr(Google, "call", mortal(Google.call))
    monkeypatch.setattr(Google, "call_once", mortal(Google.call_once))
    monkeypatch.setattr(Creator, "create", create)
    return mortality


def mortality_on_a_cluster(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    """A Mortality that kills calls to Kubernetes."""
    mortality, sent = Mortality(sandbox, monkeypatch), Cluster.send

    def send(self: Cluster, method: str, path: str, query: Mapping[str, str], *more: Any) -> Any:
        writes = method != "GET" and "dryRun" not in query and "reviews" not in path
        call = call_name(method, path) if writes else None
        return mortality.call(lambda: sent(self, method, path, query, *more), call)

    monkeypatch.setattr(Cluster, "send", send)
    return mortality


def mortality_on_hugging_face(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    """A Mortality that kills calls to Hugging Face."""
    mortality, sent = Mortality(sandbox, monkeypatch), Hub.send

    def send(self: Hub, method: str, url: str, **more: Any) -> Any:
        call = call_name(method, url, str(more)) if method != "GET" else None
        return mortality.call(lambda: sent(self, method, url, **more), call)

    monkeypatch.setattr(Hub, "send", send)
    return mortality


def mortality_on_modal(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    """A Mortality that kills calls to Modal that create and stop."""
    mortality = Mortality(sandbox, monkeypatch)

    def mortal(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: ModalWorkspace, *given: Any, **more: Any) -> Any:
            writes = method.__name__ != "app" or more.get("create", False)
            name = call_name(method.__name__, *given) if writes else None
            return mortality.call(lambda: method(self, *given, **more), name)

        return call

    for method in (ModalWorkspace.app, ModalWorkspace.create, ModalWorkspace.stop, ModalWorkspace.stop_app):
        monkeypatch.setattr(ModalWorkspace, method.__name__, mortal(method))
    return mortality


def start(run: TargetRun) -> Operator:
    options = "role: group" if isinstance(run, VertexRun) else "role: replica"
    operator = run.operator(count=SIZES[type(run)][0], options=options)
    operator.environment = {**run.environment, "AWS_MAX_ATTEMPTS": "1"}
    return operator


def mortality_of(run: TargetRun, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    if isinstance(run, VertexRun):
        return mortality_on_google(run.sandbox, monkeypatch)
    if isinstance(run, KubernetesRun):
        return mortality_on_a_cluster(run.sandbox, monkeypatch)
    if isinstance(run, HfJobsRun):
        return mortality_on_hugging_face(run.sandbox, monkeypatch)
    if isinstance(run, ModalRun):
        return mortality_on_modal(run.sandbox, monkeypatch)
    return mortality_on_aws(run.sandbox, monkeypatch, () if isinstance(run, BatchRun) else SHARED)


@pytest.mark.parametrize("run", SIZES, indirect=True, ids=lambda kind: kind.KIND)
def test_next_command_finishes_one_that_was_killed(run: TargetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command is killed after a call that none before it was killed after, until one of them completes."""

    def comparable() -> object:
        # Ids of networks differ between accounts.
        inventory = run.sandbox.inventory()
        return {kind: len(names) if isinstance(run, BatchRun) else names for kind, names in inventory.items()}

    operator = start(run)
    assert operator.apply().ok
    whole = comparable()
    run.sandbox.reset()
    operator, mortality = start(run), mortality_of(run, monkeypatch)
    # An SDK may translate the death of the process into an error.
    ends = (Killed, SkerryError) if isinstance(run, VertexRun) else (Killed,)
    outcome, created = kill_in_turn(mortality, operator.apply, ends)
    assert outcome.ok, outcome.failed
    assert comparable() == whole
    assert operator.plan().plan.empty
    removed, deleted = kill_in_turn(mortality, operator.destroy, ends)
    assert removed.ok, (removed.left, removed.outcome.failed)
    assert run.sandbox.inventory() == {}
    _, *least = SIZES[type(run)]
    assert (created >= least[0], deleted >= least[1]) == (True, True), (created, deleted)


@pytest.mark.parametrize("run", SIZES, indirect=True, ids=lambda kind: kind.KIND)
def test_apply_after_a_destroy_that_was_killed_starts_every_job(run: TargetRun) -> None:
    """An account or an App, which others know by its name, is not deleted after the jobs have started."""

    def counts() -> dict[str, int]:
        return {kind: len(names) for kind, names in run.sandbox.inventory().items() if kind != "job definition"}

    operator = start(run)
    assert operator.apply().ok
    whole = counts()
    begin_deletions(operator)
    outcome = operator.apply()
    assert outcome.ok, outcome.failed
    assert counts() == whole
    assert operator.plan().plan.empty
    removed = operator.destroy()
    assert removed.ok, (removed.left, removed.outcome.failed)
    assert run.sandbox.inventory() == {}


def test_next_apply_finishes_a_replacement_that_was_killed(
    sagemaker_run: SageMakerRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running job stays, and the lost one is recreated once."""
    sandbox = sagemaker_run.sandbox
    operator = start(sagemaker_run)
    assert operator.apply().ok
    lost, other = sandbox.inventory()["training job"]
    sandbox.training.finish(lost, 10)
    outcome, killed = kill_in_turn(mortality_on_aws(sandbox, monkeypatch), operator.apply)
    assert (outcome.ok, killed > 0) == (True, True)
    # An apply that was killed before it recorded the new job leaves the next generation to its successor.
    (again,) = set(sandbox.inventory()["training job"]) - {other}
    assert again in {f"{lost}-g1", f"{lost}-g2"}
    assert operator.plan().plan.empty
