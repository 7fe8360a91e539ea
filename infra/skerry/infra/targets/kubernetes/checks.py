"""Checks before an apply: the cluster, its version, the namespace, rights, and what the server says to each job.

Reads only: the server checks a job by a dry run.
Sources: Kubernetes, "Pod failure policy" (stable in 1.31), "Checking API access".
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from skerry.infra.clouds.bucket_and_image_checks import guarded_check
from skerry.infra.clouds.google.permissions import POOLS, lacking
from skerry.infra.clouds.handler_helpers import Absent, each
from skerry.infra.provision.graph import short_name
from skerry.infra.provision.plan import desired_of, settings_of
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.infra.targets.kubernetes import manifests
from skerry.infra.targets.kubernetes.cluster import jobs_path
from skerry.infra.targets.kubernetes.options import KubernetesTarget
from skerry.infra.targets.kubernetes.resource_types import Job
from skerry.infra.targets.shared import aws_checks
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.graph import Resource
    from skerry.infra.spec.model import Replicas
    from skerry.infra.targets.kubernetes.cluster import Cluster

# Before it, a pod failure policy may be off; before the other, the server does not know it.
_STABLE: Final = (1, 31)
_OLDEST: Final = (1, 26)
RIGHTS: Final = (
    *(("batch", "jobs", verb) for verb in ("get", "list", "create", "patch", "delete")),
    *(("", "serviceaccounts", verb) for verb in ("get", "list", "create", "patch", "delete")),
    ("", "pods", "list"),
    ("", "pods/log", "get"),
    ("", "events", "list"),
)
"""The rights of an operator in the namespace: group, resource, verb."""
_LONGEST_NAME: Final = 63
_EXAMPLE: Final = "infra/examples/kubernetes-operator.yaml"
_ADVICE: Final = f"log in, or ask for the Role in {_EXAMPLE}"


def checks(
    cluster: Cluster, run_uri: str, groups: Sequence[Replicas], resources: Sequence[Resource]
) -> Iterator[Check]:
    """See Target.checks. resources: of these groups."""
    version = guarded_check("Kubernetes", lambda: _version(cluster), _ADVICE)
    yield version
    if version.ok is False:
        return
    for namespace in dict.fromkeys(KubernetesTarget.of(group).namespace for group in groups):
        yield guarded_check(f"rights in {namespace}", lambda namespace=namespace: _rights(cluster, namespace), _ADVICE)
    jobs = [resource for resource in resources if isinstance(resource, Job)]
    for group in groups:
        first = next(job for job in jobs if job.key.rpartition("-")[0] == group.name)
        yield guarded_check(
            f"jobs of {group.name}", lambda job=first, group=group: _dry_run(cluster, run_uri, job, group), _ADVICE
        )


def issuer_of(cluster: Cluster) -> str:
    """The issuer of the tokens of a cluster's service accounts."""
    return str(cluster.get("/.well-known/openid-configuration")["issuer"])


def is_gke(issuer: str) -> bool:
    """Return whether it is a cluster of GKE, whose accounts Google knows without a pool of the run."""
    return issuer.startswith("https://container.googleapis.com/")


def issuer_check(cluster: Cluster, google: Google) -> Check:
    """Check that Google can read the keys of the cluster's tokens, and that these credentials may let it trust them."""
    name = "issuer of the cluster"

    def look() -> Check:
        issuer = issuer_of(cluster)
        if is_gke(issuer):
            return Check(name=name, ok=True, text=f"{issuer}, of GKE")
        if not issuer.startswith("https://") or not _is_public(urlsplit(issuer).hostname or ""):
            advice = (
                "start the API server with a public --service-account-issuer, or name a `secret` with "
                "GOOGLE_SERVICE_ACCOUNT_KEY"
            )
            return Check(name=name, ok=False, text=f"Google cannot read the keys of {issuer}", advice=advice)
        if missing := lacking(google, POOLS):
            advice = "ask for roles/iam.workloadIdentityPoolAdmin"
            return Check(name=name, ok=False, text=f"lacking: {', '.join(missing)}", advice=advice)
        return Check(name=name, ok=True, text=f"a pool of the run trusts {issuer}")

    return guarded_check(name, look, _ADVICE)


def _is_public(host: str) -> bool:
    """Return whether the internet may know a host of this name or address."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return "." in host and not host.rstrip(".").endswith((".local", ".svc", ".internal"))


def provider_check(cluster: Cluster, aws: Aws) -> Check:
    """Check that the AWS account of the store trusts the cluster's tokens at all."""
    name = "OIDC provider of the cluster"

    def look() -> Check:
        issuer = issuer_of(cluster).removeprefix("https://")
        otherwise = "; its keys must be reachable from the internet. Or name a `secret` with keys"
        return aws_checks.provider_check(aws, name, issuer, "sts.amazonaws.com", stops_jobs=False, otherwise=otherwise)

    return guarded_check(name, look, "log in, or ask for the right iam:ListOpenIDConnectProviders")


def _version(cluster: Cluster) -> Check:
    version = cluster.get("/version")
    text = f"{cluster.name}, version {version.get('gitVersion')}"
    # A provider adds a sign: "33+".
    numbers = tuple(int(re.sub(r"\D", "", str(version.get(part))) or 0) for part in ("major", "minor"))
    if numbers < _OLDEST:
        advice = "take a cluster of 1.31 or later: this one has no pod failure policy, so jobs that cannot work restart"
        return Check(name="Kubernetes", ok=False, text=text, advice=advice)
    if numbers < _STABLE:
        advice = "the pod failure policy is beta before 1.31; check that it is not turned off"
        return Check(name="Kubernetes", ok=None, text=text, advice=advice)
    return Check(name="Kubernetes", ok=True, text=text)


def _rights(cluster: Cluster, namespace: str) -> Check:
    def allowed(right: tuple[str, str, str]) -> bool:
        group, resource, verb = right
        kind, _, part = resource.partition("/")
        attributes = {"namespace": namespace, "group": group, "resource": kind, "subresource": part, "verb": verb}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = cluster.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    results = each(allowed, RIGHTS)
    lacking = [f"{verb} {resource}" for (_, resource, verb), may in zip(RIGHTS, results, strict=True) if not may]
    name = f"rights in {namespace}"
    if not lacking:
        return Check(name=name, ok=True, text=f"all {len(RIGHTS)} rights that jobs, accounts and logs need")
    return Check(name=name, ok=False, text=f"lacking: {', '.join(lacking)}", advice=f"ask for the Role in {_EXAMPLE}")


def _dry_run(cluster: Cluster, run_uri: str, job: Job, group: Replicas) -> Check:
    """Ask the server for a job of the group under a name that no job has. Outputs of other resources are made up."""
    name = f"jobs of {group.name}"
    trial = dataclasses.replace(job, name=short_name(f"{job.name}-check", _LONGEST_NAME), after=())
    desired = dataclasses.replace(desired_of(trial, {}, run_uri), settings=settings_of(trial, lambda _: "pending"))
    body = ready(manifests.job(desired))
    try:
        cluster.apply(jobs_path(job.region, trial.name), body, manifests.manager(run_uri), dry_run=True)
    except Absent:
        advice = f"create it: kubectl create namespace {job.region}"
        return Check(name=name, ok=False, text=f"there is no namespace {job.region}", advice=advice)
    except Invalid as error:
        return Check(name=name, ok=False, text=str(error), advice="correct the option that it names")
    return Check(name=name, ok=True, text="the server accepts them")
