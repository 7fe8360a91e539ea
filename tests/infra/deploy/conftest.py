"""A sandbox with an AWS account, and a spec for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.accounts import aws_account, aws_sandbox, quick, skerry_sandbox
from tests.infra.deploy.account import write_spec

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

__all__ = ["aws_account", "aws_sandbox", "quick", "skerry_sandbox"]


@pytest.fixture
def spec(tmp_path: Path, skerry_sandbox: Sandbox) -> str:
    """The path of a spec with one replica; this process has the sandbox's environment."""
    del skerry_sandbox
    return str(write_spec(tmp_path, count=1))
