"""Bounds what all replicas of a run may spend on one mirror.

Each slot counts its bytes in an object of its own in the mirror, before it copies them: a replica that is killed has
counted too much, never too little. Of two that reach the limit at the same time, both stop. Needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_record_bytes
from skerry.runtime.log.run_record import Spent

if TYPE_CHECKING:
    from skerry.runtime.log.run_record import MirrorSettings
    from skerry.runtime.store import Store


class SpentError(Invalid):
    """A mirror has cost what it may cost: nothing more is copied to it."""


class Budget:
    """The limit of one mirror, as one slot sees it."""

    def __init__(self, mirror: Store, settings: MirrorSettings, run: str, slot: str) -> None:
        """run: its nonce."""
        self._mirror, self._settings, self._run, self._slot = mirror, settings, run, slot

    def charge(self, size: int) -> None:
        """Counts bytes that are about to be copied. Raises SpentError, and does not count them, beyond the limit.

        size: negative takes back what was not sent.
        """
        limit, price = self._settings.max_usd, self._settings.usd_per_gb / 1e9
        if limit is None or not price:
            return
        own = self._spent(keys.spent(self._slot))
        self._put(max(0, own + size))
        if size < 0:
            return
        whole = sum(self._spent(entry.key) for entry in self._mirror.list(keys.SPENT))
        if whole * price > limit:
            self._put(own)
            raise SpentError(
                f"copying {size} bytes to {self._mirror.uri} would cost more than max_usd={limit:g} in all, of which "
                f"${(whole - size) * price:.2f} are spent; the mirror stays as it is"
            )

    def _put(self, size: int) -> None:
        record = Spent(run=self._run, slot=self._slot, bytes=size)
        self._mirror.replace(keys.spent(self._slot), record.to_bytes())

    def _spent(self, key: str) -> int:
        data = read_record_bytes(self._mirror, key)
        return 0 if data is None else Spent.parse(data, key).bytes
