"""A Google Cloud Storage server for tests that honours generations, which the published emulators do not.

It implements the XML API that obstore uses. That is S3's except for the condition: `x-goog-if-generation-match: 0` is a
create, any other number a compare-and-swap. The rest, faults included, is `S3Server`.
Source: https://cloud.google.com/storage/docs/xml-api/reference-headers
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.s3server import Response, S3Server, StoredObject, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping


class GcsServer(S3Server):
    """Serves until `stop`. Set STORAGE_EMULATOR_HOST to its endpoint."""

    def check_condition(self, headers: Mapping[str, str], existing: StoredObject | None) -> Response | None:
        """A write's generation must be the stored one; 0 means that no object may exist."""
        expected = headers.get("x-goog-if-generation-match")
        generation = 0 if existing is None else existing.serial
        return None if expected is None or int(expected) == generation else refusal(412, "PreconditionFailed")

    def describe(self, stored: StoredObject) -> list[tuple[str, str]]:
        """S3's headers and the generation."""
        return [*super().describe(stored), ("x-goog-generation", str(stored.serial)), ("x-goog-metageneration", "1")]
