"""Takes a batch of tensors through one exchange: contribute, wait for the decision, average.

All tensors of a batch travel in ONE contribution; nothing is contributed to an exchange that is decided already. While
a replica waits for the decision, it reads what it will probably need of the contributions that it sees.
Every rank of a replica moves its own bytes; rank 0 makes the records, and all ranks end alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from skerry.runtime.errors import Corrupt, Invalid, NotFinite
from skerry.runtime.log.log import Stored
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.log.records import Contribution, Decision, Part, Sha256
from skerry.runtime.ranks.interface import combine_digests
from skerry.runtime.structured_logging import emit
from skerry.runtime.tensors.choose_reduction import bytes_of, cheaper_reduction
from skerry.runtime.tensors.contribution_readability import (
    MAX_HEADERS,
    find_fault,
    find_fault_without_index,
)
from skerry.runtime.tensors.error_feedback import ErrorFeedback
from skerry.runtime.tensors.find_wrong_reduced_units import spot_check
from skerry.runtime.tensors.prefetch import Prefetch
from skerry.runtime.tensors.reduce import Source, average
from skerry.runtime.tensors.reduce_scatter import Scatter, reduce_scatter
from skerry.runtime.tensors.sum_by_pieces import Workspace
from skerry.runtime.training.contribution_writer import ContributionWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from typing_extensions import Buffer

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.log import RunLog
    from skerry.runtime.log.records import Link, Reduction
    from skerry.runtime.protocol.exchange import Exchange
    from skerry.runtime.protocol.exchange_view import ExchangeId
    from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence, WorkMonitor
    from skerry.runtime.ranks.interface import Channel
    from skerry.runtime.store import Store
    from skerry.runtime.tensors.byte_layout import Index
    from skerry.runtime.tensors.payload_encoder import Encoded
    from skerry.runtime.tensors.tensors_sent_together import TensorBatch
    from skerry.runtime.training.contribution_writer import Send
    from skerry.runtime.training.work_counter import Trained


@dataclass(frozen=True, kw_only=True)
class Average:
    """The result of an exchange. digest: of the average's bytes. contributed: this slot is among the members.

    work: what its members have trained for it, in rounds of one replica. norm: of what this call encoded, over all its
    floating point elements; None if it contributed nothing. check: the spot check that is due, for another thread; it
    returns what is wrong.
    """

    decision: Stored[Decision]
    digest: str
    contributed: bool
    work: float
    norm: float | None
    seconds: dict[str, float]
    check: Callable[[], str | None] | None = None


class _Opened(NamedTuple):
    """An exchange before this replica contributes. contributed_before: the log has a contribution of this slot."""

    tensors: str
    decided: bool
    contributed_before: bool


class _Ruling(Record):
    """The decision, its digest, and its members' contributions."""

    decision: Decision
    digest: Sha256
    contributions: tuple[Contribution, ...]


class Averager:
    """Runs exchanges one at a time; buffers are reused. feedback: what sparse contributions have left out."""

    def __init__(
        self,
        *,
        log: RunLog,
        exchange: Exchange,
        presence: Presence,
        clock: Clock,
        ranks: Channel,
        max_norm: float | None = None,
        reduction: Reduction | None = None,
        others: WorkMonitor,
    ) -> None:
        """max_norm: a contribution with a larger L2 norm becomes an abstention; None has no limit.

        reduction: what this replica proposes; None chooses by bytes and links. others: looks at their heartbeats.
        """
        self._reduction: Reduction | None = reduction
        self._log = log
        self._exchange = exchange
        self._presence = presence
        self._clock = clock
        self._ranks = ranks
        self._others = others
        self._workspace = Workspace()
        self.feedback = ErrorFeedback()
        self._indices: tuple[str, ...] = ()
        self._last: Decision | None = None
        self._writer = ContributionWriter(log.store, exchange, presence, ranks, max_norm)
        self._encode_s = self._download_s = 0.0
        self._check: Callable[[], str | None] | None = None

    def run(
        self,
        place: ExchangeId,
        batch: TensorBatch,
        *,
        trained: Trained,
        veto: str | None = None,
        round_seconds: float | None = None,
    ) -> Average:
        """Contribute the batch, wait for the decision, and write the average to the batch's tensors.

        An exchange that is decided already is followed: nothing is contributed. veto: why this replica must not
        contribute; as with tensors that are not finite or too large, the replica then abstains, and still receives the
        average.
        Raises Fenced if a newer incarnation owns the slot, and what `Exchange.decide` and `average` raise; Invalid only
        for what is this replica's own, or a store that is gone.
        """
        started, self._encode_s = self._clock.now(), 0.0
        hosts = batch.hosts()
        index = batch.index()
        opened = self._open(place, index)
        encoded, norm = None, None
        if not opened.decided:
            encoded, norm = self._contribute(place, batch, hosts, index, opened, veto, trained)
        uploaded = self._clock.now()
        ruling = self._ranks.broadcast_from_rank0(
            "decide", lambda: self._decide(place, opened, index, encoded, round_seconds), _Ruling
        )
        self.feedback.settle(
            place.round,
            trained.fragment,
            [self._mine(c) for c in ruling.contributions if c.slot == self._presence.slot],
        )
        decided = self._clock.now()
        digest = self._ranks.reduce_on_rank0(
            "average",
            lambda: self._average(ruling, batch, hosts, index, encoded, patient=not opened.decided),
            combine_digests,
        )
        return Average(
            decision=Stored(ruling.decision, ruling.digest),
            digest=digest,
            contributed=any(share.slot == self._presence.slot for share in ruling.decision.members),
            # Rounded once: a plain sum of floats has other bits on other Pythons.
            work=math.fsum(contribution.work for contribution in ruling.contributions),
            norm=norm,
            seconds={
                "encode": self._encode_s,
                "upload": uploaded - started - self._encode_s,
                "wait": decided - uploaded,
                "download": self._download_s,
                "reduce": self._clock.now() - decided - self._download_s,
            },
            check=self._check,
        )

    def contribute(self, place: ExchangeId, batch: TensorBatch, trained: Trained) -> bool:
        """Contribute the batch before its exchange is run. Returns whether the log has a contribution of this slot.

        `run` then finds that, whatever tensors it is given. False if the exchange is decided already, or if this
        replica abstains. Raises as `run` does.
        """
        hosts, index = batch.hosts(), batch.index()
        opened = self._open(place, index)
        if opened.decided:
            return False
        _, norm = self._contribute(place, batch, hosts, index, opened, None, trained)
        return norm is not None or not self._is_abstaining(place)

    def read_from(self, copies: Mapping[str, Store]) -> None:
        """Read these payloads, by key, from other stores than the run's, until the next call. They are verified too."""
        self._workspace.copies = copies

    def close(self) -> None:
        """Stop the reading threads and free the buffers."""
        self._workspace.close()

    def _open(self, place: ExchangeId, index: Index) -> _Opened:
        """Look at this exchange before contributing."""

        def look(indices: Sequence[str]) -> _Opened:
            self._presence.raise_if_fenced()
            self._indices = tuple(indices)
            decided = self._log.read_decision(place.round, place.exchange) is not None
            contributed_before = not decided and self._exchange.has_contributed(place, certain=len(indices) > 1)
            return _Opened(tensors=combine_digests(indices), decided=decided, contributed_before=contributed_before)

        return _Opened(*self._ranks.reduce_on_rank0("open", lambda: index.digest, look))

    def _contribute(
        self,
        place: ExchangeId,
        batch: TensorBatch,
        hosts: Sequence[torch.Tensor],
        index: Index,
        opened: _Opened,
        veto: str | None,
        trained: Trained,
    ) -> tuple[Encoded | None, float | None]:
        """Contribute or abstain. Returns this rank's encoded part if it is in the log, and the norm over all ranks."""
        self.feedback.begin(place.round, trained.fragment)
        encoded, written = self._writer.write(
            place,
            index,
            lambda send: self._encode(batch, hosts, index, send),
            trained,
            veto=veto,
            uploads=not opened.contributed_before,
        )
        if written.contribution is None:
            reason = written.reason or "nothing to offer"
            emit("abstained", {"round": place.round, "slot": self._presence.slot, "reason": reason})
            self._presence.abstain(place.round, reason)
            return None, None
        self._presence.withdraw_abstention()
        # An earlier attempt or incarnation may have contributed for this slot: memory does not hold what counts.
        return (encoded, written.norm) if written.mine else (None, None)

    def _encode(self, batch: TensorBatch, hosts: Sequence[torch.Tensor], index: Index, send: Send | None) -> Encoded:
        """Encode, and give each part to `send`.

        Raises Invalid; for a value that is not finite it names the parameter, if that is known.
        """
        began, sending_s = self._clock.now(), 0.0

        def timed(part: Part, data: list[Buffer]) -> None:
            nonlocal sending_s
            since = self._clock.now()
            if send is not None:
                send(part, data)
            sending_s += self._clock.now() - since

        self.feedback.add(hosts, index)
        try:
            encoded = self._writer.encode(hosts, index, batch.encoded(), None if send is None else timed)
        except NotFinite as error:
            place = batch.parameter_of(error.tensor, error.element)
            if place is None:
                raise
            name, element = place
            raise Invalid(
                f"NaN or infinity in the pseudo-gradient of parameter {name!r} (element {element})"
            ) from error
        if send is not None:
            self.feedback.keep(hosts, encoded)
        self._encode_s = self._clock.now() - began - sending_s
        return encoded

    def _decide(
        self,
        place: ExchangeId,
        opened: _Opened,
        index: Index,
        encoded: Encoded | None,
        round_seconds: float | None,
    ) -> _Ruling:
        """Wait for the decision on rank 0, and read the contributions of its members."""
        profile = self._log.store.profile
        prefetch = None
        # With less than two streams an object is read in pieces, and in layout 1 it is larger than a unit.
        if not opened.decided and index.layout > 1 and profile.streams > 1 and not profile.is_local:
            prefetch = Prefetch(self._log.store)
        try:
            decision = self._exchange.decide(
                place,
                opened.tensors,
                abstaining=self._is_abstaining(place),
                round_seconds=round_seconds,
                inspect=lambda contribution, count: self._fault_in(contribution, index, encoded, count),
                codecs=index.codecs if self._ranks.size == 1 else None,
                reduction=self._proposed(index),
                taken=None if prefetch is None else lambda seen: self._read_ahead(prefetch, seen),
            )
        finally:
            self._workspace.ahead = {} if prefetch is None else prefetch.finish()
        self._last = decision.record
        contributions = tuple(self._exchange.contributions(decision.record))
        return _Ruling(decision=decision.record, digest=decision.digest, contributions=contributions)

    def _read_ahead(self, prefetch: Prefetch, contribution: Contribution) -> None:
        """Read what this rank will need of a contribution if the members are those of the last exchange."""
        slot, last = self._presence.slot, self._last
        if last is None or contribution.slot == slot:
            return
        makers = last.makers or [share.slot for share in last.members]
        mine = self._mine(contribution)
        if last.reduction == "reduce_scatter":
            mine = tuple(part for number, part in enumerate(mine) if makers[number % len(makers)] == slot)
        prefetch.offer(contribution.round, contribution.slot, mine)

    def _average(
        self,
        ruling: _Ruling,
        batch: TensorBatch,
        hosts: Sequence[torch.Tensor],
        index: Index,
        encoded: Encoded | None,
        *,
        patient: bool,
    ) -> str:
        """Write this rank's average to the batch's tensors; its digest. patient: the members are at work now."""
        sources = self._sources(ruling, encoded)
        store = self._log.store
        self._check = None
        try:
            if ruling.decision.reduction == "all_gather":
                averaged = average(store, sources, index, hosts, workspace=self._workspace, now=self._clock.now)
            else:
                scatter = _scatter(ruling, self._ranks.rank, self._presence.slot, self._others, patient=patient)
                averaged = reduce_scatter(
                    store, scatter, sources, index, hosts, workspace=self._workspace, clock=self._clock
                )
        except Invalid as error:
            # A sound payload of something else is as good as damaged. If the store is gone, this look says so.
            faults = (
                find_fault(store, contribution, self._mine(contribution), index)
                for contribution in ruling.contributions
            )
            fault = next((fault for fault in faults if fault is not None), None)
            raise error if fault is None else Corrupt(fault) from error
        finally:
            self._workspace.ahead = {}
        batch.land()
        self._download_s = averaged.download_s
        if averaged.sample is not None:
            check = partial(spot_check, store, self._sources(ruling, None), index, averaged.sample)
            self._check = partial(check, rank=self._ranks.rank, by=self._presence.slot)
        return averaged.digest

    def _proposed(self, index: Index) -> Callable[[Sequence[Link | None]], Reduction]:
        """The reduction that this replica proposes for members with these links."""
        # A published average of sparse contributions would be as large as the dense one.
        forced = "all_gather" if index.codec == "sparse" else self._reduction
        return lambda links: forced or cheaper_reduction(bytes_of(index), links)

    def _is_abstaining(self, place: ExchangeId) -> bool:
        abstention = self._presence.progress.abstains
        return abstention is not None and abstention.round == place.round

    def _mine(self, contribution: Contribution) -> tuple[Part, ...]:
        """The parts that this rank averages."""
        return contribution.parts_of_rank(self._ranks.rank)

    def _fault_in(self, contribution: Contribution, index: Index, encoded: Encoded | None, count: int) -> str | None:
        """The reason for which a rank cannot average one of `count` contributions, or None. Its own is not read."""
        parts = self._mine(contribution)
        if encoded is not None and contribution.slot == self._presence.slot and parts == encoded.parts:
            return None
        reason = find_fault(self._log.store, contribution, parts, index, most=-(-MAX_HEADERS // count))
        for rank, digest in list(enumerate(self._indices))[1:]:
            parts_of_rank = contribution.parts_of_rank(rank)
            reason = reason or find_fault_without_index(self._log.store, contribution, parts_of_rank, digest)
        return reason

    def _sources(self, ruling: _Ruling, encoded: Encoded | None) -> list[Source]:
        return [
            Source(
                slot=share.slot,
                weight=share.weight,
                round=ruling.decision.round,
                parts=self._mine(contribution),
                local=encoded if encoded is not None and share.slot == self._presence.slot else None,
            )
            for share, contribution in zip(ruling.decision.members, ruling.contributions, strict=True)
        ]


def _scatter(ruling: _Ruling, rank: int, slot: str, others: WorkMonitor, *, patient: bool) -> Scatter:
    decision = ruling.decision
    is_elsewhere = decision.makers is not None and slot not in decision.makers
    members = [share.slot for share in decision.members]
    return Scatter(
        round=decision.round,
        exchange=decision.exchange,
        decision=ruling.digest,
        rank=rank,
        members=members,
        makers=decision.makers or members,
        mine=slot if slot in members else None,
        patient=patient,
        at_work=partial(others.any_at_work, round_number=decision.round) if is_elsewhere else None,
        limit_s=others.patience_s,
    )
