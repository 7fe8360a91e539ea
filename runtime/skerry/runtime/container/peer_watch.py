"""Watches the heartbeats of this replica's group beside the training script, and starts lost jobs again.

Of a group the lowest live slot looks after the silent ones. A look is one listing; only for a silent slot the service
of the jobs is asked. Whatever fails here is logged and tried again later, and never ends or delays the training.
"""

from __future__ import annotations

import datetime as dt
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.clock import Backoff
from skerry.runtime.container.choose_jobs_to_restart import Leave, decide, slots_to_look_at
from skerry.runtime.container.sagemaker_peer_jobs import SageMakerPeerJobs
from skerry.runtime.container.vertex_peer_jobs import VertexPeerJobs
from skerry.runtime.errors import Conflict, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.run_record import is_over
from skerry.runtime.log.setting_changes import RunSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.container.choose_jobs_to_restart import PeerJob, PeerJobs
    from skerry.runtime.container.identify_replica import Job, ReplicaSettings
    from skerry.runtime.contract import Revival
    from skerry.runtime.log.log import RunLog

# A replica writes its heartbeat every few seconds; the listing costs a request.
_LONGEST_LOOK_S: Final = 60.0
_LOOKS: Final = 3
# A slot that was looked at is left for so many times `after_s`: a new job needs minutes to start.
_LEAVES: Final = 2.0
# After a refusal or an outage; a quota or a right is not changed within a minute.
_RETRY: Final = Backoff(first=60.0, cap=1800.0)


@dataclass
class _Beat:
    """The last change of a heartbeat. stamp: its time and size in the listing. at: by this process's clock."""

    stamp: tuple[float, int] | None
    at: float


class PeerWatch:
    """The watch of one start of a replica. Not thread-safe but for `start` and `stop`."""

    def __init__(self, jobs: PeerJobs, revival: Revival, slot: str, group: str, log: RunLog, clock: Clock) -> None:
        """slot: of this replica. log: of the run, for the watch alone."""
        self._jobs, self._revival, self._slot, self._group = jobs, revival, slot, group
        self._log, self._run, self._clock = log, log.run, clock
        self._settings, self._closed = RunSettings(log), 0
        self._beats: dict[str, _Beat] = {}
        self._left_until: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._logged: dict[str, str] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        """Look while the script runs."""
        threading.Thread(target=self.run, name="peer-watch", daemon=True).start()

    def run(self) -> None:
        """Look until `stop`."""
        while not self._stopped.is_set():
            pause_s = min(_LONGEST_LOOK_S, self._revival.after_s / _LOOKS)
            try:
                self.look()
                self._failures.pop("", None)
            except Exception as error:  # noqa: BLE001  a thread's entry: the training goes on whatever fails here
                pause_s = self._failed("", error)
            self._clock.pause(pause_s, self._stopped)

    def stop(self) -> None:
        """The script has ended. A request that was sent is not waited for."""
        self._stopped.set()

    def look(self) -> None:
        """Read the heartbeats once, and start what is lost. Raises what the store raises, and for a failed listing."""
        silent = self._read_silent()
        if not silent:
            return
        self._settings.read()
        mine = [slot for slot in self._settings.slots or self._run.slots if self._is_of_group(slot)]
        now = self._clock.now()
        due = [slot for slot in slots_to_look_at(self._slot, silent, mine) if self._left_until.get(slot, now) <= now]
        if not due or self._is_run_over():
            return
        jobs = self._jobs.list()
        for slot in due:
            try:
                self._consider(slot, [job for job in jobs if job.slot == slot])
                self._failures.pop(slot, None)
                pause_s = _LEAVES * self._revival.after_s
            except Exception as error:  # noqa: BLE001  whatever is wrong with one job must not delay the others
                pause_s = self._failed(slot, error)
            self._left_until[slot] = now + pause_s

    def _consider(self, slot: str, jobs: Sequence[PeerJob]) -> None:
        now_s = dt.datetime.fromisoformat(self._clock.utc_text()).timestamp()
        decision = decide(jobs, self._jobs.read_loss, now_s, self._revival)
        if isinstance(decision, Leave):
            self._tell(slot, f"{slot} is silent: {decision.reason}")
            return
        if self._stopped.is_set():
            return
        why = f"{slot} is silent: its job {decision.job.key} failed ({decision.loss.reason})"
        try:
            name = self._jobs.start_next(decision)
        except Conflict:
            self._tell(slot, f"{why}; it has been started again already")
        else:
            self._tell(slot, f"{why}; started {name}")

    def _read_silent(self) -> set[str]:
        """The slots of the group whose heartbeat has not changed for `after_s` since it was first looked for."""
        now = self._clock.now()
        stamps: dict[str, tuple[float, int]] = {}
        for entry in self._log.store.list(keys.HEARTBEATS):
            try:
                stamps[keys.slot_of(entry.key)] = entry.modified, entry.size
            except Invalid:  # a foreign object
                continue
        known = {*stamps, *self._beats, *self._run.slots, *(self._settings.slots or ())}
        for slot in filter(self._is_of_group, known):
            stamp, beat = stamps.get(slot), self._beats.get(slot)
            if beat is None or beat.stamp != stamp:
                self._beats[slot] = _Beat(stamp=stamp, at=now)
        return {slot for slot, beat in self._beats.items() if now - beat.at >= self._revival.after_s}

    def _is_run_over(self) -> bool:
        """True if the run needs no replica any more, while the script of this one still goes on."""
        self._closed = self._log.find_head(self._closed)
        last = self._log.read_last_commit(self._closed)
        return last is not None and is_over(*self._settings.end, self._closed, last.record.work)

    def _is_of_group(self, slot: str) -> bool:
        group, _, number = slot.rpartition("-")
        return group == self._group and number.isdecimal()

    def _failed(self, slot: str, error: Exception) -> float:
        """Log a failure once, and return the pause before the next try. slot: empty for the look itself."""
        attempt = self._failures.get(slot, 0)
        self._failures[slot] = attempt + 1
        whose = f"{slot} cannot be started again yet" if slot else "the other replicas cannot be looked after yet"
        self._tell(slot, f"warning: {whose}: {type(error).__name__}: {error}; the training goes on")
        return _RETRY.delay(attempt, self._clock)

    def _tell(self, slot: str, line: str) -> None:
        if self._logged.get(slot) != line:
            self._logged[slot] = line
            _log_line(line)


def watch_peers(
    settings: ReplicaSettings,
    job: Job,
    slot: str,
    environment: Mapping[str, str],
    log: RunLog,
    clock: Clock,
) -> tuple[PeerWatch | None, str | None]:
    """The watch of this replica's group, and the reason for which this job itself must not run; None without either.

    Raises nothing: a job that cannot look after others trains all the same.
    """
    if settings.revival is None:
        return None, None
    try:
        jobs = _open_peer_jobs(settings, job, environment, clock)
        watch = PeerWatch(jobs, settings.revival, slot, slot.rpartition("-")[0], log, clock)
    except Invalid as error:
        _log_line(f"warning: revive: peers has no effect: {error}")
        return None, None
    try:
        return watch, jobs.superfluous()
    except Exception as error:  # noqa: BLE001  whatever a service answers, the job trains
        _log_line(f"warning: whether this job was cancelled is not known: {type(error).__name__}: {error}")
        return watch, None


def _open_peer_jobs(settings: ReplicaSettings, job: Job, environment: Mapping[str, str], clock: Clock) -> PeerJobs:
    """The jobs of this job's group. Raises Invalid if it is none of SageMaker or Vertex AI by `skerry apply`."""
    region = None if settings.place is None else settings.place.region
    match job.platform:
        case "sagemaker" if settings.group is not None:
            return SageMakerPeerJobs(job.facts.get("TRAINING_JOB_ARN", ""), settings.group, environment, clock)
        case "vertex" if region is not None and {"CLOUD_ML_PROJECT_ID", "CLOUD_ML_JOB_ID"} <= job.facts.keys():
            place = f"projects/{job.facts['CLOUD_ML_PROJECT_ID']}/locations/{region}"
            return VertexPeerJobs(place, job.facts["CLOUD_ML_JOB_ID"], environment)
        case _:
            raise Invalid(f"it is for jobs of SageMaker and Vertex AI by `skerry apply`, and this is {job}")


def _log_line(line: str) -> None:
    """Write one line of the watch to stderr, where the script's output also goes.

    Parts of it are another replica's words: they may contain line breaks, and what a terminal takes for commands.
    """
    text = "".join(character if character.isprintable() else "?" for character in line)
    sys.stderr.write(f"skerry-replica: revive: {text}\n")
    sys.stderr.flush()
