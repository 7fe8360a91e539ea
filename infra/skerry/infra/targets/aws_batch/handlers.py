"""Makes machines and queues of AWS Batch, job definitions, and the machines' launch template.

Batch answers before it has done what it was asked: a create waits until the thing is valid, a delete until it is gone.
What is on has to be switched off first. Sources: Batch user guide, "Job queue state", "Delete a compute environment",
"INVALID compute environment"; IAM user guide, "Changes that I make are not always immediately visible".
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.aws.handling import found, owner_of, tags_in
from skerry.infra.clouds.handling import Absent, check_owner, differing, foreign, waited
from skerry.infra.handler import ADDRESS_TAG, RUN_TAG, Condition
from skerry.infra.targets.aws_batch import reading, requests
from skerry.infra.targets.aws_batch.resources import ComputeEnvironment, JobDefinition, LaunchTemplate, Queue
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Conflict, Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.graph import Resource
    from skerry.infra.handler import Made, Seen, Wanted
    from skerry.infra.targets.aws_batch.requests import Tree

# Machines and queues are valid within two minutes, as a rule.
_VALID_S: Final = 600.0
# A compute environment goes only after its machines have gone: some ten minutes.
_GONE_S: Final = 1800.0
# A role that was just made is known everywhere within seconds; after so long it is something else.
_KNOWN_S: Final = 120.0
_AGAIN: Final = Backoff(first=5.0, cap=20.0)
# How Batch tells of a role or a profile that it cannot use.
_OF_A_ROLE: Final = re.compile(r"authorized|AssumeRole|instance ?profile", re.IGNORECASE)
# Batch describes so many in one call.
_AT_ONCE: Final = 100
_CHANGING: Final = ("CREATING", "UPDATING")
_REMEDY: Final = "if it is yours, name it under `byo:` of the target, else rename the run"


class _Validated(ABC):
    """What environments and queues have in common: a name, a state, a validation of their own. See Handler."""

    KIND: ClassVar[type[Resource]]
    WHAT: ClassVar[str]
    """As people call it."""
    NOUN: ClassVar[str]
    """As operations call it: job_queue."""
    FIELD: ClassVar[str]
    """As fields call it: jobQueue."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. A hundred in one call."""
        known = {region: self._rows(region, names) for region, names in _by_region(wanted).items()}
        rows = [known[one.resource.region].get(one.name) for one in wanted]
        pairs = zip(wanted, rows, strict=True)
        return [None if row is None else self._seen(row, one.resource.region) for one, row in pairs]

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create. What can change of one that is there already is changed."""
        region = wanted.resource.region
        row = self._row(region, wanted.name)
        if row is None:
            try:
                self._call(region, "create", self._request(wanted))
            except Invalid:
                # An answer that was lost, and boto3's own second try: it is there by now.
                if self._row(region, wanted.name) is None:
                    raise
            return self._usable(wanted)
        outputs = self._usable(wanted)
        changed = differing(wanted, self._seen(row, region)) - type(wanted.resource).FIXED
        return self.update(wanted, changed) if changed else outputs

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. All that can change is said at once."""
        del changed
        # Batch takes no change while it carries out another.
        self._at_rest(wanted.resource.region, wanted.name, self._aws.clock.now() + _VALID_S)
        self._call(wanted.resource.region, "update", self._changes(wanted))
        return self._settled(wanted)

    def delete(self, made: Made) -> None:
        """See Handler.delete. Switched off, waited for, deleted, waited for."""
        deadline = self._aws.clock.now() + _GONE_S
        row = self._at_rest(made.region, made.name, deadline)
        if row is not None and row.get("status") != "DELETING":
            _check_address(row.get("tags", {}), made, self.WHAT)
            if row.get("state") != "DISABLED":
                self._call(made.region, "update", {self.FIELD: made.name, "state": "DISABLED"})
            waited(self._aws.clock, f"the {self.WHAT} {made.name} is off", deadline, lambda: self._deleting(made))
        what = f"the {self.WHAT} {made.name} is gone"
        waited(self._aws.clock, what, deadline, lambda: True if self._row(made.region, made.name) is None else None)

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned."""
        for region in sorted(regions):
            for row in self._aws.pages("batch", region, f"describe_{self.NOUN}s", f"{self.FIELD}s"):
                tags: Mapping[str, str] = row.get("tags", {})
                if owner_of(tags) == run and row.get("status") != "DELETED":
                    outputs = self._seen(row, region).outputs
                    yield found(self.KIND, name=outputs["name"], region=region, tags=tags, outputs=outputs)

    @abstractmethod
    def _seen(self, row: Mapping[str, Any], region: str) -> Seen: ...

    @abstractmethod
    def _request(self, wanted: Wanted) -> Tree: ...

    @abstractmethod
    def _changes(self, wanted: Wanted) -> Tree: ...

    def _usable(self, wanted: Wanted) -> Mapping[str, str]:
        """As `_settled`, of what was just made."""
        return self._settled(wanted)

    def _settled(self, wanted: Wanted) -> Mapping[str, str]:
        """Its outputs, once Batch has found it valid. Raises Conflict if it is not ours, Invalid if it is not valid."""
        region, name = wanted.resource.region, wanted.name

        def ask() -> Mapping[str, Any] | None:
            row = self._row(region, name)
            return None if row is None or row.get("status") in _CHANGING else row

        deadline = self._aws.clock.now() + _VALID_S
        row = waited(self._aws.clock, f"the {self.WHAT} {name} is valid", deadline, ask)
        seen = self._seen(row, region)
        check_owner(seen, wanted, self.WHAT, _REMEDY)
        if seen.condition is Condition.BROKEN:
            raise Invalid(f"AWS Batch cannot use the {self.WHAT} {name}: {seen.detail}; mend it, and apply again")
        return seen.outputs

    def _at_rest(self, region: str, name: str, deadline: float) -> Mapping[str, Any] | None:
        """What there is, once Batch is neither making nor changing it; None if there is nothing."""

        def ask() -> tuple[Mapping[str, Any] | None] | None:
            row = self._row(region, name)
            return None if row is not None and row.get("status") in _CHANGING else (row,)

        return waited(self._aws.clock, f"the {self.WHAT} {name} is at rest", deadline, ask)[0]

    def _deleting(self, made: Made) -> bool | None:
        """Whether Batch has taken the deletion on, or there is nothing to delete; None to ask again."""
        row = self._row(made.region, made.name)
        if row is None or row.get("status") == "DELETING":
            return True
        if row.get("state") != "DISABLED" or row.get("status") in _CHANGING:
            return None
        try:
            self._call(made.region, "delete", {self.FIELD: made.name})
        except (Invalid, Conflict) as error:
            # A queue that is gone is remembered for a while by the environments it had.
            if "relationship" in str(error) or "being modified" in str(error):
                return None
            raise
        return True

    def _row(self, region: str, name: str) -> Mapping[str, Any] | None:
        return self._rows(region, [name]).get(name)

    def _rows(self, region: str, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        rows: dict[str, Mapping[str, Any]] = {}
        for some in _hundreds(names):
            told = self._aws.call("batch", region, f"describe_{self.NOUN}s", **{f"{self.FIELD}s": some})
            for row in told[f"{self.FIELD}s"]:
                if row.get("status") != "DELETED":
                    rows[str(row[f"{self.FIELD}Name"])] = row
        return rows

    def _call(self, region: str, verb: str, tree: Tree) -> None:
        self._aws.call("batch", region, f"{verb}_{self.NOUN}", **requests.ready(tree))


class ComputeEnvironments(_Validated):
    """Machines that come and go with the jobs."""

    KIND = ComputeEnvironment
    WHAT = "compute environment"
    NOUN = "compute_environment"
    FIELD = "computeEnvironment"

    def _usable(self, wanted: Wanted) -> Mapping[str, str]:
        """As `_settled`, and patient: Batch looks once at roles that IAM may not know everywhere yet.

        An update makes it look again.
        """
        clock = self._aws.clock
        deadline = clock.now() + _KNOWN_S
        for number in itertools.count():
            try:
                return self._settled(wanted)
            except Invalid as error:
                if clock.now() >= deadline or not _OF_A_ROLE.search(str(error)):
                    raise
            clock.pause(_AGAIN.delay(number, clock))
            self._call(wanted.resource.region, "update", self._changes(wanted))
        raise AssertionError("unreachable")

    def _seen(self, row: Mapping[str, Any], region: str) -> Seen:
        return reading.compute_environment(row, region)

    def _request(self, wanted: Wanted) -> Tree:
        return requests.compute_environment(wanted)

    def _changes(self, wanted: Wanted) -> Tree:
        return requests.changed_environment(wanted)


class Queues(_Validated):
    """Where jobs wait."""

    KIND = Queue
    WHAT = "job queue"
    NOUN = "job_queue"
    FIELD = "jobQueue"

    def _seen(self, row: Mapping[str, Any], region: str) -> Seen:
        return reading.queue(row, region)

    def _request(self, wanted: Wanted) -> Tree:
        return requests.queue(wanted)

    def _changes(self, wanted: Wanted) -> Tree:
        return requests.changed_queue(wanted)


class JobDefinitions:
    """What jobs run. A name has revisions; those that are not active are as good as gone. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. Those whose ARN is known in hundreds, others one by one."""
        rows: dict[str, Mapping[str, Any]] = {}
        known = [one for one in wanted if one.outputs.get("arn")]
        for region, some in _grouped(known):
            for arns in _hundreds([one.outputs["arn"] for one in some]):
                told = self._aws.call("batch", region, "describe_job_definitions", jobDefinitions=arns)
                rows |= {str(row["jobDefinitionArn"]): row for row in told["jobDefinitions"]}
        return [self._found(one, rows.get(one.outputs.get("arn", ""))) for one in wanted]

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create. A repeat would make another revision, so what is there is taken."""
        there = self._there(wanted)
        if there is not None:
            return there
        request = requests.ready(requests.job_definition(wanted))
        try:
            told = self._aws.call_once("batch", wanted.resource.region, "register_job_definition", **request)
        except Retryable:
            if (there := self._there(wanted)) is None:
                raise
            return there
        return {"name": str(told["jobDefinitionName"]), "arn": str(told["jobDefinitionArn"])}

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Every setting of a definition is fixed."""
        raise Invalid(f"a job definition cannot change: {wanted.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, made: Made) -> None:
        """See Handler.delete. Every revision of the name goes that is not somebody else's."""
        for row in list(self._active(made.region, made.name)):
            if row.get("tags", {}).get(ADDRESS_TAG) == made.address:
                arn = str(row["jobDefinitionArn"])
                self._aws.call("batch", made.region, "deregister_job_definition", jobDefinition=arn)

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned."""
        for region in sorted(regions):
            named: dict[str, Made] = {}
            rows = self._aws.pages("batch", region, "describe_job_definitions", "jobDefinitions", status="ACTIVE")
            for row in rows:
                tags: Mapping[str, str] = row.get("tags", {})
                if owner_of(tags) == run:
                    outputs = reading.job_definition(row, region).outputs
                    name = outputs["name"]
                    named[name] = found(JobDefinition, name=name, region=region, tags=tags, outputs=outputs)
            yield from named.values()

    def _there(self, wanted: Wanted) -> Mapping[str, str] | None:
        """The outputs of what is registered under the name. Raises Conflict if it is not ours."""
        row = self._newest(wanted.resource.region, wanted.name)
        if row is None:
            return None
        seen = reading.job_definition(row, wanted.resource.region)
        check_owner(seen, wanted, "job definition", _REMEDY)
        return seen.outputs

    def _found(self, wanted: Wanted, row: Mapping[str, Any] | None) -> Seen | None:
        if row is None and not wanted.outputs.get("arn"):
            row = self._newest(wanted.resource.region, wanted.name)
        if row is None or row.get("status") == "INACTIVE":
            return None
        return reading.job_definition(row, wanted.resource.region)

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
    """How machines start. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read. The user's own are named by id, ours by name."""
        return [self._read(one.resource.region, one.name) for one in wanted]

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create."""
        seen = self._read(wanted.resource.region, wanted.name)
        if seen is None:
            try:
                request = requests.ready(requests.launch_template(wanted))
                self._aws.call("ec2", wanted.resource.region, "create_launch_template", **request)
            except Conflict:  # an answer that was lost, and boto3's own second try
                pass
            deadline = self._aws.clock.now() + _VALID_S
            what = f"the launch template {wanted.name} can be seen"
            seen = waited(self._aws.clock, what, deadline, lambda: self._read(wanted.resource.region, wanted.name))
        check_owner(seen, wanted, "launch template", _REMEDY)
        return seen.outputs

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. Every setting of a template is fixed."""
        raise Invalid(f"a launch template cannot change: {wanted.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, made: Made) -> None:
        """See Handler.delete."""
        try:
            rows = self._rows(made.region, made.name)
            _check_address(tags_in(rows[0].get("Tags", [])), made, "launch template")
            self._aws.call("ec2", made.region, "delete_launch_template", LaunchTemplateName=made.name)
        except Absent:
            return

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned."""
        ours = [{"Name": f"tag:{RUN_TAG}", "Values": [run]}]
        for region in sorted(regions):
            rows = self._aws.pages("ec2", region, "describe_launch_templates", "LaunchTemplates", Filters=ours)
            for row in rows:
                outputs = {"id": str(row["LaunchTemplateId"]), "name": str(row["LaunchTemplateName"])}
                tags = tags_in(row.get("Tags", []))
                yield found(LaunchTemplate, name=outputs["name"], region=region, tags=tags, outputs=outputs)

    def _read(self, region: str, name: str) -> Seen | None:
        try:
            [row] = self._rows(region, name)
            told = self._aws.call(
                "ec2",
                region,
                "describe_launch_template_versions",
                LaunchTemplateId=row["LaunchTemplateId"],
                Versions=["$Default"],
            )
        except Absent:
            return None
        return reading.launch_template(row, told["LaunchTemplateVersions"][0], region)

    def _rows(self, region: str, name: str) -> list[Mapping[str, Any]]:
        """The one of this name, or of this id. Raises Absent if there is none."""
        named = {"LaunchTemplateIds": [name]} if name.startswith("lt-") else {"LaunchTemplateNames": [name]}
        rows: list[Mapping[str, Any]] = self._aws.call("ec2", region, "describe_launch_templates", **named)[
            "LaunchTemplates"
        ]
        return rows


def _check_address(tags: Mapping[str, str], made: Made, what: str) -> None:
    """Raises Conflict if it has our name and is not what we made: it came after ours had gone, or instead of it."""
    if tags.get(ADDRESS_TAG) != made.address:
        raise foreign(what, made.name, owner_of(tags), "delete it yourself if it is not needed")


def _by_region(wanted: Sequence[Wanted]) -> dict[str, list[str]]:
    return {region: [one.name for one in some] for region, some in _grouped(wanted)}


def _grouped(wanted: Sequence[Wanted]) -> Iterator[tuple[str, list[Wanted]]]:
    def region(one: Wanted) -> str:
        return one.resource.region

    for name, some in groupby(sorted(wanted, key=region), key=region):
        yield name, list(some)


def _hundreds(names: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), _AT_ONCE):
        yield list(names[start : start + _AT_ONCE])
