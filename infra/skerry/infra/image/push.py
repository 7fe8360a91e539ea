"""Puts an image into registries, under its own version, and names it by what specs pin: its digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.document import text_of
from skerry.infra.image.building import NAME, REVISION, revision_of
from skerry.infra.image.logins import login_of
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.engine import Engine
    from skerry.infra.image.source import Variant
    from skerry.infra.spec import Spec

UNKNOWN: Final = "sha256:..."
"""Stands for a digest that a push would tell."""


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """An image in a registry. reference: by digest, what a spec's `image:` takes. tag: the same by name."""

    reference: str
    tag: str
    digest: str
    revision: str


def push(
    engine: Engine,
    repository: str,
    variant: Variant,
    tell: Callable[[str], None],
    *,
    tag: str | None = None,
    allow_dirty: bool = False,
) -> Shipped:
    """Push skerry:{variant} to `repository`, which must exist. The tag is the commit's unless given.

    Raises Invalid for an image of a changed checkout, unless allowed: nobody could say later what ran.
    """
    if "@" in repository or ":" in repository.rpartition("/")[2]:
        raise Invalid(f"write the repository alone, e.g. registry/team/{NAME}; the tag has an option: {repository}")
    reference = f"{NAME}:{variant}"
    revision = revision_of(engine, reference)
    if revision.endswith("-dirty") and not allow_dirty:
        raise Invalid(
            f"{reference} was built from changed files ({REVISION}={revision}): commit and build again, "
            "or push it with --allow-dirty"
        )
    name = f"{repository}:{tag or _tag(revision, variant)}"
    engine.images.tag(reference, name)
    try:
        digest = engine.images.push(name, login_of(repository), tell)
    finally:
        engine.images.remove(name)
    return Shipped(reference=f"{repository}@{digest}", tag=name, digest=digest, revision=revision)


def repositories(spec: Spec) -> Mapping[str, tuple[str, ...]]:
    """Where the images of a spec's replicas lie, each repository once, and the fields that name one in it. Pure."""
    found: dict[str, tuple[str, ...]] = {}
    for index, group in enumerate(spec.replicas):
        field = "image" if group.image is None else text_of(("replicas", index, "image"))
        image = group.image or spec.image
        if image is not None:
            repository = repository_of(image)
            found[repository] = tuple(dict.fromkeys((*found.get(repository, ()), field)))
    return found


def repository_of(image: str) -> str:
    """An image's name without its tag and its digest. A port is none of these. Pure."""
    start, slash, last = image.partition("@")[0].rpartition("/")
    return f"{start}{slash}{last.partition(':')[0]}"


def pins(spec: Spec, references: Mapping[str, str]) -> tuple[str, ...]:
    """What `--set` takes so that every group runs what was pushed. references: by repository. Pure."""
    named = {field: references[place] for place, fields in repositories(spec).items() for field in fields}
    return tuple(f"{field}={named[field]}" for field in sorted(named))


def _tag(revision: str, variant: Variant) -> str:
    commit, _, rest = revision.partition("-")
    return "-".join([commit[:12], *([rest] if rest else []), variant])
