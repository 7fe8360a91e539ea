"""Checks before an apply: the service, permissions, accounts and quotas. Reads only.

What cannot be checked is reported as unknown, never as good: with these permissions, Google shows the machines of a
region and the quotas of a project only on pages of its console.
Sources: Vertex AI, "Quotas and limits", "Access control with IAM"; IAM, "Quotas and limits" (100 service accounts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.bucket_and_image_checks import guarded_check
from skerry.infra.clouds.google import permissions
from skerry.infra.clouds.google.artifact_registry import vertex_agent
from skerry.infra.clouds.google.service_accounts import ANY, ServiceAccount, path_of, project_of
from skerry.infra.clouds.handler_helpers import Absent
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.infra.targets.vertex.accelerators_disk_time_and_quota import fitting, quota_of
from skerry.infra.targets.vertex.options import VertexTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.spec.model import Replicas

_SERVICE: Final = "aiplatform.googleapis.com"
_RIGHTS: Final = (
    "aiplatform.customJobs.cancel",
    "aiplatform.customJobs.create",
    "aiplatform.customJobs.delete",
    "aiplatform.customJobs.get",
    "aiplatform.customJobs.list",
    "logging.logEntries.list",
)
_ACT_AS: Final = "iam.serviceAccounts.actAs"
# The default quota of a project.
_ACCOUNTS: Final = 100
_PAGE: Final = "100"
_QUOTAS_PAGE: Final = "https://console.cloud.google.com/iam-admin/quotas?project={}"
_REGIONS_PAGE: Final = "https://cloud.google.com/vertex-ai/docs/general/locations"


def checks(google: Google, groups: Sequence[Replicas]) -> Iterator[Check]:
    """See Target.checks."""
    yield _guarded("Vertex AI", lambda: _service(google))
    yield _guarded("rights on Vertex AI", lambda: _rights(google))
    for group in groups:
        yield _machine(group)
    yield from _quotas(google, groups)
    yield _guarded("service accounts", lambda: _accounts(google, groups))
    own = {VertexTarget.of(group).byo.service_account for group in groups}
    for account in sorted(account for account in own if account is not None):
        yield _guarded(f"right to act as {account}", lambda account=account: _act_as(google, account))


def _service(google: Google) -> Check:
    service = google.call("serviceusage", "GET", f"v1/projects/{google.project}/services/{_SERVICE}")
    if service.get("state") == "ENABLED":
        return Check(name="Vertex AI", ok=True, text=f"{_SERVICE} is enabled in {google.project}")
    text = f"{_SERVICE} is not enabled in {google.project} yet: `skerry apply` enables it, which takes some minutes"
    return Check(name="Vertex AI", ok=True, text=text)


def _rights(google: Google) -> Check:
    name, lacking = "rights on Vertex AI", permissions.lacking(google, _RIGHTS)
    if not lacking:
        return Check(name=name, ok=True, text=f"all {len(_RIGHTS)} permissions that jobs and their logs need")
    advice = "ask for roles/aiplatform.user and roles/logging.viewer on the project"
    return Check(name=name, ok=False, text=f"lacking: {', '.join(lacking)}", advice=advice)


def _machine(group: Replicas) -> Check:
    target = VertexTarget.of(group)
    has = fitting(target)
    inside = f" with {has.accelerators} {has.accelerator}" if has.accelerator else ""
    text = f"{target.machine}{inside}: its availability in {target.region} cannot be checked; see {_REGIONS_PAGE}"
    return Check(name=f"machine of {group.name}", ok=None, text=text)


def _quotas(google: Google, groups: Sequence[Replicas]) -> Iterator[Check]:
    """Return how much of each quota is needed at once, for the reader to compare."""
    need: dict[tuple[str, str], int] = {}
    for group in groups:
        target = VertexTarget.of(group)
        has = fitting(target)
        place = target.region, quota_of(has.accelerator, target.scheduling)
        need[place] = need.get(place, 0) + group.count * has.accelerators
    for (region, quota), count in sorted(need.items()):
        amount = f"{count} are needed at once" if count else "vCPUs of all machines are needed at once"
        text = f"{amount}; the limit cannot be checked"
        advice = f"compare with {_QUOTAS_PAGE.format(google.project)}: without quota jobs stay QUEUED"
        yield Check(name=f"quota {quota} in {region}", ok=None, text=text, advice=advice)


def _accounts(google: Google, groups: Sequence[Replicas]) -> Check:
    needed = sum(
        0 if VertexTarget.of(group).byo.service_account else 1 if VertexTarget.of(group).one_account else group.count
        for group in groups
    )
    path = f"v1/projects/{google.project}/serviceAccounts"
    existing = sum(1 for _ in google.pages("iam", path, "accounts", query={"pageSize": _PAGE}))
    text = f"{needed} are needed, {existing} exist, and a project may have {_ACCOUNTS}"
    if existing + needed <= _ACCOUNTS:
        return Check(name="service accounts", ok=True, text=text)
    advice = "write role: group, delete unused accounts, or request more; accounts of this run count twice here"
    return Check(name="service accounts", ok=None, text=text, advice=advice)


def _act_as(google: Google, account: str) -> Check:
    """Check that the operator may run jobs as the user's own account."""
    name = f"right to act as {account}"
    path = path_of(account, google.project)
    try:
        answer = google.call("iam", "POST", f"{path}:testIamPermissions", body={"permissions": [_ACT_AS]})
    except Absent:
        advice = f"create it, or remove `byo: {{service_account}}`: then `skerry apply` creates a {ServiceAccount.KIND}"
        return Check(name=name, ok=False, text=f"there is no service account {account}", advice=advice)
    if _ACT_AS in answer.get("permissions", ()):
        home, identity = project_of(account), google.identity()
        if home in {identity.project, identity.number}:
            return Check(name=name, ok=True, text=f"{_ACT_AS} is granted")
        # Source: "Use a custom service account", one of another project.
        agent = vertex_agent(identity.number)
        advice = f"ask its owner to grant {agent} the role roles/iam.serviceAccountTokenCreator on it"
        project = "another project" if home == ANY else home
        return Check(name=name, ok=None, text=f"{_ACT_AS} is granted; the account belongs to {project}", advice=advice)
    advice = f"ask for roles/iam.serviceAccountUser on {account}"
    # testIamPermissions reports a missing account as one without permissions.
    return Check(name=name, ok=False, text=f"{_ACT_AS} is not granted, or there is no such account", advice=advice)


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    def look_at_what_exists() -> Check:
        try:
            return look()
        except Absent as error:
            return Check(name=name, ok=None, text=f"cannot be checked: {error}")

    return guarded_check(name, look_at_what_exists)
