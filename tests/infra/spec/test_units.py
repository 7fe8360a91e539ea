from __future__ import annotations

from datetime import timedelta

import pytest

from skerry.infra.spec import units


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("60s", 60), ("1.5h", 5400), ("10m", 600), ("2d", 172800), ("0s", 0)]
)
def test_time_with_a_unit_is_parsed_and_formatted(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == timedelta(seconds=seconds)
    assert units.parse_duration(units.format_duration(timedelta(seconds=seconds))) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "-5s", "5", "1e9s", "5 weeks", "inf", "99999d", "999999999999d", "9" * 400 + "s", True, None, ()]
)
def test_text_without_a_valid_time_is_rejected(text: object) -> None:
    with pytest.raises(ValueError, match=r"must be|has no unit|unknown unit"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("60GiB", 60 << 30), ("1.5GiB", 3 << 29), ("512MiB", 512 << 20), ("2TB", 2 * 10**12), ("100 GB", 10**11)],
)
def test_size_with_a_unit_is_parsed_and_formatted(text: str, size_bytes: int) -> None:
    assert units.parse_size(text) == size_bytes
    assert units.parse_size(units.format_size(size_bytes)) == size_bytes
