"""The environment variables that a launcher sets for a replica."""

from __future__ import annotations

import pytest

from skerry.runtime import contract
from skerry.runtime.contract import Contract
from skerry.runtime.errors import Invalid

CONTRACT = Contract(run_uri="file:///tmp/run", slot="local-1", index=1, replicas=4)


def test_replica_reads_what_the_launcher_sets() -> None:
    assert contract.read(CONTRACT.environment()) == CONTRACT


def test_all_missing_variables_are_named() -> None:
    with pytest.raises(Invalid, match="SKERRY_RUN, SKERRY_SLOT, SKERRY_INDEX, SKERRY_REPLICAS"):
        contract.read({})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SKERRY_INDEX", "4", "not below"),
        ("SKERRY_INDEX", "-1", "not a whole number"),
        ("SKERRY_REPLICAS", "four", "not a whole number"),
        ("SKERRY_SLOT", "../x", "not a slot name"),
    ],
)
def test_wrong_variable_is_invalid(name: str, value: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        contract.read({**CONTRACT.environment(), name: value})
