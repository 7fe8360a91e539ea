"""An AWS account and a Google project in memory: each test finds them empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.accounts import aws_account, aws_sandbox, quick
from tests.infra.services import hub, huggingface, modal, modal_cloud
from tests.infra.targets.runs import (
    BatchRun,
    ClusterAndAccount,
    HfJobsRun,
    KubernetesRun,
    ModalRun,
    SageMakerRun,
    TargetRun,
    VertexRun,
)

from skerry.testing.google.sandbox import GoogleSandbox
from skerry.testing.kubernetes import KubernetesSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.testing.huggingface import HuggingFaceSandbox
    from skerry.testing.modal_cloud import ModalSandbox
    from skerry.testing.sandbox import Sandbox

__all__ = ["aws_account", "aws_sandbox", "hub", "huggingface", "modal", "modal_cloud", "quick"]


@pytest.fixture(scope="session")
def google_project() -> Iterator[GoogleSandbox]:
    with GoogleSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def google_sandbox(google_project: GoogleSandbox) -> Iterator[GoogleSandbox]:
    google_project.reset()
    google_project.settling = 0
    google_project.any_image = True
    google_project.jobs.refuse(None)
    yield google_project
    assert not google_project.violations


@pytest.fixture(scope="session")
def kubernetes_cluster() -> Iterator[KubernetesSandbox]:
    with KubernetesSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def kubernetes_sandbox(kubernetes_cluster: KubernetesSandbox) -> Iterator[KubernetesSandbox]:
    kubernetes_cluster.reset()
    yield kubernetes_cluster
    assert not kubernetes_cluster.violations


@pytest.fixture
def kubernetes_place(kubernetes_sandbox: KubernetesSandbox, aws_sandbox: Sandbox) -> ClusterAndAccount:
    return ClusterAndAccount(kubernetes_sandbox, aws_sandbox)


@pytest.fixture
def hf_jobs_place(huggingface: HuggingFaceSandbox, aws_sandbox: Sandbox) -> ClusterAndAccount:
    return ClusterAndAccount(huggingface, aws_sandbox)


@pytest.fixture
def modal_place(modal: ModalSandbox, aws_sandbox: Sandbox) -> ClusterAndAccount:
    return ClusterAndAccount(modal, aws_sandbox)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> TargetRun:
    """A run on the target that the test is parametrised with."""
    kind: type[TargetRun] = request.param
    fixtures: dict[type[TargetRun], str] = {
        VertexRun: "google_sandbox",
        KubernetesRun: "kubernetes_place",
        HfJobsRun: "hf_jobs_place",
        ModalRun: "modal_place",
    }
    return kind(tmp_path, request.getfixturevalue(fixtures.get(kind, "aws_sandbox")))


@pytest.fixture
def batch_run(aws_sandbox: Sandbox, tmp_path: Path) -> BatchRun:
    return BatchRun(tmp_path, aws_sandbox)


@pytest.fixture
def sagemaker_run(aws_sandbox: Sandbox, tmp_path: Path) -> SageMakerRun:
    return SageMakerRun(tmp_path, aws_sandbox)


@pytest.fixture
def vertex_run(google_sandbox: GoogleSandbox, tmp_path: Path) -> VertexRun:
    return VertexRun(tmp_path, google_sandbox)
