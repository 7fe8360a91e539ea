"""Handles the machines and queues of AWS Batch, job definitions, and the machines' launch template.

Batch answers before a request is carried out: a create waits until the resource is valid, a delete until it is gone.
An enabled resource must be disabled before it is deleted.
Sources: Batch user guide, "Job queue state", "Delete a compute environment", "INVALID compute environment";
IAM user guide, "Changes that I make are not always immediately visible".
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.aws.tags import owned_record, owner_of, tags_in
from skerry.infra.clouds.handler_helpers import Absent, check_owner, differing, owner_conflict, wait_for
from skerry.infra.provision.handler import ADDRESS_TAG, RUN_TAG, Condition
from skerry.infra.targets.aws_batch import parse_observed_settings, requests
from skerry.infra.targets.aws_batch.resource_types import ComputeEnvironment, JobDefinition, LaunchTemplate, Queue
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Conflict, Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired, Observed, StateRecord
    from skerry.infra.targets.shared.resolve_refs import Tree

# Machines and queues are usually valid within two minutes.
_VALID_S: Final = 600.0
# A compute environment is deleted only after its machines, about ten minutes later.
_GONE_S: Final = 1800.0
# A new role is visible everywhere within seconds; after this time there is another reason.
_KNOWN_S: Final = 120.0
_AGAIN: Final = Backoff(first=5.0, cap=20.0)
# Batch's messages about a role or a profile that it cannot use.
_OF_A_ROLE: Final = re.compile(r"authorized|AssumeRole|instance ?profile", re.IGNORECASE)
# The most names in one call.
_AT_ONCE: Final = 100
_CHANGING: Final = ("CREATING", "UPDATING")
_REMEDY: Final = "if it is yours, name it under `byo:` of the target, else rename the run"


class _Validated(ABC):
    """The handling that environments and queues have in common: Batch validates both. See Handler."""

    KIND: ClassVar[type[Resource]]
    WHAT: ClassVar[str]
    """Its name for people."""
    NOUN: ClassVar[str]
    """Its name in operations: job_queue."""
    FIELD: ClassVar[str]
    """Its name in fields: jobQueue."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. Reads a hundred in one call."""
        known = {region: self._rows(region, names) for region, names in _by_region(all_desired).items()}
        rows = [known[desired.resource.region].get(desired.name) for desired in all_desired]
        pairs = zip(all_desired, rows, strict=True)
        return [None if row is None else self._seen(row, given.resource.region) for given, row in pairs]

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. Updates an existing one."""
        region = desired.resource.region
        row = self._row(region, desired.name)
        if row is None:
            try:
                self._call(region, "create", self._request(desired))
            except Invalid:
                # After a lost answer boto3 repeats the request, which then fails because the resource exists.
                if self._row(region, desired.name) is None:
                    raise
            return self._usable(desired)
        outputs = self._usable(desired)
        changed = differing(desired, self._seen(row, region)) - type(desired.resource).FIXED
        return self.update(desired, changed) if changed else outputs

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Sends all settings that can change."""
        del changed
        # Batch accepts no change during another.
        self._at_rest(desired.resource.region, desired.name, self._aws.clock.now() + _VALID_S)
        self._call(desired.resource.region, "update", self._changes(desired))
        return self._settled(desired)

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete. Disables it first, and waits after each step."""
        deadline = self._aws.clock.now() + _GONE_S
        row = self._at_rest(state_record.region, state_record.name, deadline)
        if row is not None and row.get("status") != "DELETING":
            _check_address(row.get("tags", {}), state_record, self.WHAT)
            if row.get("state") != "DISABLED":
                self._call(state_record.region, "update", {self.FIELD: state_record.name, "state": "DISABLED"})
            wait_for(
                self._aws.clock,
                f"the {self.WHAT} {state_record.name} is disabled",
                deadline,
                lambda: self._deleting(state_record),
            )
        what = f"the {self.WHAT} {state_record.name} is gone"
        wait_for(
            self._aws.clock,
            what,
            deadline,
            lambda: True if self._row(state_record.region, state_record.name) is None else None,
        )

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned."""
        for region in sorted(regions):
            for row in self._aws.pages("batch", region, f"describe_{self.NOUN}s", f"{self.FIELD}s"):
                tags: Mapping[str, str] = row.get("tags", {})
                if owner_of(tags) == run and row.get("status") != "DELETED":
                    outputs = self._seen(row, region).outputs
                    yield owned_record(self.KIND, name=outputs["name"], region=region, tags=tags, outputs=outputs)

    @abstractmethod
    def _seen(self, row: Mapping[str, Any], region: str) -> Observed: ...

    @abstractmethod
    def _request(self, desired: Desired) -> Tree: ...

    @abstractmethod
    def _changes(self, desired: Desired) -> Tree: ...

    def _usable(self, desired: Desired) -> Mapping[str, str]:
        """Wait as `_settled` after a creation."""
        return self._settled(desired)

    def _settled(self, desired: Desired) -> Mapping[str, str]:
        """Return its outputs once it is valid. Raises Conflict if another run owns it, Invalid if it is not valid."""
        region, name = desired.resource.region, desired.name

        def ask() -> Mapping[str, Any] | None:
            row = self._row(region, name)
            return None if row is None or row.get("status") in _CHANGING else row

        deadline = self._aws.clock.now() + _VALID_S
        row = wait_for(self._aws.clock, f"the {self.WHAT} {name} is valid", deadline, ask)
        seen = self._seen(row, region)
        check_owner(seen, desired, self.WHAT, _REMEDY)
        if seen.condition is Condition.BROKEN:
            raise Invalid(f"AWS Batch cannot use the {self.WHAT} {name}: {seen.detail}; correct this and apply again")
        return seen.outputs

    def _at_rest(self, region: str, name: str, deadline: float) -> Mapping[str, Any] | None:
        """Return its description once no change is in progress; None if it does not exist."""

        def ask() -> tuple[Mapping[str, Any] | None] | None:
            row = self._row(region, name)
            return None if row is not None and row.get("status") in _CHANGING else (row,)

        return wait_for(self._aws.clock, f"the {self.WHAT} {name} is at rest", deadline, ask)[0]

    def _deleting(self, state_record: StateRecord) -> bool | None:
        """Return True once the deletion is accepted or not needed; None to try again."""
        row = self._row(state_record.region, state_record.name)
        if row is None or row.get("status") == "DELETING":
            return True
        if row.get("state") != "DISABLED" or row.get("status") in _CHANGING:
            return None
        try:
            self._call(state_record.region, "delete", {self.FIELD: state_record.name})
        except (Invalid, Conflict) as error:
            # For a while a compute environment still refers to its deleted queue.
            if "relationship" in str(error) or "being modified" in str(error):
                return None
            raise
        return True

    def _row(self, region: str, name: str) -> Mapping[str, Any] | None:
        return self._rows(region, [name]).get(name)

    def _rows(self, region: str, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        rows: dict[str, Mapping[str, Any]] = {}
        for batch in _hundreds(names):
            answer = self._aws.call("batch", region, f"describe_{self.NOUN}s", **{f"{self.FIELD}s": batch})
            for row in answer[f"{self.FIELD}s"]:
                if row.get("status") != "DELETED":
                    rows[str(row[f"{self.FIELD}Name"])] = row
        return rows

    def _call(self, region: str, verb: str, tree: Tree) -> None:
        self._aws.call("batch", region, f"{verb}_{self.NOUN}", **ready(tree))


class ComputeEnvironments(_Validated):
    """Handles compute environments."""

    KIND = ComputeEnvironment
    WHAT = "compute environment"
    NOUN = "compute_environment"
    FIELD = "computeEnvironment"

    def _usable(self, desired: Desired) -> Mapping[str, str]:
        """Wait as `_settled`, and retry for new roles: Batch validates roles once, and an update repeats that."""
        clock = self._aws.clock
        deadline = clock.now() + _KNOWN_S
        for number in itertools.count():
            try:
                return self._settled(desired)
            except Invalid as error:
                if clock.now() >= deadline or not _OF_A_ROLE.search(str(error)):
                    raise
            clock.pause(_AGAIN.delay(number, clock))
            self._call(desired.resource.region, "update", self._changes(desired))
        raise AssertionError("unreachable")

    def _seen(self, row: Mapping[str, Any], region: str) -> Observed:
        return parse_observed_settings.compute_environment(row, region)

    def _request(self, desired: Desired) -> Tree:
        return requests.compute_environment(desired)

    def _changes(self, desired: Desired) -> Tree:
        return requests.compute_environment_update(desired)


class Queues(_Validated):
    """Handles job queues."""

    KIND = Queue
    WHAT = "job queue"
    NOUN = "job_queue"
    FIELD = "jobQueue"

    def _seen(self, row: Mapping[str, Any], region: str) -> Observed:
        return parse_observed_settings.queue(row, region)

    def _request(self, desired: Desired) -> Tree:
        return requests.queue(desired)

    def _changes(self, desired: Desired) -> Tree:
        return requests.queue_update(desired)


class JobDefinitions:
    """Handles job definitions. A name has revisions; inactive ones count as deleted. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. Reads definitions with a known ARN in hundreds, others one by one."""
        rows: dict[str, Mapping[str, Any]] = {}
        known = [desired for desired in all_desired if desired.outputs.get("arn")]
        for region, group in _grouped(known):
            for arns in _hundreds([desired.outputs["arn"] for desired in group]):
                answer = self._aws.call("batch", region, "describe_job_definitions", jobDefinitions=arns)
                rows |= {str(row["jobDefinitionArn"]): row for row in answer["jobDefinitions"]}
        return [self._observed(desired, rows.get(desired.outputs.get("arn", ""))) for desired in all_desired]

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create. A repeated request would create another revision, so an existing definition is used."""
        existing = self._existing(desired)
        if existing is not None:
            return existing
        request = ready(requests.job_definition(desired))
        try:
            answer = self._aws.call_once("batch", desired.resource.region, "register_job_definition", **request)
        except Retryable:
            if (existing := self._existing(desired)) is None:
                raise
            return existing
        return {"name": str(answer["jobDefinitionName"]), "arn": str(answer["jobDefinitionArn"])}

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Every setting of a definition is fixed."""
        raise Invalid(f"a job definition cannot change: {desired.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete. Deletes all revisions of the name that have the address of this resource."""
        for row in list(self._active(state_record.region, state_record.name)):
            if row.get("tags", {}).get(ADDRESS_TAG) == state_record.address:
                arn = str(row["jobDefinitionArn"])
                self._aws.call("batch", state_record.region, "deregister_job_definition", jobDefinition=arn)

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned."""
        for region in sorted(regions):
            named: dict[str, StateRecord] = {}
            rows = self._aws.pages("batch", region, "describe_job_definitions", "jobDefinitions", status="ACTIVE")
            for row in rows:
                tags: Mapping[str, str] = row.get("tags", {})
                if owner_of(tags) == run:
                    outputs = parse_observed_settings.job_definition(row, region).outputs
                    name = outputs["name"]
                    named[name] = owned_record(JobDefinition, name=name, region=region, tags=tags, outputs=outputs)
            yield from named.values()

    def _existing(self, desired: Desired) -> Mapping[str, str] | None:
        """Return the outputs of the existing definition. Raises Conflict if another run owns it."""
        row = self._newest(desired.resource.region, desired.name)
        if row is None:
            return None
        seen = parse_observed_settings.job_definition(row, desired.resource.region)
        check_owner(seen, desired, "job definition", _REMEDY)
        return seen.outputs

    def _observed(self, desired: Desired, row: Mapping[str, Any] | None) -> Observed | None:
        if row is None and not desired.outputs.get("arn"):
            row = self._newest(desired.resource.region, desired.name)
        if row is None or row.get("status") == "INACTIVE":
            return None
        return parse_observed_settings.job_definition(row, desired.resource.region)

    def _newest(self, region: str, name: str) -> Mapping[str, Any] | None:
        return max(self._active(region, name), key=lambda row: int(row["revision"]), default=None)

    def _active(self, region: str, name: str) -> Iterator[Mapping[str, Any]]:
        return self._aws.pages(
            "batch",
            region,
            "describe_job_definitions",
            "jobDefinitions",
            jobDefinitionName=name,
            status="ACTIVE",
        )


class LaunchTemplates:
    """Handles launch templates. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. The user's own have an id as their name."""
        return [self._read(desired.resource.region, desired.name) for desired in all_desired]

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        seen = self._read(desired.resource.region, desired.name)
        if seen is None:
            try:
                request = ready(requests.launch_template(desired))
                self._aws.call("ec2", desired.resource.region, "create_launch_template", **request)
            except Conflict:  # a lost answer, after which boto3 repeats the request
                pass
            deadline = self._aws.clock.now() + _VALID_S
            what = f"the launch template {desired.name} is visible"
            seen = wait_for(self._aws.clock, what, deadline, lambda: self._read(desired.resource.region, desired.name))
        check_owner(seen, desired, "launch template", _REMEDY)
        return seen.outputs

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Every setting of a template is fixed."""
        raise Invalid(f"a launch template cannot change: {desired.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete."""
        try:
            rows = self._rows(state_record.region, state_record.name)
            _check_address(tags_in(rows[0].get("Tags", [])), state_record, "launch template")
            self._aws.call("ec2", state_record.region, "delete_launch_template", LaunchTemplateName=state_record.name)
        except Absent:
            return

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned."""
        ours = [{"Name": f"tag:{RUN_TAG}", "Values": [run]}]
        for region in sorted(regions):
            rows = self._aws.pages("ec2", region, "describe_launch_templates", "LaunchTemplates", Filters=ours)
            for row in rows:
                outputs = {"id": str(row["LaunchTemplateId"]), "name": str(row["LaunchTemplateName"])}
                tags = tags_in(row.get("Tags", []))
                yield owned_record(LaunchTemplate, name=outputs["name"], region=region, tags=tags, outputs=outputs)

    def _read(self, region: str, name: str) -> Observed | None:
        try:
            [row] = self._rows(region, name)
            answer = self._aws.call(
                "ec2",
                region,
                "describe_launch_template_versions",
                LaunchTemplateId=row["LaunchTemplateId"],
                Versions=["$Default"],
            )
        except Absent:
            return None
        return parse_observed_settings.launch_template(row, answer["LaunchTemplateVersions"][0], region)

    def _rows(self, region: str, name: str) -> list[Mapping[str, Any]]:
        """Return the template of this name or id. Raises Absent if there is none."""
        named = {"LaunchTemplateIds": [name]} if name.startswith("lt-") else {"LaunchTemplateNames": [name]}
        rows: list[Mapping[str, Any]] = self._aws.call("ec2", region, "describe_launch_templates", **named)[
            "LaunchTemplates"
        ]
        return rows


def _check_address(tags: Mapping[str, str], state_record: StateRecord, what: str) -> None:
    """Raise Conflict if the resource of this name is not the one in the state."""
    if tags.get(ADDRESS_TAG) != state_record.address:
        raise owner_conflict(what, state_record.name, owner_of(tags), "delete it yourself if it is not needed")


def _by_region(all_desired: Sequence[Desired]) -> dict[str, list[str]]:
    return {region: [desired.name for desired in group] for region, group in _grouped(all_desired)}


def _grouped(all_desired: Sequence[Desired]) -> Iterator[tuple[str, list[Desired]]]:
    def region(desired: Desired) -> str:
        return desired.resource.region

    for name, in_region in groupby(sorted(all_desired, key=region), key=region):
        yield name, list(in_region)


def _hundreds(names: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), _AT_ONCE):
        yield list(names[start : start + _AT_ONCE])
