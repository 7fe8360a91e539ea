"""A plan in a file: what `plan --out` writes and `apply FILE` carries out exactly, or refuses.

Holds no secret and nothing that differs between two runs of the same plan: the same plan is the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter, ValidationError

from skerry.infra.deploy.planning import Binding  # noqa: TC001  a parser reads annotations
from skerry.infra.plan import Action, Change
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.deploy.planning import Planned
    from skerry.infra.estimate import Estimate

FORMAT: Final = 1


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What was planned, for which spec. spec: its file, absolute. overrides, only: as they were given."""

    format: int
    spec: str
    overrides: tuple[str, ...]
    only: tuple[str, ...]
    binding: Binding
    changes: tuple[Change, ...]


def save(path: Path, spec: Path, overrides: tuple[str, ...], only: tuple[str, ...], planned: Planned) -> None:
    """Write a plan to a file of its own. Raises Invalid if it cannot be written, or if the plan has problems."""
    if planned.plan.problems:
        raise Invalid("\n".join(planned.plan.problems))
    if path.exists() and not is_plan(path):
        raise Invalid(f"{path} exists and is no plan; it was left as it is: name another file")
    saved = Saved(
        format=FORMAT,
        spec=str(spec.absolute()),
        overrides=overrides,
        only=only,
        binding=planned.binding,
        changes=planned.plan.changes,
    )
    try:
        path.write_bytes(_SAVED.dump_json(saved, indent=1) + b"\n")
    except OSError as error:
        raise Invalid(f"cannot write {path}: {error.strerror}") from error


def is_plan(path: Path) -> bool:
    """Whether the file looks like one that `save` wrote, of whatever version."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "binding" in found and "changes" in found


def load(path: Path) -> Saved:
    """The plan in a file. Raises Invalid if it holds none."""
    try:
        saved = _SAVED.validate_json(path.read_bytes())
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise Invalid(f"{path} is no plan; `skerry plan --out {path}` writes one") from error
    if saved.format != FORMAT:
        raise Invalid(f"{path} was written by another version of skerry; plan again")
    return saved


def check(saved: Saved, now: Planned) -> None:
    """Raise Conflict, naming what moved, unless planning again gives the same."""
    before, after = dataclasses.asdict(saved.binding), dataclasses.asdict(now.binding)
    moved = [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
    if not moved and [_text(change) for change in saved.changes] != [_text(change) for change in now.plan.changes]:
        moved = ["what is there has changed since"]
    if moved:
        raise Conflict(f"stale plan: {'; '.join(moved)}; run `skerry plan` again")


def document(planned: Planned, estimate: Estimate) -> dict[str, Any]:
    """A plan for programs: `skerry plan --json`."""
    counts = planned.plan.counts()
    return {
        "format": FORMAT,
        "binding": dataclasses.asdict(planned.binding),
        "summary": {action.value: counts[action] for action in Action},
        "problems": list(planned.plan.problems),
        "notes": list(planned.plan.notes),
        "changes": [_tree(change) for change in planned.plan.changes],
        "estimate": estimate.document(),
    }


def _tree(change: Change) -> dict[str, Any]:
    return json.loads(_CHANGE.dump_json(change))


def _text(change: Change) -> str:
    return json.dumps(_tree(change), sort_keys=True)


_SAVED: Final = TypeAdapter(Saved)
_CHANGE: Final = TypeAdapter(Change)
