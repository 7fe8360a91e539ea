"""The log's typed documents: what each JSON object of a run says, how it becomes bytes, and its digest.

Canonical bytes: UTF-8 JSON, fields in the order of the class. A record's digest is the sha256 of the stored bytes;
the chain (contribution <- decision <- commit <- next decision) is made of these. Parsing is strict: an unknown field,
a wrong type or another protocol version is refused by key and field. Does no I/O.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from skerry.runtime.errors import Corrupt

PROTOCOL = 1
# A record is about 1 KB; 4,000 members in one decision are about 600 KB. Anything larger is not a record of ours.
MAX_RECORD_BYTES = 4 << 20
# A record of 4 MB may have a million wrong fields, each with a name of any length; to list them takes seconds.
_LISTED_FIELDS = 1000
_TOLD_FIELDS = 5
_TOLD_CHARACTERS = 120
GENESIS = "0" * 64
"""What the first round's records name as the digest of the commit before them."""

Count = Annotated[int, Field(ge=0, le=1 << 62)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Xxh128 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Nonce = Xxh128
Name = Annotated[str, Field(min_length=1, max_length=256)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Work = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# A weight is tokens, or a fraction, times a fraction. The average multiplies in float32: 1e-46 is 0 there and 1e39 is
# infinite, and either makes NaN of everybody's.
Fraction = Annotated[float, Field(ge=2.0**-40, le=1)]
Weight = Annotated[float, Field(ge=1e-30, le=1e30)]
Scope = Literal["fragments", "registered", "average"]
Phase = Literal["joining", "train", "sync", "stopping", "finished", "left", "failed"]


class Record(BaseModel):
    """A frozen, strict document of the log."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="null")

    def to_bytes(self) -> bytes:
        """The canonical bytes to store."""
        return self.model_dump_json().encode()

    @classmethod
    def parse(cls, data: bytes | memoryview, key: str) -> Self:
        """The record in `data`, read from `key`. Raises Corrupt naming the key and the first few wrong fields."""
        if len(data) > MAX_RECORD_BYTES:
            raise Corrupt(f"record too large: key={key} bytes={len(data)} limit={MAX_RECORD_BYTES}")
        try:
            return cls.model_validate_json(bytes(data))
        except ValidationError as error:
            text = f"record does not parse: key={key} kind={cls.__name__} {_wrong_fields(error)}"
        # Not chained: the other error's text repeats what was read, all of it, wherever a traceback goes.
        raise Corrupt(text)


def digest_of(data: bytes | memoryview) -> str:
    """sha256 of a record's stored bytes, in hex: what the chain names it by."""
    return hashlib.sha256(data).hexdigest()


def _wrong_fields(error: ValidationError) -> str:
    if error.error_count() > _LISTED_FIELDS:
        return f"{error.error_count()} wrong fields"
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    told = [
        f"{'.'.join(map(str, one['loc']))[:_TOLD_CHARACTERS] or 'document'}: {one['msg'][:_TOLD_CHARACTERS]}"
        for one in wrong[:_TOLD_FIELDS]
    ]
    more = [f"and {len(wrong) - _TOLD_FIELDS} more"] if len(wrong) > _TOLD_FIELDS else []
    return "; ".join(told + more)


class Run(Record):
    """run.json: what all replicas of a run agree on before the first step. Created once.

    slots: the replicas that round 0 waits for, for at most start_window_s. rounds: None means until stopped. work: the
    run goes on after `rounds` until its commits tell of so much; None ends it there.
    keep_unfinished_s: seconds between two saves of the round at hand; None saves nothing within a round.
    """

    protocol: Literal[1] = PROTOCOL
    nonce: Nonce
    name: Name
    spec: Sha256 | None
    slots: tuple[Name, ...]
    rounds: Count | None
    sync_every: Count
    fragments: Annotated[int, Field(ge=1, le=1024)]
    outer_lr: float
    outer_momentum: float
    min_replicas: Annotated[int, Field(ge=1)]
    grace_s: Seconds
    start_window_s: Seconds
    checkpoint_every: Annotated[int, Field(ge=1)]
    keep_checkpoints: Annotated[int, Field(ge=1)] = 3
    keep_every: Annotated[int, Field(ge=1)] | None = None
    keep_unfinished_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    codec: Literal["none", "bf16"]
    weighting: Literal["uniform", "tokens"]
    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    work: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    created: str

    def is_over(self, closed: int, work: float) -> bool:
        """Whether the run ends when so many rounds are closed, with so much work in them (see Commit)."""
        return is_over(self.rounds, self.work, closed, work)


def is_over(rounds: int | None, due: float | None, closed: int, work: float) -> bool:
    """Whether a run of so many `rounds`, with so much work `due`, ends here."""
    if rounds is None or closed < rounds:
        return False
    # Shares are no binary fractions: their sum may miss what they come to by a last place, and never by an inner step.
    return due is None or work >= due * (1 - 1e-9)


class Member(Record):
    """One start of a replica in its slot; the highest incarnation owns the slot."""

    run: Nonce
    slot: Name
    incarnation: Count
    nonce: Nonce
    host: str
    process: Count
    created: str


class Abstention(Record):
    """This slot has nothing good to offer to this round; nobody waits for it."""

    round: Count
    reason: str


class Heartbeat(Record):
    """The one replaceable record of a slot: that it lives, where it is, and what it reports.

    waiting_for: slots whose contribution is awaited. notice: free text for people (a spot notice, a stop request).
    """

    run: Nonce
    slot: Name
    incarnation: Count
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
    waiting_for: tuple[str, ...]
    notice: str | None


class Part(Record):
    """One payload object: its content address, the length of its header, its whole length in bytes."""

    digest: Xxh128
    header_bytes: Count
    total_bytes: Count


class Contribution(Record):
    """What one slot offers to one exchange. At most one per slot and exchange, whatever crashed.

    base: digest of the commit it was offered on. index: digest of the tensor index (names, dtypes, shapes, ops,
    codec): two contributions can be averaged if and only if these are equal. share: of the inner steps since its
    fragment's last exchange, below 1 if rounds were ended early or not trained; its weight, where tokens are not. late:
    what else is in it, of earlier rounds, likewise; it weighs nothing.
    discount: what its weight is multiplied by; below 1 for what was trained for an earlier round. parts: of all ranks,
    one rank after the other; ranks: how many each has (0 for one that brings no tensors), () for a replica of one
    rank. Then index is the fold of every rank's own.
    """

    run: Nonce
    round: Count
    exchange: Count
    slot: Name
    incarnation: Count
    base: Sha256
    index: Xxh128
    parts: tuple[Part, ...]
    tokens: Count
    inner_steps: Count
    share: Fraction = 1.0
    late: Work = 0.0
    discount: Fraction = 1.0
    ranks: tuple[Count, ...] = ()
    nonce: Nonce

    @model_validator(mode="after")
    def _ranks_share_the_parts(self) -> Self:
        if self.ranks and (len(self.ranks) < 2 or sum(self.ranks) != len(self.parts)):
            raise ValueError(f"{len(self.parts)} parts cannot be those of ranks={self.ranks[:8]}")
        return self

    @property
    def work(self) -> float:
        """What was trained for it, in rounds of one replica."""
        return self.share + self.late

    def of_rank(self, rank: int) -> tuple[Part, ...]:
        """The parts that one rank has uploaded, and its like in other replicas averages."""
        counts = self.ranks or (len(self.parts),)
        return self.parts[sum(counts[:rank]) : sum(counts[: rank + 1])]


class Share(Record):
    """One member of a decision: whose contribution (by the digest of its record) and its weight."""

    slot: Name
    contribution: Sha256
    weight: Weight


class Decision(Record):
    """THE decision of one exchange: the members in slot order. The average divides by the sum of these weights."""

    run: Nonce
    round: Count
    exchange: Count
    base: Sha256
    index: Xxh128
    reduction: Literal["all_gather"]
    members: Annotated[tuple[Share, ...], Field(min_length=1)]
    proposer: Name
    nonce: Nonce


class Commit(Record):
    """Closes a round. A pure function of its decisions, so it does not matter who wrote it.

    exchanges: digests of the decisions in order. participants: the smallest member count among them. work: what was
    trained for all rounds up to this one, in rounds of one replica: the sum of its members' work, whatever that weighs;
    of several exchanges the smallest. 0 where it was not counted yet.
    """

    run: Nonce
    round: Count
    exchanges: tuple[Sha256, ...]
    participants: Count
    work: Work = 0.0
    previous: Sha256


class Receipt(Record):
    """What one replica holds after a round: exact digests of each exchange's average and of the shared state.

    scope: which state `state` covers: DiLoCo's fragments, everything registered (DDP), or nothing beyond the average.
    norm: L2 of what this replica encoded to contribute, over all exchanges of the round; None if it had nothing.
    """

    run: Nonce
    round: Count
    slot: Name
    incarnation: Count
    commit: Sha256
    averages: tuple[Xxh128, ...]
    state: Xxh128 | None
    scope: Scope
    contributed: bool
    uploaded_bytes: Count
    downloaded_bytes: Count
    requests: Count
    seconds: dict[str, Seconds]
    norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class Shard(Record):
    """What one rank has saved of a checkpoint: its own index, parts and tree."""

    index: Xxh128
    parts: tuple[Part, ...]
    tree: str


class CheckpointManifest(Record):
    """Makes a checkpoint visible. `round` rounds are closed in it; `commit` is the digest of the last one.

    tree: the JSON skeleton of the state, its tensors numbered in the order of the parts' indexes. shards: what each
    rank of its writer has saved, () for one rank. Then parts are those of all, one rank after the other, index is the
    fold of their own, and tree is empty.
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


class Pin(Record):
    """The checkpoint of this round stays until the pin is deleted. by, reason: for people."""

    run: Nonce
    round: Count
    by: Name
    reason: str
    created: str


class Outcome(Record):
    """How one incarnation ended. The truth about a replica; exit codes are only its echo."""

    run: Nonce
    slot: Name
    incarnation: Count
    status: Literal["done", "retry", "failed", "stopped"]
    exit_code: Annotated[int, Field(ge=0, le=255)]
    reason: str
    round: Count
    inner_step: Count
    tokens: Count
    loss_first: float | None
    loss_last: float | None
    ended: str
