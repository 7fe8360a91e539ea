"""The typed records of the log: their fields, canonical bytes and digests.

Canonical bytes are UTF-8 JSON with the fields in the order of the class. A record's digest is the sha256 of its stored
bytes; digests form the chain contribution <- decision <- commit <- next decision. Parsing is strict: an unknown field,
a wrong type or another protocol version is refused with the key and the field. Does no I/O.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

import xxhash
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from skerry.runtime.contract import PLACE, SLOT_PATTERN
from skerry.runtime.errors import Invalid
from skerry.runtime.failure_text import without_commands
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import Extended, Record, wrong_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PROTOCOL = 1
VERSION_CHARACTERS = 64
GENESIS = "0" * 64
"""The digest that the first round's records name as the previous commit."""

Count = Annotated[int, Field(ge=0, le=1 << 62)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Xxh128 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Nonce = Xxh128
# Readers print what any replica has stored.
Text = Annotated[str, AfterValidator(without_commands)]
Name = Annotated[Text, Field(min_length=1, max_length=256)]
# Any replica may store a record: what names another one by these has a key, or does not parse.
Slot = Annotated[str, Field(pattern=rf"^{SLOT_PATTERN}$")]
Incarnation = Annotated[int, Field(ge=0, le=keys.MAX_INCARNATION)]
Version = Annotated[Text, Field(min_length=1, max_length=VERSION_CHARACTERS)]
Uri = Annotated[Text, Field(min_length=1, max_length=2048)]
MAX_FIGURE = 1e300
"""Readers add up figures of any replica: the sums are finite."""
MAX_SECONDS = 1e12
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Work = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MAX_LATE = 1e6
"""Of one contribution, in rounds: the work of all rounds is finite, whatever replicas store."""
Finite = Annotated[float, Field(ge=-MAX_FIGURE, le=MAX_FIGURE)]
# A weight is tokens, or a fraction, times a fraction. The average multiplies in float32, where 1e-46 is 0 and 1e39 is
# infinite; either would make every replica's average NaN.
Fraction = Annotated[float, Field(ge=2.0**-40, le=1)]
Weight = Annotated[float, Field(ge=1e-30, le=1e30)]
Scope = Literal["fragments", "registered", "average"]
Codec = Literal["none", "bf16", "int8", "int4", "int2", "sparse"]
"""How tensors are transmitted. none: bytes are unchanged. bf16: float32 as bfloat16, all other dtypes unchanged. int8,
int4, int2: averaged floats in blocks of so many bits an element, all other tensors unchanged (see `tensors.codecs`).
sparse: of averaged floats one in 64, what is left out is sent later."""
Reduction = Literal["all_gather", "reduce_scatter"]
"""all_gather: every replica reads every contribution. reduce_scatter: every member reduces a share, for all."""
Layout = Literal[1, 2]
"""Of payloads: see `Run.layout`."""
Phase = Literal["joining", "train", "sync", "stopping", "finished", "left", "failed"]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    # Divided first: the sum of finite values may be infinite.
    return math.fsum(value / len(known) for value in known) if known else None


class Place(Record):
    """The machine on which a replica runs, as far as it is known, for people.

    cloud: "aws", "google", "local", ... machine: the cloud's machine type. accelerator: its kind, if it is known.
    accelerators: how many the replica has. spot: True if the machine may be taken away at any time.
    """

    # A launcher may be newer than the replica, and add fields.
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore", strict=True)

    cloud: Name | None = None
    region: Name | None = None
    machine: Name | None = None
    accelerator: Name | None = None
    accelerators: Count = 0
    spot: bool | None = None

    def to_text(self) -> str:
        """The value of the variable SKERRY_PLACE."""
        return self.model_dump_json(exclude_defaults=True)

    @classmethod
    def of_text(cls, text: str | None) -> Self | None:
        """The place in the variable's value; None if it is empty or not set. Raises Invalid naming the wrong fields."""
        try:
            return cls.model_validate_json(text) if text else None
        except ValidationError as error:
            wrong = f"{PLACE} is not the place of a replica: {wrong_fields(error)}"
        raise Invalid(f'{wrong}; write {{"cloud": "aws", "region": "us-east-1"}}, or leave it out')


class Software(Record):
    """The programs of one start: their versions, and `code`, the digest of the packed training code. For people.

    None: not installed, not packed, or not known.
    """

    python: Version | None = None
    skerry: Version | None = None
    torch: Version | None = None
    code: Sha256 | None = None


class Member(Extended):
    """One start of a replica in its slot; the highest incarnation owns the slot.

    place: as its launcher describes it. software: of the replica's process. None, and absent from the bytes: not known.
    """

    run: Nonce
    slot: Slot
    incarnation: Incarnation
    nonce: Nonce
    host: Text
    process: Count
    created: Text
    place: Place | None = None
    software: Software | None = None
    ADDED = ("place", "software")


class Abstention(Record):
    """A slot contributes nothing to a round, so the other replicas do not wait for it."""

    round: Count
    reason: Text


class MirrorState(Record):
    """A mirror as the replica knows it that copied last. copied: rounds. checkpoint: the newest one there.

    is_copying: others leave it alone meanwhile. problem: why it is behind; None if the last copy was complete.
    """

    uri: Uri
    copied: Count = 0
    checkpoint: Count | None = None
    is_copying: bool = False
    problem: Annotated[Text, Field(max_length=500)] | None = None


class Memory(Record):
    """The memory of a replica's process: the most since its start, and that of its machine or group of processes."""

    peak_bytes: Count
    limit_bytes: Annotated[int, Field(ge=1)]

    @property
    def is_nearly_full(self) -> bool:
        """True if so much was used that the kernel may soon end the process."""
        return 5 * self.peak_bytes >= 4 * self.limit_bytes

    def __str__(self) -> str:
        """For people."""
        return f"{self.peak_bytes / 1e9:.1f} of {self.limit_bytes / 1e9:.1f} GB"


class Heartbeat(Extended):
    """The only replaceable record of a slot: its liveness, position and progress.

    waiting_for: slots with an awaited contribution. notice: text for people (a spot notice, a stop request). mirrors:
    those to which this replica has copied; None, and absent from the bytes, for none. memory: None, and absent, if it
    is not known or run.json has no `links`.
    """

    run: Nonce
    slot: Slot
    incarnation: Incarnation
    sequence: Count
    round: Count
    inner_step: Count
    phase: Phase
    abstains: Abstention | None
    loss: float | None
    tokens: Count
    tokens_per_s: float | None
    uploaded_bytes: Count
    downloaded_bytes: Count
    waiting_for: tuple[Text, ...]
    notice: Text | None
    mirrors: tuple[MirrorState, ...] | None = None
    memory: Memory | None = None
    ADDED = ("mirrors", "memory")


class Part(Record):
    """One payload object: its content address, and the lengths of its header and of the whole in bytes."""

    digest: Xxh128
    header_bytes: Count
    total_bytes: Count


MAX_REASON = 500
"""Characters of the reason for which a replica did not contribute to a round."""
MAX_METRICS = 32
"""Names of a script's own metrics in one round; each has at most MAX_METRIC_NAME characters."""
MAX_METRIC_NAME = 64
MetricName = Annotated[Text, Field(min_length=1, max_length=MAX_METRIC_NAME)]


class Telemetry(Record):
    """The training of one replica in a round, for people. The run never depends on it.

    loss: mean over the inner steps. steps: inner steps taken; possible: of a whole round. tokens: of all ranks.
    train_s: seconds from the begin of the round to its exchange, less evaluate_s. learning_rate, gradient_norm: of the
    inner optimizer, at the first step. metrics: the means of what the script has logged. Of several ranks, the means.
    """

    loss: Finite | None = None
    steps: Count = 0
    possible: Count = 0
    tokens: Count = 0
    train_s: Seconds = 0.0
    evaluate_s: Seconds = 0.0
    learning_rate: Finite | None = None
    gradient_norm: Finite | None = None
    metrics: dict[MetricName, Finite] = Field(default_factory=dict[str, float], max_length=MAX_METRICS)

    @classmethod
    def of_ranks(cls, ranks: Sequence[Telemetry | None]) -> Telemetry | None:
        """One replica's telemetry from that of its ranks, which take the same steps. None if no rank has any."""
        known = [rank for rank in ranks if rank is not None]
        if len(known) < 2:
            return next(iter(known), None)
        names = list(dict.fromkeys(name for rank in known for name in rank.metrics))[:MAX_METRICS]
        return cls(
            loss=_mean(rank.loss for rank in known),
            steps=known[0].steps,
            possible=known[0].possible,
            tokens=sum(rank.tokens for rank in known),
            train_s=sum(rank.train_s for rank in known) / len(known),
            evaluate_s=sum(rank.evaluate_s for rank in known) / len(known),
            learning_rate=known[0].learning_rate,
            gradient_norm=_mean(rank.gradient_norm for rank in known),
            metrics={
                name: mean for name in names if (mean := _mean(rank.metrics.get(name) for rank in known)) is not None
            },
        )


class Link(Record):
    """The link of a replica to the store, by its last reads. request_s: of a small request."""

    bytes_per_s: Annotated[float, Field(gt=0, le=1e15)]
    request_s: Annotated[float, Field(ge=0, le=3600)]

    @classmethod
    def measured(cls, speed: tuple[float, float] | None) -> Self | None:
        """The record of a measured speed; None without one."""
        if speed is None:
            return None
        rate, request_s = (float(f"{value:.3g}") for value in speed)  # more is noise
        return cls(bytes_per_s=min(max(rate, 1.0), 1e15), request_s=min(max(request_s, 0.0), 3600.0))


class Contribution(Extended):
    """One slot's contribution to one exchange. At most one per slot and exchange, whatever crashed.

    base: digest of the commit that it builds on. index: digest of the tensor index (names, dtypes, shapes, ops, codec):
    two contributions can be averaged if and only if these are equal. share: completed part of the inner steps since the
    fragment's last exchange, below 1 if a round was ended early or not trained; it is the weight if tokens are not.
    late: work of earlier rounds that was added, in the same unit; it adds no weight. discount: factor of the weight,
    below 1 for work of an earlier round. parts: of all ranks, one rank after another. ranks: how many parts each rank
    has (0 for a rank without tensors), () for a replica of one rank; index is then the combination of all ranks' own.
    telemetry: of the round, in its first exchange. region: of the replica, if the run reduces in one; else absent.
    link: of the replica, by its last reads; None, and absent from the bytes, if they were too few, or if run.json has
    no `links`.
    """

    run: Nonce
    round: Count
    exchange: Count
    slot: Slot
    incarnation: Incarnation
    base: Sha256
    index: Xxh128
    parts: tuple[Part, ...]
    tokens: Count
    inner_steps: Count
    share: Fraction = 1.0
    late: Annotated[float, Field(ge=0, le=MAX_LATE)] = 0.0
    discount: Fraction = 1.0
    ranks: tuple[Count, ...] = ()
    telemetry: Telemetry | None = None
    nonce: Nonce
    region: Name | None = None
    link: Link | None = None
    ADDED = ("region", "link")

    @model_validator(mode="after")
    def _ranks_share_the_parts(self) -> Self:
        if self.ranks and (len(self.ranks) < 2 or sum(self.ranks) != len(self.parts)):
            raise ValueError(f"parts do not match ranks: parts={len(self.parts)} ranks={self.ranks[:8]}")
        return self

    @property
    def work(self) -> float:
        """The work in it, in rounds of one replica."""
        return self.share + self.late

    def parts_of_rank(self, rank: int) -> tuple[Part, ...]:
        """The parts that one rank has uploaded; the same rank of the other replicas averages them."""
        counts = self.ranks or (len(self.parts),)
        return self.parts[sum(counts[:rank]) : sum(counts[: rank + 1])]


class Share(Record):
    """One member of a decision: a slot's contribution (by the digest of its record) and its weight."""

    slot: Slot
    contribution: Sha256
    weight: Weight


class Decision(Extended):
    """The decision of one exchange: its members in slot order. The average divides by the sum of the weights.

    settings: digest of the Settings with which the round is applied; None, and absent from the bytes, for run.json's.
    makers: the members that make the units of reduce-scatter; None, and absent, for all members.
    """

    run: Nonce
    round: Count
    exchange: Count
    base: Sha256
    index: Xxh128
    reduction: Reduction
    members: Annotated[tuple[Share, ...], Field(min_length=1)]
    proposer: Name
    nonce: Nonce
    settings: Sha256 | None = None
    makers: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    ADDED = ("settings", "makers")

    @model_validator(mode="after")
    def _makers_are_members(self) -> Self:
        if self.makers is not None and not {share.slot for share in self.members}.issuperset(self.makers):
            raise ValueError("makers are not all members")
        return self

    def has_quorum(self, least: int) -> bool:
        """True if it has at least so many members, and lists none twice."""
        return len({share.slot for share in self.members}) >= max(least, len(self.members))


MAKERS_SHARE = 8
"""Fewer than an eighth of the members take longer within one region than all members over slower links."""


def makers_in(region: str | None, regions: Mapping[str, str | None]) -> tuple[str, ...] | None:
    """The members that make all reduced units; None if all members do.

    region: of the store, None if it does not matter. regions: of the members, in slot order.
    """
    makers = tuple(slot for slot, place in regions.items() if place == region)
    return makers if region is not None and makers and MAKERS_SHARE * len(makers) >= len(regions) else None


class Commit(Extended):
    """Closes a round. A pure function of the round's decisions, so all sound replicas write the same bytes.

    exchanges: digests of the decisions in order. participants: the smallest member count among them. work: of all
    rounds up to this one, in rounds of one replica: the sum over the members regardless of weight; the smallest sum of
    several exchanges. 0 in logs written before work was counted. averages: of each exchange, the digest of the average
    as its writer holds it; None, and absent from the bytes, in runs with payloads of layout 1 (decision 0038).
    """

    run: Nonce
    round: Count
    exchanges: Annotated[tuple[Sha256, ...], Field(max_length=keys.MAX_EXCHANGE + 1)]
    participants: Count
    work: Work = 0.0
    previous: Sha256
    averages: tuple[Xxh128, ...] | None = None
    ADDED = ("averages",)


class Receipt(Extended):
    """One replica's result of a round: exact digests of each exchange's average and of the shared state.

    scope: what `state` covers: DiLoCo's fragments, everything registered (DDP), or only the average. norm: L2 norm of
    the encoded contribution over all exchanges of the round; None without a contribution. telemetry: only if the round
    is closed without a contribution of this replica, which has it otherwise. abstained: why it did not contribute, if
    that was its own choice. disputed: a unit of another member that this replica's spot check found wrong; else None,
    and absent from the bytes.
    """

    run: Nonce
    round: Count
    slot: Slot
    incarnation: Incarnation
    commit: Sha256
    averages: tuple[Xxh128, ...]
    state: Xxh128 | None
    scope: Scope
    contributed: bool
    uploaded_bytes: Count
    downloaded_bytes: Count
    requests: Count
    seconds: dict[Text, Seconds]
    norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    telemetry: Telemetry | None = None
    abstained: Annotated[Text, Field(max_length=MAX_REASON)] | None = None
    disputed: Annotated[Text, Field(max_length=MAX_REASON)] | None = None
    ADDED = ("disputed",)


class Shard(Record):
    """One rank's shard of a checkpoint: its own index, parts and tree."""

    index: Xxh128
    parts: tuple[Part, ...]
    tree: str


class CheckpointManifest(Extended):
    """Makes a checkpoint visible. It is the state after `round` closed rounds; `commit` is the digest of the last.

    tree: the JSON skeleton of the state, with its tensors numbered in the order of the parts' indexes. shards: one per
    rank of its writer, () for one rank. With shards, parts are those of all ranks, one rank after another, index is the
    combination of their own, and tree is empty. healed: its writer's receipt of the round is of
    another state, from which it had healed; else None, and absent. seal: xxh3-128 of the stored other fields; None, and
    absent, if older.
    """

    run: Nonce
    round: Count
    commit: Sha256
    members: tuple[Name, ...]
    batches: Count
    index: Xxh128
    parts: tuple[Part, ...]
    tree: str
    shards: tuple[Shard, ...] = ()
    writer: Name
    nonce: Nonce
    healed: Literal[True] | None = None
    seal: Xxh128 | None = None
    ADDED = ("healed", "seal")

    @model_validator(mode="after")
    def _has_its_seal(self) -> Self:
        if self.seal is not None and self.seal != self.sealed().seal:
            raise ValueError("the seal is not that of the other fields")
        return self

    def sealed(self) -> Self:
        """The same with the seal of its fields."""
        unsealed = self.model_copy(update={"seal": None})
        return unsealed.model_copy(update={"seal": xxhash.xxh3_128_hexdigest(unsealed.to_bytes())})


class Pin(Record):
    """Keeps the checkpoint of a round until the pin is deleted. by, reason: for people."""

    run: Nonce
    round: Count
    by: Name
    reason: Text
    created: Text


class Outcome(Extended):
    """The end of one incarnation. This record is authoritative; the exit code follows from it.

    metrics: of evaluations after the last round of the run. None, and absent from the bytes, without any.
    """

    run: Nonce
    slot: Slot
    incarnation: Incarnation
    status: Literal["done", "retry", "failed", "stopped"]
    exit_code: Annotated[int, Field(ge=0, le=255)]
    reason: Text
    round: Count
    inner_step: Count
    tokens: Count
    loss_first: float | None
    loss_last: float | None
    ended: Text
    metrics: Annotated[dict[MetricName, Finite], Field(max_length=MAX_METRICS)] | None = None
    ADDED = ("metrics",)
