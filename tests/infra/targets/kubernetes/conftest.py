"""The cluster as the code under test reaches it, with pods that a test drives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.targets.kubernetes.kit import Scene, context_of
from tests.support.clocks import FakeClock

from skerry.infra.targets.kubernetes.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.kubernetes import KubernetesSandbox


@pytest.fixture
def sandbox(kubernetes_sandbox: KubernetesSandbox) -> KubernetesSandbox:
    return kubernetes_sandbox


@pytest.fixture
def cluster(sandbox: KubernetesSandbox) -> Cluster:
    return Cluster(FakeClock(), sandbox.environment)


@pytest.fixture
def scene(cluster: Cluster, tmp_path: Path) -> Scene:
    return Scene(cluster, context_of(tmp_path))
