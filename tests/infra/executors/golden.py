"""What executors ask of clouds, as files that a reader can look at."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

GOLDEN: Final = Path(__file__).parent / "golden"


def check_golden(name: str, value: Any) -> None:
    """`value` is what the file says. SKERRY_TEST_GOLDEN=1 writes it instead, for a reader to look at the difference."""
    path = GOLDEN / f"{name}.json"
    told = json.dumps(value, indent=2, sort_keys=True) + "\n"
    if os.environ.get("SKERRY_TEST_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(told)
    assert told == path.read_text()
