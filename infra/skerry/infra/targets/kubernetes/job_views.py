"""Describes Jobs of Kubernetes, with the reason why they wait or ended, and reads the logs of their pods.

The reason why a job waits is in its conditions, in those of its pod, in the waiting reason of the container, or, if no
pod can be created, only in an event.
Sources: Kubernetes, "Pod Lifecycle", "Jobs"; words of a control plane 1.36.2 (tests/infra/targets/kubernetes).
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.handler_helpers import Absent
from skerry.infra.provision.target_and_store_interfaces import JobView, LogLine
from skerry.infra.targets.kubernetes import manifests, parse_observed_settings
from skerry.infra.targets.kubernetes.cluster import core_path, jobs_path
from skerry.infra.targets.shared.job_view_helpers import (
    AGAIN,
    EXIT_CODES,
    exit_text,
    joined,
    slot_of,
    unknown_job,
)
from skerry.runtime import contract
from skerry.runtime.contract import ExitCode, may_succeed_again
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.targets.kubernetes.cluster import Cluster

_JOB_NAME: Final = "batch.kubernetes.io/job-name"
_EXIT_CODES: Final = {**EXIT_CODES, int(ExitCode.RETRY): "an outside failure"}
_STATES: Final = {
    parse_observed_settings.COMPLETE: "done",
    parse_observed_settings.STOPPED: "stopped on request",
    parse_observed_settings.TERMINATING: "it is being stopped",
}
_FAILURES: Final = {
    "DeadlineExceeded": "its time limit was reached: max_runtime, or the limits of the run",
    "BackoffLimitExceeded": "all its attempts are used up",
    "PodFailurePolicy": "it is not started again after this exit code",
}
_WAITING: Final = {
    "ContainerCreating": "its image is being pulled",
    "PodInitializing": "its image is being pulled",
    "ErrImagePull": "its image could not be pulled: check that it exists, and `pull_secret`",
    "ImagePullBackOff": "its image could not be pulled: check that it exists, and `pull_secret`",
    "InvalidImageName": "its image has no valid name",
    "CreateContainerConfigError": "a Secret or an entry of it is missing: see `secret` and `secrets`",
    "CreateContainerError": "its container cannot be created",
}
# The meaning of a message of the scheduler or of an event, by a part of it; the first that matches counts.
_MESSAGES: Final = {
    "exceeded quota": "the quota of the namespace is used up",
    "error looking up service account": "its service account is missing: run `skerry apply`",
    "no PriorityClass": "its priority class does not exist: see `priority_class`",
    "Insufficient nvidia.com/gpu": "no node has that many free GPUs",
    "Insufficient": "no node has that much free CPU or memory",
    "didn't match Pod's node affinity/selector": "no node has the labels of `node_selector`",
    "untolerated taint": "the nodes have a taint that `tolerations` does not name",
    "persistentvolumeclaim": "its claim is missing or cannot be mounted",
}
_LOST_NODE: Final = (
    "its node is gone, and no other pod starts before the Node is deleted: delete it, or taint it "
    "node.kubernetes.io/out-of-service"
)


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The server's answers about a job. row: None without a record. pods: oldest first. event: the newest warning."""

    row: Mapping[str, Any] | None
    pods: Sequence[Mapping[str, Any]] = field(default_factory=tuple[Any, ...])
    event: str = ""


def views(cluster: Cluster, state_records: Sequence[StateRecord]) -> list[JobView]:
    """Return the views of these jobs, in their order. Two listings for each namespace, and one of events if needed."""
    facts: dict[tuple[str, str], JobFacts] = {}
    for place in {_place(record) for record in state_records}:
        facts |= _facts(cluster, *place)
    return [view(record, facts.get((record.region, record.name), JobFacts(row=None))) for record in state_records]


def view(state_record: StateRecord, facts: JobFacts) -> JobView:
    """Describe one job. Pure."""
    row = facts.row
    if row is None or state_record.outputs.get("uid") not in {None, "", parse_observed_settings.outputs(row)["uid"]}:
        text = f"Kubernetes has no record of it: it was stopped and deleted; {AGAIN}"
        return unknown_job(state_record, state_record.name, text)
    state, code = parse_observed_settings.state(row), _exit_code(facts.pods)
    live = [pod for pod in facts.pods if not _ended(pod)]
    started = _started_s(facts.pods)
    return JobView(
        slot=slot_of(state_record),
        job=state_record.name,
        state=state,
        condition=parse_observed_settings.condition(row),
        why=_why(row, state, facts, code),
        attempt=int(parse_observed_settings.status(row).get("failed") or 0)
        + (1 if live or state == parse_observed_settings.COMPLETE else 0),
        exit_code=code if parse_observed_settings.over(row) else None,
        started_s=started,
        ended_s=_ended_s(row) if parse_observed_settings.over(row) else None,
        again=_may_succeed_again(row, state, code),
        stopped=state in {parse_observed_settings.STOPPED, parse_observed_settings.TERMINATING},
        stopping=parse_observed_settings.over(row) and not parse_observed_settings.pods_over(row),
    )


def lines(cluster: Cluster, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
    """Return the log lines of a job's pods, oldest first, after `cursor` only. An evicted pod took its log with it.

    Raises Invalid if the job does not exist.
    """
    namespace = state_record.region
    query = {"labelSelector": f"{_JOB_NAME}={state_record.name}"}
    pods = _by_age(cluster.items(core_path(namespace, "pods"), query))
    if not pods:
        try:
            cluster.get(jobs_path(namespace, state_record.name))
        except Absent:
            raise Invalid(f"no logs of {state_record.name}: its job is deleted, and its logs with it") from None
    for pod in pods:
        for at, text in _log(cluster, namespace, str(pod["metadata"]["name"]), cursor):
            yield LogLine(slot=slot_of(state_record), at_s=_seconds(at) or 0.0, text=text, cursor=at)


def _log(cluster: Cluster, namespace: str, pod: str, cursor: str | None) -> Iterator[tuple[str, str]]:
    """The time and the text of each line of a pod, after the time `cursor`. None while its container waits."""
    query = {"timestamps": "true", "container": manifests.CONTAINER}
    if cursor is not None:
        query["sinceTime"] = f"{cursor.partition('.')[0]}Z"  # whole seconds only
    try:
        text = cluster.text(f"{core_path(namespace, 'pods', pod)}/log", query)
    except Invalid:
        return
    for line in filter(None, text.split("\n")):  # a line may have other breaks, such as those of a progress bar
        at, _, rest = line.partition(" ")
        # Nanoseconds come without their last zeros.
        time = f"{at.removesuffix('Z').partition('.')[0]}.{at.removesuffix('Z').partition('.')[2]:0<9}Z"
        if cursor is None or time > cursor:
            yield time, rest


def _place(state_record: StateRecord) -> tuple[str, str]:
    """The namespace and the label selector of a job. A job that was found by its tag has no settings."""
    environment = state_record.settings.get("environment")
    run = environment.get(contract.RUN_URI) if hasattr(environment, "get") else None  # type: ignore[union-attr]
    selector = manifests.selector(run) if isinstance(run, str) else manifests.ALL_RUNS
    return state_record.region, selector


def _facts(cluster: Cluster, namespace: str, selector: str) -> dict[tuple[str, str], JobFacts]:
    query = {"labelSelector": selector}
    rows = {str(row["metadata"]["name"]): row for row in cluster.items(jobs_path(namespace), query)}
    pods: dict[str, list[Mapping[str, Any]]] = {}
    for pod in _by_age(cluster.items(core_path(namespace, "pods"), query)):
        pods.setdefault(str(pod["metadata"]["labels"].get(_JOB_NAME)), []).append(pod)
    waiting = [
        name for name, row in rows.items() if not parse_observed_settings.over(row) and not _live(pods.get(name, ()))
    ]
    events: dict[str, str] = {}
    if waiting:
        warnings = cluster.items(core_path(namespace, "events"), {"fieldSelector": "type=Warning"})
        events = {str(event["involvedObject"]["name"]): str(event.get("message", "")) for event in warnings}
    return {
        (namespace, name): JobFacts(row=row, pods=tuple(pods.get(name, ())), event=events.get(name, ""))
        for name, row in rows.items()
    }


def _why(row: Mapping[str, Any], state: str, facts: JobFacts, code: int | None) -> str:
    if state in _STATES:
        return _STATES[state]
    if state == parse_observed_settings.FAILED:
        reason = parse_observed_settings.reason(row)
        meaning = _FAILURES.get(str(reason.get("reason")), "")
        return joined(_with(meaning, str(reason.get("message", ""))), exit_text(code, _EXIT_CODES))
    if state == parse_observed_settings.SUSPENDED:
        queue = row["metadata"].get("labels", {}).get(manifests.QUEUE_LABEL)
        if queue is None:
            return "it was suspended by hand; `kubectl` can set `suspend: false`"
        return f"waits until Kueue admits it from the queue {queue}"
    return joined(_why_live(facts), _previous_attempt(facts.pods))


def _why_live(facts: JobFacts) -> str:
    """Return the reason why a job that is not over does not run; the empty text if it does."""
    live = _live(facts.pods)
    if not live:
        if facts.event:
            return _meaning(facts.event)
        return "waits before its next attempt" if facts.pods else "its pod is being created"
    pod = live[-1]
    conditions = parse_observed_settings.conditions(pod)
    if pod["metadata"].get("deletionTimestamp"):
        lost = any(condition.get("reason") == "DeletionByTaintManager" for condition in conditions)
        return _LOST_NODE if lost else "its pod is being stopped, and another one follows"
    for condition in conditions:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _meaning(str(condition.get("message") or condition.get("reason", "")))
    for container in parse_observed_settings.status(pod).get("containerStatuses") or ():
        if waiting := container.get("state", {}).get("waiting"):
            return _with(
                _WAITING.get(str(waiting.get("reason")), str(waiting.get("reason"))), waiting.get("message", "")
            )
    return "" if parse_observed_settings.status(pod).get("phase") == "Running" else "waits for a node"


def _previous_attempt(pods: Sequence[Mapping[str, Any]]) -> str:
    """Return how the attempt before the current one ended."""
    ended = [pod for pod in pods if _ended(pod)]
    text = exit_text(_exit_code(ended), _EXIT_CODES)
    return f"attempt {len(ended)} ended: {text}" if text else ""


def _may_succeed_again(row: Mapping[str, Any], state: str, code: int | None) -> bool:
    """Return whether the job failed and another start may succeed. A stop and a time limit are not failures."""
    failed = (
        state == parse_observed_settings.FAILED
        and parse_observed_settings.reason(row).get("reason") == "BackoffLimitExceeded"
    )
    return failed and (code is None or may_succeed_again(code))


def _meaning(message: str) -> str:
    return _with(next((meaning for part, meaning in _MESSAGES.items() if part in message), ""), message)


def _with(meaning: str, message: str) -> str:
    """The meaning with the server's own words in parentheses."""
    return f"{meaning} ({message})" if meaning and message else meaning or message


def _live(pods: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [pod for pod in pods if not _ended(pod)]


def _ended(pod: Mapping[str, Any]) -> bool:
    return parse_observed_settings.status(pod).get("phase") in {"Succeeded", "Failed"}


def _by_age(pods: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    # Of the same second, the one that was started later has the higher version.
    return sorted(pods, key=lambda pod: (str(pod["metadata"]["creationTimestamp"]), str(pod["metadata"]["name"])))


def _exit_code(pods: Sequence[Mapping[str, Any]]) -> int | None:
    """The exit code of the newest pod that ended."""
    codes = [
        int(ended["exitCode"])
        for pod in pods
        for container in parse_observed_settings.status(pod).get("containerStatuses") or ()
        if (ended := container.get("state", {}).get("terminated")) is not None
    ]
    return codes[-1] if codes else None


def _started_s(pods: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the time at which the container of the newest pod began."""
    times = [
        state[kind].get("startedAt")
        for pod in pods
        for container in parse_observed_settings.status(pod).get("containerStatuses") or ()
        for state in (container.get("state", {}),)
        for kind in ("running", "terminated")
        if kind in state
    ]
    return _seconds(times[-1]) if times else None


def _ended_s(row: Mapping[str, Any]) -> float | None:
    return _seconds(
        parse_observed_settings.status(row).get("completionTime")
        or parse_observed_settings.reason(row).get("lastTransitionTime")
    )


def _seconds(time: object) -> float | None:
    return dt.datetime.fromisoformat(time).timestamp() if isinstance(time, str) and time else None
