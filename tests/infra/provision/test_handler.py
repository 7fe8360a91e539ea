from __future__ import annotations

import pytest

from skerry.infra.provision.handler import Contents


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        (Contents(objects=1, size_bytes=0), "1 object (0.0 kB)"),
        (Contents(objects=2, size_bytes=1234), "2 objects (1.2 kB)"),
        (Contents(objects=2, size_bytes=2_500_000), "2 objects (2.5 MB)"),
        (Contents(objects=7, size_bytes=81_000_000_000, more=True, noun="image"), "more than 7 images (81.0 GB)"),
        (Contents(objects=3), "3 objects"),
    ],
)
def test_contents_are_printed_in_a_suitable_unit(contents: Contents, text: str) -> None:
    assert str(contents) == text
