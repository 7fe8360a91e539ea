"""The repositories of a spec's images, and the `--set` values that pin each group to its pushed image."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from tests.support.command_line import invoke

from skerry.infra import targets
from skerry.infra.clouds.bucket_and_image_checks import repository_of
from skerry.infra.image.push import pins, repositories
from skerry.infra.spec import model

MIXED: Final = Path(__file__).parents[3] / "infra/examples/mixed.yaml"
ECR: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"
GOOGLE: Final = "us-central1-docker.pkg.dev/acme-diloco/skerry/replica"


@pytest.mark.parametrize("end", ["", ":1", "@sha256:0", ":1@sha256:0"])
@pytest.mark.parametrize("repository", [ECR, GOOGLE, "127.0.0.1:5000/team/skerry", "acme/skerry", "skerry"])
def test_repository_is_the_image_name_without_tag_and_digest(repository: str, end: str) -> None:
    assert repository_of(repository + end) == repository


def test_repositories_are_listed_once_with_their_spec_fields() -> None:
    listed = model.load(MIXED, targets.kinds()).spec
    assert repositories(listed) == {ECR: ("image",), GOOGLE: ("replicas[2].image",)}
    references = {ECR: f"{ECR}@sha256:a", GOOGLE: f"{GOOGLE}@sha256:b"}
    assert pins(listed, references) == (f"image={ECR}@sha256:a", f"replicas[2].image={GOOGLE}@sha256:b")


def test_image_overrides_pin_every_group() -> None:
    before = model.load(MIXED, targets.kinds()).spec
    overrides = pins(before, {place: f"{place}@sha256:{'9' * 64}" for place in repositories(before)})
    after = model.load(MIXED, targets.kinds(), overrides).spec
    assert [after.image, *(group.image for group in after.replicas)] == [
        f"{ECR}@sha256:{'9' * 64}",
        None,
        None,
        f"{GOOGLE}@sha256:{'9' * 64}",
    ]


def test_only_images_of_groups_are_pushed() -> None:
    overrides = [f"replicas[{index}].image={ECR}:{index}" for index in range(2)]
    listed = model.load(MIXED, targets.kinds(), [*overrides, "image=acme/other:1"]).spec
    assert repositories(listed) == {ECR: ("replicas[0].image", "replicas[1].image"), GOOGLE: ("replicas[2].image",)}


@pytest.mark.parametrize(
    "image",
    ["hf.co/spaces/acme/skerry", "docker://ghcr.io/acme/skerry:1", "images/skerry.sif", "/shared/images/skerry.sif"],
)
def test_images_outside_registries_are_not_pushed(image: str) -> None:
    listed = model.load(MIXED, targets.kinds()).spec.model_copy(update={"image": image})
    assert repositories(listed) == {GOOGLE: ("replicas[2].image",)}


def test_dry_run_prints_every_override_without_an_engine() -> None:
    ended = invoke("image", "ship", str(MIXED), "--dry-run")
    assert (ended.exit_code, ended.stdout.splitlines()) == (
        0,
        [f"image={ECR}@sha256:...", f"replicas[2].image={GOOGLE}@sha256:..."],
    )


def test_local_run_has_no_repository_to_push_to(tmp_path: Path) -> None:
    path = tmp_path / "skerry.yaml"
    assert invoke("init", str(path)).exit_code == 0
    ended = invoke("image", "ship", str(path))
    assert ended.exit_code == 2
    assert "there is nothing to push" in ended.stderr
