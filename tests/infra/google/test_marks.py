"""Marks: whose something is, in what Google lets one write."""

from __future__ import annotations

import re
from dataclasses import replace
from string import ascii_letters

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.infra.google.ground import OTHER, RUN, wanted
from tests.infra.google.test_storage import BUCKET

from skerry.infra.clouds.google import marks
from skerry.infra.clouds.google.handling import name_with_room

KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
VALUE = re.compile(r"[a-z0-9_-]{0,63}")


@given(
    key=st.text(min_size=1, max_size=20), tags=st.dictionaries(st.text(max_size=90), st.text(max_size=90), max_size=5)
)
def test_whatever_is_marked_labels_take_it_and_it_is_found_again(key: str, tags: dict[str, str]) -> None:
    if any("\ud800" <= sign <= "\udfff" for sign in key):
        return
    one = replace(wanted(replace(BUCKET, key=key), generation=3), extra=tags)
    told = marks.labels(one)
    assert all(KEY.fullmatch(name) and VALUE.fullmatch(value) for name, value in told.items())
    mark = marks.of_labels(told)
    assert mark is not None
    assert (mark.owner(RUN), mark.generation) == (RUN, 3)
    found = marks.found(type(BUCKET), mark, name="acme", region="", outputs={})
    assert found.address == (one.resource.address if len(told[marks.KEY_LABEL]) else "google_bucket.acme")
    again = marks.of_description(marks.description(one))
    assert again == mark


def test_another_run_is_another_and_told_as_well_as_it_can_be() -> None:
    mark = marks.of_labels(marks.labels(wanted(BUCKET)))
    assert mark is not None
    assert mark.owner(RUN) == RUN
    assert re.fullmatch(r"with the label tiny-gpt-[0-9a-f]{32}", mark.owner(OTHER))
    assert marks.run_mark("gs://a/x/tiny-gpt") != marks.run_mark("gs://b/x/tiny-gpt")


@pytest.mark.parametrize("run", ["s3://b/Ünïcode Run", "gs://b/", "gs://b/" + "n" * 300, "gs://b/x/"])
def test_every_run_has_a_mark_that_a_label_takes(run: str) -> None:
    assert VALUE.fullmatch(marks.run_mark(run))


def test_what_carries_no_mark_is_nobodys() -> None:
    assert marks.of_labels({"team": "x"}) is None
    assert marks.of_description("made by hand") is None
    assert marks.of_description("") is None


def test_a_users_tags_are_told_as_labels_can() -> None:
    told = marks.labels(wanted(BUCKET, **{"Cost Centre": "R&D 4711", "7up": "Ja"}))
    assert (told["cost_centre"], told["tag-7up"]) == ("r_d_4711", "ja")


def test_a_description_that_was_there_is_kept_and_marked_once() -> None:
    once = marks.description(wanted(BUCKET), "made by Ann")
    assert marks.description(wanted(BUCKET), once) == once
    assert once.startswith("made by Ann [skerry run=tiny-gpt-")


@given(text=st.text(alphabet=f"{ascii_letters}0123456789-_.", min_size=1, max_size=80), longest=st.integers(16, 64))
def test_a_short_name_is_short_plain_and_its_own(text: str, longest: int) -> None:
    found = name_with_room(f"s{text}", longest)
    assert len(found) <= longest - 4
    assert re.fullmatch(r"s[a-z0-9-]*", found)
    assert found != name_with_room(f"s{text}x", longest)
