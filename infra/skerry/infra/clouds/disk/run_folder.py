"""A run's home on a shared disk: the folder of its store, which is the user's own. Nothing is tagged or deleted but the
run's own files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final
from urllib.parse import unquote

from skerry.infra.provision.graph import Life, Resource
from skerry.infra.provision.handler import Condition, Contents, Observed
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.infra.spec import store_uri
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.clouds.session_credentials_for_store_client import StoreCredentials
    from skerry.infra.provision.handler import Desired, Handler, StateRecord
    from skerry.infra.provision.target_and_store_interfaces import RunContext

STORE: Final = "store"
"""The folder's key: its address is disk_folder.store."""
_REGION: Final = "a shared folder"


def open_home(access: OperatorAccess) -> DiskHome:
    """Open the home of runs with a store in file://."""
    del access
    return DiskHome()


@dataclass(frozen=True, kw_only=True)
class Folder(Resource):
    """The folder above the run's own. name: its path."""

    KIND: ClassVar[str] = "disk_folder"
    LIFE: ClassVar[Life] = Life.DATA


class DiskHome:
    """See StoreCloud."""

    def identity(self) -> Mapping[str, str]:
        """See StoreCloud.identity. A disk has no accounts."""
        return {}

    def resources(self, context: RunContext) -> Sequence[Resource]:
        """See StoreCloud.resources."""
        path = folder_of(context.run_uri).parent
        return (Folder(key=STORE, name=str(path), region="", why="the run's store", brought=True),)

    def mirrors(self, context: RunContext) -> Sequence[Resource]:
        """See StoreCloud.mirrors. Folders of mirrors are the user's own, and created by the first write."""
        del context
        return ()

    def environment(self, context: RunContext) -> Mapping[str, str]:
        """See StoreCloud.environment."""
        del context
        return {}

    def credentials(self) -> StoreCredentials | None:
        """See StoreCloud.credentials. A disk needs none."""
        return None

    def handlers(self) -> Mapping[str, Handler]:
        """See StoreCloud.handlers."""
        return {Folder.KIND: Folders()}

    def claim(self, desired: Desired, observed: Observed) -> None:
        """See StoreCloud.claim."""
        del observed
        raise Invalid(f"cannot be imported: {desired.resource.address}; a folder is used as it is")

    def checks(self, context: RunContext) -> Iterator[Check]:
        """See StoreCloud.checks. Creates nothing."""
        path = folder_of(context.run_uri).parent
        if (reason := _unusable(path)) is not None:
            advice = "run `skerry` on a machine that mounts the disk of the replicas, or write another store"
            yield Check(name="store", ok=False, text=reason, advice=advice)
            return
        text = f"{path} can be written from here; the nodes of the replicas must mount it under the same path"
        yield Check(name="store", ok=True, text=text)


class Folders:
    """See BucketHandler. A folder is the user's own, so only the files of a run in it are ever deleted."""

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read. A missing folder is created by the first write."""
        return [_observed(Path(desired.name)) for desired in all_desired]

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        return _observed(Path(desired.name)).outputs

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update. A folder has no settings."""
        raise Invalid(f"a folder cannot change: {desired.resource.address}: {', '.join(sorted(changed))}")

    def delete(self, state_record: StateRecord) -> None:
        """See Handler.delete. The folder stays."""

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Folders have no tags."""
        del run, regions
        return ()

    def contents(self, state_record: StateRecord, prefix: str = "") -> Contents:
        """See DataHandler.contents. Only the run's own objects matter, and the store lists them."""
        del state_record, prefix
        return Contents(objects=0)

    def region_of(self, _name: str, _expected: str) -> str:
        """See BucketHandler.region_of. A missing folder is created by the first write."""
        return _REGION

    def key(self, _record: StateRecord) -> str:
        """See BucketHandler.key."""
        return ""

    def empty(self, state_record: StateRecord, prefix: str = "") -> Contents:
        """See BucketHandler.empty. The store deletes the run's objects."""
        return self.contents(state_record, prefix)

    def undelete(self, state_record: StateRecord, prefix: str, since: datetime) -> Contents:
        """See BucketHandler.undelete. A folder keeps nothing."""
        del prefix, since
        raise Invalid(f"{state_record.name} keeps no deleted files; restore them from the backups of its disk")


def folder_of(run_uri: str) -> Path:
    """Return the run's own folder. Raises Invalid for a store that is not a folder."""
    if not run_uri.startswith(store_uri.FILE):
        raise Invalid(f"not on a disk: {run_uri}")
    return Path(unquote(run_uri.removeprefix(store_uri.FILE)))


def _observed(path: Path) -> Observed:
    reason = _unusable(path)
    return Observed(
        outputs={"name": str(path), "region": _REGION},
        settings={},
        owner=None,
        condition=Condition.READY if reason is None else Condition.BROKEN,
        detail=reason or "",
    )


def _unusable(path: Path) -> str | None:
    """Return the reason why files cannot be written below `path`; None if they can."""
    existing = next((part for part in (path, *path.parents) if part.exists()), Path("/"))
    if not existing.is_dir():
        return f"{existing} is not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written from here"
