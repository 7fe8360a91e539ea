"""What can be known beforehand of what would fail later: the service, rights, accounts, quotas.

Asks, changes nothing. What cannot be looked at is told as such, never as good: which machines a region has, and how
many of them a project may have at once, Google tells on pages of its console alone to whoever has only these rights.
Sources: Vertex AI, "Quotas and limits", "Access control with IAM"; IAM, "Quotas and limits" (100 service accounts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.google import rights
from skerry.infra.clouds.google.identity import ANY, ServiceAccount, path_of, project_of
from skerry.infra.clouds.google.registry import vertex_agent
from skerry.infra.clouds.google.session import Absent
from skerry.infra.target import Check
from skerry.infra.targets.vertex.layout import target_of
from skerry.infra.targets.vertex.machines import fitting, quota_of
from skerry.runtime.errors import Conflict, Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.spec import Replicas

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
# What projects have if nobody asked for more.
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
    for account in sorted({one for group in groups if (one := target_of(group).byo.service_account) is not None}):
        yield _guarded(f"right to act as {account}", lambda account=account: _act_as(google, account))


def _service(google: Google) -> Check:
    told = google.call("serviceusage", "GET", f"v1/projects/{google.project}/services/{_SERVICE}")
    if told.get("state") == "ENABLED":
        return Check(name="Vertex AI", ok=True, text=f"{_SERVICE} is enabled in {google.project}")
    text = f"{_SERVICE} is not enabled in {google.project} yet: `skerry apply` enables it, which takes some minutes"
    return Check(name="Vertex AI", ok=True, text=text)


def _rights(google: Google) -> Check:
    name, lacking = "rights on Vertex AI", rights.lacking(google, _RIGHTS)
    if not lacking:
        return Check(name=name, ok=True, text=f"all {len(_RIGHTS)} permissions that jobs and their logs need")
    advice = "ask for roles/aiplatform.user and roles/logging.viewer on the project"
    return Check(name=name, ok=False, text=f"lacking: {', '.join(lacking)}", advice=advice)


def _machine(group: Replicas) -> Check:
    target = target_of(group)
    has = fitting(target)
    inside = f" with {has.accelerators} {has.accelerator}" if has.accelerator else ""
    text = f"{target.machine}{inside}: whether {target.region} has it cannot be looked at; {_REGIONS_PAGE} says"
    return Check(name=f"machine of {group.name}", ok=None, text=text)


def _quotas(google: Google, groups: Sequence[Replicas]) -> Iterator[Check]:
    """What is needed at once of each quota, for a person to compare."""
    need: dict[tuple[str, str], int] = {}
    for group in groups:
        target = target_of(group)
        has = fitting(target)
        place = target.region, quota_of(has.accelerator, target.scheduling)
        need[place] = need.get(place, 0) + group.count * has.accelerators
    for (region, quota), count in sorted(need.items()):
        some = f"{count} are needed at once" if count else "vCPUs of all machines are needed at once"
        text = f"{some}; what is allowed cannot be looked at from here"
        advice = f"compare with {_QUOTAS_PAGE.format(google.project)}: without quota jobs stay QUEUED"
        yield Check(name=f"quota {quota} in {region}", ok=None, text=text, advice=advice)


def _accounts(google: Google, groups: Sequence[Replicas]) -> Check:
    needed = sum(
        0 if target_of(group).byo.service_account else 1 if target_of(group).one_account else group.count
        for group in groups
    )
    path = f"v1/projects/{google.project}/serviceAccounts"
    there = sum(1 for _ in google.pages("iam", path, "accounts", query={"pageSize": _PAGE}))
    text = f"{needed} are needed, {there} are there, and a project has room for {_ACCOUNTS}"
    if there + needed <= _ACCOUNTS:
        return Check(name="service accounts", ok=True, text=text)
    advice = "write role: group, delete what is not used, or ask for more; those of this run count twice here"
    return Check(name="service accounts", ok=None, text=text, advice=advice)


def _act_as(google: Google, account: str) -> Check:
    """Whether the operator may hand the user's own account to jobs."""
    name = f"right to act as {account}"
    path = path_of(account, google.project)
    try:
        told = google.call("iam", "POST", f"{path}:testIamPermissions", body={"permissions": [_ACT_AS]})
    except Absent:
        advice = f"make it, or take `byo: {{service_account}}` out: then `skerry apply` makes a {ServiceAccount.KIND}"
        return Check(name=name, ok=False, text=f"there is no service account {account}", advice=advice)
    if _ACT_AS in told.get("permissions", ()):
        home, identity = project_of(account), google.identity()
        if home in {identity.project, identity.number}:
            return Check(name=name, ok=True, text=f"{_ACT_AS} is given")
        # Source: "Use a custom service account", one of another project.
        agent = vertex_agent(identity.number)
        advice = f"let its owner give {agent} the role roles/iam.serviceAccountTokenCreator on it"
        whose = "another project" if home == ANY else home
        return Check(name=name, ok=None, text=f"{_ACT_AS} is given; the account is {whose}'s", advice=advice)
    advice = f"ask for roles/iam.serviceAccountUser on {account}"
    # To some services what is not there is no error, but a thing that nobody has a right on (testIamPermissions).
    return Check(name=name, ok=False, text=f"{_ACT_AS} is not given, or there is no such account", advice=advice)


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except Unauthorized as error:
        return Check(name=name, ok=False, text=str(error), advice="ask for the permission, or use other credentials")
    except Absent as error:
        return Check(name=name, ok=None, text=f"cannot be looked at: {error}")
    except (Invalid, Conflict) as error:
        return Check(name=name, ok=False, text=str(error))
    except Retryable as error:
        return Check(name=name, ok=None, text=str(error))
