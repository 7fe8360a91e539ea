"""The parameter `fields` reduces a response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.testing.google.kit import good, make_bucket, refused

from skerry.testing.google.partial_response import partial
from skerry.testing.google.refusals import Refusal

if TYPE_CHECKING:
    from skerry.testing.google import GoogleSandbox

ANSWER = {"kind": "x", "items": [{"name": "a", "size": "1", "owner": {"id": 7, "kind": "u"}}], "nextPageToken": "t"}


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ("kind", {"kind": "x"}),
        ("items(name),nextPageToken", {"items": [{"name": "a"}], "nextPageToken": "t"}),
        ("items/name, kind", {"items": [{"name": "a"}], "kind": "x"}),
        ("items(name,owner/id)", {"items": [{"name": "a", "owner": {"id": 7}}]}),
        ("items/owner(kind)", {"items": [{"owner": {"kind": "u"}}]}),
        ("items/*/id", {"items": [{"name": "a", "size": "1", "owner": {"id": 7}}]}),
        ("*", ANSWER),
        ("nothing", {}),
    ],
)
def test_response_has_only_the_requested_fields(fields: str, left: dict[str, Any]) -> None:
    assert partial(ANSWER, fields) == left


@pytest.mark.parametrize(
    "fields", ["items(", "items)", "(name)", ",kind", "items(name", "kind?", "a b(", "items/", "items/,kind"]
)
def test_malformed_fields_are_refused(fields: str) -> None:
    with pytest.raises(Refusal, match="Invalid field selection"):
        partial(ANSWER, fields)


def test_response_of_the_api_has_only_the_requested_fields(google: GoogleSandbox) -> None:
    make_bucket(google)
    buckets = "/storage/v1/b?project=skerry-sandbox"
    assert good(google, "GET", f"{buckets}&fields=items(name)") == {"items": [{"name": "bucket"}]}
    assert refused(google, "GET", f"{buckets}&fields=items(")[0] == 400
