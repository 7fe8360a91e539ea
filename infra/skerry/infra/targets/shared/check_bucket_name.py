"""Checks the bucket's name in a store's URI, so that a typing error is reported before anything is created.

Only the rules that a reader could break by accident: the clouds check their lists of reserved words themselves when the
bucket is created, which is the first thing that `apply` does. Sources: S3, "General purpose bucket naming rules"; Cloud
Storage, "About Cloud Storage buckets".
"""

from __future__ import annotations

import re
from typing import Final

_S3: Final = re.compile(r"[a-z0-9][a-z0-9.-]*[a-z0-9]")
_IP_ADDRESS: Final = re.compile(r"[0-9]+(\.[0-9]+){3}")
# A name with dots is a domain, whose ownership Google asks to have verified.
_GCS: Final = re.compile(r"[a-z0-9][a-z0-9_-]*[a-z0-9]")
PREFIX: Final = re.compile(r"[A-Za-z0-9._/-]*")
"""The characters of a bucket and prefix that conditions of rights and tags can hold."""


def s3_problem(name: str) -> str | None:
    """Return why S3 would refuse the name of a bucket, or None."""
    if not 3 <= len(name) <= 63:
        return f"the bucket {name!r} must have 3 to 63 characters"
    if not _S3.fullmatch(name):
        return (
            f"the bucket {name!r} may have lower-case letters, digits, '-' and '.', the first and last "
            "a letter or digit"
        )
    if _IP_ADDRESS.fullmatch(name):
        return f"the bucket {name!r} must not look like an IP address"
    return f"the bucket {name!r} has two dots in a row" if ".." in name else None


def gcs_problem(name: str) -> str | None:
    """Return why Cloud Storage would refuse the name of a bucket, or None."""
    if not 3 <= len(name) <= 63:
        return f"the bucket {name!r} must have 3 to 63 characters"
    if not _GCS.fullmatch(name):
        return (
            f"the bucket {name!r} may have lower-case letters, digits, '-' and '_', the first and last "
            "a letter or digit"
        )
    return None
