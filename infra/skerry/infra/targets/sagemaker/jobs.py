"""Starts and ends training jobs, one for each replica.

A name is taken once for as long as a job of it is on record, so a repeat of CreateTrainingJob is refused, and whoever
lost an answer asks for the job by its name. The record of one that ended well, or was stopped, is deleted with it: a
run that begins anew may have the same names. The record of one that failed stays, for it says why; it goes when its
name is needed.
Sources: SageMaker API reference, CreateTrainingJob, DescribeTrainingJob, StopTrainingJob, DeleteTrainingJob; IAM user
guide, "Changes that I make are not always immediately visible".
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.handling import found, owner_of, tags_in
from skerry.infra.clouds.aws.session import code_of
from skerry.infra.clouds.handling import Absent, Late, differing, each, foreign, text, waited
from skerry.infra.handler import ADDRESS_TAG, Condition
from skerry.infra.target import stem_of
from skerry.infra.targets.sagemaker import making, quotas, reading, requests
from skerry.infra.targets.sagemaker.resources import TrainingJob
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Conflict, Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.handler import Made, Seen, Wanted

# A stop gives a container 120 s; then files are uploaded, and a machine that is still being found is given back.
_ENDED_S: Final = 900.0
# Whether a job was made shows in its description; how soon, AWS does not say.
_SHOWN_S: Final = 10.0
# A role that was just made is known everywhere within seconds; after so long it is something else.
_KNOWN_S: Final = 60.0
_AGAIN: Final = Backoff(first=2.0, cap=10.0)
_OF_A_ROLE: Final = re.compile(r"assume (the )?role|sts:AssumeRole", re.IGNORECASE)
# SageMaker words it in several ways, with one code for everything that is wrong with a request.
_NOT_THERE: Final = re.compile(r"not found|could not find|does not exist", re.IGNORECASE)
_QUOTA: Final = re.compile(r"service limit '([^']+)'")
# A job whose record is on its way out still has its name.
_DELETING: Final = "Deleting"
_REMEDY: Final = "rename the run, or delete that job: aws sagemaker delete-training-job"


class TrainingJobs:
    """See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. One call for each job, and for one that nobody remembers a second, for its tags."""
        return each(self._read, wanted)

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create. A job of that name that runs something else, or has failed, makes room: a slot has one.

        Raises Invalid, with what to do, if the account's quota does not allow it.
        """
        taken = None
        for _ in range(2):
            try:
                return self._make(wanted)
            except Conflict as error:
                taken = error
                there = self._there(wanted)
                if there is not None:
                    return there
        raise Conflict(
            f"SageMaker still holds the name {wanted.name}, and has no record of a job of that name any more: run the "
            f"same command again ({taken})"
        ) from taken

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Every setting of a job is fixed."""
        raise Invalid(f"a job cannot change: {wanted.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, made: Made) -> None:
        """See Handler.delete. Whatever it is doing; ended already, or forgotten, is success."""
        name = made.outputs.get("name") or made.name
        row = described(self._aws, made.region, name)
        if row is None:
            return
        # What was begun and never recorded may have the name of somebody else's.
        mine = bool(made.outputs.get("arn")) or self._tags(made.region, row).get(ADDRESS_TAG) == made.address
        if mine:
            self._end(made.region, name, row)

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. Only of jobs of the run's own names: others' tags may be none of these credentials'."""
        stem = stem_of(run)
        for region in sorted(regions):
            live = [row for status in reading.LIVE for row in self._listed(region, status, stem)]
            tags = each(lambda row, region=region: self._tags(region, row), live)
            for row, told in zip(live, tags, strict=True):
                if owner_of(told) == run:
                    name = str(row["TrainingJobName"])
                    outputs = {"name": name, "arn": str(row["TrainingJobArn"])}
                    yield found(TrainingJob, name=name, region=region, tags=told, outputs=outputs)

    def _read(self, wanted: Wanted) -> Seen | None:
        region = wanted.resource.region
        row = described(self._aws, region, wanted.outputs.get("name") or wanted.name)
        if row is None:
            return None
        known = wanted.outputs.get("arn") == row["TrainingJobArn"]
        owner = wanted.run if known else owner_of(self._tags(region, row))
        return reading.job(row, owner, region)

    def _make(self, wanted: Wanted) -> Mapping[str, str]:
        """Ask for it. Raises Conflict if the name is taken."""
        clock, region = self._aws.clock, wanted.resource.region
        request = requests.ready(requests.training_job(wanted))
        deadline = clock.now() + _KNOWN_S
        for number in itertools.count():
            try:
                return {"name": wanted.name, "arn": making.create(self._aws, region, request)}
            except Retryable as error:
                return self._made(wanted, error)
            except Invalid as error:
                if code_of(error) == "ResourceLimitExceeded":
                    raise _of_quota(wanted, error) from error
                if not _OF_A_ROLE.search(str(error)):
                    raise
                if clock.now() >= deadline:
                    role = text(wanted.settings["role"])
                    told = (
                        f"SageMaker cannot act as {role} after {_KNOWN_S:.0f} s: does it trust sagemaker.amazonaws.com?"
                    )
                    raise Invalid(f"{told} ({error})") from error
            clock.pause(_AGAIN.delay(number, clock))
        raise AssertionError("unreachable")

    def _made(self, wanted: Wanted, lost: Retryable) -> Mapping[str, str]:
        """What became of a request without an answer. Raises `lost` if there is no job: the next apply looks, too."""
        clock = self._aws.clock

        def ask() -> Seen | None:
            return self._read(wanted)

        try:
            seen = waited(clock, f"the job {wanted.name} is shown", clock.now() + _SHOWN_S, ask)
        except Late:
            raise lost from None
        if seen.owner != wanted.run:
            raise foreign("training job", wanted.name, seen.owner, _REMEDY)
        if seen.condition is Condition.LOST:
            raise lost  # the record of another, which had the name before
        return seen.outputs

    def _there(self, wanted: Wanted) -> Mapping[str, str] | None:
        """The outputs of the job that has the name, if it is the very one; else None, and the name is free again.

        Raises Conflict if it is somebody else's, or stays.
        """
        region = wanted.resource.region
        row = described(self._aws, region, wanted.name)
        if row is None:
            return None
        seen = reading.job(row, owner_of(self._tags(region, row)), region)
        if seen.owner != wanted.run:
            raise foreign("training job", wanted.name, seen.owner, _REMEDY)
        if seen.condition is not Condition.LOST and not differing(wanted, seen):
            return seen.outputs
        kept = self._end(region, wanted.name, row, forget=True)
        if kept is not None:
            why = "these credentials may not" if isinstance(kept, Unauthorized) else "SageMaker does not let it go"
            told = f"the name {wanted.name} is taken: the record of the job before it has to be deleted first"
            raise Conflict(f"{told} (aws sagemaker delete-training-job), and {why}: {kept}") from kept
        return None

    def _end(
        self, region: str, name: str, row: Mapping[str, Any], *, forget: bool = False
    ) -> Unauthorized | Conflict | None:
        """Stop a job, and delete its record, unless that says why it failed; why it stays. forget: even then."""
        if row["TrainingJobStatus"] == "InProgress":
            try:
                self._aws.call("sagemaker", region, "stop_training_job", TrainingJobName=name)
            except Invalid:
                # It has come to its end meanwhile, and is rejected for that.
                now = described(self._aws, region, name)
                if now is not None and now["TrainingJobStatus"] == "InProgress":
                    raise

        def ended() -> str | None:
            now = described(self._aws, region, name)
            status = "gone" if now is None else str(now["TrainingJobStatus"])
            return None if status in (*reading.LIVE, _DELETING) else status

        deadline = self._aws.clock.now() + _ENDED_S
        status = waited(self._aws.clock, f"the job {name} has ended", deadline, ended)
        return self._forget(region, name) if forget or status in {"Completed", "Stopped"} else None

    def _forget(self, region: str, name: str) -> Unauthorized | Conflict | None:
        """Delete a record. Who may not, or where SageMaker keeps the machine warm: then it stays, and costs nothing.

        Returns why it stays.
        """
        try:
            self._aws.call("sagemaker", region, "delete_training_job", TrainingJobName=name)
        except (Unauthorized, Conflict) as error:
            return error
        except Invalid as error:
            if isinstance(error, Absent) or _is_absent(error):
                return None
            raise

        def gone() -> bool | None:
            return True if described(self._aws, region, name) is None else None

        waited(self._aws.clock, f"the record of {name} is gone", self._aws.clock.now() + _ENDED_S, gone)
        return None

    def _listed(self, region: str, status: str, stem: str) -> Iterator[Mapping[str, Any]]:
        """Those whose names begin with `stem`."""
        rows = self._aws.pages(
            "sagemaker", region, "list_training_jobs", "TrainingJobSummaries", NameContains=stem, StatusEquals=status
        )
        return (row for row in rows if str(row["TrainingJobName"]).startswith(f"{stem}-"))

    def _tags(self, region: str, row: Mapping[str, Any]) -> dict[str, str]:
        arn = str(row["TrainingJobArn"])
        try:
            return tags_in(self._aws.pages("sagemaker", region, "list_tags", "Tags", ResourceArn=arn))
        except Absent:
            return {}


def described(aws: Aws, region: str, name: str) -> Mapping[str, Any] | None:
    """What SageMaker says of a job; None if it does not know it."""
    try:
        return aws.call("sagemaker", region, "describe_training_job", TrainingJobName=name)
    except Absent:
        return None
    except Invalid as error:
        if _is_absent(error):
            return None
        raise


def _is_absent(error: Invalid) -> bool:
    return code_of(error) == "ResourceNotFound" or (
        code_of(error) == "ValidationException" and _NOT_THERE.search(str(error)) is not None
    )


def _of_quota(wanted: Wanted, error: Invalid) -> Invalid:
    """What to do about a quota that is used up, or was never given: SageMaker says which."""
    region, instance = wanted.resource.region, text(wanted.settings["instance"])
    named = _QUOTA.search(str(error))
    quota = named[1] if named else quotas.of_machines(instance, spot=wanted.settings["spot"] is True)
    short = "no job may run so long" if quota == quotas.LONGEST else "the account may not have another machine"
    first = "write a shorter max_runtime, or shorter limits, or " if quota == quotas.LONGEST else ""
    command = f"aws service-quotas list-service-quotas --region {region} --service-code sagemaker"
    return Invalid(
        f"{short}: {error}; {first}ask for more of {quota!r} in the console of Service Quotas, or by its code: "
        f"{command} --query \"Quotas[?QuotaName=='{quota}']\", then `aws service-quotas "
        f"request-service-quota-increase`; `skerry apply` goes on from here"
    )
