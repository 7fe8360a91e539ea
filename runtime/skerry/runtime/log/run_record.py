"""The records that say what a run is: run.json, later changes of its settings, and the runs it comes from or went to.

A record's form and parsing are those of `records`. Does no I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from skerry.runtime.log.record_parsing import Extended, Record
from skerry.runtime.log.records import PROTOCOL, Codec, Count, Name, Nonce, Reduction, Seconds, Sha256, Uri, Xxh128

if TYPE_CHECKING:
    from collections.abc import Iterable

CodecSetting = Literal["none", "bf16", "int8", "int4", "int2", "sparse", "auto"]
"""A codec, or auto: see `codec_for`."""


def codec_for(setting: CodecSetting, *, is_local: bool) -> Codec:
    """The codec of a run with this setting, the same for all its replicas (decision 0031).

    is_local: no link lies between the replicas and their store.
    """
    if setting != "auto":
        return setting
    return "none" if is_local else "int8"


class InitialModel(Record):
    """The checkpoint of another run with whose model a run starts. Its objects are copied into the run, as `initial/`.

    uri: of that run, for people. run: its nonce. round: closed rounds of the checkpoint. manifest: digest of the
    checkpoint's manifest, which names all its bytes. states: the state of DiLoCo's fragments has one of these digests,
    by the receipts of that round; () if they cover no fragments.
    """

    uri: Uri
    run: Nonce
    round: Count
    manifest: Sha256
    states: tuple[Xxh128, ...] = ()


class Parent(Record):
    """The run of which a run is the continuation, made from a mirror by `skerry restore`.

    uri: of that run, for people. run: its nonce. round: how many of its closed rounds the copy has. commit: digest of
    the last of their commits there, GENESIS for none; the copy's records name its own nonce, so its digests differ.
    """

    uri: Uri
    run: Nonce
    round: Count
    commit: Sha256


class Elsewhere(Record):
    """elsewhere.json: the run under this prefix lives at another URI, so no replica may go on here.

    why: "mirror": this is a copy of the run at `uri`, and `run` is its nonce. "moved": the run of this prefix, with
    nonce `run`, was restored at `uri`, from `round` closed rounds on. by: for people.
    """

    why: Literal["mirror", "moved"]
    uri: Uri
    run: Nonce
    round: Count
    by: Name
    created: str


class PeerCopies(Record):
    """Copies of each replica's state at its own ranks, so that a lost machine is replaced without the bucket.

    every_s: seconds between two saves of the current round. copies: ranks that hold a state, its own included; 1 makes
    none at peers. apart: ranks that are lost together; None takes those of one machine. memory: in /dev/shm; else in a
    temporary folder of the machine.
    """

    every_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    copies: Annotated[int, Field(ge=1)] = 2
    apart: Annotated[int, Field(ge=1)] | None = None
    memory: bool = True


class MirrorSettings(Record):
    """A copy of the run in another store, which its replicas keep.

    uri: of the mirror itself, below which nothing else is. every: rounds between two checkpoints in it. each_round: log
    and payloads are copied after each round, and not with a checkpoint only. private: also what each replica alone has.
    max_usd: of all copies together, at usd_per_gb for each 10^9 bytes that leave the store's region; then copying ends.
    None has no limit.
    """

    uri: Uri
    every: Annotated[int, Field(ge=1)] = 1
    each_round: bool = False
    private: bool = True
    max_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    usd_per_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class FailoverSettings(Record):
    """A run goes on at `uri` by itself once a majority of its slots has not reached its store for `after_s`.

    mirror: of the run's mirrors, the one through which they vote and from which the run goes on.
    """

    mirror: Uri
    uri: Uri
    after_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Vote(Extended):
    """A slot does not reach the run's store, and adds nothing to it until the ballot has a verdict.

    incarnation: the newest start of the slot that the voter knows. The vote does not count beside a newer one; None,
    and absent, counts always.
    """

    run: Nonce
    ballot: Count
    slot: Name
    created: str
    incarnation: Count | None = None
    ADDED = ("incarnation",)


class Verdict(Record):
    """The end of a ballot. Created once.

    uri: of the run that goes on, from `round` closed rounds on, of which `commit` is the digest of the last in the
    mirror, GENESIS for none; None: the run stays in its store, and all votes of the ballot are void. votes: the slots
    of the majority. by: the slot that created it.
    """

    run: Nonce
    ballot: Count
    uri: Uri | None
    round: Count
    commit: Sha256
    votes: tuple[Name, ...]
    by: Name
    created: str

    def leads_to(self, run: Run) -> bool:
        """True if `run` is the one that goes on by this verdict."""
        parent = run.parent
        return parent is not None and (parent.run, parent.round, parent.commit) == (self.run, self.round, self.commit)


class Spent(Record):
    """The bytes of tensors that one slot has copied to a mirror, or was about to."""

    run: Nonce
    slot: Name
    bytes: Count


class Run(Extended):
    """run.json: the settings that all replicas of a run share. Created once.

    slots: the replicas that round 0 waits for, for at most start_window_s. rounds: None means until stopped. work:
    after `rounds`, the run continues until its commits have counted this much work; None ends it after `rounds`.
    keep_unfinished_s: seconds between two saves of the current round; None saves nothing within a round. init_from: the
    model to start with; None, and absent from the bytes, for that of the script. reduction: None, and absent, lets the
    proposer of each exchange choose. store: the URI at which the run was started, if that is known; with it a copy that
    was made by hand is recognized. parent: the run that this one continues. Both are absent from the bytes while None.
    layout: of payloads; 2 has objects of 1 to 8 MiB; None, and absent, of 64 MiB. peers, mirrors: copies of the run
    that its replicas keep; None, and absent, for none. reduce_in: members in this region make all reduced units, if
    there are enough; None, and absent, for all members. failover: None, and absent, if an operator restores the run.
    links: contributions have the links of their replicas; None, and absent, in a run that older versions can read.
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
    codec: CodecSetting
    weighting: Literal["uniform", "tokens"]
    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    work: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    created: str
    init_from: InitialModel | None = None
    reduction: Reduction | None = None
    store: Uri | None = None
    parent: Parent | None = None
    layout: Literal[2] | None = None
    peers: PeerCopies | None = None
    mirrors: Annotated[tuple[MirrorSettings, ...], Field(min_length=1, max_length=16)] | None = None
    reduce_in: Name | None = None
    failover: FailoverSettings | None = None
    links: Literal[True] | None = None
    ADDED = (
        "init_from",
        "reduction",
        "store",
        "parent",
        "layout",
        "peers",
        "mirrors",
        "reduce_in",
        "failover",
        "links",
    )

    @model_validator(mode="after")
    def _mirrors_are_elsewhere(self) -> Self:
        uris = [mirror.uri.rstrip("/") + "/" for mirror in self.mirrors or ()]
        taken = [*uris, *([] if self.store is None else [self.store.rstrip("/") + "/"])]
        if any(a.startswith(b) for i, a in enumerate(taken) for j, b in enumerate(taken) if i != j):
            raise ValueError(f"mirrors need prefixes of their own, apart from the run's: {', '.join(uris)[:500]}")
        return self

    @model_validator(mode="after")
    def _both_sides_cannot_go_on(self) -> Self:
        """After a majority has left, the others must be too few to close a round. The mirror must lose no closed round.

        A mirror beyond its max_usd would take the run back to the round at which copying ended.
        """
        if self.failover is None:
            return self
        mirror = next((mirror for mirror in self.mirrors or () if mirror.uri == self.failover.mirror), None)
        if mirror is None or not mirror.each_round or mirror.max_usd is not None:
            raise ValueError(f"failover needs a mirror of each round without max_usd: {self.failover.mirror}")
        others = len(self.slots) - majority(len(self.slots))
        if self.min_replicas <= others:
            raise ValueError(
                f"failover needs min_replicas of at least {others + 1} with {len(self.slots)} replicas, or the "
                f"{others} that a majority leaves could go on alone: min_replicas={self.min_replicas}"
            )
        return self

    def is_over(self, closed: int, work: float) -> bool:
        """True if the run ends after `closed` rounds with this work (see Commit)."""
        return is_over(self.rounds, self.work, closed, work)


class Settings(Extended):
    """Settings of a run from `from_round` on, in the place of those of run.json. Created once, by the operator.

    number: the first has 1. previous: digest of the record before it, GENESIS for the first. from_round: never lower
    than that of the record before it; `rounds` and `work` count at once. by: for people. slots: all expected ones, in
    the order that numbers them; None, and absent from the bytes, for those of the record before it. A record that
    changes them changes nothing else.
    """

    run: Nonce
    number: Annotated[int, Field(ge=1)]
    previous: Sha256
    from_round: Count
    rounds: Count | None
    work: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    outer_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    outer_momentum: Annotated[float, Field(ge=0, lt=1)]
    by: Name
    created: str
    slots: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    ADDED = ("slots",)


def majority(slots: int) -> int:
    """The least number of so many slots of which two sets must have one in common."""
    return slots // 2 + 1


def slot_lists(run: Run, changes: Iterable[Settings]) -> list[tuple[str, ...]]:
    """The expected slots of run.json, and of each change in order.

    A round has those of the newest change that the decision of the round before it names (decision 0046).
    """
    lists = [run.slots]
    for change in changes:
        lists.append(change.slots or lists[-1])
    return lists


def is_over(rounds: int | None, due: float | None, closed: int, work: float) -> bool:
    """True if a run of this many `rounds` and this `due` work ends after `closed` rounds with `work`."""
    if rounds is None or closed < rounds:
        return False
    # Shares are no binary fractions: their sum may be off by the last binary digit, but never by an inner step.
    return due is None or work >= due * (1 - 1e-9)
