"""Checks that the sections of a spec agree with each other. Each target adds the checks of its own options.

The checks read the document, not the models, so that a spec with other problems is still checked. Does no I/O.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from skerry.infra.spec.target_kinds import TargetKinds, kinds_of_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem

# The strictest limits of the clouds: a job of AWS Batch fails with more than 50 tags, its definition's included.
_MOST_TAGS: Final = 20
_LONGEST_TAG_NAME: Final = 128
_LONGEST_TAG: Final = 256
_TAG: Final = re.compile(r"[\w .:/=+@-]*")
_LOGINS: Final[Mapping[Where, str]] = {
    ("aws", "profile"): "set AWS_PROFILE",
    ("aws", "assume_role"): "set AWS_PROFILE to a profile with this role_arn",
    ("google", "impersonate"): "run `gcloud auth application-default login --impersonate-service-account=ACCOUNT`",
}
_NO_KINDS: Final = TargetKinds()
_RESERVED_TAG: Final = "skerry:"


def problems(document: Document, kinds: TargetKinds = _NO_KINDS) -> Iterator[Problem]:
    """Return everything in `document` that contradicts another part of it, each problem once."""
    yield from dict.fromkeys(_problems(document, kinds))


def _problems(document: Document, kinds: TargetKinds) -> Iterator[Problem]:
    yield from _duplicate_names(document)
    yield from _moved_groups(document)
    yield from _too_few_replicas(document)
    yield from _uneven_fragments(document)
    yield from _nothing_to_make_up(document)
    yield from _sparse_reduction(document)
    yield from _mixed_targets(document, kinds)
    yield from _missing_image(document, kinds)
    yield from _limits_without_jobs(document, kinds)
    yield from _login_without_jobs(document, kinds)
    named = kinds_of_groups(document)
    for options in kinds.options:
        if groups := [index for index, kind in enumerate(named) if kind == options.name()]:
            yield from options.problems(document, groups)


def _duplicate_names(document: Document) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index in range(len(document.entries(("replicas",)))):
        where: Where = ("replicas", index, "name")
        name = document.value(where)
        if not isinstance(name, str):
            continue
        if name in first:
            text = f"{name!r} is already the name of replicas[{first[name]}]; write another, e.g. name: {name}-{index}"
            yield document.problem(where, text)
        first.setdefault(name, index)


def _nothing_to_make_up(document: Document) -> Iterator[Problem]:
    where: Where = ("faults", "make_up")
    if document.value(where) is True and document.value(("outer", "rounds")) is None:
        text = "needs a number of rounds; write e.g. outer.rounds: 200, or remove this"
        yield document.problem(where, text)


def _sparse_reduction(document: Document) -> Iterator[Problem]:
    where: Where = ("outer", "reduction")
    if document.value(where) == "reduce_scatter" and document.value(("outer", "codec")) == "sparse":
        yield document.problem(where, "codec sparse has no reduce_scatter; write reduction: auto, or remove this")


def _moved_groups(document: Document) -> Iterator[Problem]:
    """A renamed group is in the spec, and no other group has its first name."""
    moved = document.value(("moved",))
    names = [document.value(("replicas", index, "name")) for index in range(len(document.entries(("replicas",))))]
    first: dict[object, str] = {}
    for name, was in moved.items() if isinstance(moved, dict) else ():
        where: Where = ("moved", name)
        if name not in names:
            yield document.problem(where, f"no group has the new name {name!r}; write NEW-NAME: FIRST-NAME", key=True)
        elif was in first or was in names:
            other = first.get(was, was)
            yield document.problem(
                where, f"{was!r} is also the name of the group {other!r}; two groups cannot share it"
            )
        first.setdefault(was, name)


def _too_few_replicas(document: Document) -> Iterator[Problem]:
    where: Where = ("faults", "min_replicas")
    least = document.value(where)
    groups = document.entries(("replicas",))
    counts = [document.integer(("replicas", index, "count")) for index in range(len(groups))]
    known = [count for count in counts if count is not None and count > 0]
    if not isinstance(least, int) or len(known) != len(groups) or not groups:
        return
    if least > (total := sum(known)):
        text = f"no round could close: {least} contributions needed, {total} replicas in the spec"
        yield document.problem(where, f"{text}; write e.g. min_replicas: {total}")


def _uneven_fragments(document: Document) -> Iterator[Problem]:
    fragments = document.integer(("outer", "fragments"))
    where: Where = ("outer", "sync_every")
    steps = document.integer(where)
    if steps is None and document.value(where) is None:
        steps = 100  # the default of the model; a test keeps them equal
    if fragments is None or steps is None or fragments < 1 or steps < 1 or steps % fragments == 0:
        return
    fit = max(steps // fragments, 1) * fragments
    text = f"must be a multiple of fragments; got {steps} with fragments: {fragments}; write e.g. sync_every: {fit}"
    yield document.problem(where, text)


def _mixed_targets(document: Document, kinds: TargetKinds) -> Iterator[Problem]:
    """Jobs in clouds and processes of this machine cannot run together."""
    named = kinds_of_groups(document)
    known = [kind for kind in named if isinstance(kind, str)]
    for index, kind in enumerate(named):
        if isinstance(kind, str) and kind != known[0] and not {kind, known[0]} <= kinds.deployed:
            text = f"cannot run with replicas[0], which is {known[0]}: only kinds in clouds can be mixed"
            yield document.problem(("replicas", index, "target", "kind"), f"{text}; write kind: {known[0]}")


def _missing_image(document: Document, kinds: TargetKinds) -> Iterator[Problem]:
    """Containers need an image, and only groups in a cloud may have an image of their own."""
    examples: list[str] = []
    by_name = dict(zip(kinds.names, kinds.options, strict=True))
    for index, kind in enumerate(kinds_of_groups(document)):
        options = by_name.get(kind) if isinstance(kind, str) else None
        if options is None:
            continue
        own: Where = ("replicas", index, "image")
        if document.value(own) is None:
            examples += [options.EXAMPLE_IMAGE] if options.EXAMPLE_IMAGE is not None else []
        elif options.CLOUD is None:
            text = "only groups in a cloud have images of their own; write it once, next to `store`"
            yield document.problem(own, text, key=True)
    if examples and document.value(("image",)) is None:
        yield document.problem(("image",), f"missing, and containers need one; write e.g. image: {examples[0]}")


def _limits_without_jobs(document: Document, kinds: TargetKinds) -> Iterator[Problem]:
    """Only jobs in a cloud enforce limits; on this machine a limit would have no effect."""
    local = _kinds_on_this_machine(document, kinds)
    limits = document.value(("limits",))
    if local and isinstance(limits, dict):
        for name in [name for name, value in limits.items() if value is not None]:
            text = f"is enforced only by jobs in a cloud, and replicas of {local[0]} run without one"
            yield document.problem(("limits", name), f"{text}; remove it", key=True)


def _login_without_jobs(document: Document, kinds: TargetKinds) -> Iterator[Problem]:
    """On this machine replicas would open the store with other credentials than the command that starts them."""
    if not (local := _kinds_on_this_machine(document, kinds)):
        return
    for where, instead in _LOGINS.items():
        if document.value(where) is not None:
            text = (
                f"is for commands that start jobs in a cloud; replicas of {local[0]} use your environment's credentials"
            )
            yield document.problem(where, f"{text}: remove it, and {instead}", key=True)


def _kinds_on_this_machine(document: Document, kinds: TargetKinds) -> list[str]:
    known = set(kinds.names) - kinds.deployed
    return [kind for kind in kinds_of_groups(document) if isinstance(kind, str) and kind in known]


def as_tags(tags: dict[str, str]) -> dict[str, str]:
    """Return tags that every cloud accepts. Raises ValueError naming the first that a cloud would refuse."""
    if len(tags) > _MOST_TAGS:
        raise ValueError(f"must be at most {_MOST_TAGS}")
    for name, value in tags.items():
        if name.lower().startswith(_RESERVED_TAG):
            raise ValueError(f"must not begin with {_RESERVED_TAG}, which skerry reserves ({name!r})")
        if not _TAG.fullmatch(name) or not 1 <= len(name) <= _LONGEST_TAG_NAME:
            raise ValueError(f"must have names of 1 to 128 letters, digits, spaces and + - = . _ : / @ ({name!r})")
        if not _TAG.fullmatch(value) or len(value) > _LONGEST_TAG:
            raise ValueError(f"must have values of at most 256 letters, digits, spaces and + - = . _ : / @ ({value!r})")
    return tags
