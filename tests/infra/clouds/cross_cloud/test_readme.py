"""The plan in the README is the output of the command for the example."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.support.page_examples import assert_shows, shown
from typer.testing import CliRunner

from skerry.infra.cli.app import app
from skerry.testing.plugin import skerry_clouds, skerry_google, skerry_sandbox

if TYPE_CHECKING:
    from skerry.testing.both_clouds import Clouds

__all__ = ["skerry_clouds", "skerry_google", "skerry_sandbox"]

pytestmark = pytest.mark.slow
ROOT: Final = Path(__file__).parents[4]
EXAMPLE: Final = "infra/examples/mixed.yaml"
PROJECT: Final = "acme-diloco"


def test_the_plan_that_is_shown_is_the_plan_of_the_example(tmp_path: Path, skerry_clouds: Clouds) -> None:
    here = skerry_clouds.google.project
    spec = (ROOT / EXAMPLE).read_text().replace(PROJECT, here)
    (tmp_path / "mixed.yaml").write_text(spec.replace(f"s3://{here}", f"s3://{PROJECT}").replace("../..", str(ROOT)))
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "mixed.yaml")])
    assert result.exit_code == 0, result.output
    assert_shows(
        result.output.replace(here, PROJECT), shown((ROOT / "README.md").read_text(), f"skerry plan {EXAMPLE}")
    )
