"""Gather the prefix one layer ahead: the ranks' blocks of layer l + 1 travel while l is computed.

    compute   plan | read 0 · attend 0 | read 1 · attend 1 | read 2 · attend 2 | end
    gather     [ 0 → slot A ]
                    [ 1 → slot B ]   [ 2 → slot A ]   …

A gather packs this rank's pages into its own block of the slot and all-gathers in place: equal
blocks, owner-major, so nothing is reordered afterwards. On CUDA it runs on a side stream that
waits for the compute stream where it was started, so that a slot is overwritten only after its
last reader; a read makes the compute stream wait for its own slot only. On a CPU the backend's
threads do the travelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from scratch.buffers import ScratchSlot, ScratchSlots
from scratch.group import GatherGroup
from scratch.kernels import pack_pages
from scratch.layout import ScratchLayout
from scratch.plan import ShardExtendPlan


class PrefixGather:
    """The scratch of one pool, and the gathers that fill it.

    Args:
        group: the ranks that share the pool.
        layout: the regions of a slot.
        layers: of each layer, the pool tensors that make up a row, integer[pool_rows, width_i].
        start_layer: id of the first layer.

    Attributes:
        plan: the plan in force, or None.

    Raises:
        ValueError: group and layout disagree on rank or size.
    """

    def __init__(
        self,
        group: GatherGroup,
        layout: ScratchLayout,
        layers: Sequence[Sequence[torch.Tensor]],
        *,
        start_layer: int = 0,
    ) -> None:
        spec = layout.spec
        if (group.rank, group.size) != (spec.shard_rank, spec.shard_size):
            raise ValueError(
                f"the group says rank {group.rank} of {group.size}, the spec shard_rank="
                f"{spec.shard_rank} of shard_size={spec.shard_size}; make both alike"
            )
        self.plan: ShardExtendPlan | None = None
        self._group = group
        self._layout = layout
        self._layers = layers
        self._start_layer = start_layer
        self._end_layer = start_layer + len(layers)
        first = layers[0][0]
        width = sum(part.shape[1] for part in layers[0])
        self._slots = ScratchSlots(layout.num_rows, width, first.dtype, first.device, start_layer)
        self._side: torch.cuda.Stream | None = None
        if first.device.type == "cuda":
            self._side = torch.cuda.Stream(first.device)  # type: ignore[no-untyped-call]

    def begin(self, plan: ShardExtendPlan) -> None:
        """Put a plan in force and start the first layer's gather.

        A gather in flight is waited for first.

        Raises:
            RuntimeError: a gather failed; no plan is in force then.
        """
        self.end()
        self.plan = plan
        try:
            self._prefetch(self._start_layer)
        except BaseException:
            self.plan = None
            raise

    def end(self) -> None:
        """Take the plan out of force and wait for a gather in flight.

        The plan's send list is kept until here, so nothing that a gather reads is freed early.

        Raises:
            RuntimeError: the gather in flight failed; no plan is in force all the same.
        """
        try:
            self._slots.settle()
        finally:
            self._slots.forget()
            self.plan = None

    def read(self, layer_id: int) -> torch.Tensor:
        """Return the scratch of a layer, its prefix gathered, and start the next layer's gather.

        Reading the same layer again starts nothing.

        Returns:
            integer[scratch_rows, width], rows ``[prefix | chunk | trash]``; it is overwritten
            when layer ``layer_id + 1`` is read.

        Raises:
            RuntimeError: no plan is in force, the layer was not prefetched (layers are read in
                order), or the gather failed.
        """
        slot = self._slot_that_holds(layer_id)
        slot.settle()
        following = layer_id + 1
        if following < self._end_layer and self._slots.of_layer(following).layer_id != following:
            self._prefetch(following)
        return slot.rows

    def stage(self, layer_id: int) -> torch.Tensor:
        """Return the scratch of a layer to write its chunk rows into, without waiting.

        A gather in flight writes prefix rows only. Without a prefix a layer may be staged without
        reading the ones before it; those that shared its slot can't be staged or read any more.

        Args:
            layer_id: the layer, one of the pool's.

        Raises:
            RuntimeError: no plan is in force, or another layer has the slot; without a prefix
                only a later one.
        """
        if self.plan is not None and self.plan.send_pages is None:
            self._slots.of_layer(layer_id).take(layer_id)
        return self._slot_that_holds(layer_id).rows

    def _slot_that_holds(self, layer_id: int) -> ScratchSlot:
        """Return the slot of a layer that may be read."""
        if self.plan is None:
            raise RuntimeError(
                f"layer {layer_id} is read from the scratch without a plan; "
                f"call begin_shard_extend first"
            )
        slot = self._slots.of_layer(layer_id)
        if slot.layer_id != layer_id:
            raise RuntimeError(
                f"layer {layer_id} was not prefetched: its slot holds layer {slot.layer_id}; "
                f"read layers in order, from {self._start_layer} on, once per plan"
            )
        return slot

    def _prefetch(self, layer_id: int) -> None:
        """Give the layer its slot; with a prefix, pack this rank's block and start the gather."""
        plan = self.plan
        slot = self._slots.of_layer(layer_id)
        if plan is None or plan.send_pages is None:
            slot.take(layer_id)
            return
        slot.layer_id = None
        own = self._layout.block_rows(self._group.rank, plan.block_pages)
        parts = self._layers[layer_id - self._start_layer]
        with self._beside_compute():
            if self._side is not None:
                plan.send_pages.record_stream(self._side)
            pack_pages(slot.rows[own], parts, plan.send_pages, plan.page_size)
            gathered = slot.rows[self._layout.gathered_rows(plan.block_pages)]
            slot.pending = self._group.all_gather(gathered)
        slot.layer_id = layer_id

    def _beside_compute(self) -> AbstractContextManager[object]:
        """Return the context in which a gather is started: the side stream on CUDA."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        return torch.cuda.stream(self._side)
