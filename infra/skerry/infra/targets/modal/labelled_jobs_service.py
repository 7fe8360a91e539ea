"""Sandboxes of Modal as `labelled_jobs` handles them, and the handler of Apps.

The name of a live sandbox is unique in its App, so Modal itself runs one sandbox of a slot at a time. An ended sandbox
is in no listing, and its id finds it. Exit code 124 is the time limit; 137 is a termination, a preemption or a kill.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.handler_helpers import Absent, each, tagged_record
from skerry.infra.provision.handler import Condition, Observed
from skerry.infra.provision.target_and_store_interfaces import stem_of
from skerry.infra.targets.modal.resource_graph import app_key
from skerry.infra.targets.modal.resource_types import App
from skerry.infra.targets.shared.job_view_helpers import AGAIN
from skerry.infra.targets.shared.labelled_jobs import LabelledJob, labels
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.runtime.errors import Conflict, Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.handler_helpers import Event
    from skerry.infra.provision.handler import Desired, StateRecord
    from skerry.infra.targets.modal.modal_client import ModalWorkspace
    from skerry.runtime.clock import Clock

STOPPED: Final = "skerry-stopped"
"""The tag of a sandbox that was stopped on request: its exit code does not show it."""
_LATE: Final = 124
_KILLED: Final = 137


class ModalSandboxes:
    """See JobService. A region is an environment."""

    def __init__(self, workspace: ModalWorkspace) -> None:
        self._workspace = workspace

    @property
    def title(self) -> str:
        """See JobService."""
        return "Modal"

    @property
    def clock(self) -> Clock:
        """See JobService."""
        return self._workspace.clock

    def listed(self, region: str, run: str) -> Iterable[LabelledJob]:
        """See JobService. Live ones only."""
        return [parse(*row) for row in self._workspace.sandboxes(stem_of(run), region)]

    def described(self, region: str, job: str) -> LabelledJob | None:
        """See JobService."""
        del region
        try:
            return parse(job, *self._workspace.sandbox(job))
        except Absent:
            return None

    def submit(self, desired: Desired) -> str:
        """See JobService."""
        tags = {name: value for name, value in labels(desired).items() if value}  # Modal takes no empty one
        try:
            return self._workspace.create(ready(dict(desired.settings)), desired.resource.name, tags)
        except Conflict as error:  # the SDK repeated a call whose answer was lost, or another sandbox has the slot
            raise Retryable(str(error)) from error

    def stop(self, region: str, job: str) -> None:
        """See JobService."""
        row = self.described(region, job)
        if row is None:
            raise Absent(f"no sandbox {job}")
        if row.live:
            self._workspace.stop(job, STOPPED)

    def events(self, region: str, job: str) -> Iterator[Event]:
        """See JobService."""
        del region
        return self._workspace.events(job)


def parse(sandbox: str, code: int | None, tags: Mapping[str, str]) -> LabelledJob:
    """Describe a sandbox by its exit code and its tags. Pure."""
    stopped = code is not None and tags.get(STOPPED) == "true"
    state, why = "LIVE", "waits or runs; Modal does not show which"
    condition, exit_code = Condition.READY, None
    if stopped:
        state, condition, why = "TERMINATED", Condition.LOST, f"it was stopped; {AGAIN}"
    elif code == 0:
        state, condition, why = "DONE", Condition.DONE, ""
    elif code == _LATE:
        state, condition = "TIMEOUT", Condition.LOST
        why = f"its time limit was reached: max_runtime, or Modal's 24 hours; {AGAIN}"
    elif code is not None:
        state, condition, exit_code = "FAILED", Condition.LOST, code
        why = "terminated, preempted or killed" if code == _KILLED else ""
    return LabelledJob(
        id=sandbox,
        labels=tags,
        state=state,
        condition=condition,
        why=why,
        exit_code=exit_code,
        passing=state == "TIMEOUT",
        stopped=stopped,
    )


class Apps:
    """See Handler. The App of a run is found by its name, which holds a digest of the run."""

    def __init__(self, workspace: ModalWorkspace) -> None:
        self._workspace = workspace

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        app = self._workspace.app(desired.name, desired.resource.region, create=True)
        return {"id": str(app.app_id)}

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. An App has no settings."""
        raise Invalid(f"an App cannot change: {desired.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete."""
        with suppress(Absent):
            self._workspace.stop_app(state_record.name, state_record.region)

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned."""
        name = stem_of(run)
        for region in sorted(regions):
            with suppress(Absent):
                outputs = {"id": str(self._workspace.app(name, region).app_id)}
                address = f"{App.KIND}.{app_key(region)}"
                yield tagged_record(App, address=address, name=name, generation="0", region=region, outputs=outputs)

    def _read(self, desired: Desired) -> Observed | None:
        try:
            app = self._workspace.app(desired.name, desired.resource.region)
        except Absent:
            return None
        return Observed(
            outputs={"id": str(app.app_id)}, settings={"region": desired.resource.region}, owner=desired.run
        )
