"""Moves bytes between ranks until a deadline, and lets all ranks of the job raise the same error.

A call moves a piece of a buffer, so the number of calls grows with the bytes, and with the tensors that have a buffer
of their own: those of at least a mebibyte. On NCCL, data passes through buffers of DEVICE_PIECE_BYTES on the device.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Final, cast

import torch
import torch.distributed as dist

from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Corrupt, Invalid, Retryable
from skerry.runtime.ranks.interface import RankLost
from skerry.runtime.replication.copy_placement import NoReplicasAvailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from skerry.runtime.replication.flat_buffers import Parts

    Transfers = Sequence[tuple[int, Parts]]
    """Global ranks, and the buffers that go to them or come from them, in order."""

PIECE_BYTES: Final = 8 << 20
"""Large enough for the link. PACKED pieces of buffers with several parts are memory of the host."""
PACKED: Final = 12
DEVICE_PIECE_BYTES: Final = 64 << 20
"""Two for each peer are memory of the device."""
_ERRORS: Final[Mapping[str, type[Exception]]] = {
    kind.__name__: kind for kind in (Corrupt, Invalid, Retryable, RankLost)
}


class Phase:
    """One operation of all ranks of a group. group: None for all ranks of the job. deadline: of the whole operation.

    Every method raises RankLost on a rank that waits longer than until the deadline, or whose peer is gone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        deadline: timedelta,
        job: dist.ProcessGroup | None = None,
        memory: list[torch.Tensor] | None = None,
    ) -> None:
        """job: of all ranks, to agree on errors; None for the default group.

        memory: of earlier operations, to pack into; what this one needs more is added. New pages cost more than a copy.
        """
        self._memory = [] if memory is None else memory
        self._group = group
        self._job = job
        self._clock = SystemClock()
        self._end = self._clock.now() + deadline.total_seconds()

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in the order of the group. Two calls."""
        return self._gather(data, self._group)

    def agree(self, error: Exception | None) -> None:
        """Raise the errors of all ranks of the JOB as one, on every rank; return if there are none. Two calls."""
        mine = [] if error is None else [type(error).__name__, *_lines(error)]
        rows: list[list[str]] = [json.loads(data) for data in self._gather(json.dumps(mine).encode(), self._job)]
        failed = [(rank, row) for rank, row in enumerate(rows) if row]
        if not failed:
            return
        if all(row[0] == NoReplicasAvailableError.__name__ for _, row in failed):
            raise NoReplicasAvailableError(
                list(dict.fromkeys(line for _, row in failed for line in row[1:]))
            ) from error
        kind = failed[0][1][0]
        text = "; ".join(f"rank {rank}: {'; '.join(row[1:] if row[0] in _ERRORS else row)}" for rank, row in failed)
        raise _ERRORS.get(kind, Retryable)(text) from error

    def exchange(self, mine: Sequence[Parts], sizes: Mapping[int, Sequence[int]]) -> dict[int, list[torch.Tensor]]:
        """The buffers of the other ranks, by global rank, for those of this one. sizes: of each, in bytes."""
        received = {rank: [torch.empty(size, dtype=torch.uint8) for size in sizes[rank]] for rank in sizes}
        self.move(
            [(rank, buffer) for rank in sizes for buffer in mine],
            [(rank, [buffer]) for rank, buffers in received.items() for buffer in buffers],
        )
        return received

    def move(self, out: Transfers, into: Transfers) -> None:
        """Send and receive all buffers at once. Between two ranks they arrive in the order in which they are sent."""
        if self._device(self._group).type == "cpu":
            works = [dist.irecv(piece[0], rank, group=self._group) for rank, piece in _pieces(into, PIECE_BYTES)]
            self._send(out)
            self._wait(works)
        else:
            self.move_by_device(out, into)

    def _send(self, out: Transfers) -> None:
        """Send all pieces, at most PACKED of them from memory that they are packed into."""
        works: list[dist.Work | None] = []
        packed: deque[tuple[torch.Tensor, dist.Work | None]] = deque()
        for rank, piece in _pieces(out, PIECE_BYTES):
            if len(piece) == 1:
                works.append(dist.isend(piece[0], rank, group=self._group))
                continue
            if self._memory:
                memory = self._memory.pop()
            elif len(packed) < PACKED:
                memory = torch.empty(PIECE_BYTES, dtype=torch.uint8)
            else:
                memory, sent = packed.popleft()
                self._wait([sent])
            data = torch.cat(piece, out=memory[: sum(map(len, piece))])
            packed.append((memory, dist.isend(data, rank, group=self._group)))
        self._wait([*works, *(work for _, work in packed)])
        self._memory += [memory for memory, _ in packed]

    def move_by_device(self, out: Transfers, into: Transfers) -> None:
        """Move one piece for each peer and direction at a time, through the device."""
        device = self._device(self._group)
        queues = [_by_rank(_pieces(direction, DEVICE_PIECE_BYTES)) for direction in (out, into)]
        while any(queues):
            sends = {rank: torch.cat(queue.pop(0)).to(device) for rank, queue in queues[0].items()}
            targets = {rank: queue.pop(0)[0] for rank, queue in queues[1].items()}
            receives = {rank: torch.empty_like(target, device=device) for rank, target in targets.items()}
            operations = [dist.P2POp(dist.isend, piece, rank, self._group) for rank, piece in sends.items()]
            operations += [dist.P2POp(dist.irecv, piece, rank, self._group) for rank, piece in receives.items()]
            self._wait(dist.batch_isend_irecv(operations))
            for rank, target in targets.items():
                target.copy_(receives[rank])
            queues = [{rank: queue for rank, queue in direction.items() if queue} for direction in queues]

    def _gather(self, data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
        device, count = self._device(group), dist.get_world_size(group)
        length = torch.full((1,), len(data), dtype=torch.int64, device=device)
        lengths = [torch.empty_like(length) for _ in range(count)]
        self._wait([cast("dist.Work | None", dist.all_gather(lengths, length, group=group, async_op=True))])
        sizes = [int(size.item()) for size in lengths]
        padded = torch.frombuffer(bytearray(data.ljust(max(sizes) or 1)), dtype=torch.uint8).to(device)
        rows = [torch.empty_like(padded) for _ in range(count)]
        self._wait([cast("dist.Work | None", dist.all_gather(rows, padded, group=group, async_op=True))])
        return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _wait(self, works: Iterable[dist.Work | None]) -> None:
        for work in works:
            if work is None:
                continue
            left = max(0.001, self._end - self._clock.now())
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:  # also torch's subclasses: a peer is gone, or the time is over
                raise RankLost(f"rank {dist.get_rank()} waited for its peers: {error}; restart the replica") from error

    @staticmethod
    def _device(group: dist.ProcessGroup | None) -> torch.device:
        """The CPU where the backend can move its memory, else the current device."""
        return torch.device("cpu" if "gloo" in dist.get_backend_config(group) else torch.cuda.current_device())


def _lines(error: Exception) -> tuple[str, ...]:
    return error.copies if isinstance(error, NoReplicasAvailableError) else (str(error),)


def _pieces(transfers: Transfers, size: int) -> Iterator[tuple[int, Parts]]:
    """Each buffer in pieces of `size` bytes, the last one shorter."""
    for rank, parts in transfers:
        piece: Parts = []
        room = size
        for part in parts:
            start = 0
            while start < len(part):
                stop = min(len(part), start + room)
                piece.append(part[start:stop])
                room -= stop - start
                start = stop
                if room == 0:
                    yield rank, piece
                    piece, room = [], size
        if piece:
            yield rank, piece


def _by_rank(pieces: Iterable[tuple[int, Parts]]) -> dict[int, list[Parts]]:
    queues: dict[int, list[Parts]] = {}
    for rank, piece in pieces:
        queues.setdefault(rank, []).append(piece)
    return queues
