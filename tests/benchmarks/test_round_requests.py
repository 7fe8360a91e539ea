"""Holds the requests of a round below half of the 2,114 that 16 replicas once sent (decision 0029 of the runtime)."""

from __future__ import annotations

import argparse

from round_requests import measure

REPLICAS = 16
BEFORE = 2114


def test_round_of_16_replicas_has_less_than_half_of_its_old_requests() -> None:
    result = measure(REPLICAS, argparse.Namespace(rounds=8, train=2.0, seed=0))
    assert result.exchange == 2 * REPLICAS**2
    assert result.exchange < result.total < BEFORE / 2
    assert result.round_s < 6.0
