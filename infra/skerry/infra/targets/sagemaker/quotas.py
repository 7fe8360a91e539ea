"""What SageMaker gives an account: how many machines of a type at once, and how long one job may run.

Sources: SageMaker endpoints and quotas, "Service quotas"; Service Quotas API reference, ListServiceQuotas (which leaves
out quotas that nobody ever changed).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.aws.session import Aws

LONGEST: Final = "Longest run time for a training job"
GIVEN: Final = timedelta(days=5)
"""How long that is for an account that never asked for more."""
_ASK: Final = "aws service-quotas request-service-quota-increase --service-code sagemaker"


def of_machines(instance: str, *, spot: bool) -> str:
    """What Service Quotas calls the number of such machines in training jobs. Pure."""
    return f"{instance} for {'spot ' if spot else ''}training job usage"


def known(aws: Aws, region: str) -> dict[str, Mapping[str, Any]]:
    """Every quota by its name, as it holds for the account. Some fifty calls."""
    found: dict[str, Mapping[str, Any]] = {}
    for operation in ("list_aws_default_service_quotas", "list_service_quotas"):
        rows = aws.pages("service-quotas", region, operation, "Quotas", ServiceCode="sagemaker")
        found |= {str(row["QuotaName"]): row for row in rows}
    return found


def ask_for(row: Mapping[str, Any], region: str, value: float) -> str:
    """The command that asks for so much of a quota."""
    return f"{_ASK} --region {region} --quota-code {row['QuotaCode']} --desired-value {value:g}"


def too_long(row: Mapping[str, Any], region: str, seconds: int) -> str | None:
    """What to do if no job may run so long; None if it may. row: of LONGEST."""
    if seconds <= float(row["Value"]):
        return None
    return f"write a shorter max_runtime, or shorter limits, or ask for more: {ask_for(row, region, seconds)}"


def check_length(aws: Aws, region: str, seconds: int) -> None:
    """Raises Invalid, with what to do, if no job of the account may run so long. Asks only about more than is GIVEN.

    Where quotas cannot be looked at nothing is known: doctor says so, and SageMaker itself when the job is made.
    """
    if seconds <= GIVEN.total_seconds():
        return
    try:
        row = known(aws, region).get(LONGEST)
    except SkerryError:
        return
    advice = None if row is None else too_long(row, region, seconds)
    if row is not None and advice is not None:
        raise Invalid(f"no job may run for {seconds} s in {region}, {row['Value']:g} s are allowed; {advice}")
