"""The table of Google's prices: what was seen and where; what was not is unknown."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from skerry.infra import prices

TABLE = json.loads(resources.files("skerry.infra").joinpath("price_tables/google.json").read_text())


def test_every_price_of_the_table_says_who_saw_it() -> None:
    told: list[object] = []
    for section in TABLE["regions"].values():
        for value in section.values():
            told += value.values() if isinstance(value, dict) else [value]
    assert all(isinstance(entry, list) and entry[0] > 0 for entry in told)
    assert {entry[1] for entry in told if isinstance(entry, list)} == set(TABLE["sources"])


@pytest.mark.parametrize("region", sorted(TABLE["regions"]))
def test_a_bucket_has_its_prices_wherever_a_region_is_told(region: str) -> None:
    table = prices.load("google")
    asked = (table.storage(region), table.write(region), table.read(region), table.transfer(region, None))
    assert all(price is not None and 0 < price.usd < 1 for price in asked)
    own = table.transfer(region, region)
    assert own is not None
    assert own.usd == 0


def test_what_was_not_seen_is_unknown() -> None:
    table = prices.load("google")
    assert table.transfer("us-central1", "europe-west4") is None
    assert table.machine("us-central1", "a2-highgpu-1g") is None
    assert table.disk("us-central1") is None
    iowa = table.machine("us-central1", "n1-standard-4")
    assert iowa is not None
    assert str(iowa) == "list price of 2026-09-08 by vertex-iowa"
