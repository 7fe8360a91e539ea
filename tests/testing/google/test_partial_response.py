"""The parameter `fields` reduces a response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.testing.google.kit import good, make_bucket, refused

from skerry.testing.google.partial_response import partial
from skerry.testing.google.refusals import Refusal

if TYPE_CHECKING:
    from skerry.testing.google import GoogleSandbox

TOLD = {"kind": "x", "items": [{"name": "a", "size": "1", "owner": {"id": 7, "kind": "u"}}], "nextPageToken": "t"}


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ("kind", {"kind": "x"}),
        ("items(name),nextPageToken", {"items": [{"name": "a"}], "nextPageToken": "t"}),
        ("items/name, kind", {"items": [{"name": "a"}], "kind": "x"}),
        ("items(name,owner/id)", {"items": [{"name": "a", "owner": {"id": 7}}]}),
        ("items/owner(kind)", {"items": [{"owner": {"kind": "u"}}]}),
        ("items/*/id", {"items": [{"name": "a", "size": "1", "owner": {"id": 7}}]}),
        ("*", TOLD),
        ("nothing", {}),
    ],
)
def test_only_what_was_asked_for_is_left(fields: str, left: dict[str, Any]) -> None:
    assert partial(TOLD, fields) == left


@pytest.mark.parametrize(
    "fields", ["items(", "items)", "(name)", ",kind", "items(name", "kind?", "a b(", "items/", "items/,kind"]
)
def test_what_cannot_be_read_is_refused(fields: str) -> None:
    with pytest.raises(Refusal, match="Invalid field selection"):
        partial(TOLD, fields)


def test_answers_are_cut_to_it(google: GoogleSandbox) -> None:
    make_bucket(google)
    buckets = "/storage/v1/b?project=skerry-sandbox"
    assert good(google, "GET", f"{buckets}&fields=items(name)") == {"items": [{"name": "bucket"}]}
    assert refused(google, "GET", f"{buckets}&fields=items(")[0] == 400
