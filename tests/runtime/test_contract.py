"""The environment that a launcher promises."""

from __future__ import annotations

import pytest

from skerry.runtime import contract
from skerry.runtime.contract import Contract, ExitCode
from skerry.runtime.errors import Invalid

PLACE = Contract(run_uri="file:///tmp/run", slot="local-1", index=1, replicas=4)


def test_what_a_launcher_sets_is_what_a_replica_reads() -> None:
    assert contract.read(PLACE.environment()) == PLACE


def test_every_missing_variable_is_named_at_once() -> None:
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
def test_a_wrong_variable_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        contract.read({**PLACE.environment(), name: value})


def test_exit_codes_are_a_promise_to_launchers() -> None:
    assert {code.name: code.value for code in ExitCode} == {"DONE": 0, "RETRY": 10, "PERMANENT": 20, "STOPPED": 30}
