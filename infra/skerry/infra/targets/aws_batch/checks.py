"""What can be known beforehand of what would fail later: offers, network, quotas, rights.

Asks, changes nothing. What cannot be looked at is told as such, never as good.
Sources: EC2 user guide, "On-Demand Instance quotas", "Spot Instance quotas"; IAM quotas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws import routes
from skerry.infra.clouds.aws.network import subnet_of
from skerry.infra.coherence import MOST_ROLES
from skerry.infra.target import Check
from skerry.infra.targets.aws_batch.layout import target_of
from skerry.infra.targets.aws_batch.machines import shape
from skerry.infra.targets.aws_batch.survey import survey
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.spec import Replicas
    from skerry.infra.target import Ground

# Running vCPUs, by the first letters of a type: on demand, and spot. The longest that fits counts.
_QUOTAS: Final = {
    "dl": ("L-6E869C2A", "L-85EED4F7"),
    "f": ("L-74FC7D96", "L-88CF9481"),
    "g": ("L-DB2E81BA", "L-3819A6DF"),
    "inf": ("L-1945791B", "L-B5D1601B"),
    "p": ("L-417A185B", "L-7212CCBC"),
    "p5": ("L-417A185B", "L-C4BD4855"),
    "p6": ("L-417A185B", "L-C4BD4855"),
    "trn": ("L-2C3B7624", "L-6B0D517C"),
    "vt": ("L-DB2E81BA", "L-3819A6DF"),
    "x": ("L-7295265B", "L-E3A00192"),
}
_STANDARD: Final = ("L-1216C47A", "L-34B43A08")
# A right to pass roles that is given with care is given for some services alone.
_TO_MACHINES: Final = {
    "ContextKeyName": "iam:PassedToService",
    "ContextKeyValues": ["ec2.amazonaws.com"],
    "ContextKeyType": "string",
}
# What accounts have if nobody asked for more.
_ROLES: Final = 1000


def checks(aws: Aws, ground: Ground, groups: Sequence[Replicas]) -> Iterator[Check]:
    """See Target.checks."""
    need: dict[tuple[str, str], int] = {}
    for group in groups:
        target = target_of(group)
        name = f"machines of {group.name}"
        try:
            terrain = survey(aws, target)
            shape_ = shape(target, group.count, terrain.machines)
        except Invalid as error:
            yield Check(name=name, ok=False, text=str(error), advice="change the target's options in the spec")
            continue
        except SkerryError as error:
            yield Check(name=name, ok=None, text=str(error))
            continue
        places = f"{len(terrain.subnets)} subnets" if terrain.subnets else "your own machines"
        if terrain.stranded:
            places += f" (not in {', '.join(terrain.stranded)}, from where machines would reach nothing)"
        each = f"{shape_.vcpus} vCPUs, {shape_.memory_mib} MiB, {target.gpus} GPUs for each replica"
        yield Check(name=name, ok=True, text=f"offered in {target.region}, {places}; {each}")
        if target.byo.subnets is not None and terrain.vpc is not None:
            yield _network(aws, target.region, f"network of {group.name}", terrain.vpc, terrain.subnets)
        if target.byo.queue is None and target.byo.compute_environment is None:
            for code in {quota_of(one, spot=target.spot) for one in target.instance_types}:
                need[target.region, code] = need.get((target.region, code), 0) + shape_.max_vcpus
    for (region, code), vcpus in sorted(need.items()):
        yield _quota(aws, region, code, vcpus)
    yield _roles(aws, groups)
    yield _pass_role(aws, ground)


def quota_of(instance_type: str, *, spot: bool) -> str:
    """The quota that machines of this type count against. Pure."""
    fitting = [start for start in _QUOTAS if instance_type.startswith(start) and _is_family(instance_type, start)]
    pair = _QUOTAS[max(fitting, key=len)] if fitting else _STANDARD
    return pair[1] if spot else pair[0]


def _is_family(instance_type: str, start: str) -> bool:
    """g6e.xlarge begins with the family g, and so does gr6; dl1 is no d, nor is trn1 a t."""
    rest = instance_type.removeprefix(start).lstrip("r") if start == "g" else instance_type.removeprefix(start)
    return start[-1].isdigit() or rest[:1].isdigit()


def _network(aws: Aws, region: str, name: str, vpc: str, ids: Sequence[str]) -> Check:
    """Whether machines in the user's own subnets reach what they must. There are ways out that nobody can see here."""
    try:
        rows = aws.call("ec2", region, "describe_subnets", SubnetIds=list(ids))["Subnets"]
        stranded = routes.stranded(aws, region, vpc, map(subnet_of, rows))
        lacking = routes.lacking_endpoints(aws, region, vpc) if stranded else ()
    except SkerryError as error:
        return Check(name=name, ok=None, text=f"whether machines get out of your subnets cannot be looked at ({error})")
    if not stranded:
        return Check(name=name, ok=True, text="machines in your subnets have a way out")
    if not lacking:
        return Check(name=name, ok=True, text=f"{vpc} has endpoints for all that machines need of AWS")
    told = ", ".join(subnet.id for subnet in stranded)
    text = (
        f"no way out of {told} can be seen: no public addresses, no route to a NAT gateway, and {vpc} has no endpoint "
        f"for {', '.join(lacking)}; jobs may wait for ever"
    )
    advice = "give them a route to a NAT gateway, or public addresses with a route to an internet gateway"
    return Check(name=name, ok=None, text=text, advice=advice)


def _quota(aws: Aws, region: str, code: str, vcpus: int) -> Check:
    name = f"quota {code} in {region}"
    try:
        told = aws.call("service-quotas", region, "get_service_quota", ServiceCode="ec2", QuotaCode=code)["Quota"]
    except SkerryError as error:
        text = f"{vcpus} vCPUs are needed at once; what is allowed cannot be looked at ({error})"
        return Check(name=name, ok=None, text=text)
    limit, title = float(told["Value"]), str(told.get("QuotaName", code))
    text = f"{title}: {vcpus} vCPUs needed at once, {limit:g} allowed"
    if limit >= vcpus:
        return Check(name=name, ok=True, text=f"{text}; others of the account use it too")
    advice = f"ask for more: aws service-quotas request-service-quota-increase --region {region} --service-code ec2"
    return Check(name=name, ok=False, text=text, advice=f"{advice} --quota-code {code} --desired-value {vcpus}")


def _roles(aws: Aws, groups: Sequence[Replicas]) -> Check:
    needed = sum(1 if target_of(group).one_role else group.count for group in groups) + 2
    try:
        told = aws.call("iam", "", "get_account_summary")["SummaryMap"]
    except SkerryError as error:
        return Check(
            name="roles", ok=None, text=f"{needed} are needed; how many there are cannot be looked at ({error})"
        )
    there, most = int(told.get("Roles", 0)), int(told.get("RolesQuota", _ROLES))
    text = f"{needed} are needed, {there} of {most} are there"
    if there + needed <= most:
        return Check(name="roles", ok=True, text=text)
    advice = f"write role: group; more than {MOST_ROLES} roles are never made for a run"
    return Check(name="roles", ok=False, text=text, advice=advice)


def _pass_role(aws: Aws, ground: Ground) -> Check:
    """Whether the operator may hand roles to jobs and machines, as far as IAM tells."""
    name = "right iam:PassRole"
    try:
        identity = aws.identity()
        role = f"arn:{identity.partition}:iam::{identity.account}:role/skerry/{ground.stem}-machines"
        told = aws.call(
            "iam",
            "",
            "simulate_principal_policy",
            PolicySourceArn=_principal(identity.arn),
            ActionNames=["iam:PassRole"],
            ResourceArns=[role],
            ContextEntries=[_TO_MACHINES],
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
