"""Identifiers, docstrings, messages and documents keep to plain technical English."""

from __future__ import annotations

import pytest
from tests.contracts.language import BANNED_NAMES, in_python, in_text, violations


def test_no_file_has_banned_names_or_phrases() -> None:
    assert [str(violation) for violation in violations()] == []


@pytest.mark.parametrize(
    "source",
    [
        '"""What a replica keeps."""',
        "def f():\n    '''Whether the round is over.'''",
        "for one in receipts: pass",
        "def f(told): pass",
        "raise ValueError('waited 60 s in vain')",
        "x = 1  # nobody reads this",
        f"def test_{'a' * 66}(): pass",
        "def test_who_is_late(): pass",
        "def told(): pass",
        "class _Made: pass",
    ],
)
def test_each_banned_habit_is_reported(source: str) -> None:
    assert list(in_python("example.py", source))


@pytest.mark.parametrize(
    "source",
    [
        '"""Compares receipts and elects the majority state."""',
        "def test_late_joiner_skips_open_round(): pass",
        "for receipt in receipts: pass",
        "raise ValueError('timed out after 60 s: bucket not visible yet; run the same command again')",
    ],
)
def test_plain_sentences_pass(source: str) -> None:
    assert not list(in_python("example.py", source))


def test_documents_are_checked_by_line() -> None:
    (violation,) = in_text("page.md", 1, "First line.\nNobody reads it.")
    assert violation.line == 2


def test_list_of_banned_names_stays_short() -> None:
    assert len(BANNED_NAMES) < 30
