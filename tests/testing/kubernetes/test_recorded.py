"""The sandbox answers in the words of a control plane 1.36.2. recorded.txt has its answers, some of them cut short."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.testing.kubernetes.kit import MERGE, NAMESPACE, Api, changed, job

from skerry.testing.kubernetes import KubernetesSandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RECORDED: Final = Path(__file__).with_name("recorded.txt").read_text()
# Names that a server chooses, and those of the recorded objects.
CHOSEN: Final = (
    (r"skerry-[xy]-([a-z0-9-]*?)-[a-z0-9]{5}\b", r"JOB-\1-POD"),
    (r"skerry-[xy]-", "JOB-"),
    (r"\('[a-z0-9]{5}', ", "('POD', "),
    (r"\b(ml|t2)/", f"{NAMESPACE}/"),
    (r'namespace "t2"', f'namespace "{NAMESPACE}"'),
    (r"system:serviceaccount:t2:operator", "operator"),
)


def plain(text: str) -> str:
    for pattern, replacement in CHOSEN:
        text = re.sub(pattern, replacement, text)
    return text


def recorded(start: str, number: int = 0) -> str:
    """The rest of the line that starts so, of several the one of this number, with its list of fields below it."""
    lines = [line for line in re.split(r"\n(?!- )", RECORDED) if line.startswith(start)]
    return lines[number].removeprefix(start).strip()


def pod(body: Any) -> Any:
    return body["spec"]["template"]["spec"]


def with_value(where: Callable[[Any], Any], **values: Any) -> Callable[[Any], None]:
    return lambda body: where(body).update(values)


REFUSALS: Final[dict[str, Callable[[Any], None]]] = {
    "misspelt field": with_value(pod, nodeSelectors={}),
    "OnFailure": with_value(pod, restartPolicy="OnFailure"),
    "capitals": with_value(lambda body: body["metadata"], name="East_0"),
    "label value": with_value(lambda body: body["metadata"]["labels"], a="s3://x"),
    "memory": with_value(lambda body: pod(body)["containers"][0]["resources"]["limits"], memory="1 GB"),
    "code 0": with_value(lambda body: body["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"], values=[0]),
    "action": with_value(lambda body: body["spec"]["podFailurePolicy"]["rules"][0], action="Retry"),
    "gpu request only": with_value(
        lambda body: pod(body)["containers"][0]["resources"]["requests"], **{"nvidia.com/gpu": "1"}
    ),
    "mount of no volume": lambda body: pod(body)["containers"][0]["volumeMounts"].append(
        {"name": "nope", "mountPath": "/x"}
    ),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubernetesSandbox]:
    with KubernetesSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def api(cluster: KubernetesSandbox) -> Iterator[Api]:
    cluster.reset()
    yield Api(cluster)
    assert cluster.violations == []


def started(api: Api, name: str, **options: Any) -> None:
    assert api.create(job(f"skerry-x-{name}", **options)) == ""
    api.sandbox.jobs.start(f"skerry-x-{name}")


@pytest.mark.parametrize("mistake", REFUSALS)
def test_mistake_is_refused_with_the_words_of_the_server(api: Api, mistake: str) -> None:
    answer = api.create(changed(job("skerry-x-bad"), REFUSALS[mistake]))
    assert answer.startswith(recorded(f"refused: {mistake} ->")), answer


def test_second_object_of_a_name_is_a_conflict(api: Api) -> None:
    assert api.create(job("skerry-x-again")) == ""
    status, answer = api.jobs("POST", body=job("skerry-x-again"))
    assert f"{status} Conflict {answer['reason']}" == recorded("again:")


@pytest.mark.parametrize(
    ("slot", "code", "ends"), [("east-0", 0, 1), ("east-1", 10, 3), ("east-2", 20, 1), ("east-3", 30, 1)]
)
def test_exit_codes_end_a_job_as_recorded(api: Api, slot: str, code: int, ends: int) -> None:
    started(api, slot)
    for _ in range(ends):
        api.sandbox.jobs.finish(f"skerry-x-{slot}", code)
    _, row = api.jobs("GET", f"skerry-x-{slot}")
    failed, succeeded = (row["status"].get(name) for name in ("failed", "succeeded"))
    pods = [each["status"] for each in api.pods(f"skerry-x-{slot}")]
    ended = [(each["phase"], each["containerStatuses"][0]["state"]["terminated"]["exitCode"]) for each in pods]
    answer = f"{api.conditions(f'skerry-x-{slot}')} failed {failed} succeeded {succeeded} pods {ended}"
    assert plain(answer) == plain(recorded(f"{slot} "))


def test_deadline_ends_a_job_as_recorded(api: Api) -> None:
    started(api, "late")
    api.jobs("PATCH", "skerry-x-late", {"spec": {"activeDeadlineSeconds": 0}}, content=MERGE, fieldManager="test")
    _, row = api.jobs("GET", "skerry-x-late")
    conditions, pods = api.conditions("skerry-x-late"), api.pods("skerry-x-late")
    assert f"{conditions} failed {row['status']['failed']} succeeded None pods {pods}" == recorded("late ")


def test_suspended_job_has_no_pods(api: Api) -> None:
    started(api, "cancel")
    api.jobs("PATCH", "skerry-x-cancel", {"spec": {"suspend": True}}, content=MERGE, fieldManager="test")
    _, row = api.jobs("GET", "skerry-x-cancel")
    pods, active = len(api.pods("skerry-x-cancel")), row["status"].get("active")
    assert f"{api.conditions('skerry-x-cancel')} pods {pods} active {active}" == recorded("cancel: ")


def test_evicted_pod_counts_as_no_failure_and_takes_its_log_with_it(api: Api) -> None:
    started(api, "evict")
    (first,) = api.pods("skerry-x-evict")
    api.sandbox.jobs.interrupt("skerry-x-evict")
    (second,) = api.pods("skerry-x-evict")
    assert second["metadata"]["name"] != first["metadata"]["name"]
    api.sandbox.jobs.finish("skerry-x-evict", 0)
    _, row = api.jobs("GET", "skerry-x-evict")
    pods = [
        (
            each["metadata"]["name"].rpartition("-")[2],
            each["status"]["phase"],
            [row for row in each["status"]["conditions"] if row["type"] == "DisruptionTarget"],
            each["metadata"].get("deletionTimestamp"),
        )
        for each in api.pods("skerry-x-evict")
    ]
    answer = f"failed {row['status'].get('failed')} active {row['status'].get('active')} {pods}"
    assert plain(answer) == plain(recorded("evict: "))


def test_deleted_job_is_gone(api: Api) -> None:
    started(api, "gone")
    api.jobs("DELETE", "skerry-x-gone", {"propagationPolicy": "Foreground"})
    assert str(api.jobs("GET", "skerry-x-gone")[0]) == recorded("gone:")


WAITING: Final[dict[str, dict[str, Any]]] = {
    "gpus": {"container": {"resources": {"limits": {"nvidia.com/gpu": "9"}}}},
    "nonode": {"nodeSelector": {"gpu": "h100"}},
    "noimg": {"container": {"image": "missing/image:1"}},
    "nosec": {"container": {"envFrom": [{"secretRef": {"name": "absent"}}]}},
    "noacct": {"serviceAccountName": "absent"},
}


@pytest.mark.parametrize("reason", WAITING)
def test_waiting_pod_has_the_reason_of_the_server(api: Api, reason: str) -> None:
    name = f"skerry-x-{reason}"
    assert api.create(job(name, **WAITING[reason])) == ""
    if reason == "noimg":
        api.sandbox.jobs.wait_for(name, 'ImagePullBackOff: Back-off pulling image "missing/image:1"')
    pods = api.pods(name)
    false = [
        (each["type"], each["status"], each["reason"], each["message"][:150])
        for pod in pods
        for each in pod["status"].get("conditions", ())
        if each["status"] == "False"
    ]
    waiting = [
        (each["state"]["waiting"]["reason"], each["state"]["waiting"].get("message"))
        for pod in pods
        for each in pod["status"].get("containerStatuses", ())
    ]
    events = [(kind, message[:150]) for kind, message in api.events(name)][:2]
    answer = f"{false[:1]} {waiting} {events} pods {len(pods)}"
    # The recorded message is cut after 150 characters, in the middle of the scheduler's own words about preemption.
    assert plain(answer) == plain(recorded(f"why {reason} "))


def test_server_adds_the_recorded_defaults(api: Api) -> None:
    assert api.create(job("skerry-x-defaults")) == ""
    _, row = api.jobs("GET", "skerry-x-defaults")
    ours = {name: value for name, value in row["spec"].items() if name not in {"template", "selector"}}
    text = recorded("defaults added: ")
    answer = ast.literal_eval(text[: text.index(", 'selector'")] + "}")
    assert ours == {**answer, "suspend": False}


def test_apply_conflicts_with_an_edit_and_force_takes_it_back(api: Api) -> None:
    body = job("skerry-y-a")
    status, first = api.apply(body)
    assert status == 201
    status, second = api.apply(body)
    assert (status, second["metadata"]["generation"]) == (200, first["metadata"]["generation"])
    api.jobs("PATCH", "skerry-y-a", {"spec": {"backoffLimit": 9}}, content=MERGE, fieldManager="kubectl-edit")
    status, answer = api.apply(body)
    assert f"-> {status} {answer['message']}" == recorded("apply afterwards")
    status, forced = api.apply(body, force="true")
    assert (status, forced["spec"]["backoffLimit"]) == (200, 2)
    assert api.apply(body)[0] == 200


def test_suspended_job_takes_other_resources_and_any_job_another_deadline(api: Api) -> None:
    body = changed(job("skerry-y-a"), with_value(lambda body: body["spec"], suspend=True))
    api.apply(body)
    limits = {"requests": {"cpu": "2"}, "limits": {"memory": "1Gi"}}
    status, _ = api.apply(changed(body, with_value(lambda body: pod(body)["containers"][0], resources=limits)))
    assert recorded("other cpu while suspended ->").startswith(f"{status} ")
    noted = changed(body, with_value(lambda body: body["metadata"], annotations={"a": "b"}))
    status, _ = api.apply(changed(noted, with_value(lambda body: body["spec"], activeDeadlineSeconds=60)))
    assert recorded("annotation and deadline ->").startswith(f"{status} ")


@pytest.mark.parametrize("query", [{}, {"dryRun": "All"}])
def test_other_template_is_refused_even_in_a_dry_run(api: Api, query: dict[str, str]) -> None:
    api.apply(job("skerry-y-a"))
    status, answer = api.apply(job("skerry-y-a", container={"image": "other"}), **query)
    assert recorded("apply with another image ->").startswith(f"{status} {answer['message'].partition(' {...}')[0]}")


def test_apply_after_a_post_of_the_same_manager_conflicts(api: Api) -> None:
    """Update and Apply are two owners, so an object is created by apply or never applied. The server's own defaults
    count as the first one's: a reference to a field has a version that is not applied.
    """
    pod_name = {"name": "SKERRY_ATTEMPT_POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    containers = [{"env": [pod_name]}, {"env": [pod_name], "image": "other"}]
    created, other = (job("skerry-x-east-0", container=container) for container in containers)
    assert api.jobs("POST", body=created, fieldManager="skerry")[0] == 201
    status, answer = api.apply(other)
    assert f"{status} {answer['message']}".startswith(recorded("immutable template:"))
    # Its own apply is no conflict, and the version is added again.
    status, applied = api.apply(created, force="true")
    assert status == 200
    again = api.apply(created)[1]
    assert again["metadata"]["generation"] == applied["metadata"]["generation"]


def test_dry_run_changes_nothing(api: Api) -> None:
    status, row = api.apply(job("skerry-x-dry"), dryRun="All")
    uid, suspend, mode = bool(row["metadata"]["uid"]), row["spec"]["suspend"], row["spec"]["completionMode"]
    assert f"uid {uid} suspend {suspend} completionMode {mode}" == recorded("ssa dry run:")
    assert status == 201
    assert api.jobs("GET", "skerry-x-dry")[0] == 404


def test_exceeded_quota_is_in_an_event_only(api: Api) -> None:
    api.sandbox.add("resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": {"requests.nvidia.com/gpu": "1"}}})
    assert api.create(job("skerry-y-quota", container={"resources": {"limits": {"nvidia.com/gpu": "2"}}})) == ""
    assert api.pods("skerry-y-quota") == []
    (event,) = api.events("skerry-y-quota")
    first = plain(recorded("quota: ["))
    assert first.startswith(plain(str(event)))


@pytest.mark.parametrize(
    ("act", "method"), [("reads secrets", "GET"), ("creates secret", "POST")], ids=lambda value: value.replace(" ", "_")
)
def test_missing_right_is_refused_with_the_words_of_the_server(api: Api, act: str, method: str) -> None:
    api.sandbox.restrict([("list", "jobs")])
    assert api.jobs("GET")[0] == 200
    body = {"metadata": {"name": "x"}} if method == "POST" else None
    status, answer = api.call(method, f"/api/v1/namespaces/{NAMESPACE}/secrets", body)
    assert f"{status} {answer['message']}" == plain(recorded(f"operator {act} ->"))


@pytest.mark.parametrize(("act", "path"), [("reads kube-system", "namespaces/kube-system"), ("lists nodes", "nodes")])
def test_right_of_a_role_ends_with_its_namespace(api: Api, act: str, path: str) -> None:
    assert api.call("GET", f"/api/v1/{path}")[0] == 200
    rights = [("get", "namespaces"), ("list", "nodes"), ("list", "jobs")]
    api.sandbox.restrict(rights)
    status, answer = api.call("GET", f"/api/v1/{path}")
    assert f"{status} {answer['message']}" == plain(recorded(f"operator {act} ->"))
    assert api.call("GET", f"/api/v1/namespaces/{NAMESPACE}")[0] == 200
    assert [api.may(*right, namespace) for right in rights for namespace in (NAMESPACE, "kube-system")] == [
        True,
        False,
    ] * 3


class LostNode:
    """A job whose only pod runs on a node that falls silent, as the log of a drive has it."""

    def __init__(self, api: Api) -> None:
        self.api = api
        started(api, "lost")
        assert plain(f"{self.pods()}") == plain(recorded("runs", 1))
        self.node = api.pods("skerry-x-lost")[0]["spec"]["nodeName"]
        api.sandbox.jobs.lose_node("skerry-x-lost")

    def pods(self) -> list[Any]:
        """The pods by the ends of their names, with what is said about their end."""
        return [
            (
                each["metadata"]["name"].rpartition("-")[2],
                each["status"]["phase"],
                "deletionTimestamp" in each["metadata"],
                [
                    (row["type"], row["reason"])
                    for row in each["status"]["conditions"]
                    if row["type"] == "DisruptionTarget"
                ],
            )
            for each in self.api.pods("skerry-x-lost")
        ]

    def taints(self) -> list[tuple[str, str]]:
        _, node = self.api.call("GET", f"/api/v1/nodes/{self.node}")
        return [(taint["key"], taint["effect"]) for taint in node["spec"]["taints"]]

    def status(self) -> dict[str, Any]:
        _, row = self.api.jobs("GET", "skerry-x-lost")
        return {name: row["status"].get(name) for name in ("active", "failed", "terminating")}


def test_pod_of_a_silent_node_has_no_successor_until_the_node_is_deleted(api: Api) -> None:
    healthy = {"metadata": {"name": "node-2"}, "status": {"allocatable": {"cpu": "4"}}}
    api.sandbox.add("nodes", healthy, "")
    lost = LostNode(api)
    assert plain(f"{lost.pods()} {lost.taints()}") == plain(recorded("after 56 s of silence:"))
    assert plain(f"{lost.pods()} {lost.status()}") == plain(recorded("15 s later, no replacement:", 1))
    api.call("DELETE", f"/api/v1/nodes/{lost.node}")
    assert plain(f"{lost.pods()} {lost.status()}") == plain(recorded("66 s after the Node object was deleted:"))


def test_pods_stay_while_every_node_is_silent(api: Api) -> None:
    lost = LostNode(api)
    keys = [key for key, _ in lost.taints()]
    assert plain(f"{lost.pods()} {keys}") == plain(recorded("after 130 s of silence:"))
    assert plain(f"{lost.pods()} {lost.status()}") == plain(recorded("15 s later, no replacement:"))
