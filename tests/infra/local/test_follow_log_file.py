from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.local.follow_log_file import LogTail

if TYPE_CHECKING:
    from pathlib import Path


def test_complete_lines_are_returned_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as log:
        tail = LogTail(path)
        log.write(b"one\ntw")
        assert tail.lines() == ("one",)
        assert tail.lines() == ()
        log.write(b"o\n\nend")
        assert tail.lines() == ("two", "")
        assert tail.close() == ("end",)
        assert tail.close() == ()


def test_progress_bars_and_control_characters_are_cleaned(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"10%\r20%\r30%\r\n\x1b[31mred\x1b[0m\x07\x1b]0;t\n\xffx\n")
    assert LogTail(path).close() == ("30%", "red]0;t", "\ufffdx")


def test_long_line_without_an_end_is_returned(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 3_000_000)
    tail = LogTail(path)
    assert sum(map(len, tail.close())) == 3_000_000
