"""Estimates from prices and sizes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.infra import targets
from skerry.infra.cost import prices
from skerry.infra.cost.estimate import BILLION, Cost, Estimate, MachineGroup, StorageCost, Volume, parse_parameters
from skerry.infra.cost.time_limit_from_cost import cost_problem, hours_allowed
from skerry.infra.provision.target_and_store_interfaces import Rate
from skerry.infra.spec.model import Limits, Spec, spec_model
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

TABLE = prices.load("aws")
SPEC = spec_model(targets.kinds())
EAST = Rate(group="east", what="g6e.xlarge, on demand, in us-east-1", count=2, per_hour=4.0, source="a", cap_hours=24)
DEAR = Rate(group="dear", what="p5e.48xlarge, spot, in us-east-1", count=2, per_hour=None, source="b", cap_hours=24)


def spec(outer: dict[str, Any] | None = None, faults: dict[str, Any] | None = None) -> Spec:
    return SPEC.model_validate(
        {
            "run": "tiny",
            "store": "s3://acme/runs",
            "code": {"path": ".", "command": ("python", "train.py")},
            "outer": {"rounds": 200, "reduction": "all_gather", **(outer or {})},
            "faults": faults or {},
            "replicas": ({"name": "local", "count": 1, "target": {"kind": "local"}},),
        }
    )


def crew(count: int, region: str | None = "us-east-1", name: str = "east") -> MachineGroup:
    return MachineGroup(name=name, count=count, region=region)


def upkeep(
    *crews: MachineGroup,
    parameters: float = BILLION,
    region: str = "us-east-1",
    table: prices.Prices = TABLE,
    **outer: Any,
) -> StorageCost:
    faults = outer.pop("faults", None)
    volume = Volume(spec=spec(outer, faults), parameters=parameters, region=region, groups=crews)
    return StorageCost(volume=volume, prices=table)


def test_round_sends_each_contribution_once_and_reads_all_others() -> None:
    volume = upkeep(crew(4), fragments=4, codec="bf16").volume
    assert volume.contribution_bytes == 1e9 / 4 * 2
    assert volume.read_bytes(volume.groups[0]) == 4 * 3 * volume.contribution_bytes
    # Contributions; each replica's own optimizer; the checkpoint, which one of them writes.
    assert volume.sent_bytes(volume.groups[0]) == 4 * volume.contribution_bytes + 4 * 8e9 + 8e9


def test_codec_auto_is_estimated_as_int8_in_a_bucket() -> None:
    auto, int8 = (upkeep(crew(4), codec=codec).volume for codec in ("auto", "int8"))
    assert auto.contribution_bytes == int8.contribution_bytes == pytest.approx(1e9 * 256 / 254)


@pytest.mark.parametrize(
    ("codec", "sent", "reduced"), [("none", 4.0, 4.0), ("bf16", 2.0, 4.0), ("int8", 256 / 254, 256 / 254)]
)
def test_share_of_the_average_is_sent_and_the_others_are_read(codec: str, sent: float, reduced: float) -> None:
    volume = upkeep(crew(8), codec=codec, reduction="reduce_scatter").volume
    assert volume.exchange.sent_bytes == pytest.approx(1e9 * (sent + reduced / 8))
    assert volume.exchange.read_bytes == pytest.approx(1e9 * (sent + reduced) * 7 / 8)


def test_replicas_next_to_the_store_read_more_and_others_less() -> None:
    nearby, away = crew(4), crew(4, "eu-west-1", "west")
    settings = {"codec": "int8", "reduction": "reduce_scatter"}
    flat = upkeep(nearby, away, **settings).volume
    volume = upkeep(nearby, away, reduce_in="us-east-1", **settings).volume
    mine = volume.contribution_bytes
    assert volume.read_bytes(away) == pytest.approx(4 * mine)
    assert flat.read_bytes(away) == pytest.approx(7 * mine)
    assert volume.read_bytes(nearby) == pytest.approx(7 * mine + 3 * mine)
    assert volume.exchange_of(away).sent_bytes == mine
    few = upkeep(crew(1), crew(8, "eu-west-1", "west"), reduce_in="us-east-1", **settings).volume
    assert few.exchange_of(crew(1)) == few.exchange


def test_reduction_is_chosen_by_replicas_and_bytes() -> None:
    chosen = [
        upkeep(crew(count), parameters=size, reduction="auto").volume.exchange.scatters
        for count, size in ((2, 1e9), (4, 1e9), (8, 1e5))
    ]
    assert chosen == [False, True, False]


def test_rarer_checkpoints_send_less_and_store_more() -> None:
    often, rarely = upkeep(crew(4)).volume, upkeep(crew(4), faults={"checkpoint_every": 4}).volume
    first = often.groups[0]
    assert rarely.sent_bytes(first) - 4 * 4e9 == pytest.approx((often.sent_bytes(first) - 4 * 4e9) / 4)
    # Three checkpoints and the initial one, two saves of each replica, and the rounds since the oldest of the three.
    assert often.stored_bytes == 4 * 8e9 + 2 * 4 * 8e9 + 4 * 4 * 4e9
    assert rarely.stored_bytes == 4 * 8e9 + 2 * 4 * 8e9 + 4 * 4 * 4 * 4e9


def test_checkpoint_without_momentum_is_half_as_large() -> None:
    assert upkeep(crew(4), momentum=0.0).volume.checkpoint_bytes == 4e9


def test_traffic_between_regions_costs_in_both_directions() -> None:
    home = upkeep(crew(4))
    assert home.transfer == Cost()
    assert home.routes == ()
    abroad = upkeep(crew(2), crew(2, "ap-northeast-1", "tokyo"))
    tokyo = abroad.volume.groups[1]
    # What leaves Tokyo costs Tokyo's price, what comes back Virginia's.
    expected = abroad.volume.sent_bytes(tokyo) / 1e9 * 0.09 + abroad.volume.read_bytes(tokyo) / 1e9 * 0.02
    assert abroad.transfer.usd == pytest.approx(expected)


def test_replica_outside_of_the_cloud_has_unknown_upload_costs() -> None:
    computed = upkeep(crew(2), crew(2, None, "home")).transfer
    assert computed.usd is None
    assert computed.known == pytest.approx(2 * 3 * 4 * 0.09)
    assert computed.missing == ("a GB from outside to AWS (us-east-1)",)


def crossing(store: str, *kinds: str) -> StorageCost:
    """A group of two for each of these kinds, priced by the tables that are shipped."""
    options: dict[str, Any] = {
        "aws_batch": {"kind": "aws_batch", "region": "us-east-1", "instance_types": ("g6e.xlarge",)},
        "vertex": {"kind": "vertex", "project": "acme-diloco", "region": "us-central1", "machine": "g2-standard-8"},
        "west": {"kind": "aws_batch", "region": "us-west-2", "instance_types": ("g6e.xlarge",)},
    }
    groups = tuple({"name": kind, "count": 2, "target": options[kind]} for kind in kinds)
    computed = SPEC.model_validate({**spec().model_dump(exclude={"replicas"}), "store": store, "replicas": groups})
    home, region = ("aws", "us-east-1") if store.startswith("s3") else ("google", "us-central1")
    crews: list[MachineGroup] = []
    for group in computed.replicas:
        cloud, place = str(group.target.CLOUD), str(getattr(group.target, "region", ""))
        away = None if cloud == home else prices.load(cloud).transfer(place, None)
        crews.append(MachineGroup(name=group.name, count=2, region=place if cloud == home else None, away=away))
    volume = Volume(spec=computed, parameters=BILLION, region=region, groups=tuple(crews))
    return StorageCost(volume=volume, prices=prices.load(home))


@pytest.mark.parametrize(
    ("store", "guest", "place", "bucket_place", "usd_a_gb"),
    [
        ("s3://acme/runs", "vertex", "Google Cloud (us-central1)", "AWS (us-east-1)", (0.12, 0.09)),
        ("gs://acme/runs", "aws_batch", "AWS (us-east-1)", "Google Cloud (us-central1)", (0.09, 0.12)),
    ],
)
def test_traffic_between_clouds_costs_the_internet_price(
    store: str, guest: str, place: str, bucket_place: str, usd_a_gb: tuple[float, float]
) -> None:
    computed = crossing(store, "aws_batch", "vertex")
    crew = next(crew for crew in computed.volume.groups if crew.name == guest)
    sizes = (computed.volume.sent_bytes(crew), computed.volume.read_bytes(crew))
    assert [(leg.way, leg.size_bytes, leg.internet) for leg in computed.routes] == [
        (f"{place} to {bucket_place}", sizes[0], True),
        (f"{bucket_place} to {place}", sizes[1], True),
    ]
    expected = [size / 1e9 * usd for size, usd in zip(sizes, usd_a_gb, strict=True)]
    assert [leg.cost.usd for leg in computed.routes] == pytest.approx(expected)
    lines = [line for line in Estimate(rates=(EAST,), upkeep=computed).lines() if line.startswith("  from ")]
    assert lines == [
        f"  from {place} to {bucket_place} over the internet {sizes[0] / 1e9:.1f} GB: ${expected[0]:.2f}",
        f"  from {bucket_place} to {place} over the internet {sizes[1] / 1e9:.1f} GB: ${expected[1]:.2f}",
    ]
    report = Estimate(rates=(EAST,), upkeep=computed).document()["upkeep"]
    assert (report["between_regions_bytes"], report["internet_bytes"]) == (0, sum(sizes))


def test_lines_separate_traffic_of_regions_and_clouds() -> None:
    computed = crossing("s3://acme/runs", "aws_batch", "west", "vertex")
    lines = [line for line in Estimate(rates=(EAST,), upkeep=computed).lines() if line.startswith("  from ")]
    assert [line.partition(":")[0].rpartition(" GB")[0].rpartition(" ")[0] for line in lines] == [
        "  from region to region",
        "  from Google Cloud (us-central1) to AWS (us-east-1) over the internet",
        "  from AWS (us-east-1) to Google Cloud (us-central1) over the internet",
    ]
    assert computed.transfer.usd == pytest.approx(sum(leg.cost.known for leg in computed.routes))


def test_requests_grow_with_parts_and_pieces() -> None:
    small, large = upkeep(crew(4), parameters=1e6).volume, upkeep(crew(4)).volume
    assert small.writes == 4 * (15 + 16 + 1 + 3) + 1
    assert small.reads == 4 * (12 + 4 * 6 + 3 * 16)
    assert large.reads - small.reads == 4 * 3 * (477 - 16)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_estimated_requests_cover_the_measured_ones(count: int) -> None:
    """In rounds of 4 s, and 24 s of three replicas, without regular heartbeats: a tiny model, no saves of its own."""
    measured = {2: (5.5 + 7.42 + 1.83, 20.83), 3: (5.0 + 7.56 + 2.2, 28.7), 4: (4.71 + 6.21 + 2.42, 31.5)}[count]
    volume = upkeep(crew(count), parameters=16).volume
    assert measured[0] < volume.writes / count < 2 * measured[0]
    assert measured[1] < volume.reads / count < 2 * measured[1]


def test_unknown_price_makes_the_sum_unknown() -> None:
    computed = Cost(known=1.5) + Cost(missing=("a disk",)) + Cost(known=2.0) + Cost(missing=("a disk",))
    assert (computed.usd, computed.known, computed.missing) == (None, 3.5, ("a disk",))
    assert str(computed) == "unknown: $3.50 plus the cost of a disk"
    assert (computed * 2).known == 7.0
    first = upkeep(crew(2), region="eu-west-1")
    assert first.requests.missing == ("a write in eu-west-1", "a read in eu-west-1")
    assert first.storage_per_month.usd is None


GOLDEN = """\
it costs, while all replicas run:
  east: 2 x g6e.xlarge, on demand, in us-east-1: $4.00/h (a)
  together $4.00/h; at most $96.00 at these prices, because they are stopped after 24 h
traffic of a round, for 1.3B parameters, sent as bf16, one of 4 fragments:
  each replica sends 650.0 MB and reads 1.9 GB
  from region to region 18.2 GB: $0.36
  766 requests that write, 1,080 that read: $0.0043
  together $0.37, as much as the machines in 6 min; 200 rounds: $73.65
in the store 145.6 GB: $3.35 a month
assumed: float32 weights, AdamW, a checkpoint every 2 rounds; no failures
heartbeats: $0.016 an hour
not counted: 10.4 GB more are permanent every 50 rounds (faults.keep_every)
not counted: each replica sends 15.6 GB at each save within a round (faults.keep_unfinished)
not counted: rounds that compensate for kills, outages and slow replicas (faults.make_up)
"""


def test_lines_of_a_known_estimate() -> None:
    computed = upkeep(
        crew(2),
        crew(2, "us-west-2", "west"),
        parameters=1.3e9,
        fragments=4,
        codec="bf16",
        faults={"checkpoint_every": 2, "keep_every": 50, "keep_unfinished": "5m", "make_up": True},
    )
    report = Estimate(rates=(EAST,), upkeep=computed, parameters="1.3B")
    assert "\n".join(report.lines()) + "\n" == GOLDEN


UNKNOWN = """\
it costs, while all replicas run:
  east: 2 x g6e.xlarge, on demand, in us-east-1: $4.00/h (a)
  dear: 2 x p5e.48xlarge, spot, in us-east-1: unknown (b)
  together unknown, $4.00/h without dear; at most unknown, because they are stopped after 24 h
traffic of a round, for every billion parameters, sent as float32:
  each replica sends 4.0 GB and reads 12.0 GB
  all of it within eu-west-1: free
  2,580 requests that write, 5,868 that read: unknown: the cost of a write in eu-west-1 and a read in eu-west-1
  together unknown: the cost of a write in eu-west-1 and a read in eu-west-1
in the store 160.0 GB: unknown: the cost of storage in eu-west-1
assumed: float32 weights, AdamW, a checkpoint every round; no failures
heartbeats: unknown: the cost of a write in eu-west-1 and a read in eu-west-1
write unknown prices in a file: --prices FILE or SKERRY_PRICES
"""


def test_lines_of_an_estimate_with_unknown_prices() -> None:
    report = Estimate(rates=(EAST, DEAR), upkeep=upkeep(crew(4, "eu-west-1"), region="eu-west-1"))
    assert "\n".join(report.lines()) + "\n" == UNKNOWN
    assert (report.per_hour, report.cap, report.machines.known) == (None, None, 4.0)


def test_machines_without_a_time_limit_have_no_cap() -> None:
    endless = Rate(group="e", what="w", count=1, per_hour=1.0, source="s", cap_hours=None)
    report = Estimate(rates=(EAST, endless))
    assert report.cap is None
    assert "no time limit: `limits: {max_hours: 24}` sets one" in "\n".join(report.lines())
    assert list(Estimate(rates=()).lines()) == []


def test_document_is_deterministic_and_names_unknown_prices() -> None:
    def report() -> str:
        return json.dumps(Estimate(rates=(EAST, DEAR), upkeep=upkeep(crew(4)), parameters="1B").document())

    assert report() == report()
    document = json.loads(report())
    assert (document["per_hour_usd"], document["known_per_hour_usd"]) == (None, 4.0)
    assert document["upkeep"]["unknown"] == []
    assert document["machines"][1]["per_hour"] is None


def test_own_prices_change_an_estimate(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    regions = {"eu-west-1": {"write_per_1000": 0.005, "read_per_1000": 0.0004, "storage_gb_month": 0.023}}
    path.write_text(json.dumps({"format": 1, "cloud": "aws", "regions": regions}))
    computed = upkeep(crew(4, "eu-west-1"), region="eu-west-1", table=prices.load("aws", path))
    assert computed.missing == ()
    assert computed.storage_per_month.usd == pytest.approx(160 * 0.023)


FREE = Rate(group="f", what="w", count=1, per_hour=0.0, source="own", cap_hours=None)


class TestHoursAllowed:
    @pytest.mark.parametrize(
        ("limits", "rates", "hours"),
        [
            ({}, [DEAR], None),
            ({"max_hours": 3}, [DEAR], 3),
            ({"max_cost_usd": 80}, [EAST, EAST], 10),
            ({"max_cost_usd": 80, "max_hours": 5}, [EAST, EAST], 5),
            ({"max_cost_usd": 80, "max_hours": 50}, [EAST, EAST], 10),
            ({"max_cost_usd": 1, "max_hours": 2}, [FREE], 2),
        ],
    )
    def test_limits_set_the_hours(self, limits: dict[str, float], rates: list[Rate], hours: float | None) -> None:
        assert hours_allowed(Limits(**limits), rates) == hours

    def test_max_cost_with_an_unknown_price_is_refused(self) -> None:
        limits = Limits(max_cost_usd=80)
        with pytest.raises(Invalid, match=r"unknown price of dear \(b\); write unknown prices in a file"):
            hours_allowed(limits, [EAST, DEAR])
        assert cost_problem(limits, [EAST, DEAR]) is not None
        assert cost_problem(limits, [EAST]) is None

    def test_limit_below_a_minute_is_refused(self) -> None:
        with pytest.raises(Invalid, match=r"used up after 45 s at \$4\.00/h"):
            hours_allowed(Limits(max_cost_usd=0.05), [EAST])

    @given(st.floats(0.01, 1e4), st.floats(0.01, 1e3), st.floats(0.1, 1e3))
    def test_allowed_hours_never_cost_more_than_the_limit(self, limit: float, price: float, hours: float) -> None:
        rate = Rate(group="g", what="w", count=1, per_hour=price, source="s", cap_hours=None)
        try:
            allowed = hours_allowed(Limits(max_cost_usd=limit, max_hours=hours), [rate, rate])
        except Invalid:
            assert limit / (2 * price) < 1 / 60
            return
        assert allowed is not None
        assert allowed * 2 * price <= limit * (1 + 1e-9)
        assert allowed <= hours


@given(
    st.integers(1, 40),
    st.integers(0, 40),
    st.floats(1e6, 1e12),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["us-west-2", "ap-northeast-1", "us-east-1"]),
)
def test_more_replicas_are_never_cheaper(count: int, more: int, parameters: float, fragments: int, region: str) -> None:
    def costs(extra: int) -> tuple[float, ...]:
        crews = (crew(count), crew(1 + extra, region, "more"))
        first = upkeep(*crews, parameters=parameters, fragments=fragments, sync_every=4)
        return (
            first.transfer.known,
            first.requests.known,
            first.storage_per_month.known,
            first.heartbeats_per_hour.known,
        )

    for few, many in zip(costs(0), costs(more), strict=True):
        assert few <= many * (1 + 1e-12)


@pytest.mark.parametrize(
    ("text", "count"), [("124M", 124e6), ("1.3B", 1.3e9), ("70b", 70e9), ("1e9", 1e9), ("250k", 250e3), ("2T", 2e12)]
)
def test_number_of_parameters_is_parsed(text: str, count: float) -> None:
    assert parse_parameters(text) == pytest.approx(count)


@pytest.mark.parametrize("text", ["", "B", "1.3 G", "-1B", "nan", "inf", "infB", "0", "many"])
def test_malformed_number_of_parameters_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match=r"write it like 124M or 1\.3B"):
        parse_parameters(text)
