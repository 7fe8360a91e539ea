"""The models of a spec, which describes a run, and the function that reads one from a file.

All problems of a file are reported at once, each with its line and what to write instead. The models define what a spec
may contain (`skerry schema` prints them for editors); `consistency` has the checks across sections. Reads one file.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union, cast

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, ValidationError, create_model
from pydantic_core import PydanticCustomError

from skerry.infra.spec import (
    check_automatic_failover,
    consistency,
    env_secrets_and_data,
    replication_section,
    store_uri,
    yaml_document,
)
from skerry.infra.spec.company_rules import AwsRules, GoogleRules
from skerry.infra.spec.section import Duration, Section, between, or_default
from skerry.infra.spec.target_kinds import TargetKinds, TargetOptions, ThisMachineOptions
from skerry.infra.spec.validation_errors import problems_of
from skerry.infra.spec_and_store_errors import SpecInvalid
from skerry.runtime.contract import check_slot
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import Reduction  # noqa: TC001  pydantic reads it
from skerry.runtime.log.run_record import CodecSetting  # noqa: TC001  pydantic reads it

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from skerry.infra.spec.yaml_document import Document
    from skerry.infra.spec_and_store_errors import Problem

WORK_FOLDER: Final = ".skerry"
"""The folder next to the spec with the code, logs and process ids of its local runs. May be deleted while none runs."""


def _as_name(text: str) -> str:
    try:
        return check_slot(text)
    except Invalid as error:
        raise ValueError("must be 1 to 63 letters, digits, '.', '_' or '-', the first a letter or digit") from error


def is_name(text: str) -> bool:
    """Return whether `text` can be the name of a run or a group."""
    try:
        check_slot(text)
    except Invalid:
        return False
    return True


Named = Annotated[str, AfterValidator(_as_name)]


class Code(Section):
    """The training code: packed, named by its digest, and uploaded to the run's store."""

    path: Annotated[str, Field(min_length=1, examples=["./train"])]
    """The folder to pack, relative to the spec. A .skerryignore in it lists files to leave out."""
    command: Annotated[tuple[str, ...], Field(min_length=1, examples=[["python", "train.py"]])]
    """The command that a replica runs in that folder; `python` is the interpreter that skerry runs on."""


CHANGED_BY: Final = "x-changed-by"
"""The key in the JSON Schema of a setting that a command changes in a running run. All others of `outer` and `faults`
but `restarts` are fixed when the run starts."""


MOST_OUTER_LR: Final = 100
"""The largest learning rate of the outer optimizer; at its start and as `skerry extend` changes it."""


class Outer(Section):
    """DiLoCo's outer loop: how often the replicas exchange, and how the average is applied."""

    rounds: Annotated[
        Annotated[int, Field(ge=1, le=keys.MAX_ROUND, examples=[40])] | None,
        Field(json_schema_extra={CHANGED_BY: "skerry extend --rounds"}),
    ]
    """Rounds until the run is finished; null trains until it is stopped. A round exchanges one fragment. Can be raised
    after the start: `skerry extend --rounds`."""
    sync_every: Annotated[int, Field(ge=1, le=1_000_000, examples=[100])] = 100
    """Inner steps between two exchanges of the same fragment. A multiple of `fragments`."""
    fragments: Annotated[int, Field(ge=1, le=1024, examples=[1])] = 1
    """The number of parts of the model that are exchanged in turn, sync_every / fragments steps apart."""
    codec: Annotated[CodecSetting, Field(examples=["int8"])] = "none"
    """How pseudo-gradients are encoded: as they are, as bfloat16 with half the bytes, or in blocks of 8, 4 or 2 bits an
    element, with a quarter, an eighth or a sixteenth of the bytes. auto is int8 in a bucket and none in a folder.
    sparse (experimental) sends one element in 64 and the rest later; the loss is several percent higher."""
    reduction: Annotated[Literal["auto"] | Reduction, Field(examples=["auto"])] = "auto"
    """How contributions are averaged: all_gather, every replica reads all of them; reduce_scatter, every replica
    averages a share and reads the other shares; auto chooses in each exchange by bytes and measured links."""
    reduce_in: Annotated[str, Field(min_length=1, max_length=256, examples=["us-east-1"])] | None = None
    """The region of the store. With reduce_scatter only the replicas in this region then average, if they are an eighth
    of all, and the others read only the average: half of the bytes that leave the region. null: all average."""
    lr: Annotated[
        float,
        Field(
            gt=0,
            le=MOST_OUTER_LR,
            allow_inf_nan=False,
            examples=[0.7],
            json_schema_extra={CHANGED_BY: "skerry extend --outer-lr"},
        ),
    ] = 0.7
    """Learning rate of the outer optimizer (Nesterov SGD). Can be changed after the start: `skerry extend`."""
    momentum: Annotated[
        float, Field(ge=0, lt=1, examples=[0.5], json_schema_extra={CHANGED_BY: "skerry extend --outer-momentum"})
    ] = 0.5
    """Momentum of the outer optimizer. In short runs 0.9 is worse than no exchange at all; DiLoCo's paper takes it for
    long ones. Can be changed after the start: `skerry extend`."""
    weighting: Annotated[Literal["uniform", "tokens"], Field(examples=["uniform"])] = "uniform"
    """The weight of a contribution: uniform counts each once, tokens by its number of tokens."""
    max_norm: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False, examples=[100.0])] | None = None
    """A replica abstains from the round if its pseudo-gradient has a larger L2 norm. null accepts all."""


def changed_by(setting: str) -> str | None:
    """Return the command that changes a setting of `outer` in a running run; None if it is fixed at the start."""
    extra = Outer.model_fields[setting].json_schema_extra
    return cast("dict[str, str]", extra).get(CHANGED_BY) if isinstance(extra, dict) else None


class Restarts(Section):
    """The limit on restarts of a crashed replica."""

    max: Annotated[int, Field(ge=0, le=1000, examples=[5])] = 5
    """Restarts of one replica within `window`; after one more crash it is not restarted."""
    window: Annotated[Duration, Field(examples=["1h"])] | None = timedelta(hours=1)
    """Restarts older than this do not count; null counts all."""


class Faults(Section):
    """The faults that the run tolerates, and how long it waits."""

    min_replicas: Annotated[int, Field(ge=1, le=65_536, examples=[2])] = 1
    """The least number of contributions of a round; with fewer it waits."""
    grace: Annotated[Duration, Field(examples=["60s"])] = timedelta(seconds=60)
    """How long a round with enough contributions waits for the others."""
    start_window: Annotated[Duration, Field(examples=["10m"])] = timedelta(minutes=10)
    """How long the first round waits for every replica to appear."""
    checkpoint_every: Annotated[int, Field(ge=1, le=10_000, examples=[1])] = 1
    """Rounds between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=1, le=1000, examples=[3])] = 3
    """The number of newest checkpoints that are kept: all but one of them may be damaged."""
    keep_every: Annotated[int, Field(ge=1, le=keys.MAX_ROUND, examples=[100])] | None = None
    """Checkpoints of rounds divisible by this are never deleted; null keeps only the newest."""
    keep_unfinished: Annotated[Duration, Field(examples=["5m"])] | None = None
    """How often a replica saves its unfinished round, and once more when it is stopped: after a restart it continues
    within the round. A save is as large as the model and the inner optimizer; null saves nothing within a round."""
    make_up: Annotated[bool, Field(examples=[True])] = False
    """Continue after `outer.rounds` until as much was trained as all replicas would have trained in these rounds. More
    rounds replace the work that was lost by kills, outages and slow replicas."""
    restarts: Annotated[Restarts, BeforeValidator(or_default)] = Restarts()
    """Restarts of crashed replicas."""


class Replicas(Section):
    """A group of equal replicas. Their slots are name-0, name-1, ..."""

    name: Annotated[Named, Field(examples=["local"])]
    """The name of the group, with which its slots begin; unique in the spec."""
    count: Annotated[int, Field(ge=1, le=1024, examples=[4], json_schema_extra={CHANGED_BY: "skerry apply"})]
    """The number of replicas. Can be changed after the start: `skerry apply` starts new ones and cancels the last."""
    image: Annotated[str, Field(min_length=1, examples=["ghcr.io/acme/train:1"])] | None = None
    """The image of this group instead of the run's: the same one, in a registry that its cloud can pull from."""
    target: SerializeAsAny[TargetOptions]
    """Where the replicas run, and its options."""
    env: env_secrets_and_data.Env
    """Variables of this group's replicas, in addition to the run's; one of the same name replaces the run's."""
    secrets: env_secrets_and_data.Secrets
    """Secrets of this group's replicas, in addition to the run's; one of the same name replaces the run's."""
    data: env_secrets_and_data.Data
    """Data of this group's replicas, in addition to the run's; one of the same name replaces the run's."""


class Limits(Section):
    """Limits of the run's time and cost. Replicas end by themselves; a job's time limit ends a replica that hangs."""

    max_hours: Annotated[float, Field(gt=0, le=8760, allow_inf_nan=False, examples=[24])] | None = None
    """How long the run may take from its first apply, with all restarts; null is no limit."""
    max_cost_usd: (
        Annotated[float, Field(gt=0, le=replication_section.MOST_USD, allow_inf_nan=False, examples=[500])] | None
    ) = None
    """The most that all replicas may cost, at the prices that `skerry estimate` shows; null is no limit."""


class Byo(Section):
    """Your own resources that hold the run: used and checked, never changed or deleted."""

    bucket: Annotated[bool, Field(examples=[True])] = False
    """The store's bucket is yours: it is not created, and `destroy` deletes only the run in it."""
    repository: Annotated[bool, Field(examples=[True])] = False
    """The image's repository is yours."""


class Spec(Section):
    """One training run: its code, its outer loop, and where its replicas run."""

    run: Annotated[Named, Field(examples=["tiny-gpt"])]
    """The run's name: its prefix in the store and its folder beside the spec."""
    store: Annotated[str, AfterValidator(store_uri.as_store), Field(examples=["file://.skerry/store"])]
    """The bucket: s3://, gs://, az:// or file://. A relative file:// path starts at the spec's folder."""
    image: Annotated[str, Field(min_length=1, examples=["ghcr.io/acme/train:1"])] | None = None
    """The container image, for targets that run one; the local target ignores it. With a digest it cannot change."""
    code: Code
    """The training code."""
    outer: Outer
    """The outer loop."""
    init_from: (
        Annotated[str, AfterValidator(store_uri.as_source), Field(examples=["s3://acme-diloco/runs/base@40"])] | None
    ) = None
    """The run with whose shared model this one starts: the URI of its own prefix, with @ROUND for a checkpoint of an
    earlier round. The run must be finished unless a round is named. null starts with the model of the script."""
    faults: Annotated[Faults, BeforeValidator(or_default)] = Faults()
    """Tolerated faults and waiting times."""
    replication: replication_section.Lines = ()
    """Further places that can carry the run on when its store, or a machine, is lost. Fixed when the run starts, except
    for `region` and `byo`."""
    failover: Annotated[Literal["automatic"], Field(examples=["automatic"])] | None = None
    """automatic: once a majority of the replicas has not reached the store for `failover_after`, the run goes on by
    itself beside the first mirror with `log: every round`. null: an operator restores it. Fixed when the run starts."""
    failover_after: Annotated[Duration, between(timedelta(seconds=30), timedelta(days=1)), Field(examples=["5m"])] = (
        timedelta(minutes=5)
    )
    """How long the store must be away before a replica votes to leave it."""
    replicas: Annotated[tuple[Replicas, ...], Field(min_length=1, examples=[[{"name": "local", "count": 4}]])]
    """The groups of replicas, in the order in which replicas are numbered. Groups that are added later come last."""
    state: Annotated[str, AfterValidator(store_uri.as_store), Field(examples=["file://.skerry/state"])] | None = None
    """Where the state of created resources is stored; null is in the run's store. A relative file:// path starts at the
    spec's folder."""
    limits: Annotated[Limits, BeforeValidator(or_default)] = Limits()
    """Limits of the run's time and cost."""
    byo: Annotated[Byo, BeforeValidator(or_default)] = Byo()
    """Your own resources that hold the run."""
    tags: Annotated[
        dict[str, str],
        BeforeValidator(or_default),
        AfterValidator(consistency.as_tags),
        Field(default_factory=dict, examples=[{"team": "research"}]),
    ]
    """Tags of all created resources, in addition to skerry's own."""
    moved: Annotated[
        dict[Named, Named],
        BeforeValidator(or_default),
        Field(default_factory=dict, examples=[{"trainers": "local"}]),
    ]
    """Groups that were renamed, each with the name under which the run knows it: its slots, resources and their names
    stay those of the first name, so nothing is created anew."""
    aws: Annotated[AwsRules, BeforeValidator(or_default)] = AwsRules()
    """The rules of a company for what is created in AWS."""
    google: Annotated[GoogleRules, BeforeValidator(or_default)] = GoogleRules()
    """The rules of a company for what is created in Google Cloud."""
    env: env_secrets_and_data.Env
    """Environment variables of all replicas. They are shown in plans and stored in descriptions of jobs."""
    secrets: env_secrets_and_data.Secrets
    """References of secrets, by the variables that replicas find the values in. A value is never stored by skerry."""
    data: env_secrets_and_data.Data
    """Data that replicas may read, by name: s3://bucket/prefix, gs://bucket/prefix, or a folder of this machine."""

    def group_name(self, first: str) -> str:
        """The name that the spec has now for the group with this first name."""
        return next((name for name, was in self.moved.items() if was == first), first)

    def slot(self, name: str) -> str:
        """The slot that an operator names, in the run: that of a renamed group has the group's first name."""
        group, dash, number = name.rpartition("-")
        return f"{self.moved.get(group, group)}{dash}{number}"


@dataclass(frozen=True, kw_only=True)
class ReplicaSlot:
    """One replica of the run: its slot, its number over all groups, and its target."""

    slot: str
    index: int
    target: TargetOptions

    @property
    def threads(self) -> int | None:
        """The CPU threads that the spec sets; None if it sets none."""
        return self.target.threads if isinstance(self.target, ThisMachineOptions) else None


@dataclass(frozen=True, kw_only=True)
class SpecFile:
    """A spec and the file it was read from, from which relative paths start. written: the document with its lines."""

    path: Path
    spec: Spec
    written: Document

    @property
    def run_uri(self) -> str:
        """The run's own prefix in the store."""
        return store_uri.run_uri(self.folder, self.spec.store, self.spec.run)

    @property
    def source(self) -> tuple[str, int | None] | None:
        """The URI of the run whose model this run starts with, and the round if one is named; None for the script's."""
        if self.spec.init_from is None:
            return None
        uri, number = store_uri.split_source(self.spec.init_from)
        return store_uri.store_uri(self.folder, uri), number

    @property
    def code_path(self) -> Path:
        """The folder with the training code, absolute."""
        return self.folder / self.spec.code.path

    @property
    def work_folder(self) -> Path:
        """The folder on this machine with the files of the run, absolute."""
        return self.folder / WORK_FOLDER / self.spec.run

    @property
    def peers(self) -> replication_section.FurtherPlace | None:
        """The line of copies at peers; None without one."""
        return next((line for line in self.spec.replication if line.is_peers), None)

    @property
    def mirrors(self) -> Mapping[str, replication_section.FurtherPlace]:
        """The lines of mirrors, by the URI of the mirror itself, in the order of the spec."""
        lines = [line for line in self.spec.replication if not line.is_peers]
        return {store_uri.run_uri(self.folder, line.to, self.spec.run): line for line in lines}

    @property
    def failover_mirror(self) -> str | None:
        """The URI of the mirror through which replicas vote to leave the store; None without failover."""
        line = check_automatic_failover.failover_line(self.spec)
        return None if line is None else store_uri.run_uri(self.folder, line.to, self.spec.run)

    @property
    def state_uri(self) -> str | None:
        """The URI of the state of the run's resources; None means with the run itself."""
        state = self.spec.state
        return None if state is None else store_uri.run_uri(self.folder, state, self.spec.run)

    @property
    def deployed(self) -> bool:
        """True if its replicas are jobs in a cloud, which run without this machine."""
        return any(group.target.CLOUD is not None for group in self.spec.replicas)

    @property
    def replica_slots(self) -> tuple[ReplicaSlot, ...]:
        """Every replica, numbered in document order."""
        pairs = [(group, number) for group in self.spec.replicas for number in range(group.count)]
        return tuple(
            ReplicaSlot(slot=f"{group.name}-{number}", index=index, target=group.target)
            for index, (group, number) in enumerate(pairs)
        )

    def digest(self) -> str:
        """Return the sha256 of the values that run.json fixes; specs with the same digest may continue one run.

        Code, targets, limits, tags and restarts are left out: a corrected bug, or a move to other machines, must not
        need a new run (decision 0001).
        """
        faults = self.spec.faults
        fixed: dict[str, object] = {
            "run": self.spec.run,
            "slots": [replica.slot for replica in self.replica_slots],
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
        if self.source is not None:  # without one, the digest is as before runs could start from others
            fixed["init_from"] = self.source
        if self.spec.replication:  # as before there were mirrors
            moving = {"__all__": {"region", "byo"}}
            fixed["replication"] = self.spec.model_dump(
                mode="json", include={"replication"}, exclude={"replication": moving}
            )
        if self.spec.failover is not None:
            fixed["failover"] = self.spec.failover_after.total_seconds()
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> Path:
        """The folder of the spec, absolute, at which relative paths start."""
        return self.path.absolute().parent


@functools.cache
def spec_model(kinds: TargetKinds) -> type[Spec]:
    """Return the model of a spec whose groups may have these kinds of targets."""
    target: Any = Annotated[
        Union[kinds.options],  # pyright: ignore[reportInvalidTypeArguments]  # noqa: UP007  made at run time
        BeforeValidator(functools.partial(_check_kind, kinds)),
        Field(
            discriminator="kind",
            examples=[{"kind": kinds.names[0]}],
            description=Replicas.model_fields["target"].description,
        ),
    ]
    group: type[Replicas] = create_model("Replicas", __base__=Replicas, __doc__=Replicas.__doc__, target=(target, ...))
    replicas: Any = Annotated[tuple[group, ...], Spec.model_fields["replicas"]]
    return create_model("Spec", __base__=Spec, __doc__=Spec.__doc__, replicas=(replicas, ...))


def _check_kind(kinds: TargetKinds, value: object) -> object:
    kind = value.get("kind") if isinstance(value, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(kind, str) or kind in kinds.names:
        return value  # pyright: ignore[reportUnknownVariableType]
    ctx = {"kind": kind, "available": f"available: {', '.join(kinds.names)}"}
    raise PydanticCustomError("target_kind", "unknown kind of target '{kind}'; {available}", ctx)


def load(
    path: Path,
    kinds: TargetKinds,
    overrides: Sequence[str] = (),
    *,
    checks: Sequence[Callable[[Document], Iterable[Problem]]] = (),
) -> SpecFile:
    """Read the spec in `path`, with `overrides` ("outer.rounds=40") applied.

    kinds: the targets that it may name. checks: more than the text alone shows (`check_machine_and_store`);
    they run even if the document has other problems. Raises SpecInvalid with all problems; Ctrl-C during a slow check
    reports those found before it.
    """
    written = yaml_document.read(path, overrides)
    model = spec_model(kinds)
    problems: list[Problem] = [*written.problems]
    spec: Spec | None = None
    try:
        spec = model.model_validate(written.tree)
    except ValidationError as error:
        problems += problems_of(model, error, written)
    try:
        own = (
            functools.partial(part.problems, kinds=kinds)
            for part in (consistency, env_secrets_and_data, check_automatic_failover)
        )
        further = functools.partial(replication_section.problems, kinds=kinds, folder=path.absolute().parent)
        for check in (*own, further, *checks):
            # A value that already has a problem gets no second one.
            taken = {(problem.place, problem.path) for problem in problems}
            problems += [problem for problem in check(written) if (problem.place, problem.path) not in taken]
    except KeyboardInterrupt as interrupt:
        if problems:
            raise SpecInvalid(problems) from interrupt
        raise
    if problems or spec is None:
        raise SpecInvalid(problems)
    groups = tuple(group.model_copy(update={"name": spec.moved.get(group.name, group.name)}) for group in spec.replicas)
    return SpecFile(path=path, spec=spec.model_copy(update={"replicas": groups}), written=written)


def is_deployed(path: Path, kinds: TargetKinds, overrides: Sequence[str] = ()) -> bool:
    """Return whether the first group's target runs in a cloud. The rest of the spec may be invalid."""
    return yaml_document.read(path, overrides).value(("replicas", 0, "target", "kind")) in kinds.deployed


def schema(kinds: TargetKinds) -> str:
    """Return the JSON Schema of a spec, for editors."""
    return json.dumps(spec_model(kinds).model_json_schema(), indent=2)
