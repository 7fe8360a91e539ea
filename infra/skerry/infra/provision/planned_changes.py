"""The values of a plan: changes with their differences and rights, and the reasons of some. Pure data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.infra.provision.graph import Json
from skerry.infra.provision.state import Id

if TYPE_CHECKING:
    from skerry.infra.provision.handler import Condition, StateRecord

DELETED_OUTSIDE: Final = "it was deleted outside of skerry"
"""The reason to create a resource that the state has and its cloud has not."""
REQUESTED: Final = "named by --replace"
"""The reason to replace a resource in which nothing differs."""
CANCELLED: Final = "stopped by `skerry cancel`"
"""The reason to start a job again that an operator stopped."""


class Action(enum.Enum):
    """The action on one generation of a resource."""

    CREATE = "create"
    UPDATE = "update"
    REPLACE = "replace"
    """Create the next generation; deleting the previous one is a separate change."""
    DELETE = "delete"
    KEEP = "keep"
    ADOPT = "adopt"
    """Exists and is this run's, but is not in the state: add it, and update what differs."""
    FORGET = "forget"
    """Remove it from the state only: it is shared, or the user's own."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One setting that differs from the desired one.

    replaces: it cannot be changed in place. drift: it was changed outside of skerry, by the manager `by` if known.
    after: a reference to a resource that does not exist yet is written ${address.output}. unknown: `after` holds one,
    so it may turn out to be equal.
    """

    setting: str
    before: Json
    after: Json
    replaces: bool = False
    drift: bool = False
    by: str = ""
    unknown: bool = False


@dataclass(frozen=True, kw_only=True)
class RightsChange:
    """A document that grants permissions, before and after a change; None is no document."""

    document: str
    before: Json
    after: Json


@dataclass(frozen=True, kw_only=True)
class Change:
    """One action and its reason. because: a reason that is no difference of a setting. rights: those that change."""

    action: Action
    address: str
    generation: int
    kind: str
    name: str
    region: str
    why: str = ""
    because: str = ""
    differences: tuple[Difference, ...] = ()
    rights: tuple[RightsChange, ...] = ()
    settings: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @classmethod
    def of(cls, record: StateRecord, action: Action = Action.DELETE, because: str = "") -> Change:
        """The action on this generation of a resource."""
        return cls(
            action=action,
            address=record.address,
            generation=record.generation,
            kind=record.kind,
            name=record.name,
            region=record.region,
            because=because,
        )

    @property
    def id(self) -> Id:
        """The generation of the resource."""
        return Id(self.address, self.generation)

    @property
    def acts(self) -> bool:
        """True if it changes a cloud or the state."""
        return self.action is not Action.KEEP


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All changes in an order that respects dependencies, and the problems that prevent an apply.

    new_conditions: of jobs whose end is not in the state yet. notes: resources that a reader may expect among the
    changes, and why they are not. outputs: of each existing address that stays; an update must not change them.
    kept: changes that were made outside of skerry and are not reverted, each with the reason.
    shared: addresses of data resources that another run created and this one uses too.
    """

    changes: tuple[Change, ...]
    problems: tuple[str, ...]
    new_conditions: Mapping[Id, Condition]
    notes: tuple[str, ...] = ()
    outputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    kept: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()

    @property
    def empty(self) -> bool:
        """True if there is nothing to do."""
        return not any(change.acts for change in self.changes)

    def counts(self) -> dict[Action, int]:
        """The number of changes of each kind."""
        return {action: sum(change.action is action for change in self.changes) for action in Action}
