"""Write a chunk's rows: every row to its scratch row, the owned ones to their pool rows too."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def store_rows(
    values: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    owned: torch.Tensor | None,
    local_rows: torch.Tensor,
    scratch: torch.Tensor | None = None,
    scratch_rows: torch.Tensor | None = None,
) -> None:
    """Persist the owned rows of a chunk, and stage all of it where a scratch is given.

    Args:
        values: integer[num_tokens, width_i] each, in the pool's dtype (as bits): K and V, or the
            latent and rope parts.
        targets: integer[pool_rows, width_i] each; may be column ranges of one tensor.
        owned: int64[num_owned] positions of the rows to persist, or None for all of them.
        local_rows: int64[num_owned] pool rows of those positions.
        scratch: integer[scratch_rows, Σ width_i] or None; the values lie side by side in a row.
        scratch_rows: int64[num_tokens] rows of the chunk in ``scratch``.

    Cost: with a scratch, the chunk's bytes are read twice and written once and 1/N.
    """
    column = 0
    for value, target in zip(values, targets, strict=True):
        width = value.shape[1]
        if scratch is not None and scratch_rows is not None:
            scratch[:, column : column + width].index_copy_(0, scratch_rows, value)
        kept = value if owned is None else value.index_select(0, owned)
        target.index_copy_(0, local_rows, kept)
        column += width
