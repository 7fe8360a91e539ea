"""What handlers here have in common besides what those of every cloud have: tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from skerry.infra.handler import ADDRESS_TAG, GENERATION_TAG, RUN_TAG, Made

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from skerry.infra.graph import Resource

PATH: Final = "/skerry/"
"""The path of all roles and profiles that are made: whoever may list it finds them without looking at all others."""


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags as most services take them."""
    return [{"Key": key, "Value": tags[key]} for key in sorted(tags)]


def tags_in(listed: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The reverse of `tag_list`."""
    return {str(tag["Key"]): str(tag["Value"]) for tag in listed}


def found(kind: type[Resource], *, name: str, region: str, tags: Mapping[str, str], outputs: Mapping[str, str]) -> Made:
    """What is known of a resource that was found by its tags."""
    generation = tags.get(GENERATION_TAG, "0")
    return Made(
        address=tags.get(ADDRESS_TAG, f"{kind.KIND}.{name}"),
        kind=kind.KIND,
        name=name,
        generation=int(generation) if generation.isdigit() else 0,
        region=region,
        life=kind.LIFE,
        brought=False,
        settings={},
        outputs=outputs,
        needs=(),
    )


def owner_of(tags: Mapping[str, str]) -> str | None:
    """The run that these tags name."""
    return tags.get(RUN_TAG)
