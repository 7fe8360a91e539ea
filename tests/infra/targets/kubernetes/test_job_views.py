from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.targets.kubernetes.kit import NAMESPACE, Scene, context_of

from skerry.infra.provision.handler import Condition
from skerry.infra.targets.kubernetes import job_views
from skerry.infra.targets.kubernetes.cluster import core_path, jobs_path
from skerry.infra.targets.kubernetes.job_views import JobFacts, lines, views
from skerry.infra.targets.kubernetes.jobs import Jobs, stop
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.infra.provision.target_and_store_interfaces import JobView
    from skerry.infra.targets.kubernetes.cluster import Cluster
    from skerry.testing.kubernetes import KubernetesSandbox


def view_of(cluster: Cluster, scene: Scene, number: int = 0) -> JobView:
    return views(cluster, scene.records)[number]


def shown(view: JobView) -> str:
    code = "" if view.exit_code is None else f", exit code {view.exit_code}"
    again = ", may succeed again" if view.again else ""
    # Names of pods end in five characters of the server's.
    return re.sub(r"-[0-9a-f]{5}\b", "-POD", f"{view.state}, {view.condition.value}{code}{again}: {view.why}")


SERVER = "train/skerry-tiny-f94f0f-cluster-0-POD"


@pytest.mark.parametrize(
    ("code", "times", "expected"),
    [
        (0, 1, "COMPLETE, done, exit code 0: done"),
        (
            20,
            1,
            (
                "FAILED, lost, exit code 20: it is not started again after this exit code (Container replica for pod "
                f"{SERVER} failed with exit code 20 matching FailJob rule at index 0); exit code 20: the options, the "
                "code or the rights are wrong; see its logs"
            ),
        ),
        (
            10,
            4,
            (
                "FAILED, lost, exit code 10, may succeed again: all its attempts are used up (Job has reached the "
                "specified backoff limit); exit code 10: an outside failure"
            ),
        ),
    ],
)
def test_ended_job_shows_its_exit_code_and_the_words_of_the_server(
    cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene, code: int, times: int, expected: str
) -> None:
    for _ in range(times):
        sandbox.jobs.finish(scene.names[0], code)
    view = view_of(cluster, scene)
    assert shown(view) == expected
    assert (view.slot, view.job, view.attempt) == ("cluster-0", scene.names[0], times)
    assert view.ended_s is not None
    assert view.started_s is not None


def test_running_job_shows_its_attempt_and_how_the_one_before_ended(
    cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene
) -> None:
    assert shown(view_of(cluster, scene)) == "PENDING, ready: its image is being pulled"
    sandbox.jobs.start(scene.names[0])
    view = view_of(cluster, scene)
    assert (shown(view), view.attempt, view.exit_code) == ("RUNNING, ready: ", 1, None)
    sandbox.jobs.finish(scene.names[0], 137)
    sandbox.jobs.start(scene.names[0])
    view = view_of(cluster, scene)
    assert (view.state, view.attempt) == ("RUNNING", 2)
    assert view.why == "attempt 1 ended: exit code 137: killed, often because memory was short"


def take_account(cluster: Cluster, scene: Scene) -> None:
    cluster.delete(core_path(NAMESPACE, "serviceaccounts", scene.names[0]))


def lose_node(sandbox: Any, scene: Scene) -> None:
    sandbox.add("nodes", {"metadata": {"name": "node-2"}, "status": {}}, "")
    sandbox.jobs.lose_node(scene.names[0])


def waiting(reason: str) -> Callable[[Any, Scene], None]:
    return lambda sandbox, scene: sandbox.jobs.wait_for(scene.names[0], reason)


@pytest.mark.parametrize(
    ("target", "act", "expected"),
    [
        (
            "gpus: 9",
            None,
            "no node has that many free GPUs (0/1 nodes are available: 1 Insufficient nvidia.com/gpu. no new claims",
        ),
        (
            "node_selector: {gpu: h100}",
            None,
            "no node has the labels of `node_selector` (0/1 nodes are available: 1 node(s) didn't match",
        ),
        (
            "secret: absent",
            None,
            'a Secret or an entry of it is missing: see `secret` and `secrets` (secrets "absent" not found)',
        ),
        (
            "secrets",
            None,
            "a Secret or an entry of it is missing: see `secret` and `secrets` (couldn't find key token in Secret",
        ),
        (
            "claim: {name: absent, path: /shared}",
            None,
            'its claim is missing or cannot be mounted (0/1 nodes are available: persistentvolumeclaim "absent"',
        ),
        (
            "",
            waiting('ImagePullBackOff: Back-off pulling image "x"'),
            'its image could not be pulled: check that it exists, and `pull_secret` (Back-off pulling image "x")',
        ),
        (
            "",
            lose_node,
            "its node is gone, and no other pod starts before the Node is deleted: delete it, or taint it",
        ),
    ],
    ids=["gpus", "labels", "secret", "entry", "claim", "image", "node"],
)
def test_pending_job_shows_why_it_waits(
    cluster: Cluster, sandbox: KubernetesSandbox, tmp_path: Path, target: str, act: Any, expected: str
) -> None:
    more = "secrets: {HF_TOKEN: {kubernetes_secret: store-keys, key: token}}\n" if target == "secrets" else ""
    store = "file:///shared/runs" if "claim" in target else "s3://acme/runs"
    context = context_of(tmp_path, "" if more else target, store=store, more=more)
    scene = Scene(cluster, context)
    if act is not None:
        act(sandbox, scene)
    view = view_of(cluster, scene)
    assert (view.state, view.condition) == ("PENDING", Condition.READY)
    assert view.why.startswith(expected)


def test_reason_why_no_pod_is_made_is_read_from_the_events(
    cluster: Cluster, sandbox: KubernetesSandbox, tmp_path: Path
) -> None:
    sandbox.add("resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": {"requests.nvidia.com/gpu": "1"}}})
    scene = Scene(cluster, context_of(tmp_path, "gpus: 2"))
    text = view_of(cluster, scene).why
    assert text.startswith("the quota of the namespace is used up (Error creating: pods ")
    assert "exceeded quota: q, requested: requests.nvidia.com/gpu=2" in text


def test_missing_account_is_named(cluster: Cluster, scene: Scene) -> None:
    Jobs(cluster).delete(scene.records[0])
    take_account(cluster, scene)
    Jobs(cluster).create(scene.jobs[0])
    anew = replace(scene.records[0], outputs={})
    assert views(cluster, [anew])[0].why.startswith(
        "its service account is missing: run `skerry apply` (Error creating"
    )


def test_suspended_job_names_the_queue_of_kueue(cluster: Cluster, sandbox: KubernetesSandbox, tmp_path: Path) -> None:
    del sandbox
    scene = Scene(cluster, context_of(tmp_path, "queue: research"))
    cluster.patch(jobs_path(NAMESPACE, scene.names[0]), {"spec": {"suspend": True}})
    assert shown(view_of(cluster, scene)) == "SUSPENDED, ready: waits until Kueue admits it from the queue research"
    plain = Scene(cluster, context_of(tmp_path))
    cluster.patch(jobs_path(NAMESPACE, plain.names[0]), {"spec": {"suspend": True}})
    assert (
        "it was suspended by hand; `kubectl` can set" in views(cluster, [replace(plain.records[0], outputs={})])[0].why
    )


def test_stopped_evicted_and_deleted_jobs_are_distinguished(
    cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene
) -> None:
    sandbox.jobs.start(scene.names[0])
    sandbox.jobs.interrupt(scene.names[0])
    view = view_of(cluster, scene)
    assert (view.state, view.attempt) == ("PENDING", 1)
    stop(cluster, NAMESPACE, scene.names[0])
    stopped = view_of(cluster, scene)
    assert shown(stopped) == "STOPPED, lost: stopped on request"
    assert (stopped.stopped, stopped.stopping) == (True, False)
    row = cluster.get(jobs_path(NAMESPACE, scene.names[0]))
    row["status"]["terminating"] = 1
    assert job_views.view(scene.records[0], JobFacts(row=row)).stopping
    Jobs(cluster).delete(scene.records[0])
    gone = view_of(cluster, scene)
    assert (gone.state, gone.condition, gone.again) == ("UNKNOWN", Condition.LOST, False)
    assert "Kubernetes has no record of it" in gone.why


def test_job_past_its_time_limit_shows_it(cluster: Cluster, scene: Scene) -> None:
    cluster.patch(jobs_path(NAMESPACE, scene.names[0]), {"spec": {"activeDeadlineSeconds": 0}})
    view = view_of(cluster, scene)
    assert view.why.startswith(
        "its time limit was reached: max_runtime, or the limits of the run (Job was active longer"
    )
    assert not view.again


def test_views_of_many_jobs_cost_two_listings(cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene) -> None:
    sandbox.calls.clear()
    assert len(views(cluster, scene.records)) == 2
    assert [call.operation for call in sandbox.calls] == ["list jobs", "list pods"]


@pytest.mark.parametrize("between", ["\r", "\r\x1b[K", "\f", "\x85", "\u2028"])
def test_line_of_a_log_ends_at_its_newline_only(
    cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene, between: str
) -> None:
    for text in (f"10%{between}20%", "next"):
        sandbox.jobs.write(scene.names[0], text)
    first, second = lines(cluster, scene.records[0], None)
    assert (first.text, second.text) == (f"10%{between}20%", "next")


def test_log_lines_of_all_attempts_continue_after_a_cursor(
    cluster: Cluster, sandbox: KubernetesSandbox, scene: Scene
) -> None:
    record = scene.records[0]
    assert list(lines(cluster, record, None)) == []
    for text in ("first", "second"):
        sandbox.jobs.write(scene.names[0], text)
    (first, second) = lines(cluster, record, None)
    assert (first.text, second.text, first.slot) == ("first", "second", "cluster-0")
    assert list(lines(cluster, record, second.cursor)) == []
    assert [line.text for line in lines(cluster, record, first.cursor)] == ["second"]
    sandbox.jobs.finish(scene.names[0], 10)
    sandbox.jobs.write(scene.names[0], "of the second attempt")
    assert [line.text for line in lines(cluster, record, second.cursor)] == ["of the second attempt"]
    Jobs(cluster).delete(record)
    with pytest.raises(Invalid, match="no logs of skerry-tiny-f94f0f-cluster-0: its job is deleted, and its logs with"):
        list(lines(cluster, record, None))
