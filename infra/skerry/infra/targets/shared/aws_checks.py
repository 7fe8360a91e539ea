"""Checks on AWS that several targets make before anything is created. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.clouds.aws.security_group_in_existing_vpc import DefaultVpc, subnet_of
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.infra.clouds.aws.session import Aws


def network_of_subnets(aws: Aws, region: str, subnets: Sequence[str]) -> DefaultVpc:
    """Return the network of the user's subnets. Raises Invalid if they are in several."""
    rows = aws.call("ec2", region, "describe_subnets", SubnetIds=list(subnets))["Subnets"]
    networks = sorted({str(row["VpcId"]) for row in rows})
    if len(networks) != 1:
        raise Invalid(f"the subnets in `byo` are in several networks: {', '.join(networks)}; name those of one")
    return DefaultVpc(vpc=networks[0], subnets=tuple(map(subnet_of, rows)))


def check_security_groups(aws: Aws, region: str, groups: Sequence[str], vpc: str) -> None:
    """Raise Invalid unless the user's security groups are in the network of the subnets."""
    for row in aws.call("ec2", region, "describe_security_groups", GroupIds=list(groups))["SecurityGroups"]:
        if row["VpcId"] != vpc:
            raise Invalid(
                f"the security group {row['GroupId']} is in {row['VpcId']}, and the subnets in {vpc}; "
                "name groups of one network"
            )


def provider_check(aws: Aws, name: str, issuer: str, audience: str, *, stops_jobs: bool, otherwise: str = "") -> Check:
    """Return whether the account of the store trusts the tokens of an issuer at all. otherwise: the end of the advice.

    issuer: without https://. stops_jobs: see Check.
    """
    rows = aws.call("iam", aws.region() or "us-east-1", "list_open_id_connect_providers")
    if any(str(row["Arn"]).endswith(f":oidc-provider/{issuer}") for row in rows["OpenIDConnectProviderList"]):
        return Check(name=name, ok=True, text=f"the account of the store trusts {issuer}")
    command = f"aws iam create-open-id-connect-provider --url https://{issuer} --client-id-list {audience}"
    text = f"the account of the store has no OIDC provider of {issuer}"
    return Check(name=name, ok=False, text=text, advice=f"make it: {command}{otherwise}", stops_jobs=stops_jobs)


def pass_role_check(aws: Aws, name: str, *, service: str, roles: Callable[[], Sequence[str]], ask: str) -> Check:
    """Return whether the operator may pass these roles to a service, as far as IAM's simulation says.

    roles: returns their ARNs. ask: the resource for which to request the permission. Source: IAM API reference,
    EvaluationResult (one for an action, whatever the number of resources).
    """
    try:
        arns = list(dict.fromkeys(roles()))
        answer = aws.call(
            "iam",
            "",
            "simulate_principal_policy",
            PolicySourceArn=_principal_arn(aws),
            ActionNames=["iam:PassRole"],
            ResourceArns=arns,
            # A permission to pass roles is often limited to some services.
            ContextEntries=[
                {"ContextKeyName": "iam:PassedToService", "ContextKeyValues": [service], "ContextKeyType": "string"}
            ],
        )
    except SkerryError as error:
        return Check(name=name, ok=None, text=f"cannot be checked ({error})")
    result = answer["EvaluationResults"][0]
    by_role = {
        row["EvalResourceName"]: row["EvalResourceDecision"] for row in result.get("ResourceSpecificResults", [])
    }
    decisions = by_role or dict.fromkeys(arns, result["EvalDecision"])
    refused = [f"{decision} for {role}" for role, decision in decisions.items() if decision != "allowed"]
    if not refused:
        return Check(name=name, ok=True, text=f"allowed for {_shortened(arns)}")
    return Check(name=name, ok=False, text=_shortened(refused), advice=f"ask for iam:PassRole on {ask}")


def _shortened(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{texts[0]} and {len(texts) - 1} more"


def _principal_arn(aws: Aws) -> str:
    """Return the ARN of the identity; for a session of a role, that of the role, whose path only a spec knows."""
    if aws.login is not None and aws.login.role is not None:
        return aws.login.role
    arn = aws.identity().arn
    if ":assumed-role/" not in arn:
        return arn
    start, _, rest = arn.partition(":assumed-role/")
    return f"{start.replace(':sts:', ':iam:')}:role/{rest.partition('/')[0]}"
