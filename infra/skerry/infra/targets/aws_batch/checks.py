"""Checks before an apply: machine types, network, quotas and permissions. Reads only.

What cannot be checked is reported as unknown, never as good.
Sources: EC2 user guide, "On-Demand Instance quotas", "Spot Instance quotas"; IAM quotas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.aws import route_checks
from skerry.infra.clouds.aws.policies import partition_of, service_principal
from skerry.infra.clouds.aws.security_group_in_existing_vpc import subnet_of
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.infra.targets.aws_batch.machine_sizing import shape
from skerry.infra.targets.aws_batch.options import AwsBatchTarget
from skerry.infra.targets.aws_batch.region_offer import find_region_offer
from skerry.infra.targets.shared.aws_checks import pass_role_check
from skerry.infra.targets.shared.aws_options import MOST_ROLES
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas

# The quotas of running vCPUs, on demand and spot, by the beginning of a type. The longest match counts.
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
# The default quota of an account.
_ROLES: Final = 1000


def checks(aws: Aws, context: RunContext, groups: Sequence[Replicas]) -> Iterator[Check]:
    """See Target.checks."""
    need: dict[tuple[str, str], int] = {}
    for group in groups:
        target = AwsBatchTarget.of(group)
        name = f"machines of {group.name}"
        try:
            offer = find_region_offer(aws, target)
            replica = shape(target, group.count, offer.machines)
        except Invalid as error:
            yield Check(name=name, ok=False, text=str(error), advice="change the target's options in the spec")
            continue
        except SkerryError as error:
            yield Check(name=name, ok=None, text=str(error))
            continue
        places = f"{len(offer.subnets)} subnets" if offer.subnets else "your own machines"
        if offer.stranded:
            places += f" (without {', '.join(offer.stranded)}, which have no way out)"
        text = f"{replica.vcpus} vCPUs, {replica.memory_mib} MiB, {target.gpus} GPUs for each replica"
        yield Check(name=name, ok=True, text=f"offered in {target.region}, {places}; {text}")
        if target.byo.subnets is not None and offer.vpc is not None:
            yield _network(aws, target.region, f"network of {group.name}", offer.vpc, offer.subnets)
        if target.byo.queue is None and target.byo.compute_environment is None:
            for code in {quota_of(instance_type, spot=target.spot) for instance_type in target.instance_types}:
                need[target.region, code] = need.get((target.region, code), 0) + replica.max_vcpus
    for (region, code), vcpus in sorted(need.items()):
        yield _quota(aws, region, code, vcpus)
    yield _roles(aws, groups)
    yield pass_role_check(
        aws,
        "right iam:PassRole",
        service=service_principal("ec2", partition_of(AwsBatchTarget.of(groups[0]).region)),
        roles=lambda: [_machine_role(aws, context)],
        ask="role/skerry/*",
    )


def quota_of(instance_type: str, *, spot: bool) -> str:
    """Return the quota that machines of this type count against. Pure."""
    fitting = [start for start in _QUOTAS if instance_type.startswith(start) and _is_family(instance_type, start)]
    pair = _QUOTAS[max(fitting, key=len)] if fitting else _STANDARD
    return pair[1] if spot else pair[0]


def _is_family(instance_type: str, start: str) -> bool:
    """Return whether a type is of a family: g6e and gr6 are of g, but dl1 is not of d, nor trn1 of t."""
    rest = instance_type.removeprefix(start).lstrip("r") if start == "g" else instance_type.removeprefix(start)
    return start[-1].isdigit() or rest[:1].isdigit()


def _network(aws: Aws, region: str, name: str, vpc: str, ids: Sequence[str]) -> Check:
    """Check that machines in the user's subnets reach AWS. Some ways out, such as a proxy, are not visible here."""
    try:
        rows = aws.call("ec2", region, "describe_subnets", SubnetIds=list(ids))["Subnets"]
        stranded = route_checks.stranded(aws, region, vpc, map(subnet_of, rows))
        lacking = route_checks.lacking_endpoints(aws, region, vpc) if stranded else ()
    except SkerryError as error:
        return Check(name=name, ok=None, text=f"a way out of your subnets cannot be checked ({error})")
    if not stranded:
        return Check(name=name, ok=True, text="machines in your subnets have a way out")
    if not lacking:
        return Check(name=name, ok=True, text=f"{vpc} has endpoints for all services of AWS that machines need")
    ids = ", ".join(subnet.id for subnet in stranded)
    text = (
        f"no way out of {ids} is visible: no public addresses, no route to a NAT gateway, and {vpc} has no endpoint "
        f"for {', '.join(lacking)}; jobs may wait forever"
    )
    advice = "give them a route to a NAT gateway, or public addresses with a route to an internet gateway"
    return Check(name=name, ok=None, text=text, advice=advice)


def _quota(aws: Aws, region: str, code: str, vcpus: int) -> Check:
    name = f"quota {code} in {region}"
    try:
        quota = aws.call("service-quotas", region, "get_service_quota", ServiceCode="ec2", QuotaCode=code)["Quota"]
    except SkerryError as error:
        text = f"{vcpus} vCPUs are needed at once; the limit cannot be checked ({error})"
        return Check(name=name, ok=None, text=text)
    limit, title = float(quota["Value"]), str(quota.get("QuotaName", code))
    text = f"{title}: {vcpus} vCPUs needed at once, {limit:g} allowed"
    if limit >= vcpus:
        return Check(name=name, ok=True, text=f"{text}; others of the account use it too")
    advice = f"ask for more: aws service-quotas request-service-quota-increase --region {region} --service-code ec2"
    return Check(name=name, ok=False, text=text, advice=f"{advice} --quota-code {code} --desired-value {vcpus}")


def _machine_role(aws: Aws, context: RunContext) -> str:
    identity = aws.identity()
    return f"arn:{identity.partition}:iam::{identity.account}:role{context.spec.aws.role_path}{context.stem}-machines"


def _roles(aws: Aws, groups: Sequence[Replicas]) -> Check:
    needed = sum(1 if AwsBatchTarget.of(group).one_role else group.count for group in groups) + 2
    try:
        summary = aws.call("iam", "", "get_account_summary")["SummaryMap"]
    except SkerryError as error:
        return Check(
            name="roles", ok=None, text=f"{needed} are needed; the number of existing ones cannot be checked ({error})"
        )
    existing, most = int(summary.get("Roles", 0)), int(summary.get("RolesQuota", _ROLES))
    text = f"{needed} are needed, {existing} of {most} exist"
    if existing + needed <= most:
        return Check(name="roles", ok=True, text=text)
    advice = f"write role: group; more than {MOST_ROLES} roles are never created for a group"
    return Check(name="roles", ok=False, text=text, advice=advice)
