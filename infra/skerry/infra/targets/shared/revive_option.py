"""Helpers for the option `revive: peers`, for the targets that have it. Does no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime.contract import Revival

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from skerry.infra.spec.model import Restarts
    from skerry.infra.spec.yaml_document import Document
    from skerry.infra.spec_and_store_errors import Problem


def revival_text(after: timedelta, restarts: Restarts) -> str:
    """The value of `contract.REVIVE` for the jobs of a group."""
    window_s = None if restarts.window is None else restarts.window.total_seconds()
    return Revival(after_s=after.total_seconds(), limit=restarts.max, window_s=window_s).to_text()


def warning_text(jobs: str, account: str) -> str:
    """The warning of a plan. jobs: in the words of the cloud. account: as what they run."""
    return (
        f"revive: peers lets each replica start {jobs} with the {account} of its group; a compromised one can use this "
        "to spend money (docs/threat-model.md)"
    )


def revive_problems(document: Document, index: int) -> Iterator[Problem]:
    """A group of one replica has none that looks after it."""
    where = ("replicas", index, "target", "revive")
    if document.value(where) is not None and document.integer(("replicas", index, "count")) == 1:
        text = "needs other replicas in its group, which look after each other; write count: 2 or more, or remove it"
        yield document.problem(where, text, key=True)
