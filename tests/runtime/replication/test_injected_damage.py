"""Hundreds of injected flips, truncations and absences: no wrong byte is used, and a whole copy is, if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kit.damage import LAYERS, inject

if TYPE_CHECKING:
    from pathlib import Path

INJECTIONS = 90


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_damage_is_detected_and_another_copy_is_used(tmp_path: Path, layer: str) -> None:
    figures = inject(layer, INJECTIONS, 3, tmp_path)
    assert figures.is_sound, figures
    assert figures.injected.total() >= INJECTIONS
    assert min(figures.injected.values()) > 0
    assert figures.served > figures.refused > 0, figures
