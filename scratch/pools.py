"""KV pools: plain ones, and page-interleave ones that keep 1/N of the pages and read all of them.

A pool tensor has ``size + page_size`` rows; the first page is the padding target. Plain and
page-interleave pools have the same tensors and calls. Under a plan a page-interleave pool's
getters return its scratch ``[prefix | chunk | trash]``, whose rows are
``translate_loc_to_scratch(loc)``; without one they return the pool, where a rank finds its own
rows only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from scratch.kernels import store_rows
from scratch.storage import (
    Layer,
    LayerRange,
    check_slots,
    make_buffers,
    pool_rows,
    row_bits,
    value_rows,
)


class MHATokenToKVPool:
    """Keys and values of every layer, one row a slot.

    Args:
        size: slots, in whole pages.
        page_size: tokens of a page.
        dtype: what is stored: bf16, fp16, fp8, any torch dtype of 1, 2, 4 or 8 bytes.
        head_num: KV heads.
        head_dim: elements of a head, for K and V alike.
        layer_num: layers of the pool.
        device: where the tensors lie.
        start_layer: id of the first layer, 0 by default.
        end_layer: one past the last layer's id; checked where given.

    Attributes:
        k_buffer: per layer, dtype[size + page_size, head_num, head_dim].
        v_buffer: the same for values.

    Raises:
        ValueError: size is not whole pages, or the layer numbers disagree.
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
    ) -> None:
        self.size, self.page_size, self.dtype = size, page_size, dtype
        self.head_num, self.head_dim = head_num, head_dim
        self.layer_num, self.device = layer_num, torch.device(device)
        self.layers = LayerRange.of(layer_num, start_layer, end_layer)
        shape = (pool_rows(size, page_size), head_num, head_dim)
        self.k_buffer = make_buffers(layer_num, shape, dtype, device)
        self.v_buffer = make_buffers(layer_num, shape, dtype, device)

    @property
    def num_slots(self) -> int:
        """Size of the id space of slots, reserved ones included."""
        return self.size + self.page_size

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer, K and V together."""
        return 2 * self.head_num * self.head_dim * self.dtype.itemsize

    def layer_rows(self) -> list[tuple[torch.Tensor, ...]]:
        """Return each layer's tensors as rows of bits, K then V: integer[rows, width] views."""
        pairs = zip(self.k_buffer, self.v_buffer, strict=True)
        return [(row_bits(k), row_bits(v)) for k, v in pairs]

    def describe(self) -> str:
        """Return what the bits of a row mean: kind, dtype, shape and layers."""
        return f"mha {self.dtype} {self.head_num}x{self.head_dim} {self.layers}"

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's keys: dtype[size + page_size, head_num, head_dim]."""
        return self.k_buffer[self.layers.index(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's values: dtype[size + page_size, head_num, head_dim]."""
        return self.v_buffer[self.layers.index(layer_id)]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(
        self, layer: Layer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write rows.

        Args:
            layer: has ``layer_id``.
            loc: int32 or int64[n] slots.
            k: [n, head_num, head_dim] or [n, head_num * head_dim]; converted to the pool's dtype.
            v: like ``k``.

        Raises:
            ValueError: shapes, dtypes, slots or the layer don't fit the pool; nothing was written.
        """
        rows = check_slots(loc, self.num_slots)
        width = self.head_num * self.head_dim
        values = [value_rows(value, rows, width) for value in (k, v)]
        index = self.layers.index(layer.layer_id)
        targets = [row_bits(self.k_buffer[index]), row_bits(self.v_buffer[index])]
        self._store(layer.layer_id, loc, values, targets)

    def _store(
        self,
        layer_id: int,
        loc: torch.Tensor,
        values: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        store_rows(values, self.dtype, targets, loc.to(torch.int64))


class MLATokenToKVPool:
    """The latent and rope parts of every layer, side by side in one row a slot.

    Args:
        size: slots, in whole pages.
        page_size: tokens of a page.
        dtype: what is stored; see ``MHATokenToKVPool``.
        kv_lora_rank: elements of the latent part.
        qk_rope_head_dim: elements of the rope part.
        layer_num: layers of the pool.
        device: where the tensors lie.
        start_layer: id of the first layer, 0 by default.
        end_layer: one past the last layer's id; checked where given.

    Attributes:
        kv_buffer: per layer, dtype[size + page_size, 1, kv_lora_rank + qk_rope_head_dim].

    Raises:
        ValueError: size is not whole pages, or the layer numbers disagree.
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
    ) -> None:
        self.size, self.page_size, self.dtype = size, page_size, dtype
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.layer_num, self.device = layer_num, torch.device(device)
        self.layers = LayerRange.of(layer_num, start_layer, end_layer)
        shape = (pool_rows(size, page_size), 1, self.kv_dim)
        self.kv_buffer = make_buffers(layer_num, shape, dtype, device)

    @property
    def num_slots(self) -> int:
        """Size of the id space of slots, reserved ones included."""
        return self.size + self.page_size

    @property
    def kv_dim(self) -> int:
        """Elements of a row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.kv_dim * self.dtype.itemsize

    def layer_rows(self) -> list[tuple[torch.Tensor, ...]]:
        """Return each layer's one tensor as rows of bits: integer[rows, width] views."""
        return [(row_bits(kv),) for kv in self.kv_buffer]

    def describe(self) -> str:
        """Return what the bits of a row mean: kind, dtype, shape and layers."""
        shape = f"{self.kv_lora_rank}|{self.qk_rope_head_dim}"
        return f"mla {self.dtype} {shape} {self.layers}"

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's rows, latent and rope: dtype[rows, 1, kv_dim]."""
        return self.kv_buffer[self.layers.index(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return a layer's latent parts, which are its values: dtype[rows, 1, kv_lora_rank]."""
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``get_key_buffer`` and ``get_value_buffer`` of a layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def get_mla_kv_buffer(
        self, layer: Layer, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the latent and rope parts of some slots.

        Args:
            layer: has ``layer_id``.
            loc: int32 or int64[n] slots, in any order.
            dst_dtype: dtype to convert to; the pool's own by default.

        Returns:
            [n, 1, kv_lora_rank] and [n, 1, qk_rope_head_dim].

        Raises:
            ValueError: slots or the layer don't fit the pool.
        """
        check_slots(loc, self.num_slots)
        buffer = self.get_key_buffer(layer.layer_id)
        rows = row_bits(buffer).index_select(0, self._rows_of(loc))
        taken = rows.view(self.dtype).to(dst_dtype or self.dtype)[:, None]
        return taken[..., : self.kv_lora_rank], taken[..., self.kv_lora_rank :]

    def set_mla_kv_buffer(
        self, layer: Layer, loc: torch.Tensor, k_nope: torch.Tensor, k_rope: torch.Tensor
    ) -> None:
        """Write rows from their two parts.

        Args:
            layer: has ``layer_id``.
            loc: int32 or int64[n] slots.
            k_nope: [n, kv_lora_rank] or [n, 1, kv_lora_rank]; converted to the pool's dtype.
            k_rope: [n, qk_rope_head_dim] or [n, 1, qk_rope_head_dim].

        Raises:
            ValueError: shapes, dtypes, slots or the layer don't fit the pool; nothing was written.
        """
        rows = check_slots(loc, self.num_slots)
        values = [
            value_rows(k_nope, rows, self.kv_lora_rank),
            value_rows(k_rope, rows, self.qk_rope_head_dim),
        ]
        target = row_bits(self.kv_buffer[self.layers.index(layer.layer_id)])
        targets = [target[:, : self.kv_lora_rank], target[:, self.kv_lora_rank :]]
        self._store(layer.layer_id, loc, values, targets)

    def set_kv_buffer(
        self, layer: Layer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None
    ) -> None:
        """Write whole rows; ``v`` is part of ``k`` and ignored.

        Args:
            layer: has ``layer_id``.
            loc: int32 or int64[n] slots.
            k: [n, kv_dim] or [n, 1, kv_dim]; converted to the pool's dtype.
            v: ignored.

        Raises:
            ValueError: shapes, dtypes, slots or the layer don't fit the pool; nothing was written.
        """
        values = [value_rows(k, check_slots(loc, self.num_slots), self.kv_dim)]
        targets = [row_bits(self.kv_buffer[self.layers.index(layer.layer_id)])]
        self._store(layer.layer_id, loc, values, targets)

    def _rows_of(self, loc: torch.Tensor) -> torch.Tensor:
        return loc

    def _store(
        self,
        layer_id: int,
        loc: torch.Tensor,
        values: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
    ) -> None:
        store_rows(values, self.dtype, targets, loc.to(torch.int64))
