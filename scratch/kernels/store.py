"""Write a chunk's rows: every row to its scratch row, the owned ones to their pool rows too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype that rows of each element size travel as, so that every dtype arrives bit for
bit and goes through the same copies."""


def store_rows(
    values: Sequence[torch.Tensor],
    dtype: torch.dtype,
    targets: Sequence[torch.Tensor],
    pool_rows: torch.Tensor,
    scratch: torch.Tensor | None = None,
    scratch_rows: torch.Tensor | None = None,
) -> None:
    """Convert a chunk's rows, persist the owned ones, and stage all of them in a scratch.

    Args:
        values: [num_tokens, width_i] each, of any dtype: K and V, or the latent and rope parts.
        dtype: the pool's dtype; conversion rounds to nearest, as ``Tensor.to`` does.
        targets: bits[pool_rows, width_i] each; may be column ranges of one tensor.
        pool_rows: int64[num_tokens] pool row of each token; negative ones are not persisted.
        scratch: bits[num_scratch_rows, Σ width_i] or None; values lie side by side in a row.
        scratch_rows: int64[num_tokens] rows of the chunk in ``scratch``.

    Rows that are named twice (padding) hold one of the values written to them.
    """
    owned = (pool_rows >= 0).nonzero(as_tuple=True)[0]
    kept_rows = pool_rows.index_select(0, owned)
    column = 0
    for value, target in zip(values, targets, strict=True):
        width = value.shape[1]
        bits = value.to(dtype).view(BITS[dtype.itemsize])
        if scratch is not None and scratch_rows is not None:
            scratch[:, column : column + width].index_copy_(0, scratch_rows, bits)
        target.index_copy_(0, kept_rows, bits.index_select(0, owned))
        column += width
