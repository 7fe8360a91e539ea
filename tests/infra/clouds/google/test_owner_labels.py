"""Owner labels are valid for Google and are parsed back."""

from __future__ import annotations

import re
from dataclasses import replace
from string import ascii_letters

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.infra.clouds.google.kit import OTHER, RUN, wanted
from tests.infra.clouds.google.test_gcs import BUCKET

from skerry.infra.clouds.google import owner_labels
from skerry.infra.clouds.google.generation_names import name_with_room

KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
VALUE = re.compile(r"[a-z0-9_-]{0,63}")


@given(
    key=st.text(min_size=1, max_size=20), tags=st.dictionaries(st.text(max_size=90), st.text(max_size=90), max_size=5)
)
def test_labels_are_valid_and_parsed_back(key: str, tags: dict[str, str]) -> None:
    if any("\ud800" <= sign <= "\udfff" for sign in key):
        return
    desired = replace(wanted(replace(BUCKET, key=key), generation=3), extra=tags)
    labels = owner_labels.labels(desired)
    assert all(KEY.fullmatch(name) and VALUE.fullmatch(value) for name, value in labels.items())
    mark = owner_labels.of_labels(labels)
    assert mark is not None
    assert (mark.owner(RUN), mark.generation) == (RUN, 3)
    parsed = owner_labels.owned_record(type(BUCKET), mark, name="acme", region="", outputs={})
    assert parsed.address == (desired.resource.address if len(labels[owner_labels.KEY_LABEL]) else "google_bucket.acme")
    again = owner_labels.of_description(owner_labels.description(desired))
    assert again == mark


def test_owner_of_another_run_is_described_by_its_label() -> None:
    mark = owner_labels.of_labels(owner_labels.labels(wanted(BUCKET)))
    assert mark is not None
    assert mark.owner(RUN) == RUN
    assert re.fullmatch(r"with the label tiny-gpt-[0-9a-f]{32}", mark.owner(OTHER))
    assert owner_labels.run_mark("gs://a/x/tiny-gpt") != owner_labels.run_mark("gs://b/x/tiny-gpt")


@pytest.mark.parametrize("run", ["s3://b/Ünïcode Run", "gs://b/", "gs://b/" + "n" * 300, "gs://b/x/"])
def test_run_mark_is_a_valid_label(run: str) -> None:
    assert VALUE.fullmatch(owner_labels.run_mark(run))


def test_unlabelled_resource_has_no_owner() -> None:
    assert owner_labels.of_labels({"team": "x"}) is None
    assert owner_labels.of_description("made by hand") is None
    assert owner_labels.of_description("") is None


def test_user_tags_become_valid_labels() -> None:
    labels = owner_labels.labels(wanted(BUCKET, **{"Cost Centre": "R&D 4711", "7up": "Ja"}))
    assert (labels["cost_centre"], labels["tag-7up"]) == ("r_d_4711", "ja")


def test_existing_description_is_kept_and_marked_once() -> None:
    once = owner_labels.description(wanted(BUCKET), "made by Ann")
    assert owner_labels.description(wanted(BUCKET), once) == once
    assert once.startswith("made by Ann [skerry run=tiny-gpt-")


@given(text=st.text(alphabet=f"{ascii_letters}0123456789-_.", min_size=1, max_size=80), longest=st.integers(16, 64))
def test_short_name_is_short_plain_and_unique(text: str, longest: int) -> None:
    parsed = name_with_room(f"s{text}", longest)
    assert len(parsed) <= longest - 4
    assert re.fullmatch(r"s[a-z0-9-]*", parsed)
    assert parsed != name_with_room(f"s{text}x", longest)
