"""The cost of mirrors, computed by hand, and the limit at which copying ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.infra.kit import ground_from, write_spec

from skerry.infra.cost.estimate import MachineGroup, Volume
from skerry.infra.cost.mirror_costs import KEPT, MirrorCost, route_of
from skerry.infra.cost.prices import load
from skerry.infra.cost.time_limit_from_cost import limits_of
from skerry.infra.spec.replication_section import FurtherPlace
from skerry.runtime.mirrors import mirror as runtime_mirror

if TYPE_CHECKING:
    from pathlib import Path

BATCH = "  - {name: b, count: 2, target: {kind: aws_batch, region: us-east-1, instance_types: [c7i.large]}}\n"
CLUSTER = "  - {name: k, count: 2, target: {kind: kubernetes, secret: keys}}\n"


def cost_of(
    folder: Path,
    to: str = "gs://acme-dr/runs",
    *,
    groups: str = BATCH,
    rounds: str = "40",
    region: str = "us-west-2",
    **line: Any,
) -> MirrorCost:
    """A mirror of a run of a billion parameters, 40 rounds and two replicas, that sends float32."""
    path = write_spec(folder, groups, store="s3://acme/runs", image="x", outer=f"{{rounds: {rounds}, codec: none}}")
    spec = ground_from(path).spec
    place = ("google", "us-central1") if to.startswith("gs") else ("aws", region)
    route = route_of(f"{to}/tiny", FurtherPlace(to=to, **line), place, spec.replicas, None)
    volume = Volume(
        spec=spec, parameters=1e9, region="us-east-1", groups=(MachineGroup(name="b", count=2, region="us-east-1"),)
    )
    return MirrorCost(route=route, volume=volume)


def test_traffic_is_checkpoints_private_states_and_payloads(tmp_path: Path) -> None:
    price = load("aws").transfer("us-east-1", None)
    assert price is not None
    every_ten = cost_of(tmp_path, every=10)
    # Weights and momentum are 8 GB, and the private states of two replicas 16 GB.
    assert every_ten.copy_bytes == 24e9
    assert every_ten.per_round.known == 2.4 * price.usd
    shared = cost_of(tmp_path, every=10, private=False, log="every round")
    assert (shared.copy_bytes, shared.log_bytes) == (8e9, 8e9)
    assert shared.per_round.known == (8 + 0.8) * price.usd
    assert f"{shared.per_round * 40} in all" in shared.in_words


def test_limit_names_the_round_at_which_copying_ends(tmp_path: Path) -> None:
    price = load("aws").transfer("us-east-1", None)
    assert price is not None
    limited = cost_of(tmp_path, every=10, max_usd=2.4 * price.usd * 5.5)
    assert limited.in_words.endswith("after 5 rounds")
    assert limited.route.problem is None


def test_limit_of_free_traffic_in_an_endless_run_is_never_reached(tmp_path: Path) -> None:
    free = cost_of(tmp_path, "s3://acme-dr/runs", region="us-east-1", rounds="null", max_usd=5)
    assert free.per_round.usd == 0
    assert free.in_words == "$0.00 a copy, free"


def test_unknown_price_is_no_zero_and_makes_a_limit_a_problem(tmp_path: Path) -> None:
    unknown = cost_of(tmp_path, groups=CLUSTER, max_usd=5)
    assert unknown.per_round.usd is None
    assert "unknown: the cost of a GB from kubernetes to gs://acme-dr/runs" in unknown.in_words
    assert "max_usd of gs://acme-dr/runs cannot be enforced: unknown price" in str(unknown.route.problem)


def test_other_region_of_one_cloud_costs_less_than_the_internet(tmp_path: Path) -> None:
    near, far = cost_of(tmp_path, "s3://acme-west/runs"), cost_of(tmp_path)
    assert 0 < near.per_round.known < far.per_round.known


def test_number_of_kept_checkpoints_is_that_of_the_runtime() -> None:
    assert KEPT == runtime_mirror.KEPT


def test_cost_limit_of_the_run_sets_the_mirrors_aside(tmp_path: Path) -> None:
    lines = "[{to: gs://a-dr/r, max_usd: 4}, {to: s3://a-w/r, region: us-west-2, max_usd: 2}]"
    lines = f"limits: {{max_cost_usd: 10}}\nreplication: {lines}\n"
    spec = ground_from(write_spec(tmp_path, BATCH, store="s3://acme/runs", image="x", more=lines)).spec
    assert limits_of(spec).max_cost_usd == 4
    assert limits_of(spec.model_copy(update={"replication": ()})).max_cost_usd == 10
