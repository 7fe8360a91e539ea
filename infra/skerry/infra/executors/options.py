"""Options that every executor takes, whatever runs its replicas; from them it makes the spec and run.json of a run.

A run that an executor began is the same run that a spec with these values begins; either can continue the other's.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self
from urllib.parse import unquote

from pydantic import ValidationError

from skerry.infra.executors.entrypoint_to_command import RENDEZVOUS, read_entrypoint
from skerry.infra.run import code_archive
from skerry.infra.run.run_record import create_or_load_run
from skerry.infra.spec import consistency, store_uri
from skerry.infra.spec.model import Code, Faults, Outer, Replicas, Spec, SpecFile
from skerry.infra.spec.validation_errors import rule_of
from skerry.infra.spec.yaml_document import Document
from skerry.infra.spec_and_store_errors import Place, SpecInvalid
from skerry.runtime import contract
from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.executors.entrypoint_to_command import Entrypoint
    from skerry.infra.run.executor import EntrypointArguments
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.infra.spec.target_kinds import TargetOptions

# Slots are part of names in every cloud: SageMaker's are the shortest, 63 characters in all.
_SLOTS: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,14}[a-z0-9])?")
_MAX_REPLICAS: Final = 1024
_LOG: Final = logging.getLogger(__name__)
# The start of relative paths: the spec has none.
_NO_FILE: Final = Path("skerry.yaml")
# An executor passes variables itself.
_NO_INPUTS: Final[dict[str, Any]] = {"env": {}, "secrets": {}, "data": {}}
_ARGUMENTS: Final = Place(line=0, column=0, source="the executor's arguments")


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that replicas can join. code: digest of the packed code in its store; None is the code of the image."""

    spec: SpecFile
    code: str | None


@dataclass(kw_only=True)
class RunOptions(ABC):
    """Options of every executor.

    run: the run's prefix in a store, s3://bucket/runs/tiny; its last part is the run's name. A relative file:// path
    starts in the current folder. Without it, the run is the `rendezvous` among the arguments of the first launch.
    outer, faults: as in a spec, fixed by the first launch. code: the folder that replicas
    run in, packed and uploaded if they are not on this machine; None uses what is there (see each executor).
    slots: the prefix of the replicas' slots: replica-0, ... variables: environment variables added to every replica's.
    environment: where credentials and endpoints are looked up.
    """

    SDK: ClassVar[tuple[str, str] | None] = None
    """The module that the executor needs, and the extra of skerry that installs it."""

    run: str = ""
    outer: Outer = field(default_factory=lambda: Outer(rounds=None))
    faults: Faults = field(default_factory=Faults)
    code: Path | None = None
    slots: str = "replica"
    variables: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    clock: Clock = field(default_factory=SystemClock, repr=False)

    _rank_variable: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises Invalid for an impossible name of a run or slot, and without the SDK."""
        if self.SDK is not None and not _is_installed(self.SDK[0]):
            raise Invalid(f"{type(self).__name__} needs {self.SDK[0]}: pip install 'skerry[{self.SDK[1]}]'")
        if not _SLOTS.fullmatch(self.slots):
            raise Invalid(f"not a name for slots: {self.slots!r}; write up to 16 of a-z, 0-9 and -")
        if self.run:
            self._set_run(self.run)

    def _set_run(self, uri: str) -> None:
        """Use this run. Raises Invalid for one that the replicas cannot use."""
        store, _, name = uri.rstrip("/").rpartition("/")
        if not store or store.endswith("/"):
            raise Invalid(f"not a run: {uri!r}; write a prefix of a store, s3://bucket/runs/{name or 'tiny'}")
        try:
            self.run = store_uri.run_uri(Path.cwd(), store_uri.as_store(store), name)
        except ValueError as error:
            raise Invalid(f"not a run: {uri!r}: the store {error}") from error

    def read_entrypoint(self, entrypoint: str, arguments: EntrypointArguments) -> Entrypoint:
        """The command of a launch; the run and the variable for the index are those that its options name, if any."""
        read = read_entrypoint(entrypoint, arguments)
        self._rank_variable = read.rank_variable
        if not self.run and read.rendezvous is not None:
            self._set_run(read.rendezvous)
        if not self.run:
            raise Invalid(f"no run: write {type(self).__name__}(run=...), or {RENDEZVOUS!r} among the arguments")
        return read

    def own_variables(self, replica: ReplicaSlot) -> dict[str, str]:
        """The variables of this replica alone."""
        numbered = {} if self._rank_variable is None else {self._rank_variable: str(replica.index)}
        return {**numbered, contract.SLOT: replica.slot, contract.INDEX: str(replica.index)}

    @property
    def backend(self) -> str:
        """The kind of place for handles: the name of the executor's module, which is that of its target."""
        return type(self).__module__.rpartition(".")[2]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """See ServerlessExecutor.close."""

    @property
    def name(self) -> str:
        """The run's name, without its store."""
        return unquote(self.run.rpartition("/")[2])

    def group_of(self, n_replicas: int, target: TargetOptions) -> Replicas:
        """The replicas as a group of the spec."""
        return Replicas(name=self.slots, count=n_replicas, target=target, **_NO_INPUTS)

    def spec_for(self, n_replicas: int, command: Sequence[str], target: TargetOptions) -> SpecFile:
        """The spec with the same values. Raises Invalid with every problem."""
        if not 1 <= n_replicas <= _MAX_REPLICAS:
            raise Invalid(f"cannot start {n_replicas} replicas: write 1 to {_MAX_REPLICAS}")
        try:
            spec = Spec(
                run=self.name,
                store=self.run.rpartition("/")[0],
                code=Code(path=str(self.code or "."), command=tuple(command)),
                outer=self.outer,
                faults=self.faults,
                replicas=(self.group_of(n_replicas, target),),
                tags={},
                **_NO_INPUTS,
            )
        except ValidationError as error:
            raise Invalid(f"cannot describe the run: {problems_of(error)}") from error
        written = Document(
            tree={
                "outer": {"sync_every": self.outer.sync_every, "fragments": self.outer.fragments},
                "faults": {"min_replicas": self.faults.min_replicas},
                "replicas": ({"name": self.slots, "count": n_replicas},),
            },
            places={(): _ARGUMENTS},
            keys={},
        )
        if inconsistencies := list(consistency.problems(written)):
            raise SpecInvalid(inconsistencies)
        return SpecFile(path=_NO_FILE, spec=spec, written=written)

    def prepare(self, spec: SpecFile, environment: Mapping[str, str], *, pack_code: bool) -> PreparedRun:
        """Write run.json, or check that it has the same values; upload the code. environment: for the store.

        pack_code: the code goes through the store; a warning is logged about files that git does not track. Raises
        Invalid, naming every difference, if the run was begun with other values.
        """
        packed = code_archive.pack(self.code) if pack_code and self.code is not None else None
        store = open_store(self.run, clock=self.clock, environment=environment)
        create_or_load_run(store, spec, self.clock)
        if packed is not None:
            if packed.note is not None:
                _LOG.warning(packed.note)
            store.create(keys.code(packed.digest), packed.data)
        return PreparedRun(spec=spec, code=None if packed is None else packed.digest)


def problems_of(error: ValidationError, names: Mapping[str, str] | None = None) -> str:
    """All problems in one line. names: of fields that have another name for the user."""
    known = names or {}
    problems = [(".".join(map(str, item["loc"])), item) for item in error.errors()]
    return "; ".join(f"{known.get(name, name)}: {rule_of(item)}" for name, item in problems)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
