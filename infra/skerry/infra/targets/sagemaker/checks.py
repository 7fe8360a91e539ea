"""What can be known beforehand of what would fail later: machines, quotas, the place for artifacts, rights.

Asks, changes nothing. What cannot be looked at is told as such, never as good.
Sources: SageMaker endpoints and quotas, "Service quotas"; Service Quotas API reference, ListServiceQuotas (which leaves
out quotas that nobody ever changed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.storage import Buckets
from skerry.infra.target import Check
from skerry.infra.targets.sagemaker.layout import runtime_s, target_of
from skerry.infra.targets.sagemaker.survey import survey
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.spec import Replicas
    from skerry.infra.target import Ground

_LONGEST: Final = "Longest run time for a training job"
_ASK: Final = "aws service-quotas request-service-quota-increase --service-code sagemaker"


def checks(aws: Aws, ground: Ground, groups: Sequence[Replicas]) -> Iterator[Check]:
    """See Target.checks."""
    for group in groups:
        yield _machine(aws, group)
    for region in sorted({target_of(group).region for group in groups}):
        here = [group for group in groups if target_of(group).region == region]
        yield from _quotas(aws, region, here, ground.spec.limits.max_hours)
    for group in groups:
        yield _output(aws, ground, group)
    if any(target_of(group).byo.role is None for group in groups):
        yield _pass_role(aws, ground)


def quota_name(instance: str, *, spot: bool) -> str:
    """What Service Quotas calls the number of such machines in training jobs. Pure."""
    return f"{instance} for {'spot ' if spot else ''}training job usage"


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
        quota = quota_name(target.instance, spot=target.spot)
        need[quota] = need.get(quota, 0) + group.count
    try:
        known = _known(aws, region)
    except SkerryError as error:
        for quota, count in need.items():
            text = f"{count} are needed at once; what is allowed cannot be looked at ({error})"
            yield Check(name=f"quota of {quota} in {region}", ok=None, text=text)
        return
    for quota, count in sorted(need.items()):
        yield _quota(region, quota, count, known.get(quota))
    if (longest := known.get(_LONGEST)) is not None:
        seconds = max(runtime_s(hours, target_of(group)) for group in groups)
        text = f"{seconds} s are asked for, {longest['Value']:g} allowed"
        code = longest["QuotaCode"]
        advice = f"write max_runtime or limits, or ask for more: {_ASK} --region {region} --quota-code {code}"
        good = seconds <= float(longest["Value"])
        yield Check(name=f"longest job in {region}", ok=good, text=text, advice="" if good else advice)


def _known(aws: Aws, region: str) -> dict[str, Mapping[str, Any]]:
    """Every quota by its name, as it holds for the account."""
    found: dict[str, Mapping[str, Any]] = {}
    for operation in ("list_aws_default_service_quotas", "list_service_quotas"):
        rows = aws.pages("service-quotas", region, operation, "Quotas", ServiceCode="sagemaker")
        found |= {str(row["QuotaName"]): row for row in rows}
    return found


def _quota(region: str, quota: str, count: int, row: Mapping[str, Any] | None) -> Check:
    name = f"quota of {quota} in {region}"
    if row is None:
        text = f"Service Quotas knows none of this name: SageMaker may not have this machine in {region}"
        return Check(name=name, ok=False, text=text, advice="name another instance, or another region")
    limit = float(row["Value"])
    text = f"{count} needed at once, {limit:g} allowed"
    if limit >= count:
        return Check(name=name, ok=True, text=f"{text}; others of the account use it too")
    advice = f"ask for more: {_ASK} --region {region} --quota-code {row['QuotaCode']} --desired-value {count}"
    return Check(name=name, ok=False, text=text, advice=advice)


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


def _pass_role(aws: Aws, ground: Ground) -> Check:
    """Whether the operator may hand roles to jobs, as far as IAM tells."""
    name = "right iam:PassRole to SageMaker"
    try:
        identity = aws.identity()
        role = f"arn:{identity.partition}:iam::{identity.account}:role/skerry/{ground.stem}-all"
        told = aws.call(
            "iam",
            "",
            "simulate_principal_policy",
            PolicySourceArn=_principal(identity.arn),
            ActionNames=["iam:PassRole"],
            ResourceArns=[role],
            ContextEntries=[
                {
                    "ContextKeyName": "iam:PassedToService",
                    "ContextKeyValues": ["sagemaker.amazonaws.com"],
                    "ContextKeyType": "string",
                }
            ],
        )
    except SkerryError as error:
        return Check(name=name, ok=None, text=f"cannot be looked at ({error})")
    decision = str(told["EvaluationResults"][0]["EvalDecision"])
    if decision == "allowed":
        return Check(name=name, ok=True, text=f"allowed for {role}")
    return Check(name=name, ok=False, text=f"{decision} for {role}", advice="ask for iam:PassRole on role/skerry/*")


def _principal(arn: str) -> str:
    """Who is asked about: for a session of a role, the role."""
    if ":assumed-role/" not in arn:
        return arn
    start, _, rest = arn.partition(":assumed-role/")
    return f"{start.replace(':sts:', ':iam:')}:role/{rest.partition('/')[0]}"
