"""A Google Cloud Storage fake that honours generations, which the published emulators do not.

It speaks the XML API, as obstore does, which is S3's but for the condition: `x-goog-if-generation-match: 0` is a
create, any other number a compare-and-swap. Everything else, faults included, is `S3Server`.
Source: https://cloud.google.com/storage/docs/xml-api/reference-headers
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.s3server import Response, S3Server, Stored, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping


class GcsServer(S3Server):
    """Serve until `stop`. STORAGE_EMULATOR_HOST is its endpoint."""

    def refused(self, headers: Mapping[str, str], found: Stored | None) -> Response | None:
        """A write's generation must be the stored one; 0 stands for no object."""
        wanted = headers.get("x-goog-if-generation-match")
        generation = 0 if found is None else found.serial
        return None if wanted is None or int(wanted) == generation else refusal(412, "PreconditionFailed")

    def describe(self, stored: Stored) -> list[tuple[str, str]]:
        """The generation besides what S3 tells."""
        return [*super().describe(stored), ("x-goog-generation", str(stored.serial)), ("x-goog-metageneration", "1")]
