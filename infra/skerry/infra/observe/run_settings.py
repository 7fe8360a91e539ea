"""Reads the settings of a run that were changed after its start (decision 0024 of the runtime). Never writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS, digest_of
from skerry.runtime.log.run_record import Settings

if TYPE_CHECKING:
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """A run with all changes of its settings, in order. first: run.json; last_digest: of the newest change."""

    first: Run
    changes: tuple[Settings, ...] = ()
    last_digest: str = GENESIS

    @property
    def now(self) -> Run:
        """The run with the settings of the newest change, whether its round has come or not."""
        if not self.changes:
            return self.first
        changeable = ("rounds", "work", "outer_lr", "outer_momentum")
        update = {name: getattr(self.changes[-1], name) for name in changeable}
        slots = next((change.slots for change in reversed(self.changes) if change.slots), self.first.slots)
        return self.first.model_copy(update=update | {"slots": slots})

    def had(self, name: str, value: object) -> bool:
        """True if a field of the run has this value, or had it before a change."""
        return value in {getattr(self.first, name), *(getattr(each, name) for each in self.changes)}

    def read_newer(self, store: Store) -> RunSettings:
        """With the changes that were stored since. One read, and one for each. Raises Corrupt if one is damaged."""
        settings = self
        while (data := store.read(key := keys.settings(len(settings.changes) + 1))) is not None:
            change = Settings.parse(data, key)
            if (change.run, change.previous) != (self.first.nonce, settings.last_digest):
                raise Corrupt(f"settings do not follow their predecessor, or are of another run: key={key}")
            settings = replace(settings, changes=(*settings.changes, change), last_digest=digest_of(data))
        return settings
