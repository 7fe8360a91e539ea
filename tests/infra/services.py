"""Fixtures with a service in memory for a whole session; each test finds it empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from skerry.testing.huggingface import HuggingFaceSandbox
from skerry.testing.modal_cloud import ModalSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def hub() -> Iterator[HuggingFaceSandbox]:
    with HuggingFaceSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def huggingface(hub: HuggingFaceSandbox) -> Iterator[HuggingFaceSandbox]:
    hub.reset()
    yield hub
    assert hub.violations == []


@pytest.fixture(scope="session")
def modal_cloud() -> Iterator[ModalSandbox]:
    with ModalSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def modal(modal_cloud: ModalSandbox, monkeypatch: pytest.MonkeyPatch) -> ModalSandbox:
    modal_cloud.reset()
    for name, value in modal_cloud.environment.items():
        monkeypatch.setenv(name, value)
    return modal_cloud
