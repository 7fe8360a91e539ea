"""Checks that a cloud's service can pull the image of a group. Does no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.spec.target_kinds import kinds_of_groups

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem


def image_problems(
    document: Document, groups: Sequence[int], pattern: re.Pattern[str], *, service: str, registries: str, example: str
) -> Iterator[Problem]:
    """Images of these groups must match `pattern`. service, registries, example: for the error."""
    # An image that groups of other kinds run as well is right for them: then a group needs its own.
    all_of_one_kind = len(groups) == len(kinds_of_groups(document))
    for index in groups:
        own: Where = ("replicas", index, "image")
        image = document.value(own) or document.value(("image",))
        if isinstance(image, str) and not pattern.fullmatch(image):
            where: Where = ("image",) if all_of_one_kind and document.value(own) is None else own
            text = f"{service} runs images of {registries} only; push it there (scripts/image push)"
            yield document.problem(where, f"{text}, and write e.g. image: {example}")
