"""Tokens of a machine's service account: the variable that selects them, and malformed responses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from skerry.runtime.store.credentials.google_metadata import PATH, MetadataToken, metadata_token

if TYPE_CHECKING:
    from tests.runtime.store.credentials.issuer import CredentialIssuer


def test_provider_is_selected_by_the_variable() -> None:
    assert metadata_token({}) is None
    assert isinstance(metadata_token({"GCE_METADATA_HOST": "metadata"}), MetadataToken)


@pytest.mark.parametrize(
    "body", ["[]", "{}", '{"access_token": "", "expires_in": 1}', '{"access_token": "hunter2"}', "x" * 70_000]
)
def test_malformed_response_is_an_error_without_its_content(issuer: CredentialIssuer, body: str) -> None:
    issuer.failures[PATH] = 200, body
    with pytest.raises(OSError, match=f"no token: host={issuer.host}") as raised:
        MetadataToken(issuer.host)()
    assert "hunter2" not in str(raised.value)
