"""What the parts of a spec must agree on, checked on the text alone, and how its store is named.

Works on the document, not on the models, so that a spec with other problems is still checked. Does no I/O.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.document import Document, Where
    from skerry.infra.errors import Problem

FILE: Final = "file://"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)")
_SCHEMES: Final = ("file", "s3", "gs", "az")


def as_store(text: str) -> str:
    """The store's URI as written. Raises ValueError for what no replica could open, saying what to write."""
    match = _SCHEME.fullmatch(text)
    if match is None:
        folder = Path(text)
        raise ValueError(
            f"must be a URI; for a folder write {folder.as_uri() if folder.is_absolute() else FILE + text}"
        )
    scheme, rest = match.groups()
    if scheme != scheme.lower():
        raise ValueError(f"must begin in lower case; write {scheme.lower()}://{rest}")
    if scheme == "memory":
        raise ValueError("must be a store that other processes can open; memory:// is gone with the process")
    if scheme not in _SCHEMES and not scheme.startswith("fsspec+"):
        raise ValueError(f"must begin with s3://, gs://, az:// or file://; there is no store for {scheme}://")
    if scheme == "file":
        _check_folder(rest)
    elif not rest.strip("/"):
        raise ValueError(f"must name a bucket; write {scheme}://bucket/prefix")
    return text


def store_uri(folder: Path, text: str) -> str:
    """The store's URI without a trailing slash; a relative file:// path starts at `folder`."""
    if not text.startswith(FILE):
        return text.rstrip("/")
    # absolute, not resolve: this text is compared and printed, and a link in it is the user's own choice.
    return (folder / unquote(text.removeprefix(FILE))).absolute().as_uri()


def run_uri(folder: Path, store: str, run: str) -> str:
    """Where a run lies in its store."""
    return f"{store_uri(folder, store)}/{run}"


def _check_folder(text: str) -> None:
    """Refuse what looks like a folder and would be another one."""
    first, _, rest = text.partition("/")
    if not text.strip("/"):
        raise ValueError("must name a folder; write file:///folder, or file://folder beside the spec")
    if first.startswith("~"):
        raise ValueError(f"must not begin with ~, which nobody expands; write file:///home/you/{rest}")
    if first == "localhost":
        raise ValueError(f"must name no host; write file:///{rest}")


def problems(document: Document) -> Iterator[Problem]:
    """Everything in `document` that contradicts something else in it."""
    yield from _duplicate_names(document)
    yield from _too_few_replicas(document)
    yield from _uneven_fragments(document)
    yield from _unlike_targets(document)


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


def _too_few_replicas(document: Document) -> Iterator[Problem]:
    where: Where = ("faults", "min_replicas")
    least = document.value(where)
    groups = document.entries(("replicas",))
    counts = [_whole(document, ("replicas", index, "count")) for index in range(len(groups))]
    known = [count for count in counts if count is not None and count > 0]
    if not isinstance(least, int) or len(known) != len(groups) or not groups:
        return
    if least > (total := sum(known)):
        text = f"no round could ever close: {least} needed, {total} replicas in the spec"
        yield document.problem(where, f"{text}; write e.g. min_replicas: {total}")


def _uneven_fragments(document: Document) -> Iterator[Problem]:
    fragments = _whole(document, ("outer", "fragments"))
    where: Where = ("outer", "sync_every")
    steps = _whole(document, where)
    if steps is None and document.value(where) is None:
        steps = 100  # the default of the model; a test keeps them equal
    if fragments is None or steps is None or fragments < 1 or steps < 1 or steps % fragments == 0:
        return
    fit = -(-steps // fragments) * fragments
    text = f"must be a multiple of fragments; got {steps} with fragments: {fragments}; write e.g. sync_every: {fit}"
    yield document.problem(where, text)


def _unlike_targets(document: Document) -> Iterator[Problem]:
    """One `up` has one executor; and containers need an image."""
    kinds = [
        document.value(("replicas", index, "target", "kind")) for index in range(len(document.entries(("replicas",))))
    ]
    known = [kind for kind in kinds if isinstance(kind, str)]
    for index, kind in enumerate(kinds):
        if isinstance(kind, str) and kind != known[0]:
            text = f"cannot run beside replicas[0], which is {known[0]}: one run has one kind of target so far"
            yield document.problem(("replicas", index, "target", "kind"), f"{text}; write kind: {known[0]}")
    if "docker" in known and document.value(("image",)) is None:
        yield document.problem(("image",), "missing, and containers are made of one; write e.g. image: skerry:cpu")


def _whole(document: Document, where: Where) -> int | None:
    value = document.value(where)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
