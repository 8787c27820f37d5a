"""The ranks that share one pool, and the one collective they need: an in-place all-gather.

A group has a rank, a size and ``all_gather``; ``PrefixGather`` asks for nothing else. Three kinds:
``ShardGroup`` over any ``torch.distributed`` process group, ``SoloGroup`` of one rank, and
``InProcessGroup`` (scratch/in_process.py), several ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT_S = 60.0
"""Seconds after which a gather whose ranks don't all arrive is an error."""

_OUTSIDE = "this process is not a rank of process_group; pass one it is in"


class PendingGather(Protocol):
    """An all-gather that has been started."""

    def wait(self) -> None:
        """Make the current stream (on a CPU: the caller) wait until the rows are there.

        Raises:
            RuntimeError: a rank is gone or late, or the collective failed.
        """


class GatherGroup(Protocol):
    """What ``PrefixGather`` needs of a group of ranks."""

    @property
    def rank(self) -> int:
        """This rank, in ``[0, size)``."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    def all_gather(self, blocks: torch.Tensor) -> PendingGather:
        """Start filling ``blocks`` with every rank's block, in place.

        Every rank calls it in the same order with tensors of the same shape.

        Args:
            blocks: [size * n, width], contiguous; rows ``[rank * n, (rank + 1) * n)`` hold this
                rank's block already. Nothing else may use it until ``wait`` returns.
        """


class SoloGroup:
    """The group of one rank: nothing is sent."""

    __slots__ = ()

    rank = 0
    size = 1

    def all_gather(self, blocks: torch.Tensor) -> PendingGather:
        """Return at once: the only block is there already, in the order of the stream."""
        return StreamPoint(blocks.device)


class StreamPoint:
    """A moment of a device's current stream; on a CPU, where work is done in order, nothing."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Make the device's current stream wait for that moment."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class ShardGroup:
    """The ranks of a ``torch.distributed`` process group: NCCL on CUDA, Gloo on CPUs.

    Give each pool a communicator of its own (``dedicated``): its gathers then never queue behind
    the model's collectives.

    Args:
        process_group: the ranks; None for the default group.
        timeout_s: seconds after which a Gloo gather without all its ranks is an error. NCCL's
            own timeout, given when the process group is made, holds on CUDA.

    Attributes:
        process_group: the ranks.
        rank: this rank in the group.
        size: ranks of the group.

    Raises:
        ValueError: this process is not in the group, or timeout_s is not positive.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} must be positive")
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(_OUTSIDE)
        self._timeout = timedelta(seconds=timeout_s)

    @classmethod
    def dedicated(
        cls, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> ShardGroup:
        """Return a group of the same ranks and backend with its own communicator.

        Collective: every rank of ``process_group`` calls it, in the same order.
        """
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        own = dist.new_group(
            ranks=ranks,
            timeout=timedelta(seconds=timeout_s),
            backend=dist.get_backend(process_group),
            use_local_synchronization=True,
        )
        return cls(own, timeout_s=timeout_s)

    def all_gather(self, blocks: torch.Tensor) -> PendingGather:
        """Start a regular all-gather of equal blocks, in place; see ``GatherGroup``.

        The bytes travel as they are, whatever the dtype.
        """
        flat = blocks.view(torch.uint8)
        rows = flat.shape[0] // self.size
        own = flat[self.rank * rows : (self.rank + 1) * rows]
        try:
            work = _all_gather_single(flat, own, group=self.process_group, async_op=True)
        except RuntimeError as error:
            raise self._failed(error) from error
        return _Work(work, self._timeout if blocks.device.type == "cpu" else None, self._failed)

    def _failed(self, error: Exception) -> RuntimeError:
        return RuntimeError(
            f"the prefix gather failed on rank {self.rank} of {self.size}: a rank has died, is "
            f"more than {self._timeout.total_seconds():g} s late, or planned another batch "
            f"({str(error).strip()}); restart the group"
        )


class _Work:
    """A started ``torch.distributed`` collective."""

    __slots__ = ("_explain", "_timeout", "_work")

    def __init__(
        self, work: Any, timeout: timedelta | None, explain: Callable[[Exception], RuntimeError]
    ) -> None:
        self._work = work
        self._timeout = timeout
        self._explain = explain

    def wait(self) -> None:
        # With a timeout NCCL would block the host; without one only the current stream waits.
        try:
            if self._timeout is None:
                self._work.wait()
            else:
                self._work.wait(self._timeout)
        except RuntimeError as error:
            raise self._explain(error) from error


AnyGroup: TypeAlias = "dist.ProcessGroup | GatherGroup"


def get_kv_shard_group(
    *, use_mla: bool, cp_group: AnyGroup | None = None, tp_group: AnyGroup | None = None
) -> GatherGroup:
    """Choose the group to shard KV pages over.

    The context-parallel group if it has more than one rank: its ranks hold the same heads of the
    same tokens. Else the tensor-parallel group for MLA, whose latent is the same on every rank.
    Else nothing: tensor-parallel MHA ranks hold different heads.

    Args:
        use_mla: the model's attention is MLA.
        cp_group: the attention's context-parallel ranks; None if there is none.
        tp_group: the attention's tensor-parallel ranks; None if there is none.

    Returns:
        The group; ``SoloGroup`` (size 1) means that sharding is off. A process group is used as
        it is: pass ``ShardGroup.dedicated(process_group)`` where the model's own collectives run
        on it too.

    Raises:
        ValueError: this process is not in a process group that was asked.
    """
    for group in (cp_group, tp_group if use_mla else None):
        chosen = _as_gather_group(group)
        if chosen.size > 1:
            return chosen
    return SoloGroup()


def _as_gather_group(group: AnyGroup | None) -> GatherGroup:
    if group is None:
        return SoloGroup()
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is outside:
        raise ValueError(_OUTSIDE)
    if isinstance(group, dist.ProcessGroup):
        return ShardGroup(group)
    return group


def _current_all_gather() -> Callable[..., Any]:
    """Return the all-gather into one tensor under the name that this torch does not deprecate."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    call: Callable[..., Any] = getattr(dist, name)
    return call


_all_gather_single = _current_all_gather()
