"""moto 5.2.5 takes any training job: unknown and misspelt fields, any words, a name that is taken, a role that is none.

AWS refuses each. Here a request is held against botocore's own model of the service, with its patterns, words and
limits, which no client checks, and against what the API reference says of times, disks and networks.
Sources: SageMaker API reference, CreateTrainingJob, StoppingCondition, ResourceConfig.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any, Final

from moto.core.utils import get_service_model
from moto.sagemaker.exceptions import AWSValidationException, ResourceInUseException
from moto.sagemaker.responses import SageMakerResponse

from skerry.infra.testing.jobs import Refused
from skerry.infra.testing.roles import keys_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.testing.shims.patches import Patches

SERVICE: Final = "sagemaker.amazonaws.com"
_KINDS: Final[Mapping[str, type]] = {
    "structure": dict,
    "list": list,
    "map": dict,
    "string": str,
    "integer": int,
    "long": int,
    "boolean": bool,
}
_MOST_RUNTIME_S: Final = 28 * 24 * 3600


def install(patches: Patches) -> None:
    """Check before a job is made."""

    def create_training_job(self: Any) -> Any:
        request = json.loads(self.body)
        if problems := problems_of(request):
            raise AWSValidationException(f"{len(problems)} validation errors detected: {'; '.join(problems)}")
        name, role = request["TrainingJobName"], request["RoleArn"]
        if (there := self.sagemaker_backend.training_jobs.get(name)) is not None:
            told = "Training job names must be unique within an AWS account and region, and a training job with this"
            raise ResourceInUseException(f"{told} name already exists ({there.arn})")
        try:
            keys_of(role, "validation", self.region, service=SERVICE)
        except Refused as error:
            told = f"Could not assume role {role}. Please ensure that the role exists and allows principal '{SERVICE}'"
            raise AWSValidationException(f"{told} to assume the role.") from error
        return moto_s(self)

    moto_s: Any = patches.replace(SageMakerResponse, "create_training_job", create_training_job)


def problems_of(request: Mapping[str, Any]) -> list[str]:
    """Why SageMaker would refuse a CreateTrainingJob."""
    return list(_wrong(_input_shape(), request, "request")) or list(_incoherent(request))


@functools.cache
def _input_shape() -> Any:
    """To read the model takes a tenth of a second."""
    return get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape


def _wrong(shape: Any, value: Any, where: str) -> Iterator[str]:
    """What of a value the model of the service does not allow."""
    kinds = _KINDS[shape.type_name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        yield f"{where} is not a {shape.type_name}: {value!r}"
        return
    held: Any = value
    inner: list[tuple[Any, Any, str]] = []
    match shape.type_name:
        case "structure":
            yield from (f"{where} has no field {name}" for name in held if name not in shape.members)
            yield from (f"{where} lacks {name}" for name in shape.required_members if name not in held)
            inner = [(shape.members[name], one, name) for name, one in held.items() if name in shape.members]
        case "list":
            inner = [(shape.member, one, str(number)) for number, one in enumerate(held)]
        case "map":
            inner = [(shape.key, name, f"key {name}") for name in held]
            inner += [(shape.value, one, name) for name, one in held.items()]
        case kind:
            if kind == "string":
                yield from _wrong_text(shape, held, where)
    if shape.type_name != "structure":
        yield from _out_of_bounds(shape, held if isinstance(held, int) else len(held), where)
    for part, one, name in inner:
        yield from _wrong(part, one, f"{where}.{name}")


def _wrong_text(shape: Any, value: str, where: str) -> Iterator[str]:
    pattern = shape.metadata.get("pattern", "")
    # Java's classes of characters are none of Python's.
    if pattern and "\\p{" not in pattern and not re.fullmatch(pattern, value):
        yield f"{where}={value!r} does not match {pattern}"
    if shape.enum and value not in shape.enum:
        yield f"{where}={value!r} is none of its words"


def _out_of_bounds(shape: Any, size: int, where: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if least is not None and size < least:
        yield f"{where} is less than {least}"
    if most is not None and size > most:
        yield f"{where} is more than {most}"


def _incoherent(request: Mapping[str, Any]) -> Iterator[str]:
    """What contradicts itself, whatever its parts look like."""
    times, spot = request.get("StoppingCondition", {}), request.get("EnableManagedSpotTraining", False)
    runtime, wait = times.get("MaxRuntimeInSeconds", 24 * 3600), times.get("MaxWaitTimeInSeconds")
    if runtime > _MOST_RUNTIME_S:
        yield "MaxRuntimeInSeconds is more than 28 days"
    if spot and wait is None:
        yield "EnableManagedSpotTraining needs MaxWaitTimeInSeconds"
    if not spot and wait is not None:
        yield "MaxWaitTimeInSeconds is for managed spot training alone"
    if wait is not None and wait < runtime:
        yield "MaxWaitTimeInSeconds is less than MaxRuntimeInSeconds"
    resources, algorithm = request.get("ResourceConfig", {}), request["AlgorithmSpecification"]
    if spot and "InstancePreferences" in resources:
        yield "InstancePreferences cannot be used with EnableManagedSpotTraining"
    if ("TrainingImage" in algorithm) is ("AlgorithmName" in algorithm):
        yield "one of TrainingImage and AlgorithmName must be given"
