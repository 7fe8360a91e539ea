"""Fixtures with one AWS account in memory for each module: each test finds it empty, and creates no client twice.

Starting an account takes longer than using it, and so does creating boto3's clients for every command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.clouds.aws.account import share_clients

from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def aws_account() -> Iterator[Sandbox]:
    """The account; its patches of moto end with the module."""
    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def aws_sandbox(aws_account: Sandbox) -> Sandbox:
    """The account, empty again; every image counts as pushed."""
    aws_account.reset()
    aws_account.settling = 0
    aws_account.any_image = True
    return aws_account


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the clients of AWS between commands."""
    share_clients(monkeypatch)


@pytest.fixture
def skerry_sandbox(aws_sandbox: Sandbox, quick: None, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """The same account, which the commands of this process use by its environment."""
    del quick
    for name, value in aws_sandbox.environment.items():
        monkeypatch.setenv(name, value)
    return aws_sandbox
