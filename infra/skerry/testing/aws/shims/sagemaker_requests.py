"""moto 5.2.5 accepts any training job: unknown fields, invalid values, a name in use, a role that does not exist.

AWS refuses each. This shim checks requests with botocore's model of the service (patterns, enums and limits, which no
client checks) and with the API reference's rules about times and instances.
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

from skerry.testing.aws.container_role_keys import role_keys
from skerry.testing.job_runner import StartRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.testing.aws.shims.patching import Patches

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
    """Install the shim: check each request."""

    def create_training_job(self: Any) -> Any:
        request = json.loads(self.body)
        if problems := problems_of(request):
            raise AWSValidationException(f"{len(problems)} validation errors detected: {'; '.join(problems)}")
        name, role = request["TrainingJobName"], request["RoleArn"]
        if (existing := self.sagemaker_backend.training_jobs.get(name)) is not None:
            message = "Training job names must be unique within an AWS account and region, and a training job with this"
            raise ResourceInUseException(f"{message} name already exists ({existing.arn})")
        try:
            role_keys(role, "validation", self.region, service=SERVICE)
        except StartRefused as error:
            message = (
                f"Could not assume role {role}. Please ensure that the role exists and allows principal '{SERVICE}'"
            )
            raise AWSValidationException(f"{message} '{SERVICE}' to assume the role.") from error
        return moto_create(self)

    moto_create: Any = patches.replace(SageMakerResponse, "create_training_job", create_training_job)


def problems_of(request: Mapping[str, Any]) -> list[str]:
    """Return the reasons for which SageMaker would refuse a CreateTrainingJob."""
    return list(_shape_problems(_input_shape(), request, "request")) or list(_contradictions(request))


@functools.cache
def _input_shape() -> Any:
    """Read the model once; that takes a tenth of a second."""
    return get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape


def _shape_problems(shape: Any, value: Any, path: str) -> Iterator[str]:
    """Yield what the model of the service does not allow in a value."""
    kinds = _KINDS[shape.type_name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        yield f"{path} is not a {shape.type_name}: {value!r}"
        return
    content: Any = value
    inner: list[tuple[Any, Any, str]] = []
    match shape.type_name:
        case "structure":
            yield from (f"{path} has no field {name}" for name in content if name not in shape.members)
            yield from (f"{path} lacks {name}" for name in shape.required_members if name not in content)
            inner = [(shape.members[name], child, name) for name, child in content.items() if name in shape.members]
        case "list":
            inner = [(shape.member, child, str(number)) for number, child in enumerate(content)]
        case "map":
            inner = [(shape.key, name, f"key {name}") for name in content]
            inner += [(shape.value, child, name) for name, child in content.items()]
        case kind:
            if kind == "string":
                yield from _text_problems(shape, content, path)
    if shape.type_name != "structure":
        yield from _bound_problems(shape, content if isinstance(content, int) else len(content), path)
    for part, child, name in inner:
        yield from _shape_problems(part, child, f"{path}.{name}")


def _text_problems(shape: Any, value: str, path: str) -> Iterator[str]:
    pattern = shape.metadata.get("pattern", "")
    # Python lacks Java's character classes.
    if pattern and "\\p{" not in pattern and not re.fullmatch(pattern, value):
        yield f"{path}={value!r} does not match {pattern}"
    if shape.enum and value not in shape.enum:
        yield f"{path}={value!r} is not an allowed value"


def _bound_problems(shape: Any, size: int, path: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if least is not None and size < least:
        yield f"{path} is less than {least}"
    if most is not None and size > most:
        yield f"{path} is more than {most}"


def _contradictions(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield contradictions between valid fields."""
    times, spot = request.get("StoppingCondition", {}), request.get("EnableManagedSpotTraining", False)
    runtime, wait = times.get("MaxRuntimeInSeconds", 24 * 3600), times.get("MaxWaitTimeInSeconds")
    if runtime > _MOST_RUNTIME_S:
        yield "MaxRuntimeInSeconds is more than 28 days"
    if spot and wait is None:
        yield "EnableManagedSpotTraining needs MaxWaitTimeInSeconds"
    if not spot and wait is not None:
        yield "MaxWaitTimeInSeconds is only for managed spot training"
    if wait is not None and wait < runtime:
        yield "MaxWaitTimeInSeconds is less than MaxRuntimeInSeconds"
    resources, algorithm = request.get("ResourceConfig", {}), request["AlgorithmSpecification"]
    if spot and "InstancePreferences" in resources:
        yield "InstancePreferences cannot be used with EnableManagedSpotTraining"
    if ("TrainingImage" in algorithm) is ("AlgorithmName" in algorithm):
        yield "one of TrainingImage and AlgorithmName must be given"
