"""Finds programs of which the replicas of a run have different versions. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.doctor.findings import finding
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.history import Start

# The fields of `Software`, and their names for people.
_PROGRAMS: Final = {"torch": "torch", "skerry": "skerry", "python": "Python", "code": "code"}
_DIGITS: Final = 12
_SLOTS: Final = 4


def check_versions(starts: Iterable[Start]) -> Iterator[Finding]:
    """A warning for each program of which the last starts of the replicas have different versions, where known."""
    newest = {start.slot: start for start in sorted(starts, key=lambda start: start.incarnation)}
    for field, program in _PROGRAMS.items():
        slots: defaultdict[str, list[str]] = defaultdict(list)
        for slot in sorted(newest, key=keys.slot_order):
            version = getattr(newest[slot].software, field, None)
            if version is not None:
                slots[version].append(slot)
        if len(slots) > 1:
            texts = (f"{version[:_DIGITS]} in {_shown(group)}" for version, group in slots.items())
            least = min(slots.values(), key=len)
            key = keys.member(least[0], newest[least[0]].incarnation)
            text = f"replicas run different versions of {program}: {'; '.join(texts)}"
            yield finding("mixed-versions", key, text, slot=least[0], severity="warning")


def _shown(slots: Iterable[str]) -> str:
    """At most four slots by name."""
    listed = list(slots)
    names = listed if len(listed) <= _SLOTS else [*listed[: _SLOTS - 1], f"{len(listed) - _SLOTS + 1} more"]
    return ", ".join(names)
