"""What the scratch costs in bytes, and whether a batch fits into it.

A scheduler asks before it admits a batch: ``fits`` from lengths alone, or ``fits_pages`` from the
prefix pages. Both answer for sizes; the planner also checks the pages themselves. No device.

>>> spec = PageShardSpec(0, 4, 16, max_prefix_tokens=256, chunk_tokens=64)
>>> budget = ScratchBudget(spec, row_bytes=1152)
>>> budget.scratch_bytes == 2 * spec.scratch_rows * 1152
True
>>> budget.fits([112, 64], [130, 90]), budget.fits([112, 64, 64, 64], [130, 90, 70, 80])
(True, False)
>>> exact = ScratchBudget(spec, row_bytes=1152, exact_blocks=True)
>>> shared = np.array([5, 6, 7, 8, 9])                       # read by three, gathered once
>>> exact.fits_pages([shared] * 3, [90] * 3), exact.fits([80] * 3, [90] * 3)
(True, False)
>>> exact.fits_pages([np.array([5, 9, 13, 17, 21])], [90])   # five pages of one rank
False
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alloc import PageIds, PageLayout, PageShardSpec, ceil_div
from scratch.layout import ScratchLayout

NUM_SLOTS = 2
"""Scratch slots of a pool: one is read while the next layer's prefix is gathered into the other."""


def padded_block_pages(prefix_pages: Sequence[int], shard_size: int) -> int:
    """Return ``Σ ceil(K_i / N)``: pages that suffice on every rank if owners are cyclic.

    Args:
        prefix_pages: K_i, whole pages of each request's prefix.
        shard_size: N.
    """
    return sum(ceil_div(pages, shard_size) for pages in prefix_pages)


def prefix_page_counts(
    prefix_lens: Sequence[int], seq_lens: Sequence[int], page_size: int
) -> list[int]:
    """Return each request's prefix in pages, after checking the lengths.

    Raises:
        ValueError: the lists differ in length, or a prefix is not whole pages or is longer than
            its sequence.
    """
    if len(prefix_lens) != len(seq_lens):
        raise ValueError(
            f"{len(prefix_lens)} prefix_lens and {len(seq_lens)} seq_lens; "
            f"pass one of each per request"
        )
    for prefix, seq in zip(prefix_lens, seq_lens, strict=True):
        if prefix % page_size:
            raise ValueError(
                f"prefix_len={prefix} is not a multiple of page_size={page_size}; "
                f"match with a page-aligned key"
            )
        if not 0 <= prefix <= seq:
            raise ValueError(
                f"prefix_len={prefix} is not in [0, seq_len={seq}]; "
                f"seq_lens count prefix and chunk together"
            )
    return [prefix // page_size for prefix in prefix_lens]


@dataclass(frozen=True, slots=True)
class ScratchBudget:
    """Bytes of the scratch of one pool, and admission into it.

    Attributes:
        spec: the shard; its token limits size the scratch.
        row_bytes: bytes of one token in one layer: K and V, or the latent and rope parts.
        layout: where pages lie; the page-interleave layout by default.
        exact_blocks: as the planner's.

    Raises:
        ValueError: row_bytes is below 1.
    """

    spec: PageShardSpec
    row_bytes: int
    layout: PageLayout | None = None
    exact_blocks: bool = False

    def __post_init__(self) -> None:
        """Reject rows without bytes."""
        if self.row_bytes < 1:
            raise ValueError(f"row_bytes={self.row_bytes} must be at least 1")

    @property
    def scratch_bytes(self) -> int:
        """Bytes of both slots, whatever the number of layers."""
        return NUM_SLOTS * self.spec.scratch_rows * self.row_bytes

    def fits(
        self,
        prefix_lens_cpu: Sequence[int],
        seq_lens_cpu: Sequence[int],
        *,
        block_pages: int | None = None,
    ) -> bool:
        """Say whether the scratch holds a batch.

        Args:
            prefix_lens_cpu: cached tokens of each request, whole pages.
            seq_lens_cpu: tokens of each request after the chunk.
            block_pages: pages a rank where the caller knows the exact number (a planner with
                ``exact_blocks``); None takes the default bound.

        Raises:
            ValueError: the lists differ in length, a prefix is not whole pages or longer than
                its sequence.
        """
        counts = prefix_page_counts(prefix_lens_cpu, seq_lens_cpu, self.spec.page_size)
        if block_pages is None:
            block_pages = padded_block_pages(counts, self.spec.shard_size)
        chunk_pages = sum(
            ceil_div(seq - prefix, self.spec.page_size)
            for prefix, seq in zip(prefix_lens_cpu, seq_lens_cpu, strict=True)
        )
        return ScratchLayout(self.spec).fits(block_pages, chunk_pages)

    def fits_pages(self, prefix_pages: Sequence[PageIds], seq_lens_cpu: Sequence[int]) -> bool:
        """Say whether the scratch holds a batch whose prefix pages are known.

        With ``exact_blocks`` distinct pages are counted by rank, as prefixes over rotation seams
        need; without, the default bound is taken. A batch of pages that can be planned is then
        planned if and only if it fits; whether they can be (usable pages and, without
        ``exact_blocks``, cyclic owners) is left to the planner.

        Args:
            prefix_pages: int[K_i] logical pages of each request's prefix; requests may share pages.
            seq_lens_cpu: tokens of each request after the chunk.

        Raises:
            ValueError: the lists differ in length, or a prefix is longer than its sequence.

        Cost: O(requests), with ``exact_blocks`` one sort of the pages.
        """
        lens = [len(pages) * self.spec.page_size for pages in prefix_pages]
        if not (self.exact_blocks and any(lens)):
            return self.fits(lens, seq_lens_cpu)
        pages = np.concatenate(list(prefix_pages))
        pages.sort()
        distinct = pages[np.flatnonzero(np.diff(pages, prepend=-1))]
        layout = self.layout or self.spec.layout(pages_per_rank=1)
        fullest = int(layout.count_classes(distinct).max())
        return self.fits(lens, seq_lens_cpu, block_pages=fullest)
