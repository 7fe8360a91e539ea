"""The `skerry` command as installed: its help, completion and errors, and the commands behind its table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from skerry.infra.cli.fast_help_entry_point import root

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result


def skerry(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(root, [*arguments], env={"COLUMNS": "120", **environment}, prog_name="skerry")


def test_help_groups_the_commands() -> None:
    text = skerry("--help").output
    assert [panel for panel in ("Start here", "Watch", "Cloud", "Care") if panel in text] == [
        panel for _, panel in sorted((text.index(panel), panel) for panel in ("Start here", "Watch", "Cloud", "Care"))
    ]
    assert "--install-completion" in text
    assert "3 done, but not by all replicas" in " ".join(text.split())


def test_command_runs_and_shows_its_own_help(tmp_path: Path) -> None:
    assert skerry("init", str(tmp_path / "a.yaml")).exit_code == 0
    assert skerry("validate", str(tmp_path / "a.yaml"), "--set", "outer.rounds=x").exit_code == 2
    assert "--deep" in skerry("doctor", "--help").output
    assert "ship" in skerry("image", "--help").output


@pytest.mark.parametrize("arguments", [("stats",), ("status", "--nonsense")])
def test_bad_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert skerry(*arguments).exit_code == 2


def test_completion_offers_commands_and_their_options() -> None:
    names = skerry(_SKERRY_COMPLETE="complete_bash", COMP_WORDS="skerry stat", COMP_CWORD="1")
    assert names.output.split() == ["status", "state"]
    options = skerry(_SKERRY_COMPLETE="complete_bash", COMP_WORDS="skerry doctor --de", COMP_CWORD="2")
    assert options.output.split() == ["--deep"]
