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
MOST_ROLES: Final = 200
"""So many replicas may have a role of their own (decision 0005)."""
# A job of Batch fails with more than 50, its definition's counted in; ours come to both.
_MOST_TAGS: Final = 20
# Batch User Guide, "Job timeouts".
_SHORTEST_S: Final = 60
_PREFIX: Final = re.compile(r"[A-Za-z0-9._/-]*")
_LONGEST_TAG: Final = 256
_TAG: Final = re.compile(r"[\w .:/=+@-]*")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]*[a-z0-9]")
_ADDRESS: Final = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+")
_RESERVED_STARTS: Final = ("xn--", "sthree-", "amzn-s3-demo-")
_RESERVED_ENDS: Final = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
# What a kind of target that runs an image would have for one.
_IMAGES: Final = {"docker": "skerry:cpu", "aws_batch": "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu"}
_MACHINES: Final = ("instance_profile", "launch_template", "security_groups", "subnets")
# What somebody who brings the first thing cannot choose any more.
_MOOT: Final = {"queue": ("compute_environment", *_MACHINES), "compute_environment": _MACHINES}


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
    yield from _unfit_store(document)
    yield from _too_many_roles(document)
    yield from _unfit_options(document)
    yield from _short_limits(document)
    yield from _unkept_limits(document)


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
    """One run has one kind of target; and containers need an image."""
    kinds = _kinds(document)
    known = [kind for kind in kinds if isinstance(kind, str)]
    for index, kind in enumerate(kinds):
        if isinstance(kind, str) and kind != known[0]:
            text = f"cannot run beside replicas[0], which is {known[0]}: one run has one kind of target so far"
            yield document.problem(("replicas", index, "target", "kind"), f"{text}; write kind: {known[0]}")
    example = next((_IMAGES[kind] for kind in known if kind in _IMAGES), None)
    if example is not None and document.value(("image",)) is None:
        yield document.problem(("image",), f"missing, and containers are made of one; write e.g. image: {example}")


def _unfit_store(document: Document) -> Iterator[Problem]:
    """Jobs of AWS Batch reach a bucket by their role, and nothing else."""
    store = document.value(("store",))
    if not isinstance(store, str) or "aws_batch" not in _kinds(document):
        return
    scheme, _, rest = store.partition("://")
    if scheme != "s3":
        text = "jobs of aws_batch need a store in S3 so far; others come"
        yield document.problem(("store",), f"{text}; write e.g. store: s3://my-bucket/runs")
    elif (wrong := bucket_problem(rest.partition("/")[0])) is not None:
        yield document.problem(("store",), f"{wrong}; write e.g. store: s3://my-bucket/runs")
    elif not _PREFIX.fullmatch(rest) or len(f"{store}/{document.value(('run',))}") > _LONGEST_TAG:
        text = f"the run's URI marks all that is made: letters, digits, '.', '_', '-' and '/', {_LONGEST_TAG} at most"
        yield document.problem(("store",), f"{text}; write e.g. store: s3://my-bucket/runs")


def bucket_problem(name: str) -> str | None:
    """Why S3 would refuse this name of a bucket. Source: "General purpose bucket naming rules"."""
    if not 3 <= len(name) <= 63:
        return f"the bucket {name!r} has not 3 to 63 characters"
    if not _BUCKET.fullmatch(name):
        return (
            f"the bucket {name!r} may have small letters, digits, '-' and '.', and begins and ends "
            "with a letter or digit"
        )
    if ".." in name or _ADDRESS.fullmatch(name):
        return f"the bucket {name!r} must not look like a network address, nor hold two dots in a row"
    if name.startswith(_RESERVED_STARTS) or name.endswith(_RESERVED_ENDS):
        return f"the bucket {name!r} begins or ends with what S3 keeps for itself"
    return None


def _too_many_roles(document: Document) -> Iterator[Problem]:
    """IAM allows 1,000 roles in an account, and others need some."""
    single: list[tuple[int, int]] = []
    for index, kind in enumerate(_kinds(document)):
        target: Where = ("replicas", index, "target")
        shared = document.value((*target, "role")) == "group" or document.value((*target, "byo", "job_role"))
        count = _whole(document, ("replicas", index, "count"))
        if kind == "aws_batch" and not shared and count is not None:
            single.append((index, count))
    total = sum(count for _, count in single)
    if total > MOST_ROLES:
        index, _ = max(single, key=lambda one: one[1])
        text = f"{total} replicas would need a role each, and IAM allows 1,000 in an account"
        yield document.problem(("replicas", index, "target", "role"), f"{text}; above {MOST_ROLES} write role: group")


def _unfit_options(document: Document) -> Iterator[Problem]:
    """Options of AWS Batch that contradict each other."""
    for index, kind in enumerate(_kinds(document)):
        if kind != "aws_batch":
            continue
        target: Where = ("replicas", index, "target")
        allocation, spot = document.value((*target, "allocation")), document.value((*target, "spot"))
        if isinstance(allocation, str) and allocation.startswith("spot_") and spot is not True:
            text = f"{allocation} is for spot machines, and these are not"
            yield document.problem((*target, "allocation"), f"{text}; write allocation: best_fit_progressive")
        region, zones = document.value((*target, "region")), document.entries((*target, "zones"))
        for number, zone in enumerate(zones):
            if isinstance(zone, str) and isinstance(region, str) and not zone.startswith(region):
                text = f"{zone} is not in {region}"
                yield document.problem((*target, "zones", number), f"{text}; write e.g. {region}a")
        given = document.value((*target, "byo"))
        names = [name for name, value in given.items() if value is not None] if isinstance(given, dict) else []
        for stronger, weaker in _MOOT.items():
            for name in [name for name in names if stronger in names and name in weaker]:
                text = f"is not used beside {stronger}, which has its own"
                yield document.problem((*target, "byo", name), f"{text}; take one of them out", key=True)


def _short_limits(document: Document) -> Iterator[Problem]:
    """What `limits` allow must be a time limit that Batch accepts for a job."""
    hours = document.value(("limits", "max_hours"))
    if not isinstance(hours, int | float) or isinstance(hours, bool):
        return
    if "aws_batch" in _kinds(document) and 0 < hours * 3600 < _SHORTEST_S:
        text = f"is {hours * 3600:.0f} s, and {_SHORTEST_S} s are the least that a job may be limited to"
        yield document.problem(("limits", "max_hours"), f"{text}; write 0.017 or more")


def _unkept_limits(document: Document) -> Iterator[Problem]:
    """A limit that nobody would keep is worse than none."""
    here = [kind for kind in _kinds(document) if kind in {"local", "docker"}]
    given = document.value(("limits",))
    if here and isinstance(given, dict):
        for name in [name for name, value in given.items() if value is not None]:
            text = f"is kept by jobs in a cloud, and replicas of {here[0]} end only by themselves"
            yield document.problem(("limits", name), f"{text}; take it out", key=True)


def as_tags(tags: dict[str, str]) -> dict[str, str]:
    """Tags that every cloud so far takes. Raises ValueError naming the first that one would refuse."""
    if len(tags) > _MOST_TAGS:
        raise ValueError(f"must be at most {_MOST_TAGS}")
    for name, value in tags.items():
        if name.lower().startswith(("skerry:", "aws:")):
            raise ValueError(f"must not begin with {name.partition(':')[0]}:, which is not yours to use ({name!r})")
        if not _TAG.fullmatch(name) or not 1 <= len(name) <= 128:
            raise ValueError(f"must have names of 1 to 128 letters, digits, spaces and + - = . _ : / @ ({name!r})")
        if not _TAG.fullmatch(value) or len(value) > _LONGEST_TAG:
            raise ValueError(f"must have values of at most 256 letters, digits, spaces and + - = . _ : / @ ({value!r})")
    return tags


def _kinds(document: Document) -> list[object]:
    count = len(document.entries(("replicas",)))
    return [document.value(("replicas", index, "target", "kind")) for index in range(count)]


def _whole(document: Document, where: Where) -> int | None:
    value = document.value(where)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
