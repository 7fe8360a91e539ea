"""Reads an account's quotas of SageMaker: the number of machines of a type, and the time of one job.

Sources: SageMaker endpoints and quotas, "Service quotas"; Service Quotas API reference, ListServiceQuotas (which leaves
out unchanged quotas).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from skerry.runtime.errors import Invalid, SkerryError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.aws.session import Aws

LONGEST: Final = "Longest run time for a training job"
DEFAULT: Final = timedelta(days=5)
"""Its default."""
_ASK: Final = "aws service-quotas request-service-quota-increase --service-code sagemaker"


def of_machines(instance: str, *, spot: bool) -> str:
    """Return the name of the quota of such machines in training jobs. Pure."""
    return f"{instance} for {'spot ' if spot else ''}training job usage"


def known(aws: Aws, region: str) -> dict[str, Mapping[str, Any]]:
    """Return every quota of the account by its name. Makes about fifty calls."""
    rows_by_name: dict[str, Mapping[str, Any]] = {}
    for operation in ("list_aws_default_service_quotas", "list_service_quotas"):
        rows = aws.pages("service-quotas", region, operation, "Quotas", ServiceCode="sagemaker")
        rows_by_name |= {str(row["QuotaName"]): row for row in rows}
    return rows_by_name


def ask_for(row: Mapping[str, Any], region: str, value: float) -> str:
    """Return the command that requests this much of a quota."""
    return f"{_ASK} --region {region} --quota-code {row['QuotaCode']} --desired-value {value:g}"


def too_long(row: Mapping[str, Any], region: str, seconds: int) -> str | None:
    """Return the advice for a job that is too long; None if it is not. row: of LONGEST."""
    if seconds <= float(row["Value"]):
        return None
    return f"write a shorter max_runtime, or shorter limits, or ask for more: {ask_for(row, region, seconds)}"


def check_length(aws: Aws, region: str, seconds: int) -> None:
    """Raise Invalid, with advice, if no job of the account may run so long. Makes calls only above DEFAULT.

    Unreadable quotas are ignored here: `skerry doctor` reports them, and SageMaker refuses the job.
    """
    if seconds <= DEFAULT.total_seconds():
        return
    try:
        row = known(aws, region).get(LONGEST)
    except SkerryError:
        return
    advice = None if row is None else too_long(row, region, seconds)
    if row is not None and advice is not None:
        raise Invalid(f"no job may run for {seconds} s in {region}, {row['Value']:g} s are allowed; {advice}")
