"""What every executor is told of a run, wherever its replicas are, and how it founds the run in its store.

A run that was begun here is the same run that a spec with these values would begin, and either can go on with it.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import unquote

from pydantic import ValidationError

from skerry.infra import bundle, coherence
from skerry.infra.document import Document
from skerry.infra.errors import Place, SpecInvalid
from skerry.infra.founding import fix_run
from skerry.infra.spec import Code, Faults, Outer, Replicas, Spec, SpecFile
from skerry.runtime import keys
from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.placement import Target

# Slots are part of names in every cloud: SageMaker's take the least, and 63 characters in all.
_SLOTS: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,14}[a-z0-9])?")
_MOST: Final = 1024
# Where relative paths would start: none is given.
_NO_FILE: Final = Path("skerry.yaml")
_HERE: Final = Place(line=0, column=0, source="the executor's arguments")


@dataclass(frozen=True, kw_only=True)
class Founded:
    """A run that replicas can take part in. code: digest of the packed code in its store; None is the place's own."""

    spec: SpecFile
    code: str | None


@dataclass(kw_only=True)
class RunOptions(ABC):
    """Of every executor.

    run: the run's prefix in a store, s3://bucket/runs/tiny; its last part is the run's name. A relative file:// path
    starts in the current folder. outer, faults: as in a spec, fixed by the first launch. code: the folder that replicas
    run in, packed and uploaded where they are not on this machine; None is what is there already (see each executor).
    slots: what replicas are called: replica-0, ... variables: given to every replica besides. environment: where
    credentials and endpoints are looked for.
    """

    run: str
    outer: Outer
    faults: Faults = field(default_factory=Faults)
    code: Path | None = None
    slots: str = "replica"
    variables: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)
    clock: Clock = field(default_factory=SystemClock, repr=False)

    def __post_init__(self) -> None:
        """Raises Invalid for what no run or slot can be called."""
        store, _, name = self.run.rstrip("/").rpartition("/")
        if not store or store.endswith("/"):
            raise Invalid(f"not a run: {self.run!r}; write a prefix of a store, s3://bucket/runs/{name or 'tiny'}")
        if not _SLOTS.fullmatch(self.slots):
            raise Invalid(f"not a name for slots: {self.slots!r}; write up to 16 of a-z, 0-9 and -")
        try:
            self.run = coherence.run_uri(Path.cwd(), coherence.as_store(store), name)
        except ValueError as error:
            raise Invalid(f"not a run: {self.run!r}: the store {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """See ServerlessExecutor.close."""

    @property
    def name(self) -> str:
        """The run's own name."""
        return unquote(self.run.rpartition("/")[2])

    def described(self, n_replicas: int, command: Sequence[str], target: Target) -> SpecFile:
        """The spec that says the same. Raises Invalid with everything that is wrong."""
        if not 1 <= n_replicas <= _MOST:
            raise Invalid(f"cannot start {n_replicas} replicas: write 1 to {_MOST}")
        try:
            spec = Spec(
                run=self.name,
                store=self.run.rpartition("/")[0],
                code=Code(path=str(self.code or "."), command=tuple(command)),
                outer=self.outer,
                faults=self.faults,
                replicas=(Replicas(name=self.slots, count=n_replicas, target=target),),
                tags={},
            )
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise Invalid(f"no run can be made of this: {told}") from error
        written = Document(
            tree={
                "outer": {"sync_every": self.outer.sync_every, "fragments": self.outer.fragments},
                "faults": {"min_replicas": self.faults.min_replicas},
                "replicas": ({"name": self.slots, "count": n_replicas},),
            },
            places={(): _HERE},
            keys={},
        )
        if problems := list(coherence.problems(written)):
            raise SpecInvalid(problems)
        return SpecFile(path=_NO_FILE, spec=spec, written=written)

    def founded(self, spec: SpecFile, environment: Mapping[str, str], *, packs: bool) -> Founded:
        """Write run.json, or find that it says the same, and upload the code. environment: for the store.

        packs: whether the code goes through the store. Raises Invalid, naming every difference, if the run was begun
        with other values.
        """
        packed = bundle.pack(self.code) if packs and self.code is not None else None
        store = open_store(self.run, clock=self.clock, environment=environment)
        fix_run(store, spec, self.clock)
        if packed is not None:
            store.create(keys.code(packed.digest), packed.data)
        return Founded(spec=spec, code=None if packed is None else packed.digest)
