"""The checks of a cluster and its partitions, and the price of its jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.kit import ground_from, problems_in, write_spec
from tests.infra.targets.slurm.kit import Recorded
from tests.infra.targets.test_options import SPECS

from skerry.infra.cost import prices
from skerry.infra.targets.slurm import costs
from skerry.infra.targets.slurm.checks import checks
from skerry.infra.targets.slurm.cluster import Answer

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target_and_store_interfaces import Check
    from skerry.infra.spec.model import Replicas

IMAGE = "/shared/images/skerry.sif"
# Of Slurm 22.05.8, shortened.
PARTITIONS = """\
slurm-wlm 22.05.8
PartitionName=main AllowGroups=ALL Default=YES MaxTime=1-00:00:00 MinNodes=0 State=UP TRES=cpu=16,mem=62.50G
PartitionName=short AllowGroups=ALL Default=NO MaxTime=00:10:00 MinNodes=0 State=UP TRES=cpu=16,mem=62.50G
PartitionName=free AllowGroups=ALL Default=NO MaxTime=UNLIMITED MinNodes=0 State=DOWN TRES=cpu=16,mem=62.50G
"""


def group_of(folder: Path, target: str) -> Replicas:
    groups = f"  - {{name: hpc, count: 2, target: {{kind: slurm{target}}}}}\n"
    return ground_from(write_spec(folder, groups, store="file:///shared/runs", image="x")).spec.replicas[0]


def check_of(folder: Path, target: str) -> Check:
    recorded = Recorded(sinfo=PARTITIONS)
    _, partition = checks(lambda _: recorded.cluster, [group_of(folder, target)])
    return partition


@pytest.mark.parametrize(
    ("target", "ok", "text"),
    [
        ("", True, "main runs jobs up to 1-00:00:00"),
        (", time: 24h", True, "main runs jobs up to 1-00:00:00"),
        (", time: 25h", False, "main allows 1-00:00:00, and time is 1500 minutes: the jobs would wait for ever"),
        (", partition: 'short,main', time: 12h", True, "short, main runs jobs up to 1-00:00:00"),
        (", partition: short, time: 11m", False, "short allows 00:10:00, and time is 11 minutes"),
        (", partition: gpu", False, "no partition gpu"),
        (", partition: free, time: 30d", None, "free is DOWN: jobs wait until it is UP"),
    ],
)
def test_partition_must_exist_and_allow_the_time(tmp_path: Path, target: str, ok: bool | None, text: str) -> None:  # noqa: FBT001  a table
    check = check_of(tmp_path, target)
    assert (check.ok, check.text.startswith(text)) == (ok, True), check.text


def test_cluster_that_does_not_answer_fails_its_check_alone(tmp_path: Path) -> None:
    error = Answer(code=1, out="", err="slurm_load_partitions: Unable to contact slurm controller")
    (check,) = checks(lambda _: Recorded(sinfo=error).cluster, [group_of(tmp_path, "")])
    assert (check.ok, check.advice) == (False, "log in there and try `sinfo`")


def test_price_is_known_from_the_file_of_the_user_only(tmp_path: Path) -> None:
    group = group_of(tmp_path, ", partition: gpu, gpus: 1")
    limits = ground_from(tmp_path / "skerry.yaml").spec.limits
    (rate,) = costs.rates(prices.load("slurm"), limits, [group])
    assert (rate.per_hour, rate.source) == (None, "no price of gpu at localhost")
    own = tmp_path / "prices.json"
    own.write_text('{"format": 1, "cloud": "slurm", "regions": {"localhost": {"machines": {"gpu": 1.5}}}}')
    (rate,) = costs.rates(prices.load("slurm", own), limits, [group])
    assert rate.per_hour == 3.0


def test_container_without_an_image_is_a_problem(tmp_path: Path) -> None:
    text = SPECS["slurm"].replace("image: /shared/skerry.sif\n", "").replace("gpus: 1", "container: apptainer")
    (problem,) = problems_in(tmp_path, text)
    assert problem.endswith("container: apptainer runs an image, and the spec names none; write e.g. image: " + IMAGE)
