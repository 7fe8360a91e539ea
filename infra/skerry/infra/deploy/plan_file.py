"""A plan in a file: `plan --out` writes it, and `apply FILE` applies exactly that plan or refuses it.

The file holds no secret, and planning twice without a change in between gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping  # noqa: TC003  a parser reads annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter, ValidationError

from skerry.infra.deploy.plan_and_apply import Binding  # noqa: TC001  a parser reads annotations
from skerry.infra.provision.graph import Json, in_words, without_references
from skerry.infra.provision.planned_changes import Action, Change
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from skerry.infra.cost.estimate import Estimate
    from skerry.infra.deploy.plan_and_apply import Planned

FORMAT: Final = 2


@dataclass(frozen=True, kw_only=True)
class Review:
    """The parts of a plan for people that are not among its changes.

    principals: the operator's name in each cloud, for the head; not compared, because a colleague may apply a plan.
    table: the groups, with a header, or of a destroy empty. checks, remarks: lines, each with its style. total: the
    cost of all machines and its cap, or "". verbose: with every file of the code.
    """

    principals: Mapping[str, str] = field(default_factory=dict[str, str])
    table: tuple[tuple[str, ...], ...] = ()
    checks: tuple[tuple[str, str], ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()
    total: str = ""
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class Destruction:
    """Deletions of a destroy beside its changes, and what it keeps. No number of objects, which a live run changes.

    strays: resources that the state does not record. in_use: addresses of resources that other runs may use. mirrors:
    URIs. bucket: the run's store exists; it is kept.
    """

    strays: tuple[str, ...]
    in_use: tuple[str, ...]
    mirrors: tuple[str, ...]
    bucket: bool


@dataclass(frozen=True, kw_only=True)
class SavedPlan:
    """The file's content. spec: the absolute path of the spec. overrides, only, replace: as on the command line.

    destroy: None, or it removes the run, without its data.
    """

    format: int = FORMAT
    spec: str
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    replace: tuple[str, ...] = ()
    destroy: Destruction | None = None
    binding: Binding
    changes: tuple[Change, ...]
    review: Review


def save(path: Path, saved: SavedPlan) -> None:
    """Write a plan to a new file or over a plan. Raises Invalid if it cannot be written."""
    if path.exists() and not is_plan(path):
        raise Invalid(f"{path} exists and is not a plan, so it was not overwritten: name another file")
    try:
        path.write_bytes(_SAVED.dump_json(saved, indent=1) + b"\n")
    except OSError as error:
        raise Invalid(f"cannot write {path}: {error.strerror}") from error


def is_plan(path: Path) -> bool:
    """True if the file looks like a plan that `save` wrote, in any version of the format."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and "binding" in document and "changes" in document


def load(path: Path) -> SavedPlan:
    """The plan in a file. Raises Invalid if the file holds no plan of this format."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}") from error
    if not is_plan(path):
        raise Invalid(f"{path} is not a plan; write one with `skerry plan --out {path}`")
    # Before the rest is parsed: another format may have other parts.
    if (number := json.loads(content).get("format")) != FORMAT:
        raise Invalid(
            f"{path} was written by another version of skerry (format {number}, this one has {FORMAT}); plan again"
        )
    try:
        return _SAVED.validate_json(content)
    except ValidationError as error:
        raise Invalid(f"{path} is a damaged plan: {error.errors()[0]['msg']}; plan again") from error


def check_current(saved: SavedPlan, binding: Binding, changes: Sequence[Change], review: Review | None) -> None:
    """Raise Conflict, naming each difference, unless planning again gave the same plan.

    review: now; its checks are not compared, because they ask about the machine and the login that plan. None for a
    destroy, whose remarks count objects.
    """
    before, after = dataclasses.asdict(saved.binding), dataclasses.asdict(binding)
    moved = [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
    if not moved and [_text(change) for change in saved.changes] != [_text(change) for change in changes]:
        moved = ["the resources have changed since"]
    if not moved and review is not None:
        moved = list(_changed_review(saved.review, review))
    if moved:
        raise Conflict(f"stale plan: {'; '.join(moved)}; run `skerry plan` again")


def _changed_review(before: Review, after: Review) -> Iterator[str]:
    if before.total != after.total:
        yield f"cost: {before.total} -> {after.total}"
    elif before.table != after.table or before.remarks != after.remarks:
        yield "what it shows of costs, groups and inputs has changed since"


def to_json(saved: SavedPlan) -> str:
    """The content of the file in one line, for programs: values that do not exist yet are as in `document`."""
    content = json.loads(_SAVED.dump_json(saved))
    return json.dumps({**content, "changes": [_shown(change) for change in saved.changes]})


def document(planned: Planned, estimate: Estimate) -> dict[str, Any]:
    """The JSON document of `skerry plan --json`.

    A text that holds a value which does not exist yet is {"unknown_until_apply": its text with that in words}.
    """
    counts = planned.plan.counts()
    return {
        "format": FORMAT,
        "binding": dataclasses.asdict(planned.binding),
        "summary": {action.value: counts[action] for action in Action},
        "code": {"files": dict(planned.code.files), "untracked": list(planned.code.untracked)},
        "problems": list(planned.plan.problems),
        "notes": [*planned.plan.notes, *planned.plan.kept],
        "checks": [dataclasses.asdict(check) for check in planned.resolved.checks],
        "changes": [_shown(change) for change in planned.plan.changes],
        "estimate": estimate.document(),
    }


def _tree(change: Change) -> dict[str, Any]:
    return json.loads(_CHANGE.dump_json(change))


def _shown(change: Change) -> dict[str, Json]:
    """The change without references. Its reasons and the names of its documents stay texts."""
    tree = _tree(change)
    for document in tree["rights"]:
        document["document"] = in_words(document["document"])
    reasons: dict[str, Json] = {name: in_words(tree[name]) for name in ("why", "because")}
    values = {name: without_references(value, unknown=_unknown) for name, value in tree.items()}
    return {**values, **reasons}


def _unknown(words: str) -> Json:
    return {"unknown_until_apply": words}


def _text(change: Change) -> str:
    return json.dumps(_tree(change), sort_keys=True)


_SAVED: Final = TypeAdapter(SavedPlan)
_CHANGE: Final = TypeAdapter(Change)
