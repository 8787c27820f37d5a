"""Page-interleave pools: each rank keeps its own pages, every rank reads the whole prefix.

A pool has a ``ShardExtend`` (``shard``) and asks it what to do with a write and where a read
comes from; tensors, shapes and checks are the plain pool's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from alloc import PageLayout, PageShardSpec
from scratch.extend import ShardExtend
from scratch.group import GatherGroup
from scratch.page_source import PageSource
from scratch.plan import ShardExtendPlan
from scratch.pools import MHATokenToKVPool, MLATokenToKVPool


class _PageInterleavePool:
    """The calls under a plan, alike for all kinds of rows; stands before the plain pool's class.

    Attributes:
        shard: planner, gather and write plans.
        dtype: the pool's.
    """

    shard: ShardExtend
    dtype: torch.dtype

    @property
    def num_slots(self) -> int:
        """Size of the id space of logical slots, all ranks together, reserved ones included."""
        return self.shard.num_slots

    def begin_shard_extend(
        self,
        req_to_token: PageSource,
        req_pool_indices: Any,
        prefix_lens_cpu: Sequence[int],
        seq_lens_cpu: Sequence[int],
    ) -> ShardExtendPlan:
        """Plan a batch and start the first layer's gather; see ``ShardExtend.begin``."""
        return self.shard.begin(req_to_token, req_pool_indices, prefix_lens_cpu, seq_lens_cpu)

    def end_shard_extend(self) -> None:
        """Take the plan out of force and wait for a gather in flight."""
        self.shard.end()

    def shard_extend(
        self,
        req_to_token: PageSource,
        req_pool_indices: Any,
        prefix_lens_cpu: Sequence[int],
        seq_lens_cpu: Sequence[int],
    ) -> AbstractContextManager[ShardExtendPlan]:
        """Return a context that plans a batch and ends the plan; see ``ShardExtend.extending``."""
        return self.shard.extending(req_to_token, req_pool_indices, prefix_lens_cpu, seq_lens_cpu)

    def translate_loc_to_scratch(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the scratch rows of slots, computed once per tensor and plan: int64[n]."""
        return self.shard.planner.translate_cached(loc)

    def _store(
        self,
        layer_id: int,
        loc: torch.Tensor,
        values: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        self.shard.store(layer_id, loc, values, self.dtype, targets)


class PageInterleaveMHATokenToKVPool(_PageInterleavePool, MHATokenToKVPool):
    """``MHATokenToKVPool`` sharded by pages over a group.

    Args:
        size: slots of ONE rank, in whole pages; the group holds N times as many.
        page_size: tokens of a page, the spec's.
        dtype: see ``MHATokenToKVPool``, as for the next six.
        shard_spec: this rank's shard.
        shard_group: the ranks.
        layout: where pages lie; the page-interleave layout by default.
        debug: check more; never changes a result.
        exact_blocks: see ``ShardExtendPlanner``.

    Attributes:
        shard: planner, gather and write plans.
        scratch_budget: admission of batches, as this pool's planner will see them.

    K and V travel together: a scratch row is ``K | V``, so under a plan ``get_key_buffer`` and
    ``get_value_buffer`` are strided views, contiguous inside a row.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: Any,
        start_layer: int | None = None,
        end_layer: int | None = None,
        *,
        shard_spec: PageShardSpec,
        shard_group: GatherGroup,
        layout: PageLayout | None = None,
        debug: bool = False,
        exact_blocks: bool = False,
    ) -> None:
        super().__init__(
            size, page_size, dtype, head_num, head_dim, layer_num, device, start_layer, end_layer
        )
        self.shard = ShardExtend(
            shard_spec,
            shard_group,
            self.layer_rows(),
            layout=_pool_layout(shard_spec, size, page_size, layout),
            start_layer=self.layers.start,
            debug=debug,
            exact_blocks=exact_blocks,
        )
        self.scratch_budget = self.shard.budget(self.row_bytes)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's keys: the scratch under a plan, else the pool.

        Raises:
            RuntimeError: the layer was not prefetched, or the gather failed.
        """
        if not self.shard.active:
            return super().get_key_buffer(layer_id)
        return self._scratch_part(layer_id, 0)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's values; see ``get_key_buffer``."""
        if not self.shard.active:
            return super().get_value_buffer(layer_id)
        return self._scratch_part(layer_id, 1)

    def _scratch_part(self, layer_id: int, part: int) -> torch.Tensor:
        self.layers.index(layer_id)
        rows = self.shard.read(layer_id).view(self.dtype)
        return rows.view(len(rows), 2, self.head_num, self.head_dim)[:, part]


class PageInterleaveMLATokenToKVPool(_PageInterleavePool, MLATokenToKVPool):
    """``MLATokenToKVPool`` sharded by pages over a group.

    Args:
        size: slots of ONE rank, in whole pages; the group holds N times as many.
        page_size: tokens of a page, the spec's.
        dtype: see ``MLATokenToKVPool``, as for the next six.
        shard_spec: this rank's shard.
        shard_group: the ranks.
        layout: where pages lie; the page-interleave layout by default.
        debug: check more; never changes a result.
        exact_blocks: see ``ShardExtendPlanner``.

    Attributes:
        shard: planner, gather and write plans.
        scratch_budget: admission of batches, as this pool's planner will see them.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: Any,
        start_layer: int | None = None,
        end_layer: int | None = None,
        *,
        shard_spec: PageShardSpec,
        shard_group: GatherGroup,
        layout: PageLayout | None = None,
        debug: bool = False,
        exact_blocks: bool = False,
    ) -> None:
        super().__init__(
            size,
            page_size,
            dtype,
            kv_lora_rank,
            qk_rope_head_dim,
            layer_num,
            device,
            start_layer,
            end_layer,
        )
        self.shard = ShardExtend(
            shard_spec,
            shard_group,
            self.layer_rows(),
            layout=_pool_layout(shard_spec, size, page_size, layout),
            start_layer=self.layers.start,
            debug=debug,
            exact_blocks=exact_blocks,
        )
        self.scratch_budget = self.shard.budget(self.row_bytes)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's rows: the scratch under a plan, else the pool.

        Raises:
            RuntimeError: the layer was not prefetched, or the gather failed.
        """
        if not self.shard.active:
            return super().get_key_buffer(layer_id)
        self.layers.index(layer_id)
        return self.shard.read(layer_id).view(self.dtype)[:, None]

    def _rows_of(self, loc: torch.Tensor) -> torch.Tensor:
        if self.shard.active:
            return self.shard.planner.translate_cached(loc)
        return self.shard.local_rows(loc)


def _pool_layout(
    spec: PageShardSpec, size: int, page_size: int, layout: PageLayout | None
) -> PageLayout:
    """Return the layout of a pool of ``size`` slots a rank, checked against the spec."""
    if spec.page_size != page_size:
        raise ValueError(
            f"page_size={page_size} differs from shard_spec.page_size={spec.page_size}"
        )
    return spec.layout(size // page_size) if layout is None else layout
