"""moto 5.2.5 fails a listing of a bucket if another request deletes an object meanwhile.

It copies the keys and then looks up each of them. The client gets the sandbox's 501, which a replica does not repeat.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moto.s3.utils import _VersionedKeyStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.testing.aws.shims.patching import Patches


def install(patches: Patches) -> None:
    """Install the shim: list the objects of one moment."""
    patches.replace(_VersionedKeyStore, "items", _items)
    patches.replace(_VersionedKeyStore, "values", _values)


def _items(self: Any) -> Iterator[tuple[str, Any]]:
    """Yield each key with its newest version. A copy of the store holds all versions."""
    for key, versions in dict(self).items():
        if versions:
            yield key, versions[-1]


def _values(self: Any) -> Iterator[Any]:
    for _, newest in _items(self):
        yield newest
