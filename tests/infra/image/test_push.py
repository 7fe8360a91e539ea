"""Where a spec's images go, and what pins them there: each repository once, each group to what its cloud pulls."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from skerry.infra import spec
from skerry.infra.cli import app
from skerry.infra.image.shipping import pins, repositories, repository_of

MIXED: Final = Path(__file__).parents[2] / "infra/examples/mixed.yaml"
ECR: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"
GOOGLE: Final = "us-central1-docker.pkg.dev/acme-diloco/skerry/replica"


@pytest.mark.parametrize("end", ["", ":1", "@sha256:0", ":1@sha256:0"])
@pytest.mark.parametrize("repository", [ECR, GOOGLE, "127.0.0.1:5000/team/skerry", "acme/skerry", "skerry"])
def test_a_repository_is_an_images_name_without_what_changes(repository: str, end: str) -> None:
    assert repository_of(repository + end) == repository


def test_each_repository_is_named_once_with_the_fields_that_name_it() -> None:
    found = spec.load(MIXED).spec
    assert repositories(found) == {ECR: ("image",), GOOGLE: ("replicas[2].image",)}
    references = {ECR: f"{ECR}@sha256:a", GOOGLE: f"{GOOGLE}@sha256:b"}
    assert pins(found, references) == (f"image={ECR}@sha256:a", f"replicas[2].image={GOOGLE}@sha256:b")


def test_what_pins_is_taken_and_leaves_nothing_as_it_was() -> None:
    before = spec.load(MIXED).spec
    overrides = pins(before, {place: f"{place}@sha256:{'9' * 64}" for place in repositories(before)})
    after = spec.load(MIXED, overrides).spec
    assert [after.image, *(group.image for group in after.replicas)] == [
        f"{ECR}@sha256:{'9' * 64}",
        None,
        None,
        f"{GOOGLE}@sha256:{'9' * 64}",
    ]


def test_an_image_that_no_group_runs_is_not_pushed_and_one_that_several_run_is_once() -> None:
    overrides = [f"replicas[{index}].image={ECR}:{index}" for index in range(2)]
    found = spec.load(MIXED, [*overrides, "image=acme/other:1"]).spec
    assert repositories(found) == {ECR: ("replicas[0].image", "replicas[1].image"), GOOGLE: ("replicas[2].image",)}


def test_a_dry_run_tells_every_field_and_asks_nobody() -> None:
    ended = CliRunner().invoke(app, ["image", "ship", str(MIXED), "--dry-run"])
    assert (ended.exit_code, ended.stdout.splitlines()) == (
        0,
        [f"image={ECR}@sha256:...", f"replicas[2].image={GOOGLE}@sha256:..."],
    )


def test_a_run_of_this_machine_has_nowhere_to_push(tmp_path: Path) -> None:
    path = tmp_path / "skerry.yaml"
    assert CliRunner().invoke(app, ["init", str(path)]).exit_code == 0
    ended = CliRunner().invoke(app, ["image", "ship", str(path)])
    assert ended.exit_code == 2
    assert "there is nowhere to push" in ended.stderr
