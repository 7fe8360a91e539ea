"""One AWS account and one Google project per module; each test uses its own run in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.clouds.aws.account import share_clients
from tests.infra.services import hub, huggingface, modal, modal_cloud
from tests.support.batchplace import make_place, make_role

from skerry.testing.google.sandbox import GoogleSandbox
from skerry.testing.kubernetes import KubernetesSandbox
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.batchplace import Place

__all__ = ["hub", "huggingface", "modal", "modal_cloud"]


@pytest.fixture(scope="module")
def account() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def place(account: Sandbox) -> Place:
    """The resources that jobs need. Shared, because creating them takes longer than a test; no test changes them."""
    account.client("s3").create_bucket(Bucket="acme")
    make_role(account, "trainer", "sagemaker.amazonaws.com")
    for name in ("replica", "execution"):
        make_role(account, name)
    return make_place(account)


@pytest.fixture
def aws(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    share_clients(monkeypatch)
    place.sandbox.heal()
    place.sandbox.calls.clear()
    return place


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[KubernetesSandbox]:
    with KubernetesSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def cluster(kubernetes: KubernetesSandbox) -> Iterator[KubernetesSandbox]:
    kubernetes.reset()
    yield kubernetes
    assert not kubernetes.violations


@pytest.fixture(scope="module")
def project() -> Iterator[GoogleSandbox]:
    with GoogleSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def google(project: GoogleSandbox) -> Iterator[GoogleSandbox]:
    project.reset()
    yield project
    assert not project.violations
