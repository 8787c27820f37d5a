"""Pool tensors as rows of bits: dtype conversion, shapes and layer ids. No plan, no group.

Rows are moved as integers of the dtype's size, so that every dtype, fp8 included, goes through the
same copies and arrives bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from scratch.kernels import BITS


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

    def __str__(self) -> str:
        return f"layers [{self.start}, {self.end})"

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
    return buffer.view(BITS[buffer.element_size()]).flatten(1)


def value_rows(values: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """Return new rows as [num_rows, width], of their own dtype; a view where strides allow it.

    Args:
        values: [num_rows, ...] with ``width`` elements a row, of any dtype.
        num_rows: number of slots that they are written to.
        width: elements of a row.

    Raises:
        ValueError: rows or width differ.
    """
    if values.ndim < 2 or values.shape[0] != num_rows or values.numel() != num_rows * width:
        raise ValueError(
            f"values have shape {list(values.shape)}; {num_rows} slots need {num_rows} rows of "
            f"{width} elements"
        )
    return values.reshape(num_rows, width)


def check_slots(loc: torch.Tensor, num_slots: int) -> int:
    """Return the number of slots in ``loc``.

    Args:
        loc: the slots of a read or write.
        num_slots: end of the id space. Slots on a CPU are compared with it; on CUDA that would
            wait for the device, and slots out of range are the caller's fault.

    Raises:
        ValueError: ``loc`` is not a one-dimensional int32 or int64 tensor, or a slot on the host
            is out of range.
    """
    if loc.ndim != 1 or loc.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"loc is {loc.dtype}{list(loc.shape)}; pass int32 or int64 [num_tokens]")
    if loc.device.type == "cpu" and len(loc):
        low, high = (int(bound) for bound in loc.aminmax())
        if low < 0 or high >= num_slots:
            raise ValueError(f"slot {low if low < 0 else high} is not in [0, {num_slots})")
    return loc.shape[0]
