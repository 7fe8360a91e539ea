"""Pushes an image to registries, tagged by its commit, and returns the digest that specs pin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.bucket_and_image_checks import repository_of
from skerry.infra.image.logins import registry_login
from skerry.infra.local.docker_engine import EngineFailed
from skerry.infra.spec.yaml_document import text_of
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.local.docker_engine import Engine
    from skerry.infra.spec.model import Spec

UNKNOWN: Final = "sha256:..."
"""The placeholder for a digest that is known only after the push."""
_REVISION: Final = "org.opencontainers.image.revision"


def push(
    engine: Engine,
    repository: str,
    variant: str,
    access: OperatorAccess,
    on_line: Callable[[str], None],
    *,
    tag: str | None = None,
    allow_dirty: bool = False,
) -> str:
    """Push skerry:{variant} to `repository`, which must exist; return its name by digest. The tag is the commit.

    Raises Invalid for an image of a changed checkout unless allowed, because its code could not be identified later.
    """
    if repository_of(repository) != repository:
        raise Invalid(
            f"not a repository: {repository}; write it without a tag, e.g. registry/team/skerry, and use --tag"
        )
    reference = f"skerry:{variant}"
    try:
        labels: Mapping[str, str] = engine.images.inspect(reference)["Config"].get("Labels") or {}
    except EngineFailed as error:
        raise Invalid(f"no image {reference} on this engine; build it with `scripts/image build`") from error
    commit, dirty, _ = labels.get(_REVISION, "").partition("-dirty")
    if not commit:
        raise Invalid(f"{reference} is not an image of skerry: it has no label {_REVISION}")
    if dirty and not allow_dirty:
        raise Invalid(
            f"{reference} was built from changed files: {_REVISION}={commit}{dirty}; commit and build again, "
            "or push it with --allow-dirty"
        )
    name = f"{repository}:{tag or f'{commit[:12]}{dirty}-{variant}'}"
    engine.images.tag(reference, name)
    try:
        return f"{repository}@{engine.images.push(name, registry_login(repository, access), on_line)}"
    finally:
        engine.images.remove(name)


def repositories(spec: Spec) -> Mapping[str, tuple[str, ...]]:
    """The repositories of the images of a spec's replicas, each with the spec fields that name it. Pure.

    An image that is a file, a Space or the URI of another kind of place is in no repository that can be pushed to.
    """
    fields_of: dict[str, tuple[str, ...]] = {}
    for index, group in enumerate(spec.replicas):
        field = "image" if group.image is None else text_of(("replicas", index, "image"))
        image = group.image or spec.image
        if image is not None and not _is_elsewhere(image):
            repository = repository_of(image)
            fields_of[repository] = tuple(dict.fromkeys((*fields_of.get(repository, ()), field)))
    return fields_of


def _is_elsewhere(image: str) -> bool:
    return "://" in image or image.startswith(("/", "hf.co/spaces/")) or image.endswith(".sif")


def pins(spec: Spec, references: Mapping[str, str]) -> tuple[str, ...]:
    """The `--set` values that make every group run the pushed images. references: by repository. Pure."""
    named = {field: references[place] for place, fields in repositories(spec).items() for field in fields}
    return tuple(f"{field}={named[field]}" for field in sorted(named))
