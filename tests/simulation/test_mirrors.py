"""Mirrors that replicas keep: whole older runs after every put, with kills there. More by `scripts/bench simulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.run import run_seed
from tests.simulation.search import quiet, search

from skerry.runtime.mirrors import checked_cut
from skerry.runtime.mirrors.mirror import Mirror

if TYPE_CHECKING:
    import pytest


def test_mirror_is_an_older_run_after_every_put() -> None:
    total = search(range(10), mirrored=True)
    assert not total.reports, total.reports[0]
    assert total.facts["puts of mirrors"] > 150
    assert total.facts["kills at a put of a mirror"] > 5
    assert total.facts["restores"] > 8
    assert total.facts["restores of a damaged mirror"] > 8
    assert total.facts["mirrors complete at the end"] > 4


def test_search_sees_a_mirror_that_names_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mirror, "_copy_parts", lambda *_: True)
    with quiet():
        assert any("mirror" in text for seed in range(3) for text in run_seed(seed, mirrored=True).violations)


def test_search_sees_a_restore_that_compares_only_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_cut, "check_fork", lambda *_: ())
    with quiet():
        assert any("mirror" in text for seed in range(10) for text in run_seed(seed, mirrored=True).violations)


def test_search_sees_a_mirror_without_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mirror, "_copy_newest_checkpoint", lambda _: None)
    with quiet():
        assert any("mirror" in text for seed in range(3) for text in run_seed(seed, mirrored=True).violations)
