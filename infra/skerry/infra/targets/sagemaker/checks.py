"""What can be known beforehand of what would fail later: machines, quotas, the place for artifacts, rights.

Asks, changes nothing. What cannot be looked at is told as such, never as good.
Source: IAM API reference, EvaluationResult (one for an action, whatever the number of resources).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.handling import PATH
from skerry.infra.clouds.aws.session import Account
from skerry.infra.clouds.aws.storage import Buckets
from skerry.infra.target import Check
from skerry.infra.targets.sagemaker import quotas
from skerry.infra.targets.sagemaker.layout import SERVICE, crews_of, role_name, runtime_s, target_of
from skerry.infra.targets.sagemaker.survey import survey
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.spec import Replicas
    from skerry.infra.target import Ground

_TO_SAGEMAKER: Final = {
    "ContextKeyName": "iam:PassedToService",
    "ContextKeyValues": [SERVICE],
    "ContextKeyType": "string",
}


def checks(aws: Aws, ground: Ground, groups: Sequence[Replicas]) -> Iterator[Check]:
    """See Target.checks."""
    for group in groups:
        yield _machine(aws, group)
    for region in sorted({target_of(group).region for group in groups}):
        here = [group for group in groups if target_of(group).region == region]
        yield from _quotas(aws, region, here, ground.hours)
    for group in groups:
        yield _output(aws, ground, group)
    yield _pass_role(aws, ground, groups)


def _machine(aws: Aws, group: Replicas) -> Check:
    name, target = f"machine of {group.name}", target_of(group)
    try:
        machine = survey(aws, target)
    except Invalid as error:
        return Check(name=name, ok=False, text=str(error), advice="change the target's options in the spec")
    except SkerryError as error:
        return Check(name=name, ok=None, text=str(error))
    disk = "disks of its own" if machine.own_disk else "a disk beside it"
    return Check(name=name, ok=True, text=f"{machine.type}: {machine.gpus} GPUs, {disk}, in {target.region}")


def _quotas(aws: Aws, region: str, groups: Sequence[Replicas], hours: float | None) -> Iterator[Check]:
    """Whether SageMaker has these machines here, and gives the account as many, for so long."""
    need: dict[str, int] = {}
    for group in groups:
        target = target_of(group)
        quota = quotas.of_machines(target.instance, spot=target.spot)
        need[quota] = need.get(quota, 0) + group.count
    try:
        known = quotas.known(aws, region)
    except SkerryError as error:
        for quota, count in need.items():
            text = f"{count} are needed at once; what is allowed cannot be looked at ({error})"
            yield Check(name=f"quota of {quota} in {region}", ok=None, text=text)
        return
    for quota, count in sorted(need.items()):
        yield _quota(region, quota, count, known.get(quota))
    if (longest := known.get(quotas.LONGEST)) is not None:
        seconds = max(runtime_s(hours, target_of(group)) for group in groups)
        text = f"{seconds} s are asked for, {longest['Value']:g} allowed"
        advice = quotas.too_long(longest, region, seconds)
        yield Check(name=f"longest job in {region}", ok=advice is None, text=text, advice=advice or "")


def _quota(region: str, quota: str, count: int, row: Mapping[str, Any] | None) -> Check:
    name = f"quota of {quota} in {region}"
    if row is None:
        text = f"Service Quotas knows none of this name: SageMaker may not have this machine in {region}"
        return Check(name=name, ok=False, text=text, advice="name another instance, or another region")
    limit = float(row["Value"])
    text = f"{count} needed at once, {limit:g} allowed"
    if limit >= count:
        return Check(name=name, ok=True, text=f"{text}; others of the account use it too")
    return Check(name=name, ok=False, text=text, advice=f"ask for more: {quotas.ask_for(row, region, count)}")


def _output(aws: Aws, ground: Ground, group: Replicas) -> Check:
    """SageMaker stores what is left in /opt/ml/model in buckets of the job's own region alone."""
    name, target = f"artifacts of {group.name}", target_of(group)
    place = target.output or ground.run_uri
    bucket = place.removeprefix("s3://").partition("/")[0]
    try:
        look = Buckets(aws).look(bucket, target.region)
    except SkerryError as error:
        return Check(name=name, ok=None, text=f"the bucket {bucket} cannot be looked at ({error})")
    if look is None and target.output is None:
        return Check(name=name, ok=True, text=f"go with the run, to {bucket}")
    if look is None:
        return Check(name=name, ok=False, text=f"there is no bucket {bucket}", advice="make it, or name another")
    if look.region != target.region:
        text = f"{bucket} is in {look.region}, and the machines in {target.region}: a job that leaves files would fail"
        advice = f"write output: s3://a-bucket-in-{target.region}/..., or leave /opt/ml/model empty"
        return Check(name=name, ok=False, text=text, advice=advice)
    return Check(name=name, ok=True, text=f"go to {bucket}, in the same region")


def _pass_role(aws: Aws, ground: Ground, groups: Sequence[Replicas]) -> Check:
    """Whether the operator may hand the groups' roles to jobs, made or brought, as far as IAM tells."""
    name = "right iam:PassRole to SageMaker"
    try:
        identity = aws.identity()
        roles = list(dict.fromkeys(role for group in groups for role in _roles(aws, ground, group)))
        told = aws.call(
            "iam",
            "",
            "simulate_principal_policy",
            PolicySourceArn=_principal(identity.arn),
            ActionNames=["iam:PassRole"],
            ResourceArns=roles,
            ContextEntries=[_TO_SAGEMAKER],
        )
    except SkerryError as error:
        return Check(name=name, ok=None, text=f"cannot be looked at ({error})")
    result = told["EvaluationResults"][0]
    each = {row["EvalResourceName"]: row["EvalResourceDecision"] for row in result.get("ResourceSpecificResults", [])}
    decisions = each or dict.fromkeys(roles, result["EvalDecision"])
    refused = [f"{decision} for {role}" for role, decision in decisions.items() if decision != "allowed"]
    if not refused:
        return Check(name=name, ok=True, text=f"allowed for {_shown(roles)}")
    return Check(name=name, ok=False, text=_shown(refused), advice="ask for iam:PassRole on them")


def _roles(aws: Aws, ground: Ground, group: Replicas) -> Iterator[str]:
    """The ARNs of those that a group's jobs get, as they are made first. One brought by its name is asked for."""
    own = target_of(group).byo.role
    if own is not None:
        yield own if own.startswith("arn:") else str(aws.call("iam", "", "get_role", RoleName=own)["Role"]["Arn"])
        return
    identity = aws.identity()
    account = Account(number=identity.account, partition=identity.partition)
    for _, crew in crews_of(ground, group):
        yield f"arn:{account.partition}:iam::{account.number}:role{PATH}{role_name(ground, account, group, crew)}"


def _shown(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{texts[0]} and {len(texts) - 1} more"


def _principal(arn: str) -> str:
    """Who is asked about: for a session of a role, the role."""
    if ":assumed-role/" not in arn:
        return arn
    start, _, rest = arn.partition(":assumed-role/")
    return f"{start.replace(':sts:', ':iam:')}:role/{rest.partition('/')[0]}"
