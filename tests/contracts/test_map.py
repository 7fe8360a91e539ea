"""The picture of the rooms in the README is the one that the imports draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_committed_map_matches_the_imports() -> None:
    """Run `scripts/map` after a room, an import between rooms or a room's first sentence has changed."""
    compared = subprocess.run([sys.executable, "scripts/map.py", "--check"], cwd=ROOT, check=False)
    assert compared.returncode == 0


def test_readme_shows_the_map() -> None:
    assert "docs/map.svg" in (ROOT / "README.md").read_text()
