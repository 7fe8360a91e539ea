"""The spec: what a user writes to describe a run, as frozen models, and the one function that reads it.

Every problem of a file is reported at once, with its line and what to write instead. The models say what a spec may
contain (`skerry schema` prints them for editors); `coherence` says what its parts must agree on. Reads one file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from skerry.infra import coherence, document
from skerry.infra.complaints import problems_of
from skerry.infra.errors import SpecInvalid
from skerry.infra.placement import (
    AwsBatchTarget,
    DockerTarget,
    Duration,
    LocalTarget,
    SageMakerTarget,
    Section,
    Target,
    VertexTarget,
    or_default,
)
from skerry.runtime.errors import Invalid
from skerry.runtime.keys import check_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from skerry.infra.document import Document
    from skerry.infra.errors import Problem

WORK_FOLDER: Final = ".skerry"
"""Beside the spec: code, logs and process ids of its local runs. Safe to delete when nothing runs."""

AVAILABLE: Final = ("local", "docker", "aws_batch", "sagemaker", "vertex")
DEPLOYED: Final = frozenset({"aws_batch", "sagemaker", "vertex"})
"""Kinds of targets whose replicas run elsewhere, without this machine: `plan` and `apply` make what they need."""
# Named in the design and coming; telling them from a typing error saves the user a search.
PLANNED: Final = ("kubernetes", "modal", "hf_jobs")


def _as_name(text: str) -> str:
    try:
        return check_slot(text)
    except Invalid as error:
        raise ValueError("must be 1 to 63 letters, digits, '.', '_' or '-', the first a letter or digit") from error


def is_name(text: str) -> bool:
    """Whether `text` can be the name of a run or a group."""
    try:
        check_slot(text)
    except Invalid:
        return False
    return True


def _known_target(value: object) -> object:
    kind = value.get("kind") if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(kind, str) or kind in AVAILABLE:
        return value  # pyright: ignore[reportUnknownVariableType]
    ctx = {"kind": kind, "available": f"available: {', '.join(AVAILABLE)}"}
    if kind in PLANNED:
        raise PydanticCustomError("target_kind", "{kind} is not available yet in this version; {available}", ctx)
    raise PydanticCustomError("target_kind", "unknown kind of target '{kind}'; {available}", ctx)


Named = Annotated[str, AfterValidator(_as_name)]


class Code(Section):
    """The training code: packed, named by its digest, and uploaded to the run's store."""

    path: Annotated[str, Field(min_length=1, examples=["./train"])]
    """The folder to pack, relative to the spec. A .skerryignore in it lists what to leave out."""
    command: Annotated[tuple[str, ...], Field(min_length=1, examples=[["python", "train.py"]])]
    """What a replica runs inside that folder; `python` is the interpreter that skerry itself runs on."""


class Outer(Section):
    """DiLoCo's outer loop: how often the replicas exchange, and what is done with the average."""

    rounds: Annotated[int, Field(ge=1, le=99_999_999, examples=[40])] | None
    """Rounds until the run is finished; null trains until it is stopped. A round exchanges one fragment."""
    sync_every: Annotated[int, Field(ge=1, examples=[100])] = 100
    """Inner steps between two exchanges of the same fragment. A multiple of `fragments`."""
    fragments: Annotated[int, Field(ge=1, le=1024, examples=[1])] = 1
    """Parts of the model that are exchanged in turn, sync_every / fragments steps apart."""
    codec: Annotated[Literal["none", "bf16"], Field(examples=["bf16"])] = "none"
    """How pseudo-gradients travel: as they are, or as bfloat16 at half the bytes."""
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False, examples=[0.7])] = 0.7
    """Learning rate of the outer optimizer (Nesterov SGD)."""
    momentum: Annotated[float, Field(ge=0, lt=1, examples=[0.9])] = 0.9
    """Momentum of the outer optimizer."""
    weighting: Annotated[Literal["uniform", "tokens"], Field(examples=["uniform"])] = "uniform"
    """Whether a contribution counts once, or by the tokens behind it."""
    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=False, examples=[100.0])] | None = None
    """A pseudo-gradient of a larger L2 norm is not offered: its replica abstains from the round. null offers all."""


class Restarts(Section):
    """How often a replica that crashed is started again."""

    max: Annotated[int, Field(ge=0, le=1000, examples=[5])] = 5
    """Restarts of one replica within `window`; one more crash gives it up."""
    window: Annotated[Duration, Field(examples=["1h"])] | None = timedelta(hours=1)
    """Restarts older than this are forgotten; null forgets none."""


class Faults(Section):
    """What the run tolerates, and how long it waits."""

    min_replicas: Annotated[int, Field(ge=1, examples=[2])] = 1
    """A round needs at least so many contributions; with fewer it waits."""
    grace: Annotated[Duration, Field(examples=["60s"])] = timedelta(seconds=60)
    """How long a round with enough contributions waits for the others."""
    start_window: Annotated[Duration, Field(examples=["10m"])] = timedelta(minutes=10)
    """How long the first round waits for every replica to appear."""
    checkpoint_every: Annotated[int, Field(ge=1, examples=[1])] = 1
    """Rounds between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=1, examples=[3])] = 3
    """So many of the newest checkpoints stay: all but one of them may be damaged."""
    keep_every: Annotated[int, Field(ge=1, examples=[100])] | None = None
    """Checkpoints of rounds divisible by this stay for good; null keeps none but the newest."""
    keep_unfinished: Annotated[Duration, Field(examples=["5m"])] | None = None
    """How often a replica saves the round at hand, and again when it is stopped: after a restart it goes on within the
    round. A save is as large as the model and the inner optimizer; null saves nothing within a round."""
    make_up: Annotated[bool, Field(examples=[True])] = False
    """Go on after `outer.rounds` until as much was trained as all replicas would have trained in these rounds: what
    kills, outages and slow replicas have cost is made up for in more rounds, however many that takes."""
    restarts: Annotated[Restarts, BeforeValidator(or_default)] = Restarts()
    """Restarts of crashed replicas."""


class Replicas(Section):
    """A group of equal replicas. Their slots are name-0, name-1, ..."""

    name: Annotated[Named, Field(examples=["local"])]
    """What the slots of this group are called; unique in the spec."""
    count: Annotated[int, Field(ge=1, le=1024, examples=[4])]
    """How many replicas."""
    image: Annotated[str, Field(min_length=1, examples=["ghcr.io/acme/train:1"])] | None = None
    """Instead of the run's image: the same one, in a registry that this group's cloud can fetch from."""
    target: Annotated[
        LocalTarget | DockerTarget | AwsBatchTarget | SageMakerTarget | VertexTarget,
        BeforeValidator(_known_target),
        Field(discriminator="kind", examples=[{"kind": "local"}]),
    ]
    """Where they run."""


class Limits(Section):
    """What the run may take at most. Replicas end by themselves; the time limits of their jobs end one that hangs."""

    max_hours: Annotated[float, Field(gt=0, le=8760, allow_inf_nan=False, examples=[24])] | None = None
    """How long the run may take from its first apply, whatever is started again meanwhile; null is no limit."""
    max_cost_usd: Annotated[float, Field(gt=0, allow_inf_nan=False, examples=[500])] | None = None
    """What the replicas may cost together at the prices that `skerry estimate` shows, as hours; null is no limit."""


class Byo(Section):
    """What of the run's home is already there and is yours: used and checked, never changed or deleted."""

    bucket: Annotated[bool, Field(examples=[True])] = False
    """The store's bucket is yours; it is not made, and `destroy` deletes nothing but the run in it."""
    repository: Annotated[bool, Field(examples=[True])] = False
    """The image's repository is yours."""


class Spec(Section):
    """One training run: its code, its outer loop, and where its replicas run."""

    run: Annotated[Named, Field(examples=["tiny-gpt"])]
    """The run's name: its prefix in the store and its folder beside the spec."""
    store: Annotated[str, AfterValidator(coherence.as_store), Field(examples=["file://.skerry/store"])]
    """The bucket: s3://, gs://, az:// or file://. A relative file:// path starts at the spec's folder."""
    image: Annotated[str, Field(min_length=1, examples=["ghcr.io/acme/train:1"])] | None = None
    """The container image, for targets that run one; the local target ignores it. By digest, it cannot change."""
    code: Code
    """The training code."""
    outer: Outer
    """The outer loop."""
    faults: Annotated[Faults, BeforeValidator(or_default)] = Faults()
    """What the run tolerates."""
    replicas: Annotated[tuple[Replicas, ...], Field(min_length=1, examples=[[{"name": "local", "count": 4}]])]
    """The replicas, in the order that numbers them."""
    state: Annotated[str, AfterValidator(coherence.as_store), Field(examples=["file://.skerry/state"])] | None = None
    """Where is written down what was made; null is with the run, in its store. A relative file:// path starts here."""
    limits: Annotated[Limits, BeforeValidator(or_default)] = Limits()
    """What the run may cost at most."""
    byo: Annotated[Byo, BeforeValidator(or_default)] = Byo()
    """What is already there and is yours."""
    tags: Annotated[
        dict[str, str],
        BeforeValidator(or_default),
        AfterValidator(coherence.as_tags),
        Field(default_factory=dict, examples=[{"team": "research"}]),
    ]
    """What everything that is made is tagged with, besides skerry's own tags."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One replica's place in the run: its slot, its number over all groups, and where it runs."""

    slot: str
    index: int
    target: Target

    @property
    def threads(self) -> int | None:
        """The CPU threads that the spec fixes; None where it does not, or cannot."""
        return self.target.threads if isinstance(self.target, LocalTarget | DockerTarget) else None


@dataclass(frozen=True, kw_only=True)
class SpecFile:
    """A spec and the file it was read from, which its relative paths start at. written: where its parts stand."""

    path: Path
    spec: Spec
    written: Document

    @property
    def run_uri(self) -> str:
        """The run's own prefix in the store."""
        return coherence.run_uri(self._folder, self.spec.store, self.spec.run)

    @property
    def code_path(self) -> Path:
        """The folder with the training code, absolute."""
        return self._folder / self.spec.code.path

    @property
    def work_folder(self) -> Path:
        """Where this machine keeps what belongs to the run, absolute."""
        return self._folder / WORK_FOLDER / self.spec.run

    @property
    def state_uri(self) -> str | None:
        """Where is written down what was made for the run; None is with the run itself."""
        state = self.spec.state
        return None if state is None else coherence.run_uri(self._folder, state, self.spec.run)

    @property
    def deployed(self) -> bool:
        """Whether its replicas run elsewhere, without this machine."""
        return any(group.target.kind in DEPLOYED for group in self.spec.replicas)

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Every replica, numbered in document order."""
        pairs = [(group, number) for group in self.spec.replicas for number in range(group.count)]
        return tuple(
            Seat(slot=f"{group.name}-{number}", index=index, target=group.target)
            for index, (group, number) in enumerate(pairs)
        )

    def digest(self) -> str:
        """sha256 of what run.json fixes for the life of a run; two specs with the same digest may continue one run.

        Code, targets, limits, tags and restarts are left out on purpose: a fixed bug, or a move to other machines, must
        not need a new run (decision 0001).
        """
        faults = self.spec.faults
        fixed = {
            "run": self.spec.run,
            "slots": [seat.slot for seat in self.seats],
            "outer": self.spec.outer.model_dump(),
            "min_replicas": faults.min_replicas,
            "grace_s": faults.grace.total_seconds(),
            "start_window_s": faults.start_window.total_seconds(),
            "checkpoint_every": faults.checkpoint_every,
            "keep_checkpoints": faults.keep_checkpoints,
            "keep_every": faults.keep_every,
            "keep_unfinished_s": None if faults.keep_unfinished is None else faults.keep_unfinished.total_seconds(),
            "make_up": faults.make_up,
        }
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()

    @property
    def _folder(self) -> Path:
        return self.path.absolute().parent


def load(
    path: Path, overrides: Sequence[str] = (), *, checks: Sequence[Callable[[Document], Iterable[Problem]]] = ()
) -> SpecFile:
    """The spec in `path`, with `overrides` ("outer.rounds=40") laid over it.

    checks: more that must hold, beyond what the text alone can tell (see `preflight`); they see the document even if
    it has other problems. Raises SpecInvalid with everything that is wrong; Ctrl-C during a slow check does not lose
    what was found before it.
    """
    written = document.read(path, overrides)
    problems: list[Problem] = [*written.problems]
    spec: Spec | None = None
    try:
        spec = Spec.model_validate(written.tree)
    except ValidationError as error:
        problems += problems_of(Spec, error, written)
    try:
        for check in (coherence.problems, *checks):
            # A value that already has a problem is not complained about twice.
            taken = {(problem.place, problem.path) for problem in problems}
            problems += [problem for problem in check(written) if (problem.place, problem.path) not in taken]
    except KeyboardInterrupt as interrupt:
        if problems:
            raise SpecInvalid(problems) from interrupt
        raise
    if problems or spec is None:
        raise SpecInvalid(problems)
    return SpecFile(path=path, spec=spec, written=written)


def is_deployed(path: Path, overrides: Sequence[str] = ()) -> bool:
    """Whether its first group names a target that runs without this machine; the spec may be wrong in any other way."""
    return document.read(path, overrides).value(("replicas", 0, "target", "kind")) in DEPLOYED


def schema() -> str:
    """JSON Schema of a spec, for editors."""
    return json.dumps(Spec.model_json_schema(), indent=2)
