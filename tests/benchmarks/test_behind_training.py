"""Tests how the share of an exchange that training hides follows from receipts."""

from __future__ import annotations

import pytest
from common.behind_training import HiddenCase, of_receipts

from skerry.runtime.log.records import GENESIS, Receipt


def receipt(exposed: float, **phases: float) -> Receipt:
    return Receipt(
        run="a" * 32,
        round=3,
        slot="r-0",
        incarnation=0,
        commit=GENESIS,
        averages=(),
        state=None,
        scope="fragments",
        contributed=True,
        uploaded_bytes=0,
        downloaded_bytes=0,
        requests=0,
        seconds={**phases, "exposed": exposed},
    )


def test_hidden_is_what_training_did_not_wait_for() -> None:
    case = HiddenCase(
        codec="int8",
        reduction="reduce_scatter",
        replicas=2,
        elements=1,
        rounds=1,
        steps=4,
        delay=3,
        step_s=0.5,
        port=0,
    )
    result = of_receipts(case, [receipt(0.0, upload=2.0, wait=2.0), receipt(1.0, upload=1.0, wait=1.0, download=4.0)])
    assert (result.exchange_s, result.exposed_s, result.behind_s) == (5.0, 0.5, 1.5)
    assert (result.hidden, result.least) == (pytest.approx(0.9), pytest.approx(5 / 6, abs=1e-3))
    assert of_receipts(case, [receipt(5.0, upload=4.0)]).hidden == 0.0
