"""Options of a benchmark, refused before it begins: one that has run for half an hour must not end in a wrong name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

PICTURES: Final = (".svg", ".png")


def picture(text: str) -> Path:
    """Parse the path of a picture. Raises argparse's error for an unknown format or an absent folder."""
    path = Path(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: a picture ends in {' or '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    return path
