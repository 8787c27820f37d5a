"""Pool tensors as rows of bits: dtype conversion, shapes and layer ids. No plan, no group.

Rows are moved as integers of the dtype's size, so that every dtype, fp8 included, goes through the
same copies and arrives bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Layer(Protocol):
    """An attention layer, as far as a pool is concerned."""

    @property
    def layer_id(self) -> int:
        """Its index in the model."""


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The layers of one pool, ``[start, end)``."""

    start: int
    end: int

    @classmethod
    def of(cls, layer_num: int, start_layer: int | None, end_layer: int | None) -> LayerRange:
        """Return the range of ``layer_num`` layers from ``start_layer`` (0 if None) on.

        Raises:
            ValueError: no layers, a negative start, or an ``end_layer`` (exclusive) elsewhere.
        """
        start = 0 if start_layer is None else start_layer
        if layer_num < 1 or start < 0:
            raise ValueError(
                f"layer_num={layer_num} must be at least 1 and start_layer={start} at least 0"
            )
        end = start + layer_num
        if end_layer is not None and end_layer != end:
            raise ValueError(
                f"end_layer={end_layer} must be start_layer + layer_num = {end}: it is exclusive"
            )
        return cls(start, end)

    def index(self, layer_id: int) -> int:
        """Return the position of a layer among the pool's tensors.

        Raises:
            ValueError: the layer is not in the range.
        """
        if not self.start <= layer_id < self.end:
            raise ValueError(
                f"layer_id={layer_id} is not in [{self.start}, {self.end}), the pool's layers"
            )
        return layer_id - self.start


def make_buffers(
    num_layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: Any
) -> list[torch.Tensor]:
    """Return a zeroed tensor of ``shape`` for each layer."""
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]


def pool_rows(size: int, page_size: int) -> int:
    """Return the rows of a pool tensor: ``size`` and a trash page.

    Raises:
        ValueError: size is not a positive multiple of page_size.
    """
    if page_size < 1 or size < 1 or size % page_size:
        raise ValueError(f"size={size} must be a positive multiple of page_size={page_size}")
    return size + page_size


def row_bits(buffer: torch.Tensor) -> torch.Tensor:
    """Return a tensor [rows, ...] as integer[rows, width] of the same memory."""
    return buffer.view(_BITS[buffer.element_size()]).flatten(1)


def value_bits(values: torch.Tensor, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return new rows as integer[num_rows, width], converted to the pool's dtype.

    Args:
        values: [num_rows, ...] with ``width`` elements a row, of any floating dtype.
        num_rows: number of slots that they are written to.
        width: elements of a row.
        dtype: the pool's dtype; conversion is ``Tensor.to``: it rounds to nearest.

    Raises:
        ValueError: rows or width differ.
    """
    if values.shape[0] != num_rows or values.numel() != num_rows * width:
        raise ValueError(
            f"values have shape {list(values.shape)}; {num_rows} slots need {num_rows} rows of "
            f"{width} elements"
        )
    rows = values.to(dtype).reshape(num_rows, width)
    return rows.view(_BITS[rows.element_size()])


def check_slots(loc: torch.Tensor) -> int:
    """Return the number of slots.

    Raises:
        ValueError: ``loc`` is not a one-dimensional int32 or int64 tensor.
    """
    if loc.ndim != 1 or loc.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"loc is {loc.dtype}{list(loc.shape)}; pass int32 or int64 [num_tokens]")
    return loc.shape[0]
