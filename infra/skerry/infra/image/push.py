"""Pushes an image to registries, tagged by its commit, and returns the digest that specs pin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.bucket_and_image_checks import repository_of
from skerry.infra.image.building import NAME, REVISION, revision_of
from skerry.infra.image.logins import registry_login
from skerry.infra.spec.yaml_document import text_of
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.image.source import Variant
    from skerry.infra.local.docker_engine import Engine
    from skerry.infra.spec.model import Spec

UNKNOWN: Final = "sha256:..."
"""The placeholder for a digest that is known only after the push."""


@dataclass(frozen=True, kw_only=True)
class PushedImage:
    """An image in a registry. reference: by digest, for a spec's `image:`. tag: by name."""

    reference: str
    tag: str
    digest: str
    revision: str


def push(
    engine: Engine,
    repository: str,
    variant: Variant,
    on_line: Callable[[str], None],
    *,
    tag: str | None = None,
    allow_dirty: bool = False,
) -> PushedImage:
    """Push skerry:{variant} to `repository`, which must exist. The default tag is the commit.

    Raises Invalid for an image of a changed checkout unless allowed, because its code could not be identified later.
    """
    if "@" in repository or ":" in repository.rpartition("/")[2]:
        raise Invalid(
            f"not a repository: {repository}; write it without a tag, e.g. registry/team/{NAME}, and use --tag"
        )
    reference = f"{NAME}:{variant}"
    revision = revision_of(engine, reference)
    if revision.endswith("-dirty") and not allow_dirty:
        raise Invalid(
            f"{reference} was built from changed files: {REVISION}={revision}; commit and build again, "
            "or push it with --allow-dirty"
        )
    name = f"{repository}:{tag or _tag(revision, variant)}"
    engine.images.tag(reference, name)
    try:
        digest = engine.images.push(name, registry_login(repository), on_line)
    finally:
        engine.images.remove(name)
    return PushedImage(reference=f"{repository}@{digest}", tag=name, digest=digest, revision=revision)


def repositories(spec: Spec) -> Mapping[str, tuple[str, ...]]:
    """The repositories of the images of a spec's replicas, each with the spec fields that name it. Pure."""
    fields_of: dict[str, tuple[str, ...]] = {}
    for index, group in enumerate(spec.replicas):
        field = "image" if group.image is None else text_of(("replicas", index, "image"))
        image = group.image or spec.image
        if image is not None:
            repository = repository_of(image)
            fields_of[repository] = tuple(dict.fromkeys((*fields_of.get(repository, ()), field)))
    return fields_of


def pins(spec: Spec, references: Mapping[str, str]) -> tuple[str, ...]:
    """The `--set` values that make every group run the pushed images. references: by repository. Pure."""
    named = {field: references[place] for place, fields in repositories(spec).items() for field in fields}
    return tuple(f"{field}={named[field]}" for field in sorted(named))


def _tag(revision: str, variant: Variant) -> str:
    commit, _, rest = revision.partition("-")
    return "-".join([commit[:12], *([rest] if rest else []), variant])
