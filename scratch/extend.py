"""What makes a pool a sharded one: planner, gather and write plans of one pool, working together.

The pools own it and forward to it. Per batch: ``begin``, then per layer ``store`` (persist the
owned rows, stage the chunk) and ``read``, then ``end``; ``extending`` encloses them. Outside a plan
``store`` only persists.
On CUDA make all these calls on one stream, the one that computes: the order on it is what keeps
a table or a slot from being overwritten before its last reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from alloc import PageLayout, PageShardSpec
from scratch.budget import ScratchBudget
from scratch.gather import PrefixGather
from scratch.group import GatherGroup
from scratch.kernels import store_rows
from scratch.page_source import PageSource
from scratch.plan import ShardExtendPlan, ShardExtendPlanner
from scratch.write_plan import LayoutPlacement, WritePlanCache


class ShardExtend:
    """One rank's side of sharded extend batches over a pool's tensors.

    Args:
        spec: this rank's shard.
        group: the ranks that share the pool.
        layers: of each layer, the pool tensors that make up a row, integer[rank_rows, width_i].
        layout: where pages lie.
        start_layer: id of the first layer.
        debug: passed to the planner.
        exact_blocks: passed to the planner.

    Attributes:
        planner: the planner; its table translates slots.
        gather: the scratch.

    Raises:
        ValueError: spec, group, layout and tensors disagree.
    """

    def __init__(
        self,
        spec: PageShardSpec,
        group: GatherGroup,
        layers: Sequence[Sequence[torch.Tensor]],
        *,
        layout: PageLayout,
        start_layer: int = 0,
        debug: bool = False,
        exact_blocks: bool = False,
    ) -> None:
        tensor = layers[0][0]
        if layout.rank_rows != tensor.shape[0]:
            raise ValueError(
                f"the pool's tensors have {tensor.shape[0]} rows, the layout {layout.rank_rows} "
                f"per rank; size is one rank's slots in whole pages"
            )
        self.planner = ShardExtendPlanner(
            spec,
            device=tensor.device,
            debug=debug,
            exact_blocks=exact_blocks,
            layout=layout,
        )
        self.gather = PrefixGather(group, self.planner.scratch, layers, start_layer=start_layer)
        self._write_plans = WritePlanCache(LayoutPlacement(layout), spec.shard_rank)

    @property
    def num_slots(self) -> int:
        """Size of the id space of logical slots."""
        return self.planner.layout.num_pages * self.planner.layout.page_size

    def budget(self, row_bytes: int) -> ScratchBudget:
        """Return the budget that admits what this planner plans.

        Args:
            row_bytes: bytes of one token in one layer.
        """
        planner = self.planner
        return ScratchBudget(planner.spec, row_bytes, planner.layout, planner.exact_blocks)

    @property
    def active(self) -> bool:
        """Whether a plan is in force."""
        return self.planner.active

    def begin(
        self,
        req_to_token: PageSource,
        req_pool_indices: Any,
        prefix_lens_cpu: Sequence[int],
        seq_lens_cpu: Sequence[int],
    ) -> ShardExtendPlan:
        """Plan a batch and start the first layer's gather; every rank of the group calls it.

        See ``ShardExtendPlanner.begin_shard_extend`` for arguments and cost.

        Raises:
            ValueError: the batch can't be planned; the previous plan is intact.
            RuntimeError: a gather failed; no plan is in force.
        """
        plan = self.planner.begin_shard_extend(
            req_to_token, req_pool_indices, prefix_lens_cpu, seq_lens_cpu
        )
        try:
            self.gather.begin(plan)
        except BaseException:
            self.planner.end_shard_extend()
            raise
        return plan

    def end(self) -> None:
        """Take the plan out of force and wait for a gather in flight; without a plan do nothing.

        Raises:
            RuntimeError: that gather failed; no plan is in force all the same.
        """
        self.planner.end_shard_extend()
        self.gather.end()

    @contextmanager
    def extending(
        self,
        req_to_token: PageSource,
        req_pool_indices: Any,
        prefix_lens_cpu: Sequence[int],
        seq_lens_cpu: Sequence[int],
    ) -> Iterator[ShardExtendPlan]:
        """Enclose a batch: ``begin`` on the way in, ``end`` on every way out.

        >>> with shard.extending(table, rows, prefix_lens, seq_lens) as plan:  # doctest: +SKIP
        ...     model.forward(batch)

        Raises:
            ValueError: the batch can't be planned; the body isn't run and the previous plan is
                intact.
            RuntimeError: a gather failed, on the way in or out; no plan is in force. An error of
                the body is its context.
        """
        plan = self.begin(req_to_token, req_pool_indices, prefix_lens_cpu, seq_lens_cpu)
        try:
            yield plan
        finally:
            self.end()

    def read(self, layer_id: int) -> torch.Tensor:
        """Return the scratch of a layer; see ``PrefixGather.read``."""
        return self.gather.read(layer_id)

    def store(
        self,
        layer_id: int,
        loc: torch.Tensor,
        values: Sequence[torch.Tensor],
        dtype: torch.dtype,
        targets: Sequence[torch.Tensor],
    ) -> None:
        """Persist the rows that this rank owns and, under a plan, stage all of them.

        Args:
            layer_id: the layer.
            loc: int32 or int64[n] slots of the rows.
            values: [n, width_i] of any dtype, side by side in a row.
            dtype: the pool's dtype, to which they are converted.
            targets: integer[rank_rows, width_i], where each of them is persisted.

        Raises:
            RuntimeError: the scratch holds another layer; nothing was written.
        """
        if not self.active:
            store_rows(values, dtype, targets, self._write_plans.compute_pool_rows(loc))
            return
        scratch = self.gather.stage(layer_id)
        pool_rows = self._write_plans.pool_rows(loc, epoch=self.planner.epoch)
        scratch_rows = self.planner.translate_cached(loc)
        store_rows(values, dtype, targets, pool_rows, scratch, scratch_rows)

    def local_rows(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the pool row of each slot on its owner: int64[n]."""
        rows: torch.Tensor = self._write_plans.placement.local_index(loc.to(torch.int64))
        return rows
