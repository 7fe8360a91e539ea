"""Checks before an apply: that Slurm answers, and that the partitions can run what is asked for. Reads only.

Slurm accepts a job with more time than its partition allows, and lets it wait for ever; so the partition is asked. All
other requests that a cluster can never fulfil are refused by sbatch at once.
Source: scontrol(1), "show partition"; sbatch(1), "--time".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.infra.targets.slurm.options import SlurmTarget
from skerry.runtime.errors import SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.spec.model import Replicas
    from skerry.infra.targets.slurm.cluster import Cluster

_PARTITIONS: Final = "sinfo --version && exec scontrol --oneliner show partition"
_TIME: Final = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_UNLIMITED: Final = frozenset({"UNLIMITED", "INFINITE", "NONE", ""})


def checks(cluster_of: Callable[[str], Cluster], groups: Sequence[Replicas]) -> Iterator[Check]:
    """See Target.checks. One call for each cluster."""
    for region in dict.fromkeys(SlurmTarget.of(group).region for group in groups):
        cluster = cluster_of(region)
        name = f"Slurm at {cluster.name}"
        try:
            version, _, text = cluster.call(_PARTITIONS).partition("\n")
        except SkerryError as error:
            refused = isinstance(error, Unauthorized)
            advice = "ask the cluster's administrator for access" if refused else "log in there and try `sinfo`"
            yield Check(name=name, ok=False, text=str(error), advice=advice)
            continue
        partitions = parse_partitions(text)
        yield Check(name=name, ok=True, text=f"{version} answers; partitions: {', '.join(sorted(partitions))}")
        for group in groups:
            if SlurmTarget.of(group).region == region:
                yield partition_check(group, partitions)


def partition_check(group: Replicas, partitions: Mapping[str, Mapping[str, str]]) -> Check:
    """Check that a partition of a group exists, takes jobs, and allows their time. Pure."""
    target, name = SlurmTarget.of(group), f"partition of {group.name}"
    default = (key for key, fields in partitions.items() if fields.get("Default") == "YES")
    wanted = (target.partition or next(default, "")).split(",")
    known = [key for key in wanted if key in partitions]
    if not known:
        text = (
            "the cluster has no default partition" if target.partition is None else f"no partition {target.partition}"
        )
        return Check(name=name, ok=False, text=text, advice=f"write partition: {' or '.join(sorted(partitions))}")
    if all(partitions[key].get("State") != "UP" for key in known):
        states = ", ".join(f"{key} is {partitions[key].get('State')}" for key in known)
        return Check(name=name, ok=None, text=f"{states}: jobs wait until it is UP")
    limits = [partitions[key].get("MaxTime", "") for key in known]
    longest = None if any(limit in _UNLIMITED for limit in limits) else max(map(_minutes, limits))
    minutes = None if target.time is None else target.time.total_seconds() / 60
    if minutes is not None and longest is not None and minutes > longest:
        text = f"{', '.join(known)} allows {max(limits, key=_minutes)}, and time is {minutes:.0f} minutes"
        advice = f"write time: {longest:.0f}m or less (the job is requeued when it is over), or another partition"
        return Check(name=name, ok=False, text=f"{text}: the jobs would wait for ever", advice=advice)
    allowed = f"up to {max(limits, key=_minutes)}" if longest is not None else "without a time limit"
    return Check(name=name, ok=True, text=f"{', '.join(known)} runs jobs {allowed}")


def parse_partitions(text: str) -> dict[str, dict[str, str]]:
    """Parse `scontrol --oneliner show partition`: fields of each partition, by its name."""
    rows = [dict(field.split("=", 1) for field in line.split() if "=" in field) for line in text.splitlines()]
    return {row["PartitionName"]: row for row in rows if "PartitionName" in row}


def _minutes(text: str) -> float:
    """Return a time of Slurm, days-hours:minutes:seconds, in minutes; infinite without a limit."""
    match = _TIME.fullmatch(text)
    if match is None:
        return float("inf") if text in _UNLIMITED else float(text) if text.isdecimal() else 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes + seconds / 60
