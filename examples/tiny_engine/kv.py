"""How attention reads pools: a plain one of one rank, or a page-interleave one of several.

Both keep rows at slots. In a plain pool a slot is a row. A page-interleave pool keeps the rows of
this rank's own pages, and during a prefill batch its reads come from the scratch
``[prefix | chunk]``, where a slot's row is what ``translate_loc_to_scratch`` says:

    one rank    write(slots)                              read: pool rows = slots
    sharded     begin | write(slots): own rows, and the   read: scratch rows = translate(slots)
                chunk's scratch rows | end
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch

from alloc import PageShardSpec, ReqToTokenPool
from examples.tiny_engine.model import Attention, ModelConfig, Parts
from scratch import (
    GatherGroup,
    MHATokenToKVPool,
    MLATokenToKVPool,
    PageInterleaveMHATokenToKVPool,
    PageInterleaveMLATokenToKVPool,
    ShardExtendPlan,
)

KV_DTYPE = torch.float32

PlainPool: TypeAlias = MHATokenToKVPool | MLATokenToKVPool
ShardedPool: TypeAlias = PageInterleaveMHATokenToKVPool | PageInterleaveMLATokenToKVPool


@dataclass(frozen=True, slots=True)
class ExtendRows:
    """The requests of one prefill batch: their rows, and their tokens before and after it."""

    table: ReqToTokenPool
    rows: Sequence[int]
    prefix_lens: Sequence[int]
    seq_lens: Sequence[int]


class PlainKv:
    """A pool that has every slot's row: one rank's prefill pool, and any rank's decode pool."""

    def __init__(self, pool: PlainPool) -> None:
        self.pool = pool

    def extending(self, batch: ExtendRows) -> AbstractContextManager[ShardExtendPlan | None]:
        """Enclose the forward pass of a prefill batch: there is nothing to gather."""
        return nullcontext()

    def write(self, layer: Attention, slots: torch.Tensor, parts: Parts) -> None:
        """Keep both parts of tokens at their slots, in the pool's dtype."""
        if isinstance(self.pool, MLATokenToKVPool):
            self.pool.set_mla_kv_buffer(layer, slots, *parts)
        else:
            self.pool.set_kv_buffer(layer, slots, *parts)

    def read(self, layer: Attention, slots: torch.Tensor) -> Parts:
        """Return both parts of tokens by their slots."""
        if isinstance(self.pool, MLATokenToKVPool):
            latent, rope = self.pool.get_mla_kv_buffer(layer, slots)
            return latent[:, 0], rope[:, 0]
        rows = self._rows(slots)
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        return keys[rows], values[rows]

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        return slots


class ShardedKv(PlainKv):
    """A pool that has this rank's rows; under a plan it reads like one that has them all."""

    pool: ShardedPool

    def extending(self, batch: ExtendRows) -> AbstractContextManager[ShardExtendPlan | None]:
        """Enclose the forward pass of a prefill batch; every rank enters with the same batch.

        The first layer's prefix travels from here on, each next one while a layer is computed.
        """
        return self.pool.shard_extend(batch.table, batch.rows, batch.prefix_lens, batch.seq_lens)

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        return self.pool.translate_loc_to_scratch(slots)


class SlotKv:
    """A batch's ``BatchKv``: the slots of its new tokens, and of each request's whole sequence.

    Args:
        kv: the pool.
        new_slots: int[n] of the batch's new tokens.
        sequences: of each request, int[length] of all its tokens by position.
        decode: a pool that finished prompts are copied to while they are read; None for none.
        copies: of each request, where in ``decode`` its tokens go; None for a request that stays.
    """

    def __init__(
        self,
        kv: PlainKv,
        new_slots: torch.Tensor,
        sequences: Sequence[torch.Tensor],
        decode: PlainKv | None = None,
        copies: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self._kv = kv
        self._new_slots = new_slots
        self._sequences = sequences
        self._decode = decode
        self._copies = copies

    def write(self, layer: Attention, parts: Parts) -> None:
        """Keep the parts of the new tokens."""
        self._kv.write(layer, self._new_slots, parts)

    def read(self, layer: Attention, request: int) -> Parts:
        """Return a request's parts, and hand a copy to the decode pool if its prompt is done."""
        parts = self._kv.read(layer, self._sequences[request])
        if self._decode is not None and (copy := self._copies[request]) is not None:
            self._decode.write(layer, copy, parts)
        return parts


class RecomputeKv:
    """A ``BatchKv`` without pools, of one request: to compute a sequence anew and in full."""

    def __init__(self) -> None:
        self._layers: dict[int, list[Parts]] = {}

    def write(self, layer: Attention, parts: Parts) -> None:
        """Keep the parts of the new tokens, rounded as a pool would."""
        kept = self._layers.setdefault(layer.layer_id, [])
        kept.append((parts[0].to(KV_DTYPE), parts[1].to(KV_DTYPE)))

    def read(self, layer: Attention, request: int) -> Parts:
        """Return all parts so far."""
        firsts, seconds = zip(*self._layers[layer.layer_id], strict=True)
        return torch.cat(firsts), torch.cat(seconds)


def make_plain_kv(model: ModelConfig, size: int, page_size: int, device: str) -> PlainKv:
    """Make a pool of ``size`` slots that has them all."""
    if model.variant == "gqa":
        heads = (model.num_kv_heads, model.head_dim)
        mha = MHATokenToKVPool(size, page_size, KV_DTYPE, *heads, model.num_layers, device)
        return PlainKv(mha)
    parts = (model.latent_dim, model.rope_dim)
    return PlainKv(MLATokenToKVPool(size, page_size, KV_DTYPE, *parts, model.num_layers, device))


def make_sharded_kv(
    model: ModelConfig,
    size: int,
    spec: PageShardSpec,
    group: GatherGroup,
    device: str,
    *,
    exact_blocks: bool,
) -> ShardedKv:
    """Make this rank's pool of ``size`` slots; the group has ``size * spec.shard_size``."""
    if model.variant == "gqa":
        mha = PageInterleaveMHATokenToKVPool(
            size,
            spec.page_size,
            KV_DTYPE,
            model.num_kv_heads,
            model.head_dim,
            model.num_layers,
            device,
            shard_spec=spec,
            shard_group=group,
            exact_blocks=exact_blocks,
        )
        return ShardedKv(mha)
    mla = PageInterleaveMLATokenToKVPool(
        size,
        spec.page_size,
        KV_DTYPE,
        model.latent_dim,
        model.rope_dim,
        model.num_layers,
        device,
        shard_spec=spec,
        shard_group=group,
        exact_blocks=exact_blocks,
    )
    return ShardedKv(mla)
