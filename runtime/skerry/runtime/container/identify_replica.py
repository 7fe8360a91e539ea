"""Determines which replica this container is, from skerry's own contract or from the cloud's description of the job.

The contract's variables win, then SageMaker's hyperparameters of the same names, then the platform's own numbering with
the slots of run.json. The platform's name for the job is only logged, because it differs per attempt. Reads two files.
Sources: SageMaker "How Amazon SageMaker provides training information"; Vertex AI "Environment variables in training
containers"; AWS Batch "Job environment variables".
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

from skerry.runtime import contract
from skerry.runtime.contract import Contract, Revival, check_slot
from skerry.runtime.errors import Invalid
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ML: Final = Path("/opt/ml")
"""SageMaker's own folder in a training container."""

Platform: TypeAlias = Literal["sagemaker", "vertex", "aws_batch"]

# The variables of a job that are logged. None can be a secret: no AWS_CONTAINER_*, no token.
_LOGGED: Final[Mapping[Platform, Sequence[str]]] = {
    "sagemaker": ("TRAINING_JOB_NAME", "TRAINING_JOB_ARN"),
    "vertex": (
        "CLOUD_ML_JOB_ID",
        "CLOUD_ML_PROJECT_ID",
        "AIP_MODEL_DIR",
        "AIP_CHECKPOINT_DIR",
        "AIP_TENSORBOARD_LOG_DIR",
    ),
    "aws_batch": (
        "AWS_BATCH_JOB_ID",
        "AWS_BATCH_JOB_ARRAY_INDEX",
        "AWS_BATCH_JOB_ARRAY_SIZE",
        "AWS_BATCH_JOB_ATTEMPT",
        "AWS_BATCH_JQ_NAME",
        "AWS_BATCH_CE_NAME",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job as the platform describes it. platform: None if unknown. index: its number for this container, from 0."""

    platform: Platform | None
    facts: Mapping[str, str]
    index: int | None

    def __str__(self) -> str:
        if self.platform is None:
            return "no cloud job"
        return " ".join([self.platform, *(f"{name}={text}" for name, text in self.facts.items())])


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """The settings of this container. None: not set.

    code: digest of the packed code; None runs the code in the image. ranks: processes of this replica; None is one per
    GPU. group: the group that the platform's numbering counts in. max_hours: of the run, from its beginning. secrets:
    their references, by the names of their variables. place: the machine, as its launcher describes it.
    failover: the URI of the mirror that knows if the run goes on elsewhere. revival: of the jobs of the group.
    """

    run_uri: str
    slot: str | None
    index: int | None
    replicas: int | None
    group: str | None
    code: str | None
    command: tuple[str, ...]
    ranks: int | None
    max_hours: float | None = None
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    place: Place | None = None
    failover: str | None = None
    revival: Revival | None = None


def detect_job(environment: Mapping[str, str], ml: Path = ML) -> Job:
    """Detect the platform and its description of the job. A platform's document that does not parse is ignored."""
    if environment.get("AWS_BATCH_JOB_ID"):
        return _job("aws_batch", environment, _batch_index(environment))
    if environment.get("CLOUD_ML_JOB_ID") or environment.get("CLUSTER_SPEC"):
        return _job("vertex", environment, _vertex_index(environment))
    resources = _document(ml / "input/config/resourceconfig.json")
    if environment.get("TRAINING_JOB_NAME") or resources:
        return _job("sagemaker", environment, _sagemaker_index(resources))
    return Job(platform=None, facts={}, index=None)


def read_settings(environment: Mapping[str, str], arguments: Sequence[str] = (), ml: Path = ML) -> ReplicaSettings:
    """Read this container's settings. arguments: a command that wins over SKERRY_COMMAND.

    Raises Invalid naming the variable that is missing or wrong.
    """
    # SageMaker limits the length of environment values; hyperparameters may be longer, and are strings as well.
    hyperparameters = _strings(_document(ml / "input/config/hyperparameters.json"))
    variables = {
        name: text
        for name, text in (hyperparameters | dict(environment)).items()
        if name.startswith("SKERRY_") and text
    }
    if contract.RUN_URI not in variables:
        raise Invalid(
            f"no run given: {contract.RUN_URI} is not set; a launcher sets it, or by hand: "
            f"docker run -e {contract.RUN_URI}=s3://bucket/run ... (see images/README.md)"
        )
    command = tuple(arguments) or _command(variables.get(contract.COMMAND))
    if not command:
        raise Invalid(f'no command: set {contract.COMMAND} to JSON, e.g. ["python", "train.py"], or write it after --')
    slot = variables.get(contract.SLOT)
    return ReplicaSettings(
        run_uri=variables[contract.RUN_URI],
        slot=None if slot is None else check_slot(slot),
        index=_number(variables, contract.INDEX),
        replicas=_number(variables, contract.REPLICAS),
        group=variables.get(contract.GROUP),
        code=_digest(variables.get(contract.CODE)),
        command=command,
        ranks=_number(variables, contract.RANKS),
        max_hours=_hours(variables.get(contract.MAX_HOURS)),
        secrets={
            name.removeprefix(contract.SECRET): text
            for name, text in sorted(variables.items())
            if name.startswith(contract.SECRET)
        },
        place=Place.of_text(variables.get(contract.PLACE)),
        failover=variables.get(contract.FAILOVER),
        revival=Revival.of_text(variables.get(contract.REVIVE)),
    )


def resolve_contract(
    settings: ReplicaSettings, job: Job, slots: Sequence[str], now: Sequence[str] | None = None
) -> Contract:
    """The complete contract. slots: those of run.json, by which a launcher's number selects one, for good.

    now: those that the run expects, in the order that numbers them; None for those of run.json. Raises Invalid if slot
    and index cannot be derived, or contradict the run; and for a slot that was removed from it.
    """
    now = slots if now is None else now
    slot, index, replicas = settings.slot, settings.index, settings.replicas
    if slot is None and index is None:
        slot = _slot_by_number(settings, job, slots)
    if slot is None:
        if index is None or index >= len(slots):
            raise Invalid(f"{contract.INDEX}={index} has no slot: the run has {len(slots)}; set {contract.SLOT}")
        slot = slots[index]
    if slot in slots and slot not in now:
        raise Invalid(f"{slot} was removed from the run; `skerry apply` ends this job, and can add it again")
    if index is None:
        if slot not in now:
            raise Invalid(
                f"{contract.SLOT}={slot} is not one of the run's {len(now)} slots; if it was removed from the spec, "
                f"`skerry apply` ends this job; by hand, set {contract.INDEX} and {contract.REPLICAS}"
            )
        index, replicas = now.index(slot), len(now)
    replicas = len(now) if replicas is None else replicas
    resolved = Contract(run_uri=settings.run_uri, slot=slot, index=index, replicas=replicas)
    return contract.read(resolved.environment())


def _slot_by_number(settings: ReplicaSettings, job: Job, slots: Sequence[str]) -> str:
    if job.index is None:
        raise Invalid(
            f"replica unknown: set {contract.SLOT} or {contract.INDEX} (this is {job}, which gives it no number)"
        )
    if settings.group is not None:
        return check_slot(f"{settings.group}-{job.index}")
    if job.index >= len(slots):
        raise Invalid(
            f"number {job.index} of {job.platform} has no slot: the run has {len(slots)}; "
            f"set {contract.SLOT}, or {contract.GROUP} if the numbers count within one group of the spec"
        )
    return slots[job.index]


def _job(platform: Platform, environment: Mapping[str, str], index: int | None) -> Job:
    facts = {name: environment[name] for name in _LOGGED[platform] if environment.get(name)}
    return Job(platform=platform, facts=facts, index=index)


def _batch_index(environment: Mapping[str, str]) -> int | None:
    """The array index; a child's id also ends in it, and some emulations set only that."""
    text = environment.get("AWS_BATCH_JOB_ARRAY_INDEX") or environment["AWS_BATCH_JOB_ID"].partition(":")[2]
    return int(text) if text.isdecimal() else None


def _vertex_index(environment: Mapping[str, str]) -> int | None:
    """The position among the machines of all worker pools, pools in order of their numbers."""
    try:
        spec = cast("dict[str, dict[str, object]]", json.loads(environment.get("CLUSTER_SPEC") or "{}"))
        cluster, task = spec["cluster"], spec["task"]
        pools = sorted(cluster, key=lambda pool: int(pool.removeprefix("workerpool")))
        before = pools[: pools.index(str(task["type"]))]
        return sum(len(cast("list[str]", cluster[pool])) for pool in before) + int(cast("int", task["index"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _sagemaker_index(resources: Mapping[str, object]) -> int | None:
    hosts, current = resources.get("hosts"), resources.get("current_host")
    names = cast("list[object]", hosts) if isinstance(hosts, list) else []
    return names.index(current) if current in names else None


def _document(path: Path) -> Mapping[str, object]:
    try:
        document: object = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, object]", document) if isinstance(document, dict) else {}


def _strings(document: Mapping[str, object]) -> dict[str, str]:
    return {name: value for name, value in document.items() if isinstance(value, str)}


def _command(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    try:
        document: object = json.loads(text)
    except ValueError as error:
        raise Invalid(f"{contract.COMMAND} is not JSON: {error}") from error
    words = cast("list[object]", document) if isinstance(document, list) else []
    if not words or not all(isinstance(word, str) for word in words):
        raise Invalid(f'{contract.COMMAND} must be a list of strings, e.g. ["python", "train.py"]; it is {text[:80]}')
    return tuple(cast("list[str]", words))


def _hours(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 < hours < math.inf:
        raise Invalid(f"{contract.MAX_HOURS}={text!r} is not a number of hours")
    return hours


def _digest(text: str | None) -> str | None:
    if text is not None and (len(text) != 64 or not set(text) <= set("0123456789abcdef")):
        raise Invalid(f"{contract.CODE} must be the sha256 of the packed code, 64 hex digits; it is {text[:80]!r}")
    return text


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise Invalid(f"{name}={text!r} is not a whole number")
    return int(text)
