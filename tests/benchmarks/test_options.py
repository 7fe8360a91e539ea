from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import pytest
from common.options import picture

if TYPE_CHECKING:
    from pathlib import Path


def test_a_picture_has_a_format_and_a_folder(tmp_path: Path) -> None:
    assert picture(str(tmp_path / "a.svg")) == tmp_path / "a.svg"
    assert picture("b.png").name == "b.png"
    with pytest.raises(argparse.ArgumentTypeError, match=r"a\.html: a picture ends in \.svg or \.png"):
        picture(str(tmp_path / "a.html"))
    with pytest.raises(argparse.ArgumentTypeError, match="there is no folder"):
        picture(str(tmp_path / "none" / "a.svg"))
