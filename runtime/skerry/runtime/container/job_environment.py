"""Which replica this container is, by our own contract or by what the cloud says about its job. Pure but for two files.

The contract's variables win, then SageMaker's hyperparameters of the same names, then the platform's own numbering with
the slots of run.json. What the platform calls the job is told, never used to name anything: names differ per attempt.
Sources: SageMaker "How Amazon SageMaker provides training information"; Vertex AI "Environment variables in training
containers"; AWS Batch "Job environment variables".
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

from skerry.runtime import contract, keys
from skerry.runtime.contract import Contract
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ML: Final = Path("/opt/ml")
"""SageMaker's own folder in a training container."""

Platform: TypeAlias = Literal["sagemaker", "vertex", "aws_batch"]

# What is worth telling of a job. Nothing that can be a secret is in it: no AWS_CONTAINER_*, no token.
_TOLD: Final[Mapping[Platform, Sequence[str]]] = {
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
    """What the platform says. platform: None where none is known. index: its own number for this container, from 0."""

    platform: Platform | None
    facts: Mapping[str, str]
    index: int | None

    def __str__(self) -> str:
        if self.platform is None:
            return "no cloud's job"
        return " ".join([self.platform, *(f"{name}={text}" for name, text in self.facts.items())])


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What this container was told to do. None is what it was not told.

    code: digest of the packed code; None runs what is in the image. ranks: processes of this replica; None is one for
    each GPU. group: the name that a numbering of the platform's is within. max_hours: of the run, from its beginning.
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


def job_of(environment: Mapping[str, str], ml: Path = ML) -> Job:
    """What platform this is and what it says. A platform's document that does not parse says nothing."""
    if environment.get("AWS_BATCH_JOB_ID"):
        return _job("aws_batch", environment, _batch_index(environment))
    if environment.get("CLOUD_ML_JOB_ID") or environment.get("CLUSTER_SPEC"):
        return _job("vertex", environment, _vertex_index(environment))
    resources = _document(ml / "input/config/resourceconfig.json")
    if environment.get("TRAINING_JOB_NAME") or resources:
        return _job("sagemaker", environment, _sagemaker_index(resources))
    return Job(platform=None, facts={}, index=None)


def orders_of(environment: Mapping[str, str], arguments: Sequence[str] = (), ml: Path = ML) -> Orders:
    """What this container is to do. arguments: a command that wins over SKERRY_COMMAND.

    Raises Invalid naming what is missing or wrong.
    """
    # SageMaker caps the values of its environment; hyperparameters are longer, and strings as well.
    written = _strings(_document(ml / "input/config/hyperparameters.json"))
    told = {name: text for name, text in (written | dict(environment)).items() if name.startswith("SKERRY_") and text}
    if contract.RUN_URI not in told:
        raise Invalid(
            f"not told which run: {contract.RUN_URI} is not set; a launcher sets it, or by hand: "
            f"docker run -e {contract.RUN_URI}=s3://bucket/run ... (see images/README.md)"
        )
    command = tuple(arguments) or _command(told.get(contract.COMMAND))
    if not command:
        raise Invalid(f'no command: set {contract.COMMAND} to JSON, e.g. ["python", "train.py"], or write it after --')
    slot = told.get(contract.SLOT)
    return Orders(
        run_uri=told[contract.RUN_URI],
        slot=None if slot is None else keys.check_slot(slot),
        index=_number(told, contract.INDEX),
        replicas=_number(told, contract.REPLICAS),
        group=told.get(contract.GROUP),
        code=_digest(told.get(contract.CODE)),
        command=command,
        ranks=_number(told, contract.RANKS),
        max_hours=_hours(told.get(contract.MAX_HOURS)),
    )


def settle(orders: Orders, job: Job, slots: Sequence[str]) -> Contract:
    """The whole contract. slots: those of run.json, in the order that numbers them.

    Raises Invalid if the place does not follow, or contradicts the run.
    """
    replicas = len(slots) if orders.replicas is None else orders.replicas
    slot, index = orders.slot, orders.index
    if slot is None and index is None:
        slot = _slot_by_number(orders, job, slots)
    if slot is None:
        if index is None or index >= len(slots):
            raise Invalid(f"{contract.INDEX}={index} names no slot: the run has {len(slots)}; set {contract.SLOT}")
        slot = slots[index]
    if index is None:
        if slot not in slots:
            raise Invalid(f"{contract.SLOT}={slot} is none of the run's {len(slots)} slots; set {contract.INDEX}")
        index = slots.index(slot)
    place = Contract(run_uri=orders.run_uri, slot=slot, index=index, replicas=replicas)
    return contract.read(place.environment())


def _slot_by_number(orders: Orders, job: Job, slots: Sequence[str]) -> str:
    if job.index is None:
        raise Invalid(
            f"not told which replica: set {contract.SLOT} or {contract.INDEX} (here is {job}, which numbers nothing)"
        )
    if orders.group is not None:
        return keys.check_slot(f"{orders.group}-{job.index}")
    if job.index >= len(slots):
        raise Invalid(
            f"number {job.index} of {job.platform} names no slot: the run has {len(slots)}; "
            f"set {contract.SLOT}, or {contract.GROUP} if the numbers are within one group of the spec"
        )
    return slots[job.index]


def _job(platform: Platform, environment: Mapping[str, str], index: int | None) -> Job:
    facts = {name: environment[name] for name in _TOLD[platform] if environment.get(name)}
    return Job(platform=platform, facts=facts, index=index)


def _batch_index(environment: Mapping[str, str]) -> int | None:
    """The array's index; a child's id ends in it too, which is all that some emulations set."""
    text = environment.get("AWS_BATCH_JOB_ARRAY_INDEX") or environment["AWS_BATCH_JOB_ID"].partition(":")[2]
    return int(text) if text.isdecimal() else None


def _vertex_index(environment: Mapping[str, str]) -> int | None:
    """The position among the machines of all worker pools, pools in order of their numbers."""
    try:
        told = cast("dict[str, dict[str, object]]", json.loads(environment.get("CLUSTER_SPEC") or "{}"))
        cluster, task = told["cluster"], told["task"]
        pools = sorted(cluster, key=lambda pool: int(pool.removeprefix("workerpool")))
        before = pools[: pools.index(str(task["type"]))]
        return sum(len(cast("list[str]", cluster[pool])) for pool in before) + int(cast("int", task["index"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _sagemaker_index(resources: Mapping[str, object]) -> int | None:
    hosts, mine = resources.get("hosts"), resources.get("current_host")
    known = cast("list[object]", hosts) if isinstance(hosts, list) else []
    return known.index(mine) if mine in known else None


def _document(path: Path) -> Mapping[str, object]:
    try:
        found: object = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def _strings(document: Mapping[str, object]) -> dict[str, str]:
    return {name: value for name, value in document.items() if isinstance(value, str)}


def _command(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    try:
        found: object = json.loads(text)
    except ValueError as error:
        raise Invalid(f"{contract.COMMAND} is not JSON: {error}") from error
    words = cast("list[object]", found) if isinstance(found, list) else []
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


def _number(told: Mapping[str, str], name: str) -> int | None:
    text = told.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise Invalid(f"{name}={text!r} is not a whole number")
    return int(text)
