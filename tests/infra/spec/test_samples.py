from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from skerry.infra import cli, spec
from skerry.infra.sample import SAMPLES

EXAMPLES = Path(__file__).parents[2] / "infra/examples"
# A workflow of a CI lies among them.
SPECS = [path for path in sorted(EXAMPLES.glob("*.yaml")) if "\nrun: " in path.read_text()]


def init(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["init", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.mark.parametrize("kind", SAMPLES)
def test_init_writes_a_valid_spec_for_the_target_that_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "skerry.yaml"
    code, output = init(path, "--target", kind)
    assert (code, path.read_text()) == (0, SAMPLES[kind]), output
    assert spec.load(path).spec.replicas[0].target.kind == kind
    assert (tmp_path / "train" / "train.py").exists()


def test_init_for_a_cloud_says_what_to_put_in_and_what_comes_next(tmp_path: Path) -> None:
    path = tmp_path / "skerry.yaml"
    assert (
        init(path, "--target", "aws_batch")[1]
        .splitlines()[-1]
        .endswith(f"put in your bucket and image: skerry plan {path}")
    )


def test_init_for_an_unknown_target_writes_nothing_and_names_those_there_are(tmp_path: Path) -> None:
    code, output = init(tmp_path / "skerry.yaml", "--target", "lambda")
    assert code == 2
    assert "no sample for 'lambda'; there are local, aws_batch" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_every_example_is_a_valid_spec(path: Path) -> None:
    assert spec.load(path).seats


def test_there_is_an_example_of_every_kind_of_target() -> None:
    assert {group.target.kind for path in SPECS for group in spec.load(path).spec.replicas} == set(spec.AVAILABLE)
