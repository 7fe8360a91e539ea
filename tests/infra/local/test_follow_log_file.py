from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.tail import Tail

if TYPE_CHECKING:
    from pathlib import Path


def test_lines_are_given_once_and_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as log:
        tail = Tail(path) if path.exists() else None
        assert tail is not None
        log.write(b"one\ntw")
        assert tail.lines() == ("one",)
        assert tail.lines() == ()
        log.write(b"o\n\nend")
        assert tail.lines() == ("two", "")
        assert tail.close() == ("end",)
        assert tail.close() == ()


def test_a_progress_bar_is_its_last_state_and_control_characters_stay_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"10%\r20%\r30%\r\n\x1b[31mred\x1b[0m\x07\x1b]0;t\n\xffx\n")
    assert Tail(path).close() == ("30%", "red]0;t", "\ufffdx")


def test_a_line_without_an_end_is_given_out_when_it_is_long(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 3_000_000)
    tail = Tail(path)
    assert sum(map(len, tail.close())) == 3_000_000
