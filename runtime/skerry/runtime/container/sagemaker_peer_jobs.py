"""Lists the training jobs of this job's group, and creates the one that follows a lost one, by signed requests.

The next job has the name that the operator's next generation would have. SageMaker gives a name to one job only, so two
replicas, or a replica and the operator, never create two.
Sources: SageMaker API reference, ListTrainingJobs, DescribeTrainingJob, ListTags, CreateTrainingJob.
"""

from __future__ import annotations

import datetime as dt
import http.client
import json
import re
from typing import TYPE_CHECKING, Any, Final

from skerry.runtime import contract
from skerry.runtime.container.choose_jobs_to_restart import JobLoss, PeerJob, PeerJobState
from skerry.runtime.contract import may_succeed_again
from skerry.runtime.errors import Conflict, Invalid, Retryable, Unauthorized
from skerry.runtime.store.credentials.aws_json_api import call_aws, error_code, kind_of_refusal
from skerry.runtime.store.credentials.find_aws_keys import keys_of_job
from skerry.runtime.store.credentials.http import redact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.container.choose_jobs_to_restart import Start

_ARN: Final = re.compile(r"(?P<start>arn:[a-z-]+:sagemaker:(?P<region>[a-z0-9-]+):\d+:training-job/)(?P<name>.+)")
# The group, the number of the replica in it, a digest of the spec, and the generation.
_NAME: Final = re.compile(r"(?P<group>.+-)(?P<number>\d+)-[0-9a-f]{6}(?:-g(?P<generation>\d+))?")
_GENERATION: Final = re.compile(r"-g\d+$")
_STATES: Final = {
    "InProgress": PeerJobState.LIVE,
    "Stopping": PeerJobState.LIVE,
    "Deleting": PeerJobState.LIVE,
    "Failed": PeerJobState.FAILED,
}
_EXIT_CODE: Final = re.compile(r"exit code:? (\d+)")
# Failures without an exit code after which another start may succeed.
_PASSING: Final = ("CapacityError", "InternalServerError")
_PAGE: Final = 100
# A page of a listing has about 30 KB.
_MAX_BYTES: Final = 1 << 20
# What a job is created with, and its description repeats; of structures only these fields.
_COPIED: Final = ("RoleArn", "Environment", "HyperParameters", "EnableManagedSpotTraining", "EnableNetworkIsolation")
_FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "AlgorithmSpecification": ("TrainingImage", "TrainingInputMode"),
    "OutputDataConfig": ("S3OutputPath",),
    "ResourceConfig": ("InstanceType", "InstanceCount", "VolumeSizeInGB", "VolumeKmsKeyId"),
    "StoppingCondition": ("MaxRuntimeInSeconds", "MaxWaitTimeInSeconds", "MaxPendingTimeInSeconds"),
    "RetryStrategy": ("MaximumRetryAttempts",),
    "VpcConfig": ("SecurityGroupIds", "Subnets"),
}


class SageMakerPeerJobs:
    """See PeerJobs. arn: of this job. group: of the spec."""

    def __init__(self, arn: str, group: str, environment: Mapping[str, str], clock: Clock) -> None:
        """Raises Invalid if the job was not created by `skerry apply`."""
        place = _ARN.fullmatch(arn)
        name = None if place is None else _NAME.fullmatch(place["name"])
        if place is None or name is None:
            raise Invalid(f"not a job of `skerry apply`, whose names number the replicas of a group: {arn!r}")
        self._arn, self._start, self._region = arn, place["start"], place["region"]
        self._group, self._prefix = group, name["group"]
        self._environment, self._clock = environment, clock

    def list(self) -> Sequence[PeerJob]:
        """See PeerJobs.list."""
        jobs: list[PeerJob] = []
        request: dict[str, object] = {"NameContains": self._prefix, "MaxResults": _PAGE}
        while True:
            answer = self._ask("ListTrainingJobs", request)
            for row in answer["TrainingJobSummaries"]:
                name = _NAME.fullmatch(str(row["TrainingJobName"]))
                if name is not None and name["group"] == self._prefix:
                    jobs.append(
                        PeerJob(
                            slot=f"{self._group}-{name['number']}",
                            key=name.string,
                            generation=int(name["generation"] or 0),
                            state=_STATES.get(str(row["TrainingJobStatus"]), PeerJobState.ENDED),
                            created_s=float(row["CreationTime"]),
                        )
                    )
            if not answer.get("NextToken"):
                return jobs
            request["NextToken"] = answer["NextToken"]

    def read_loss(self, job: PeerJob) -> JobLoss:
        """See PeerJobs.read_loss."""
        description = self._ask("DescribeTrainingJob", {"TrainingJobName": job.key})
        tags = self._tags(self._start + job.key)
        reason = str(description.get("FailureReason", ""))
        return JobLoss(
            # It may have changed since it was listed.
            again=description["TrainingJobStatus"] == "Failed" and may_help(reason),
            reason=redact(reason),
            is_cancelled=contract.CANCELLED_TAG in tags,
            description={**description, "Tags": tags},
        )

    def start_next(self, start: Start) -> str:
        """See PeerJobs.start_next. The new job is the lost one in all but name, number and the mark of its origin."""
        request = next_request(start.loss.description, start.generation)
        self._ask("CreateTrainingJob", request)
        return str(request["TrainingJobName"])

    def superfluous(self) -> str | None:
        """See PeerJobs.superfluous: the operator cancelled the lost job while this one was being created."""
        if (lost := self._tags(self._arn).get(contract.REVIVED_TAG)) is None:
            return None
        cancelled = contract.CANCELLED_TAG in self._tags(self._start + lost)
        return f"{lost}, which this job follows, was cancelled" if cancelled else None

    def _tags(self, arn: str) -> dict[str, str]:
        answer = self._ask("ListTags", {"ResourceArn": arn, "MaxResults": _PAGE})
        tags = {str(tag["Key"]): str(tag["Value"]) for tag in answer["Tags"]}
        # Those of AWS itself are in no request.
        return {key: value for key, value in tags.items() if not key.startswith("aws:")}

    def _ask(self, action: str, request: Mapping[str, object]) -> Any:
        keys = keys_of_job(self._environment)
        if keys is None:
            raise Unauthorized(f"{action}: this job has no AWS role")
        response = call_aws(
            keys,
            self._environment,
            service="sagemaker",
            region=self._region,
            action=f"SageMaker.{action}",
            request=request,
            now=dt.datetime.fromisoformat(self._clock.utc_text()),
            max_bytes=_MAX_BYTES,
        )
        try:
            document = json.loads(response.body)
        except ValueError:
            raise Retryable(f"{action}: the response is not JSON: status={response.status}") from None
        if response.status == http.client.OK:
            return document
        code = error_code(document)
        kind = Conflict if code == "ResourceInUse" else kind_of_refusal(response.status, code)
        message = redact(str(document.get("message") or document.get("Message") or ""))
        raise kind(f"{action}: {code or response.status}: {message}")


def may_help(reason: str) -> bool:
    """True if another start may succeed after a failure with this reason. `skerry status` decides in the same way."""
    codes = _EXIT_CODE.findall(reason)
    return may_succeed_again(int(codes[-1])) if codes else reason.startswith(_PASSING)


def next_request(description: Mapping[str, Any], generation: int) -> dict[str, object]:
    """CreateTrainingJob of the next generation. description: of the lost job, with its tags. Pure."""
    lost = str(description["TrainingJobName"])
    tags = {**description["Tags"], contract.GENERATION_TAG: str(generation), contract.REVIVED_TAG: lost}
    request: dict[str, object] = {name: description[name] for name in _COPIED if description.get(name)}
    for name, fields in _FIELDS.items():
        structure: Mapping[str, Any] = description.get(name) or {}
        if copied := {field: structure[field] for field in fields if structure.get(field)}:
            request[name] = copied
    return {
        "EnableManagedSpotTraining": False,
        "EnableNetworkIsolation": False,
        **request,
        "TrainingJobName": f"{_GENERATION.sub('', lost)}-g{generation}",
        "ProfilerConfig": {"DisableProfiler": True},
        "Tags": [{"Key": key, "Value": value} for key, value in sorted(tags.items())],
    }
