from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.command_line import invoke

from skerry.infra import targets
from skerry.infra.cli import recipes_for_init
from skerry.infra.spec import model

EXAMPLES = Path(__file__).parents[3] / "infra/examples"
PAGE = (EXAMPLES.parents[1] / "docs/recipes.md").read_text()
# One of them is the workflow of a CI.
SPECS = [path for path in sorted(EXAMPLES.glob("*.yaml")) if "\nrun: " in path.read_text()]


@pytest.mark.parametrize("kind", targets.samples())
def test_init_writes_a_valid_spec_for_the_target(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "skerry.yaml"
    result = invoke("init", path, "--target", kind)
    assert (result.exit_code, path.read_text()) == (0, targets.samples()[kind]), result.output
    assert model.load(path, targets.kinds()).spec.replicas[0].target.kind == kind
    assert (tmp_path / "train" / "train.py").exists()


@pytest.mark.parametrize("kind", targets.samples())
def test_commented_inputs_of_a_sample_are_valid(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "skerry.yaml"
    text = re.sub(r"(?m)^# (env|secrets|data|  HF_TOKEN):", r"\1:", targets.samples()[kind])
    path.write_text(text)
    spec = model.load(path, targets.kinds()).spec
    assert (list(spec.env), list(spec.secrets), list(spec.data)) == (["HF_HOME"], ["HF_TOKEN"], ["corpus"])


def test_init_for_a_cloud_names_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "skerry.yaml"
    last = invoke("init", path, "--target", "aws_batch").output.splitlines()[-1]
    assert last.endswith(f"put in your bucket and image: skerry plan {path}")


@pytest.mark.parametrize("recipe", recipes_for_init.FILES)
def test_init_writes_the_script_of_a_recipe(tmp_path: Path, recipe: str) -> None:
    assert invoke("init", tmp_path / "skerry.yaml", "--from", recipe).exit_code == 0
    script = (tmp_path / "train" / "train.py").read_text()
    assert script == (recipes_for_init.folder() / recipes_for_init.FILES[recipe]).read_text()
    assert f"[`{recipe}`](../runtime/skerry/runtime/recipes/{recipes_for_init.FILES[recipe]})" in PAGE, (
        "docs/recipes.md"
    )


def test_init_without_a_recipe_writes_the_plain_loop(tmp_path: Path) -> None:
    assert invoke("init", tmp_path / "skerry.yaml").exit_code == 0
    assert (tmp_path / "train" / "train.py").read_text() == recipes_for_init.script_of("loop")


def test_init_for_an_unknown_recipe_writes_nothing(tmp_path: Path) -> None:
    result = invoke("init", tmp_path / "skerry.yaml", "--from", "keras")
    assert result.exit_code == 2
    assert "no recipe 'keras'; choose one of loop, hf, lightning, torchft" in result.output
    assert list(tmp_path.iterdir()) == []


def test_init_for_an_unknown_target_writes_nothing(tmp_path: Path) -> None:
    result = invoke("init", tmp_path / "skerry.yaml", "--target", "lambda")
    assert result.exit_code == 2
    assert "no sample for 'lambda'; choose one of local, aws_batch" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_example_is_a_valid_spec(path: Path) -> None:
    assert model.load(path, targets.kinds()).replica_slots


def test_every_kind_of_target_has_an_example() -> None:
    groups = [group for path in SPECS for group in model.load(path, targets.kinds()).spec.replicas]
    assert {group.target.kind for group in groups} == set(targets.kinds().names)
