"""Handles training jobs, one for each replica: creates, reads and stops them.

The name of a job is unique while SageMaker has a record of it. So a repeated CreateTrainingJob is refused, and after a
lost answer the job is read by its name. The record of a completed or stopped job is deleted with it, because a new run
may have the same names. The record of a failed job remains, because it has the reason; it is deleted when its name is
needed.
Sources: SageMaker API reference, CreateTrainingJob, DescribeTrainingJob, StopTrainingJob, DeleteTrainingJob; IAM user
guide, "Changes that I make are not always immediately visible".
"""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.session import code_of
from skerry.infra.clouds.aws.tags import owned_job, owner_of, tags_in
from skerry.infra.clouds.handler_helpers import Absent, NotYetVisible, differing, each, owner_conflict, text, wait_for
from skerry.infra.provision.graph import generation_name
from skerry.infra.provision.handler import ADDRESS_TAG, Condition, NamedJob
from skerry.infra.provision.target_and_store_interfaces import stem_of
from skerry.infra.targets.sagemaker import parse_observed_settings, quotas, requests
from skerry.infra.targets.sagemaker.resource_types import Job
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.runtime import contract
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Conflict, Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.handler import Desired, Observed, StateRecord

# A container has 120 s to stop; then files are uploaded and the machine is released.
_ENDED_S: Final = 900.0
# A created job can be described; AWS does not document how soon.
_SHOWN_S: Final = 10.0
# A new role is visible everywhere within seconds; after this time there is another reason.
_KNOWN_S: Final = 60.0
_AGAIN: Final = Backoff(first=2.0, cap=10.0)
_OF_A_ROLE: Final = re.compile(r"assume (the )?role|sts:AssumeRole", re.IGNORECASE)
# SageMaker has several messages for a missing job, with the code of any invalid request.
_NOT_THERE: Final = re.compile(r"not found|could not find|does not exist", re.IGNORECASE)
_QUOTA: Final = re.compile(r"service limit '([^']+)'")
# A job whose record is being deleted still has its name.
_DELETING: Final = "Deleting"
_REMEDY: Final = "rename the run, or delete that job: aws sagemaker delete-training-job"


class Jobs:
    """See JobHandler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. One call for each job, and a second one for the tags of an unrecorded job."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. Another or failed job of the name is removed first, because a slot has one job.

        Raises Invalid, with what to do, if the account's quota does not allow it.
        """
        taken = None
        for _ in range(2):
            try:
                return self._make(desired)
            except Conflict as error:
                taken = error
                existing = self._existing(desired)
                if existing is not None:
                    return existing
        raise Conflict(
            f"SageMaker still holds the name {desired.name}, and has no record of a job of that name any more: run the "
            f"same command again ({taken})"
        ) from taken

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Every setting of a job is fixed."""
        raise Invalid(f"a job cannot change: {desired.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete. In any state; a job that has ended, or has no record, counts as deleted."""
        name = state_record.outputs.get("name") or state_record.name
        row = described(self._aws, state_record.region, name)
        if row is None:
            return
        # An unrecorded job may have the name of another run's job.
        mine = (
            bool(state_record.outputs.get("arn"))
            or self._tags(state_record.region, row).get(ADDRESS_TAG) == state_record.address
        )
        if mine:
            self._end(state_record.region, name, row)

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Reads the tags of jobs with the run's names only."""
        stem = stem_of(run)
        for region in sorted(regions):
            live = [
                row
                for status in parse_observed_settings.LIVE
                for row in self._listed(region, stem, StatusEquals=status)
            ]
            tags = each(lambda row, region=region: self._tags(region, row), live)
            for row, row_tags in zip(live, tags, strict=True):
                name = str(row["TrainingJobName"])
                outputs = {"name": name, "arn": str(row["TrainingJobArn"])}
                job = owned_job(Job, run, name=name, region=region, tags=row_tags, outputs=outputs)
                if job is not None:
                    yield job

    def stop(self, state_record: StateRecord) -> None:
        """See JobHandler.stop."""
        self._stop(state_record.region, state_record.outputs["name"])

    def names(self, like: StateRecord, run: str) -> Iterable[NamedJob]:
        """See JobHandler.names."""
        for row in self._listed(like.region, stem_of(run)):
            over = row["TrainingJobStatus"] not in parse_observed_settings.LIVE
            yield NamedJob(str(row["TrainingJobName"]), over=over)

    def list_revived(self, run: str, records: Sequence[StateRecord]) -> Mapping[str, StateRecord]:
        """See RevivableJobHandler.list_revived. One listing for each region, and the tags of each later job."""
        revived: dict[str, StateRecord] = {}
        for region in {record.region for record in records}:
            rows = {str(row["TrainingJobName"]): row for row in self._listed(region, stem_of(run))}
            for record in (record for record in records if record.region == region):
                newest = record
                for number, name in _later(rows, record):
                    if rows[newest.name]["TrainingJobStatus"] in parse_observed_settings.LIVE:
                        break  # whatever was created beside a live job does not follow it
                    if contract.REVIVED_TAG in self._tags(region, rows[name]):
                        outputs = {"name": name, "arn": str(rows[name]["TrainingJobArn"])}
                        newest = replace(record, name=name, generation=number, outputs=outputs)
                        revived[record.address] = newest
        return revived

    def forbid_revival(self, state_record: StateRecord) -> None:
        """See RevivableJobHandler.forbid_revival. By a tag, which replicas read, and the next job when it starts."""
        row = described(self._aws, state_record.region, state_record.outputs.get("name") or state_record.name)
        if row is not None:
            tags = [{"Key": contract.CANCELLED_TAG, "Value": "true"}]
            arn = str(row["TrainingJobArn"])
            self._aws.call("sagemaker", state_record.region, "add_tags", ResourceArn=arn, Tags=tags)

    def _read(self, desired: Desired) -> Observed | None:
        region = desired.resource.region
        row = described(self._aws, region, desired.outputs.get("name") or desired.name)
        if row is None:
            return None
        known = desired.outputs.get("arn") == row["TrainingJobArn"]
        owner = desired.run if known else owner_of(self._tags(region, row))
        return parse_observed_settings.job(row, owner, region)

    def _make(self, desired: Desired) -> Mapping[str, str]:
        """Create the job. Raises Conflict if its name is taken."""
        clock, region = self._aws.clock, desired.resource.region
        request = ready(requests.job(desired))
        deadline = clock.now() + _KNOWN_S
        for number in itertools.count():
            try:
                answer = self._aws.call_once("sagemaker", region, "create_training_job", **request)
                return {"name": desired.name, "arn": str(answer["TrainingJobArn"])}
            except Retryable as error:
                return self._job_without_reply(desired, error)
            except Invalid as error:
                if code_of(error) == "ResourceLimitExceeded":
                    raise _of_quota(desired, error) from error
                if not _OF_A_ROLE.search(str(error)):
                    raise
                if clock.now() >= deadline:
                    role = text(desired.settings["role"])
                    message = (
                        f"SageMaker cannot act as {role} after {_KNOWN_S:.0f} s: does it trust sagemaker.amazonaws.com?"
                    )
                    raise Invalid(f"{message} ({error})") from error
            clock.pause(_AGAIN.delay(number, clock))
        raise AssertionError("unreachable")

    def _job_without_reply(self, desired: Desired, lost: Retryable) -> Mapping[str, str]:
        """Return the job of a request without an answer. Raises `lost` if there is none."""
        clock = self._aws.clock

        def ask() -> Observed | None:
            return self._read(desired)

        try:
            seen = wait_for(clock, f"the job {desired.name} is shown", clock.now() + _SHOWN_S, ask)
        except NotYetVisible:
            raise lost from None
        if seen.owner != desired.run:
            raise owner_conflict("training job", desired.name, seen.owner, _REMEDY)
        if seen.condition is Condition.LOST:
            raise lost  # the record of an earlier job of this name
        return seen.outputs

    def _existing(self, desired: Desired) -> Mapping[str, str] | None:
        """Return the outputs of the job of this name if it is the same job; else remove it and return None.

        Raises Conflict if it belongs to another run, or cannot be removed.
        """
        region = desired.resource.region
        row = described(self._aws, region, desired.name)
        if row is None:
            return None
        seen = parse_observed_settings.job(row, owner_of(self._tags(region, row)), region)
        if seen.owner != desired.run:
            raise owner_conflict("training job", desired.name, seen.owner, _REMEDY)
        if seen.condition is not Condition.LOST and not differing(desired, seen):
            return seen.outputs
        remains = self._end(region, desired.name, row, forget=True)
        if remains is not None:
            why = "these credentials may not" if isinstance(remains, Unauthorized) else "SageMaker does not let it go"
            message = f"the name {desired.name} is taken: the record of the job before it has to be deleted first"
            raise Conflict(f"{message} (aws sagemaker delete-training-job), and {why}: {remains}") from remains
        return None

    def _stop(self, region: str, name: str) -> None:
        """Ask a job to stop. SageMaker refuses that if it has ended. Raises Absent if there is none."""
        try:
            self._aws.call("sagemaker", region, "stop_training_job", TrainingJobName=name)
        except Invalid as error:
            row = described(self._aws, region, name)
            if row is None:
                raise Absent(str(error)) from error
            if row["TrainingJobStatus"] == "InProgress":
                raise

    def _end(
        self, region: str, name: str, row: Mapping[str, Any], *, forget: bool = False
    ) -> Unauthorized | Conflict | None:
        """Stop a job and delete its record, unless it failed. forget: delete the record of a failed job, too.

        Returns why the record remains.
        """
        if row["TrainingJobStatus"] == "InProgress":
            with suppress(Absent):
                self._stop(region, name)

        def ended() -> str | None:
            now = described(self._aws, region, name)
            status = "gone" if now is None else str(now["TrainingJobStatus"])
            return None if status in (*parse_observed_settings.LIVE, _DELETING) else status

        deadline = self._aws.clock.now() + _ENDED_S
        status = wait_for(self._aws.clock, f"the job {name} has ended", deadline, ended)
        return self._forget(region, name) if forget or status in {"Completed", "Stopped"} else None

    def _forget(self, region: str, name: str) -> Unauthorized | Conflict | None:
        """Delete a record. Without the permission, or with a warm machine, it remains and costs nothing.

        Returns why it remains.
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

        wait_for(self._aws.clock, f"the record of {name} is gone", self._aws.clock.now() + _ENDED_S, gone)
        return None

    def _listed(self, region: str, stem: str, **more: str) -> Iterator[Mapping[str, Any]]:
        """Return the jobs whose names begin with `stem`. more: parameters of the call."""
        rows = self._aws.pages(
            "sagemaker", region, "list_training_jobs", "TrainingJobSummaries", NameContains=stem, **more
        )
        return (row for row in rows if str(row["TrainingJobName"]).startswith(f"{stem}-"))

    def _tags(self, region: str, row: Mapping[str, Any]) -> dict[str, str]:
        arn = str(row["TrainingJobArn"])
        try:
            return tags_in(self._aws.pages("sagemaker", region, "list_tags", "Tags", ResourceArn=arn))
        except Absent:
            return {}


def _later(rows: Mapping[str, Mapping[str, Any]], record: StateRecord) -> list[tuple[int, str]]:
    """Return generation and name of the jobs that may follow the recorded one, in the order of their creation.

    rows: by name. Records of failed jobs remain after a destroy, so only those created after the recorded job count.
    """
    if (own := rows.get(record.name)) is None:
        return []
    first = record.name.removesuffix(generation_name("", record.generation))
    numbers = {name: name.removeprefix(f"{first}-g") for name in rows}
    later = [(int(number), name) for name, number in numbers.items() if number.isdecimal()]
    later = [(number, name) for number, name in later if rows[name]["CreationTime"] > own["CreationTime"]]
    return sorted(later, key=lambda pair: rows[pair[1]]["CreationTime"])


def described(aws: Aws, region: str, name: str) -> Mapping[str, Any] | None:
    """Return the description of a job; None if SageMaker has no record of it."""
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


def _of_quota(desired: Desired, error: Invalid) -> Invalid:
    """Return an error with the commands that request more of the exceeded quota."""
    region, instance = desired.resource.region, text(desired.settings["instance"])
    named = _QUOTA.search(str(error))
    quota = named[1] if named else quotas.of_machines(instance, spot=desired.settings["spot"] is True)
    short = "no job may run so long" if quota == quotas.LONGEST else "the account may not have another machine"
    first = "write a shorter max_runtime, or shorter limits, or " if quota == quotas.LONGEST else ""
    command = f"aws service-quotas list-service-quotas --region {region} --service-code sagemaker"
    return Invalid(
        f"{short}: {error}; {first}ask for more of {quota!r} in the console of Service Quotas, or by its code: "
        f"{command} --query \"Quotas[?QuotaName=='{quota}']\", then `aws service-quotas "
        f"request-service-quota-increase`; then run the same command again"
    )
