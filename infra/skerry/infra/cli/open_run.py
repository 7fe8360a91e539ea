"""Opens the store of a run that is named by its URI or by its spec, on this machine or in a cloud."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.infra import targets
from skerry.infra.cli.common import is_uri, run_uri
from skerry.infra.deploy.prepared_deployment import prepare
from skerry.infra.deploy.read_clouds import read_move
from skerry.infra.run import check_machine_and_store
from skerry.infra.run.run_record import mirror_settings
from skerry.infra.spec import model
from skerry.runtime.errors import Invalid
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.run_record import MirrorSettings
    from skerry.runtime.store import Store

OPENED_RUN_DEADLINE_S: Final = 20.0
"""A person waits for each call."""


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """The store of a run. deployment: of a spec for clouds; None for any other name of a run."""

    store: Store
    deployment: Deployment | None = None


def prepare_if_deployed(run: str, overrides: Sequence[str], clock: Clock) -> Deployment | None:
    """The deployment of a run that is named by a spec for clouds; None for any other name of a run."""
    if is_uri(run) or not model.load(Path(run), targets.kinds(), overrides).deployed:
        return None
    return prepare(check_machine_and_store.load_deployed(Path(run), targets.kinds(), overrides), clock, os.environ)


def open_run(run: str, overrides: Sequence[str], clock: Clock, deadline_s: float = OPENED_RUN_DEADLINE_S) -> OpenedRun:
    """The store of a run. That of a spec for clouds is opened as its commands do, with region and credentials.

    deadline_s: of a call to another store.
    """
    if (deployment := prepare_if_deployed(run, overrides, clock)) is not None:
        move = read_move(deployment)
        store = deployment.open_store() if move is None else deployment.open_source(move.uri)
        return OpenedRun(store=store, deployment=deployment)
    return OpenedRun(store=open_store(run_uri(run, overrides), clock=clock, deadline_s=deadline_s))


@dataclass(frozen=True, kw_only=True)
class RunPlaces:
    """A run and the mirrors that its spec names. open_at: opens the prefix of a mirror, or of another run."""

    run: Store
    lines: tuple[MirrorSettings, ...]
    open_at: Callable[[str], Store]

    @property
    def mirrors(self) -> tuple[MirrorSettings, ...]:
        """The mirrors of the spec, at least one. Raises Invalid without any."""
        if not self.lines:
            raise Invalid(
                "the spec names no mirror; write `replication: [{to: gs://bucket/prefix}]` into it, or name the URI"
            )
        return self.lines


def open_places(run: str, overrides: Sequence[str], clock: Clock) -> RunPlaces:
    """The run, named by its spec or its URI, and its mirrors; a run that is named by its URI has none here."""
    opened = open_run(run, overrides, clock)

    def open_at(uri: str) -> Store:
        return open_store(uri, clock=clock, deadline_s=OPENED_RUN_DEADLINE_S)

    if is_uri(run):
        return RunPlaces(run=opened.store, lines=(), open_at=open_at)
    spec = model.load(Path(run), targets.kinds(), overrides)
    return RunPlaces(
        run=opened.store,
        lines=mirror_settings(spec, {}),
        open_at=open_at if opened.deployment is None else opened.deployment.open_source,
    )
