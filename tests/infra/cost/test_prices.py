"""The price tables of the package, and a user's own prices."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest

from skerry.infra.cost import prices
from skerry.infra.cost.prices import Price
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

REGIONS = ("us-east-1", "us-east-2", "us-west-2", "eu-west-1", "eu-central-1", "ap-northeast-1")


def write(folder: Path, regions: object, **more: object) -> Path:
    path = folder / "own.json"
    path.write_text(json.dumps({"format": 1, "cloud": "aws", "regions": regions, **more}))
    return path


def table(cloud: str) -> Any:
    return json.loads(resources.files("skerry.infra.cost").joinpath(f"price_tables/{cloud}.json").read_text())


@pytest.mark.parametrize("cloud", ["aws", "google"])
def test_every_price_of_a_table_has_a_source(cloud: str) -> None:
    entries: list[Any] = []
    for section in table(cloud)["regions"].values():
        for value in section.values():
            entries += value.values() if isinstance(value, dict) else [value]
    assert all(isinstance(entry, list) and entry[0] > 0 for entry in entries)
    assert {entry[1] for entry in entries} == set(table(cloud)["sources"])


@pytest.mark.parametrize("region", sorted(table("google")["regions"]))
def test_every_region_of_google_has_bucket_prices(region: str) -> None:
    google = prices.load("google")
    known = (google.storage(region), google.write(region), google.read(region), google.transfer(region, None))
    assert all(price is not None and 0 < price.usd < 1 for price in known)
    within = google.transfer(region, region)
    assert within is not None
    assert within.usd == 0


@pytest.mark.parametrize(
    ("region", "kind", "usd"),
    [
        ("us-east-1", "g6e.xlarge", 1.861),
        ("us-east-1", "p5.48xlarge", 55.04),
        ("us-west-2", "p6-b200.48xlarge", 113.9328),
        ("us-west-2", "c7i.2xlarge", 0.357),
        ("eu-central-1", "g5.xlarge", 1.258),
        ("eu-west-1", "c7i.48xlarge", 9.19296),
        ("ap-northeast-1", "p4d.24xlarge", 30.09784),
        ("us-east-1", "ml.g6e.xlarge", 2.61),
        ("us-west-2", "ml.g6.xlarge", 1.127),
        ("eu-central-1", "ml.g5.xlarge", 1.76),
    ],
)
def test_machine_has_its_list_price(region: str, kind: str, usd: float) -> None:
    price = prices.load("aws").machine(region, kind)
    assert price is not None
    assert price.usd == usd


@pytest.mark.parametrize(
    ("region", "kind"),
    [("us-east-1", "p5e.48xlarge"), ("eu-west-1", "g6.xlarge"), ("us-east-2", "ml.g5.xlarge"), ("mars-1", "g5.xlarge")],
)
def test_missing_price_is_unknown(region: str, kind: str) -> None:
    assert prices.load("aws").machine(region, kind) is None
    assert prices.load("gcp").machine(region, kind) is None
    assert prices.load("google").transfer("us-central1", "europe-west4") is None
    assert prices.load("google").disk("us-central1") is None


def test_sagemaker_machine_costs_more_than_the_same_in_ec2() -> None:
    regions = table("aws")["regions"]
    pairs = [
        (price[0], section["machines"][name.removeprefix("ml.")][0])
        for section in regions.values()
        for name, price in section["machines"].items()
        if name.startswith("ml.") and name.removeprefix("ml.") in section["machines"]
    ]
    assert len(pairs) > 15
    # What is known of the ratio: 1.25 to 1.4.
    assert all(1.2 < ours / ec2 < 1.45 for ours, ec2 in pairs)


def test_table_has_disk_prices_and_no_spot_prices() -> None:
    aws = prices.load("aws")
    assert all(aws.spot(region, "g5.xlarge") is None for region in REGIONS)
    assert all(aws.disk(region) is not None for region in REGIONS)


def test_traffic_between_all_regions_has_a_price() -> None:
    aws = prices.load("aws")
    for source in REGIONS:
        for destination in REGIONS:
            price = aws.transfer(source, destination)
            assert price is not None
            assert (price.usd == 0) == (source == destination)
        out = aws.transfer(source, None)
        assert out is not None
        assert out.usd >= 0.09
    assert aws.transfer("us-east-1", "mars-1") is None
    assert aws.transfer("mars-1", "mars-1") is not None


def test_own_prices_override_the_table(tmp_path: Path) -> None:
    own = {"us-east-1": {"machines": {"g6e.xlarge": 1.2}, "spot": {"g6e.xlarge": 0.5}, "write_per_1000": 0}}
    price = prices.load("aws", write(tmp_path, own))
    assert price.machine("us-east-1", "g6e.xlarge") == Price(usd=1.2, source="own.json", date=None, own=True)
    assert str(price.spot("us-east-1", "g6e.xlarge")) == "price in own.json"
    # A price of 0 in the user's file is known.
    assert price.write("us-east-1") == Price(usd=0, source="own.json", date=None, own=True)
    assert str(price.machine("us-east-1", "g6e.2xlarge")) == "list price of 2026-07-20 by karpenter"
    assert str(price.machine("us-west-2", "c7i.xlarge")) == "undated list price by skypilot"


def test_own_prices_may_have_sources(tmp_path: Path) -> None:
    regions = {"us-east-1": {"storage_gb_month": [0.02, "contract"]}}
    path = write(tmp_path, regions, sources={"contract": {"what": "our contract", "date": "2026-05-01"}})
    assert prices.load("aws", path).storage("us-east-1") == Price(usd=0.02, source="contract", date="2026-05-01")


def test_own_prices_of_another_cloud_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path, {"us-east-1": {"machines": {"g6e.xlarge": 9}}}, cloud="gcp")
    assert prices.load("aws", path).machine("us-east-1", "g6e.xlarge") == prices.load("aws").machine(
        "us-east-1", "g6e.xlarge"
    )
    price = prices.load("gcp", path).machine("us-east-1", "g6e.xlarge")
    assert price is not None
    assert price.usd == 9


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "own.json: is not JSON: EOF while parsing"),
        ("[]", "own.json: the file: must be a mapping"),
        ('{"cloud": "aws", "regions": {}}', "own.json: format: is missing"),
        ('{"format": 2, "cloud": "aws", "regions": {}}', "own.json: format: input should be 1"),
        ('{"format": 1, "cloud": "aws", "regions": {"r": 3}}', "own.json: regions.r: must be a mapping"),
        (
            '{"format": 1, "cloud": "aws", "regions": {"r": {"machine": {}}}}',
            "regions.r.machine: unknown price; known are machines, spot",
        ),
        (
            '{"format": 1, "cloud": "aws", "regions": {"r": {"machines": {"a.b": -1}}}}',
            "regions.r.machines.a.b: must be US dollars, a number of 0 or more",
        ),
        (
            '{"format": 1, "cloud": "aws", "regions": {"r": {"disk_gb_month": "0.1"}}}',
            "regions.r.disk_gb_month: must be US dollars",
        ),
        (
            '{"format": 1, "cloud": "aws", "regions": {"r": {"spot": {"a.b": NaN}}}}',
            "own.json: ",
        ),
        (
            '{"format": 1, "cloud": "aws", "regions": {"r": {"to_region_gb": {"s": [1, "x"]}}}}',
            "regions.r.to_region_gb.s: 'x' is missing in `sources`",
        ),
        (
            '{"format": 1, "cloud": "aws", "sources": {"x": {"what": "y", "date": "May"}}, "regions": {}}',
            "sources.x.date: ",
        ),
    ],
)
def test_malformed_file_is_refused_with_its_place(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(text)
    with pytest.raises(Invalid) as caught:
        prices.load("aws", path)
    assert complaint in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"cannot read the prices in .*none\.json: No such file"):
        prices.load("aws", tmp_path / "none.json")


def test_environment_names_the_own_file(tmp_path: Path) -> None:
    assert prices.own_file({}) is None
    assert prices.own_file({prices.VARIABLE: ""}) is None
    assert prices.own_file({prices.VARIABLE: str(tmp_path)}) == tmp_path


@pytest.mark.parametrize(
    ("usd", "entries"),
    [(0, "$0.00"), (1234.5, "$1,234.50"), (0.1, "$0.10"), (0.0123, "$0.012"), (0.00004, "$0.000040")],
)
def test_small_amounts_keep_two_digits(usd: float, entries: str) -> None:
    assert prices.rounded(usd) == entries


def test_file_may_have_prices_of_several_clouds(tmp_path: Path) -> None:
    tables = [
        {"format": 1, "cloud": cloud, "regions": {"r": {"machines": {"m": usd}}}}
        for cloud, usd in (("aws", 1.5), ("google", 2))
    ]
    path = tmp_path / "own.json"
    path.write_text(json.dumps(tables))
    price = [prices.load(cloud, path).machine("r", "m") for cloud in ("aws", "google", "elsewhere")]
    assert [price and (price.usd, str(price)) for price in price] == [
        (1.5, "price in own.json"),
        (2.0, "price in own.json"),
        None,
    ]
    path.write_text(json.dumps([tables[0], {"format": 1}]))
    with pytest.raises(Invalid, match=r"own\.json: 2: cloud: is missing"):
        prices.load("aws", path)
