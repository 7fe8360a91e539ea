"""An apply or a destroy is killed after each of its calls in turn; the next one finishes the work."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.crashes import Crashes, Mortality, mortality_on_aws
from tests.infra.kit import Killed
from tests.infra.targets.runs import BatchRun, HfJobsRun, KubernetesRun, ModalRun, SageMakerRun, TargetRun, VertexRun

from skerry.infra.clouds.google.session import Google
from skerry.infra.targets.hf_jobs.hub import Hub
from skerry.infra.targets.kubernetes.cluster import Cluster
from skerry.infra.targets.modal.workspace import ModalWorkspace
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
    """A Mortality that counts and kills calls to Google."""
    mortality, created = Mortality(sandbox, monkeypatch), Creator.create

    def mortal(send: Callable[..., Any]) -> Callable[..., Any]:
        def ask(self: Google, service: str, method: str, path: str, **more: Any) -> Any:
            writes = method != "GET" and not path.endswith(READING)
            return mortality.call(lambda: send(self, service, method, path, **more), writes=writes)

        return ask

    def create(self: Creator, *positional: Any) -> str:
        return mortality.call(functools.partial(created, self, *positional), writes=True)

    monkeypatch.setattr(Google, "call", mortal(Google.call))
    monkeypatch.setattr(Google, "call_once", mortal(Google.call_once))
    monkeypatch.setattr(Creator, "create", create)
    return mortality


def mortality_on_a_cluster(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    """A Mortality that counts and kills calls to Kubernetes."""
    mortality, sent = Mortality(sandbox, monkeypatch), Cluster.send

    def send(self: Cluster, method: str, path: str, query: Mapping[str, str], *more: Any) -> Any:
        writes = method != "GET" and "dryRun" not in query and "reviews" not in path
        return mortality.call(lambda: sent(self, method, path, query, *more), writes=writes)

    monkeypatch.setattr(Cluster, "send", send)
    return mortality


def mortality_on_hugging_face(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    """A Mortality that counts and kills calls to Hugging Face."""
    mortality, sent = Mortality(sandbox, monkeypatch), Hub.send

    def send(self: Hub, method: str, url: str, **more: Any) -> Any:
        return mortality.call(lambda: sent(self, method, url, **more), writes=method != "GET")

    monkeypatch.setattr(Hub, "send", send)
    return mortality


def mortality_on_modal(sandbox: Any, monkeypatch: pytest.MonkeyPatch) -> Mortality:
    """A Mortality that counts and kills calls to Modal that create and stop."""
    mortality = Mortality(sandbox, monkeypatch)

    def mortal(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: ModalWorkspace, *given: Any, **more: Any) -> Any:
            writes = method.__name__ != "app" or more.get("create", False)
            return mortality.call(lambda: method(self, *given, **more), writes=writes)

        return call

    for method in (ModalWorkspace.app, ModalWorkspace.create, ModalWorkspace.stop, ModalWorkspace.stop_app):
        monkeypatch.setattr(ModalWorkspace, method.__name__, mortal(method))
    return mortality


def start(run: TargetRun) -> Operator:
    options = "role: group" if isinstance(run, VertexRun) else "role: replica"
    operator = run.operator(count=SIZES[type(run)][0], options=options)
    operator.environment = {**run.environment, "AWS_MAX_ATTEMPTS": "1"}
    return operator


def crashes_of(run: TargetRun, monkeypatch: pytest.MonkeyPatch) -> Crashes:
    on_google = isinstance(run, VertexRun)
    if on_google:
        mortality = mortality_on_google(run.sandbox, monkeypatch)
    elif isinstance(run, KubernetesRun):
        mortality = mortality_on_a_cluster(run.sandbox, monkeypatch)
    elif isinstance(run, HfJobsRun):
        mortality = mortality_on_hugging_face(run.sandbox, monkeypatch)
    elif isinstance(run, ModalRun):
        mortality = mortality_on_modal(run.sandbox, monkeypatch)
    else:
        mortality = mortality_on_aws(run.sandbox, monkeypatch, () if isinstance(run, BatchRun) else SHARED)
    # An SDK may translate the death of the process into an error.
    ends = (Killed, SkerryError) if on_google else (Killed,)
    return Crashes(functools.partial(start, run), run.sandbox, mortality, ends)


@pytest.mark.parametrize("run", SIZES, indirect=True, ids=lambda kind: kind.KIND)
def test_next_command_finishes_one_that_was_killed(run: TargetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def comparable(inventory: dict[str, tuple[str, ...]]) -> object:
        # Ids of networks differ between accounts.
        return {kind: len(names) if isinstance(run, BatchRun) else names for kind, names in inventory.items()}

    _, created, deleted = SIZES[type(run)]
    crashes_of(run, monkeypatch).check((created, deleted), comparable)


def test_next_apply_finishes_a_replacement_that_was_killed(
    sagemaker_run: SageMakerRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running job stays, and the lost one is recreated once."""
    sandbox, mortality = sagemaker_run.sandbox, mortality_on_aws(sagemaker_run.sandbox, monkeypatch)
    calls, number = 1, 0
    while number < calls:
        sandbox.reset()
        mortality.revive()
        operator = start(sagemaker_run)
        assert operator.apply().ok
        lost, other = sandbox.inventory()["training job"]
        sandbox.training.finish(lost, 10)
        mortality.revive(after=number or None)
        with contextlib.suppress(Killed):
            operator.apply()
        calls = max(calls, mortality.written + 1)
        mortality.revive()
        assert operator.apply().ok, number
        # An apply that was killed before it recorded the new job leaves the next generation to its successor.
        (again,) = set(sandbox.inventory()["training job"]) - {other}
        assert again in {f"{lost}-g1", f"{lost}-g2"}, number
        assert operator.plan().plan.empty, number
        number += 1
