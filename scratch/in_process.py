"""Several ranks in one process: N pools on one GPU, or on none.

The whole path of a sharded prefill runs on one device, to be tested and studied: either one
thread drives the ranks in lockstep (every rank plans, then every rank runs layer 0, and so on),
or each rank has a thread. The rank that arrives last copies everybody's block. After a gather that
failed the ranks no longer agree on which comes next, so the group is broken for good: nothing is
exchanged any more, and only what was gathered before can still be waited for.
"""

from __future__ import annotations

import threading

import torch

from scratch.group import DEFAULT_TIMEOUT_S, StreamPoint


class _Round:
    """One all-gather: who has arrived, with what, and when it was done."""

    __slots__ = ("blocks", "done", "points", "waited")

    def __init__(self) -> None:
        self.blocks: dict[int, torch.Tensor] = {}
        self.points: dict[int, StreamPoint] = {}
        self.done: StreamPoint | None = None
        self.waited = 0


class _Meeting:
    """Where the ranks of one in-process group meet, round after round, until one round fails."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.rounds: dict[int, _Round] = {}
        self.broken: str | None = None

    def arrive(self, number: int, rank: int, blocks: torch.Tensor) -> None:
        """Enter a round; the last to arrive copies all blocks and opens it."""
        with self.changed:
            self._check_not_broken(rank)
            try:
                self._enter(number, rank, blocks)
            except BaseException as error:
                self._break(str(error) or repr(error))
                raise

    def _enter(self, number: int, rank: int, blocks: torch.Tensor) -> None:
        current = self.rounds.setdefault(number, _Round())
        for other, theirs in current.blocks.items():
            if theirs.shape != blocks.shape or theirs.dtype != blocks.dtype:
                raise RuntimeError(
                    f"gather {number}: rank {rank} brings {blocks.dtype}{list(blocks.shape)}, "
                    f"rank {other} {theirs.dtype}{list(theirs.shape)}; every rank must plan "
                    f"the same batch"
                )
        current.blocks[rank] = blocks
        current.points[rank] = StreamPoint(blocks.device)
        if len(current.blocks) == self.size:
            _exchange(current)
            self.changed.notify_all()

    def await_round(self, number: int, rank: int) -> None:
        """Wait until everybody arrived in a round; on CUDA, order the stream behind its copies."""
        with self.changed:
            current = self.rounds[number]
            self.changed.wait_for(
                lambda: current.done is not None or self.broken is not None, self.timeout_s
            )
            if current.done is None:
                self._check_not_broken(rank)
                missing = sorted(set(range(self.size)) - set(current.blocks))
                late = (
                    f"gather {number}: ranks {missing} did not arrive within {self.timeout_s:g} s; "
                    f"drive all ranks in lockstep or give each a thread"
                )
                self._break(late)
                raise RuntimeError(late)
            current.waited += 1
            if current.waited == self.size:
                del self.rounds[number]
            current.done.wait()

    def leave(self, rank: int) -> None:
        """Note that a rank is gone for good, and wake whoever waits for it."""
        with self.changed:
            self._break(f"rank {rank} has left the group")

    def _break(self, reason: str) -> None:
        """Fail whoever waits and whatever comes; the first reason stays."""
        self.broken = self.broken or reason
        self.changed.notify_all()

    def _check_not_broken(self, rank: int) -> None:
        if self.broken is not None:
            raise RuntimeError(
                f"the prefix gather failed on rank {rank} of {self.size}: "
                f"{self.broken}; make a new group"
            )


def _exchange(current: _Round) -> None:
    """Copy every rank's block to all others, in the order of the current stream."""
    size = len(current.blocks)
    for point in current.points.values():
        point.wait()
    for receiver, into in current.blocks.items():
        rows = into.shape[0] // size
        for sender, blocks in current.blocks.items():
            if sender != receiver:
                part = slice(sender * rows, (sender + 1) * rows)
                into[part].copy_(blocks[part], non_blocking=True)
    current.done = StreamPoint(next(iter(current.blocks.values())).device)


class _PendingRound:
    """A rank's part in a round."""

    __slots__ = ("_meeting", "_number", "_rank")

    def __init__(self, meeting: _Meeting, number: int, rank: int) -> None:
        self._meeting = meeting
        self._number = number
        self._rank = rank

    def wait(self) -> None:
        self._meeting.await_round(self._number, self._rank)


class InProcessGroup:
    """One rank of a group whose ranks live in this process; made by ``create``.

    Attributes:
        rank: this rank.
        size: ranks of the group.
    """

    __slots__ = ("_calls", "_meeting", "rank", "size")

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._calls = 0
        self.rank = rank
        self.size = meeting.size

    @classmethod
    def create(cls, size: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[InProcessGroup]:
        """Return the ranks of a new group.

        Args:
            size: number of ranks, at least 1.
            timeout_s: seconds that ``wait`` gives the other ranks to arrive.

        Raises:
            ValueError: size is below 1 or timeout_s is not positive.
        """
        if size < 1:
            raise ValueError(f"size={size} must be at least 1")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} must be positive")
        meeting = _Meeting(size, timeout_s)
        return [cls(meeting, rank) for rank in range(size)]

    def all_gather(self, blocks: torch.Tensor) -> _PendingRound:
        """Enter this rank's next round; see ``GatherGroup``.

        Raises:
            RuntimeError: another rank brought another shape, a gather failed before, or a rank
                left the group.
        """
        self._meeting.arrive(self._calls, self.rank, blocks)
        self._calls += 1
        return _PendingRound(self._meeting, self._calls - 1, self.rank)

    def leave(self) -> None:
        """Leave for good: every wait of the others becomes an error at once."""
        self._meeting.leave(self.rank)
