"""Tests that the picture of the recorded session shows one frame at every moment, and its last where nothing moves."""

from __future__ import annotations

import re

import pytest
from scripts import session

FRAME = re.compile(r'<g visibility="(\w+)"><animate attributeName="visibility" values="([\w;]+)" keyTimes="([\d.;]+)"')
COMMITTED = session.PICTURE.read_text()


def drawn() -> str:
    recording = session.Recording()
    for text in ("skerry init", "skerry up"):
        recording.type(text)
        recording.now += session.PAUSE_S
    return session.picture(recording)


def shown(picture: str, moment: float) -> list[int]:
    """The frames that are visible at this share of the animation."""
    frames = list[int]()
    for number, (_, values, times) in enumerate(FRAME.findall(picture)):
        past = [float(time) <= moment for time in times.split(";")]
        if values.split(";")[past.count(True) - 1] == "visible":
            frames.append(number)
    return frames


@pytest.mark.parametrize("picture", [COMMITTED, drawn()], ids=["committed", "drawn"])
def test_last_frame_is_shown_first_and_where_nothing_moves(picture: str) -> None:
    frames = FRAME.findall(picture)
    last = len(frames) - 1
    assert [number for number, frame in enumerate(frames) if frame[0] == "visible"] == [last]
    assert shown(picture, 0) == [last]
    for moment in sorted({float(time) for _, _, times in frames for time in times.split(";")}):
        assert len(shown(picture, moment)) == 1
    middle = [shown(picture, (number + 0.5) / 200)[0] for number in range(200)]
    begin = next(number for number, frame in enumerate(middle) if frame != last)
    assert middle[begin:] == sorted(middle[begin:])
