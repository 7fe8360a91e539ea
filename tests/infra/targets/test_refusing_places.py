"""Without a state, a service that does not answer is named by every command, which fails and changes nothing.

`test_running_jobs_are_reported` has all losses, in two clouds; here are the other kinds of targets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.targets.runs import (
    HfJobsRun,
    KubernetesRun,
    ModalRun,
    SageMakerRun,
    TargetRun,
    delete_state,
    start_one,
)
from tests.support.command_line import invoke

if TYPE_CHECKING:
    from skerry.testing.faults import How

pytestmark = pytest.mark.usefixtures("quick")
CALLS: Final = {
    SageMakerRun: "sagemaker:*",
    KubernetesRun: "kubernetes:*",
    HfJobsRun: "huggingface:*",
    ModalRun: "modal:*",
}
NAMES: Final = {SageMakerRun: "sagemaker", KubernetesRun: "Kubernetes", HfJobsRun: "Hugging Face", ModalRun: "Modal"}
# In the same account, because none of them changes it.
COMMANDS: Final = {
    "status": (),
    "plan": (),
    "up": ("--auto-approve",),
    "cancel": ("--auto-approve",),
    "destroy": ("--yes", "--data"),
}


@pytest.mark.parametrize("how", ["deny", "throttle"])
@pytest.mark.parametrize("run", CALLS, indirect=True, ids=lambda kind: kind.KIND)
def test_service_that_cannot_be_asked_is_named(run: TargetRun, how: How, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = start_one(run, monkeypatch)
    delete_state(operator)
    run.sandbox.fail(how=how, on=CALLS[type(run)], times=None)
    for command, options in COMMANDS.items():
        result = invoke(command, str(operator.path), *options)
        text = f"{command}: {result.exit_code}: {result.stdout}{result.stderr}"
        assert result.exit_code not in {0, 3}, text
        assert NAMES[type(run)] in text, text
        assert "no job" not in text, text
    assert run.live() == 1
