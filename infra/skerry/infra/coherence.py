"""What the parts of a spec must agree on, checked on the text alone, and how its store is named.

Works on the document, not on the models, so that a spec with other problems is still checked. Does no I/O.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from skerry.infra import accelerators, words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from skerry.infra.document import Document, Where
    from skerry.infra.errors import Problem

FILE: Final = "file://"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)")
_SCHEMES: Final = ("file", "s3", "gs", "az")
MOST_ROLES: Final = 200
"""So many replicas may have a role of their own (decision 0005)."""
MOST_ACCOUNTS: Final = 50
"""So many replicas may have a service account of their own: a project has room for 100 (IAM quotas)."""
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
# With dots a name is a domain's, and Google wants to be shown whose that is.
_GOOGLE_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9_-]*[a-z0-9]")
# What a kind of target that runs an image would have for one.
_IMAGES: Final = {
    "docker": "skerry:cpu",
    "aws_batch": "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu",
    "sagemaker": "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu",
    "vertex": "us-central1-docker.pkg.dev/acme-diloco/skerry/replica:gpu",
}
_MACHINES: Final = ("instance_profile", "launch_template", "security_groups", "subnets")
# Kinds whose replicas are jobs in a cloud, which take no notice of each other.
_JOBS: Final = ("aws_batch", "sagemaker", "vertex")
# Where a cloud's service pulls images from. Sources: SageMaker API reference, AlgorithmSpecification, TrainingImage;
# Vertex AI, "Configure container settings for custom training" (Artifact Registry or Docker Hub; a name whose first
# part is no host is Docker Hub's).
_PULLED: Final = {
    "sagemaker": ("SageMaker", "ECR", re.compile(r"[0-9]{12}\.dkr\.ecr(-fips)?\.[a-z0-9-]+\.amazonaws\.com(\.cn)?/.+")),
    "vertex": (
        "Vertex AI",
        "Artifact Registry and Docker Hub",
        re.compile(
            r"[a-z0-9-]+-docker\.pkg\.dev/[^/]+/[^/]+/.+|([a-z]+\.)?gcr\.io/.+|docker\.io/.+|[^/]+"
            r"|(?!localhost/)[^/.:]+/.+"
        ),
    ),
}
# API reference, StoppingCondition: families of machines with accelerators.
_ACCELERATED: Final = re.compile(r"ml\.(g|p|trn)[0-9].*")
# A value of a job's hyperparameters; its variables hold 512 (API reference, CreateTrainingJob).
_LONGEST_COMMAND: Final = 2500
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
    yield from _nothing_to_make_up(document)
    yield from _unlike_targets(document)
    yield from _unfit_store(document)
    yield from _too_many_roles(document)
    yield from _unfit_options(document)
    yield from _short_limits(document)
    yield from _unkept_limits(document)
    yield from _unfit_images(document)
    yield from _unfit_sagemaker(document)
    yield from _unfit_vertex(document)


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
        text = "a run without rounds has no end to put off; give it some, e.g. outer.rounds: 200, or leave this out"
        yield document.problem(where, text)


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
    """Jobs in clouds and processes of this machine do not run together; and containers need an image."""
    kinds = _kinds(document)
    known = [kind for kind in kinds if isinstance(kind, str)]
    for index, kind in enumerate(kinds):
        if isinstance(kind, str) and kind != known[0] and not (kind in _JOBS and known[0] in _JOBS):
            text = f"cannot run beside replicas[0], which is {known[0]}: one run has one kind of target so far"
            yield document.problem(("replicas", index, "target", "kind"), f"{text}; write kind: {known[0]}")
        own = ("replicas", index, "image")
        if kind in ("local", "docker") and document.value(own) is not None:
            text = "a group has an image of its own in a cloud alone; write it once, beside `store`"
            yield document.problem(own, text, key=True)
    without = [kind for index, kind in enumerate(kinds) if document.value(("replicas", index, "image")) is None]
    example = next((_IMAGES[kind] for kind in without if isinstance(kind, str) and kind in _IMAGES), None)
    if example is not None and document.value(("image",)) is None:
        yield document.problem(("image",), f"missing, and containers are made of one; write e.g. image: {example}")


def _unfit_store(document: Document) -> Iterator[Problem]:
    """Jobs on AWS reach a bucket by their role, here or in the other cloud, and nothing else."""
    store, kinds = document.value(("store",)), _kinds(document)
    kind = next((kind for kind in ("aws_batch", "sagemaker") if kind in kinds), None)
    if not isinstance(store, str) or kind is None:
        return
    scheme, _, rest = store.partition("://")
    bucket, example = rest.partition("/")[0], f"{scheme}://my-bucket/runs"
    if scheme == "gs":
        wrong = google_bucket_problem(bucket)
    elif scheme == "s3":
        wrong = bucket_problem(bucket)
    else:
        wrong, example = f"jobs of {kind} reach a store in S3 or Cloud Storage", "s3://my-bucket/runs"
    if wrong is None and (not _PREFIX.fullmatch(rest) or len(f"{store}/{document.value(('run',))}") > _LONGEST_TAG):
        wrong = f"the run's URI marks all that is made: letters, digits, '.', '_', '-' and '/', {_LONGEST_TAG} at most"
    if wrong is not None:
        yield document.problem(("store",), f"{wrong}; write e.g. store: {example}")


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
        brought = document.value((*target, "byo", "job_role")) or document.value((*target, "byo", "role"))
        default = {"aws_batch": "replica", "sagemaker": "group"}.get(str(kind))
        own = (document.value((*target, "role")) or default) == "replica" and not brought
        count = _whole(document, ("replicas", index, "count"))
        if default is not None and own and count is not None:
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


def _unfit_images(document: Document) -> Iterator[Problem]:
    """Images that the service of a group's cloud cannot pull."""
    kinds = _kinds(document)
    for kind, (service, registries, pulled) in _PULLED.items():
        owns: list[Where] = [("replicas", index, "image") for index, one in enumerate(kinds) if one == kind]
        for own in owns:
            image = document.value(own) or document.value(("image",))
            if not isinstance(image, str) or pulled.fullmatch(image):
                continue
            # What other groups run they may go on running: then this one needs another.
            alone = document.value(own) is None and len(owns) == len(kinds)
            text = f"{service} runs images of {registries} alone; push it there (scripts/image push)"
            yield document.problem(("image",) if alone else own, f"{text}, and write e.g. image: {_IMAGES[kind]}")
            if alone:
                break


def _unfit_sagemaker(document: Document) -> Iterator[Problem]:
    """Options of SageMaker that contradict each other, or what its jobs need of the rest."""
    indices = [index for index, kind in enumerate(_kinds(document)) if kind == "sagemaker"]
    for index in indices:
        target: Where = ("replicas", index, "target")
        yield from _unfit_times(document, target)
        subnets, groups = (document.value((*target, "byo", name)) for name in ("subnets", "security_groups"))
        if (subnets is None) is not (groups is None):
            given, lacking = ("subnets", "security_groups") if groups is None else ("security_groups", "subnets")
            text = f"needs {lacking} beside it: a machine is in both or in SageMaker's own network; add {lacking}"
            yield document.problem((*target, "byo", given), text, key=True)
        store, output = document.value(("store",)), document.value((*target, "output"))
        if output is None and isinstance(store, str) and not store.startswith("s3://"):
            text = "SageMaker wants a place in S3 for what a script leaves in /opt/ml/model, and the store is not there"
            yield document.problem(target, f"{text}; write e.g. output: s3://my-bucket/artifacts")
        if isinstance(output, str) and (wrong := bucket_problem(output[5:].partition("/")[0])) is not None:
            yield document.problem((*target, "output"), f"{wrong}; write e.g. output: s3://my-bucket/artifacts")
    command = document.entries(("code", "command"))
    if indices and len(json.dumps(command)) > _LONGEST_COMMAND:
        text = f"is longer than the {_LONGEST_COMMAND} characters that SageMaker hands to a job; put it into a script"
        yield document.problem(("code", "command"), text)


def _unfit_times(document: Document, target: Where) -> Iterator[Problem]:
    """What of a job's times SageMaker would refuse, or take no notice of."""
    runtime, wait = (_duration(document, (*target, name)) for name in ("max_runtime", "max_wait"))
    if document.value((*target, "max_wait")) is not None and document.value((*target, "spot")) is not True:
        text = "is how long a job may wait for spare machines, and these are not; take it out, or write spot: true"
        yield document.problem((*target, "max_wait"), text, key=True)
    elif runtime is not None and wait is not None and wait < runtime:
        least = words.format_duration(runtime)
        text = f"counts the running in, and is less than max_runtime: {least}; write max_wait: {least} or more"
        yield document.problem((*target, "max_wait"), text)
    instance, pending = document.value((*target, "instance")), document.value((*target, "max_pending"))
    if pending is not None and isinstance(instance, str) and not _ACCELERATED.fullmatch(instance):
        text = f"has no effect on {instance}: SageMaker keeps to it for ml.g, ml.p and ml.trn alone; take it out"
        yield document.problem((*target, "max_pending"), text, key=True)


def _duration(document: Document, where: Where) -> timedelta | None:
    try:
        return words.parse_duration(document.value(where))
    except ValueError:
        return None


def _unfit_vertex(document: Document) -> Iterator[Problem]:
    """Options of Vertex AI that contradict each other, or what its jobs need of the rest."""
    for index, kind in enumerate(_kinds(document)):
        if kind != "vertex":
            continue
        target: Where = ("replicas", index, "target")
        yield from _unfit_machine(document, target)
        waits = document.value((*target, "max_wait")) is not None
        if waits and document.value((*target, "scheduling")) != "flex_start":
            text = "is how long a flex_start may queue, and this is none; take it out, or write scheduling: flex_start"
            yield document.problem((*target, "max_wait"), text, key=True)
        region, key = document.value((*target, "region")), document.value((*target, "byo", "key"))
        if isinstance(region, str) and isinstance(key, str) and f"/locations/{region}/" not in key:
            text = f"lies elsewhere than the machines; it must be projects/.../locations/{region}/keyRings/..."
            yield document.problem((*target, "byo", "key"), text)
        shared = document.value((*target, "role")) != "replica" or document.value((*target, "byo", "service_account"))
        count = _whole(document, ("replicas", index, "count"))
        if not shared and count is not None and count > MOST_ACCOUNTS:
            text = f"{count} replicas would need a service account each, and a project has room for 100"
            yield document.problem((*target, "role"), f"{text}; above {MOST_ACCOUNTS} write role: group")
    if "vertex" in _kinds(document):
        yield from _unreachable_store(document)
        yield from _several_projects(document)


def _unfit_machine(document: Document, target: Where) -> Iterator[Problem]:
    """What Vertex AI would refuse of a machine and what goes with it."""
    machine, accelerator = document.value((*target, "machine")), document.value((*target, "accelerator"))
    count, disk = _whole(document, (*target, "accelerators")), document.value((*target, "disk_type"))
    scheduling = document.value((*target, "scheduling"))
    if not isinstance(machine, str) or not isinstance(accelerator, str | None):
        return
    known = accelerator in (None, *accelerators.KNOWN)
    fitted = accelerators.fitted(machine, accelerator, count)
    found = (
        accelerators.wrong_machine(machine),
        accelerators.wrong_accelerator(machine, accelerator, count) if known else None,
        accelerators.wrong_scheduling(machine, None if fitted is None else fitted[0], scheduling)
        if known and isinstance(scheduling, str | None)
        else None,
        accelerators.wrong_disk(machine, disk) if isinstance(disk, str) else None,
    )
    # The first is why the others are wrong, more often than not.
    wrong = next((one for one in found if one is not None), None)
    if wrong is not None:
        yield document.problem((*target, wrong.option), wrong.text)


def _unreachable_store(document: Document) -> Iterator[Problem]:
    """Jobs of Vertex AI reach a bucket as their service account, or as a role of AWS that trusts it."""
    store = document.value(("store",))
    if not isinstance(store, str):
        return
    scheme, _, rest = store.partition("://")
    example = "write e.g. store: gs://my-bucket/runs"
    if scheme not in {"gs", "s3"}:
        yield document.problem(("store",), f"jobs of vertex reach gs:// and s3:// alone; {example}")
    elif scheme == "gs" and (wrong := google_bucket_problem(rest.partition("/")[0])) is not None:
        yield document.problem(("store",), f"{wrong}; {example}")
    elif not _PREFIX.fullmatch(rest):
        text = "a condition of every right names the run's prefix: letters, digits, '.', '_', '-' and '/'"
        yield document.problem(("store",), f"{text}; {example}")


def _several_projects(document: Document) -> Iterator[Problem]:
    """One project holds what a run has on Google Cloud: accounts, and what they may do."""
    first: str | None = None
    for index, kind in enumerate(_kinds(document)):
        where: Where = ("replicas", index, "target", "project")
        project = document.value(where)
        if kind != "vertex" or not isinstance(project, str):
            continue
        first = first or project
        if project != first:
            text = f"a run has one project so far, and another group is in {first}; write project: {first}"
            yield document.problem(where, text)


def google_bucket_problem(name: str) -> str | None:
    """Why Cloud Storage would refuse this name of a bucket. Source: "About Cloud Storage buckets", naming."""
    if not 3 <= len(name) <= 63:
        return f"the bucket {name!r} has not 3 to 63 characters"
    if not _GOOGLE_BUCKET.fullmatch(name):
        return f"the bucket {name!r} may have small letters, digits, '-' and '_', the first and last a letter or digit"
    if name.startswith("goog") or "google" in name or "g00gle" in name:
        return f"the bucket {name!r} looks like Google's own"
    return None


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
