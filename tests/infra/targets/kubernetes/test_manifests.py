from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tests.infra.kit import of_kind, plain, wanted
from tests.infra.targets.kubernetes.kit import WHOLE, check_golden, context_of, graph_of

from skerry.infra.targets.kubernetes import manifests, parse_observed_settings
from skerry.infra.targets.kubernetes.resource_types import Job, ServiceAccount
from skerry.infra.targets.shared.resolve_refs import ready

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.targets.kubernetes.cluster import Cluster


VOLUME = "file:///shared/runs"


def bodies(folder: Path, target: str, more: str = "") -> list[dict[str, Any]]:
    context = context_of(folder, target, count=1, more=more)
    graph = graph_of(context)
    desired = [
        wanted(each, context.run_uri, **context.spec.tags)
        for kind in (ServiceAccount, Job)
        for each in of_kind(graph, kind)
    ]
    builders = (manifests.service_account, manifests.job)
    return [ready(build(each)) for build, each in zip(builders, desired, strict=True)]


def test_objects_are_frozen_and_the_server_accepts_them(tmp_path: Path, cluster: Cluster) -> None:
    tagged = "tags: {team: research}\nlimits: {max_hours: 24}\n"
    written = {"plain": bodies(tmp_path, ""), "whole": bodies(tmp_path, WHOLE, tagged)}
    check_golden("objects", plain(written))
    for account, job in written.values():
        name = account["metadata"]["name"]
        for path, body in (
            (f"/api/v1/namespaces/train/serviceaccounts/{name}", account),
            (f"/apis/batch/v1/namespaces/train/jobs/{name}", job),
        ):
            assert cluster.apply(path, body, "test", dry_run=True)["metadata"]["uid"]


def test_annotation_of_tags_is_valid_whatever_their_names(tmp_path: Path) -> None:
    tags = {"Cost-Centre-": "a", "a:b": "c", "a/b": "d", "größe": "e", "/": "f", "n" * 49 + ".x": "g"}
    for body in bodies(tmp_path, "", f"tags: {json.dumps(tags)}\n"):
        notes: dict[str, str] = body["metadata"]["annotations"]
        key = r"skerry\.dev/([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]"  # apimachinery, IsQualifiedName
        assert [name for name in notes if re.fullmatch(key, name) is None] == []
        assert json.loads(notes["skerry.dev/tags"]) == tags


SECRETS = """secrets:
  HF_TOKEN: {kubernetes_secret: hf, key: token}
  WANDB: {aws_ssm: "arn:aws:ssm:us-east-1:123456789012:parameter/w"}
"""


def test_secret_of_the_cluster_is_a_reference_in_the_pod(tmp_path: Path, cluster: Cluster) -> None:
    context = context_of(tmp_path, count=1, more=SECRETS)
    (job,) = of_kind(graph_of(context), Job)
    assert job.secrets == {"HF_TOKEN": {"name": "hf", "key": "token"}}
    assert [name for name in job.environment if "SECRET" in name] == ["SKERRY_SECRET_WANDB"]
    body: dict[str, Any] = ready(manifests.job(wanted(job, context.run_uri)))
    (container,) = body["spec"]["template"]["spec"]["containers"]
    reference = {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert {"name": "HF_TOKEN", "valueFrom": reference} in container["env"]
    path = f"/apis/batch/v1/namespaces/train/jobs/{job.name}"
    seen = parse_observed_settings.job(cluster.apply(path, body, "test", dry_run=True))
    assert seen.settings["secrets"] == job.secrets


def test_only_what_a_pod_is_made_of_is_in_the_digest_of_its_settings(tmp_path: Path) -> None:
    def digest(target: str) -> str:
        (_, job) = bodies(tmp_path, target)
        return str(job["metadata"]["annotations"][manifests.SETTINGS])

    assert digest("") == digest("attempts: 2, max_runtime: 1h")
    assert digest("") != digest("cpu: '2'")


def test_job_that_starts_once_has_no_free_evictions(tmp_path: Path) -> None:
    rules = [bodies(tmp_path, f"attempts: {count}")[1]["spec"]["podFailurePolicy"]["rules"] for count in (1, 2)]
    assert [[rule["action"] for rule in each] for each in rules] == [["FailJob"], ["FailJob", "Ignore"]]


def test_volume_of_a_claim_is_mounted_for_its_user(tmp_path: Path, cluster: Cluster) -> None:
    context = context_of(tmp_path, "claim: {name: shared, path: /shared, user: 1000}", count=1, store=VOLUME)
    (desired,) = [wanted(job, context.run_uri) for job in of_kind(graph_of(context), Job)]
    body: dict[str, Any] = ready(manifests.job(desired))
    pod = body["spec"]["template"]["spec"]
    assert {"name": "store", "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"]
    assert {"name": "store", "mountPath": "/shared"} in pod["containers"][0]["volumeMounts"]
    assert [pod["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")] == [1000] * 3
    path = f"/apis/batch/v1/namespaces/train/jobs/{desired.name}"
    assert cluster.apply(path, body, "test", dry_run=True)["metadata"]["uid"]
