"""Runs `skerry` in the test's process."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import typer.testing
from typer.main import get_command

from skerry.infra.cli.app import app

if TYPE_CHECKING:
    from typer.testing import Result

# The tree of commands takes 60 ms to build, and typer's runner builds it at every call.
typer.testing._get_command = functools.cache(get_command)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def invoke(*words: object) -> Result:
    """Run `skerry` with these words, and return its output and exit code."""
    return typer.testing.CliRunner().invoke(app, [str(word) for word in words])
