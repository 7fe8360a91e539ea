from __future__ import annotations

import pytest

from skerry.infra.handler import Held


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (Held(objects=1, size_bytes=0), "1 object (0.0 kB)"),
        (Held(objects=2, size_bytes=1234), "2 objects (1.2 kB)"),
        (Held(objects=2, size_bytes=2_500_000), "2 objects (2.5 MB)"),
        (Held(objects=7, size_bytes=81_000_000_000, more=True, noun="image"), "more than 7 images (81.0 GB)"),
        (Held(objects=3), "3 objects"),
    ],
)
def test_what_something_holds_is_told_in_a_unit_that_fits(held: Held, said: str) -> None:
    assert str(held) == said
