"""The regions of one scratch slot ``[prefix | chunk | trash]`` and their row arithmetic.

    rows   0                     max_prefix_tokens      + chunk_tokens   + page_size
           |  rank 0 | rank 1 | … | unused  |     chunk      |   trash page  |
           |<- N * block_pages ->|

Prefix pages are owner-major: rank r's block starts at page ``r * block_pages``. Chunk pages follow
in batch order at the first chunk page. Whatever a plan does not name lies in the trash page.

>>> layout = ScratchLayout(PageShardSpec(1, 4, 16, max_prefix_tokens=256, chunk_tokens=64))
>>> layout.chunk_page, layout.trash_page, layout.num_rows
(16, 20, 336)
>>> layout.block_rows(rank=1, block_pages=2)
slice(32, 64, None)
"""

from __future__ import annotations

from dataclasses import dataclass

from alloc import PageShardSpec


@dataclass(frozen=True, slots=True)
class ScratchLayout:
    """Where prefix, chunk and trash lie in a scratch slot of ``spec``.

    Attributes:
        spec: the shard; its ``max_prefix_tokens`` and ``chunk_tokens`` size the regions.
    """

    spec: PageShardSpec

    @property
    def page_size(self) -> int:
        """Rows of a scratch page."""
        return self.spec.page_size

    @property
    def num_rows(self) -> int:
        """Rows of one slot, all regions together."""
        return self.spec.scratch_rows

    @property
    def prefix_pages(self) -> int:
        """Pages of the prefix region, all ranks' blocks together."""
        return self.spec.max_prefix_tokens // self.page_size

    @property
    def chunk_page(self) -> int:
        """The first page of the chunk region."""
        return self.prefix_pages

    @property
    def chunk_pages(self) -> int:
        """Pages of the chunk region."""
        return self.spec.chunk_tokens // self.page_size

    @property
    def trash_page(self) -> int:
        """The page of everything that is off the plan."""
        return self.prefix_pages + self.chunk_pages

    def gathered_rows(self, block_pages: int) -> slice:
        """Return the rows that a gather of ``block_pages`` pages a rank fills."""
        return slice(0, self.spec.shard_size * block_pages * self.page_size)

    def block_rows(self, rank: int, block_pages: int) -> slice:
        """Return the rows of one rank's block in a gather of ``block_pages`` pages a rank."""
        block = block_pages * self.page_size
        return slice(rank * block, (rank + 1) * block)

    def fits(self, block_pages: int, chunk_pages: int) -> bool:
        """Say whether the regions hold blocks and chunk of these sizes."""
        prefix_fits = self.spec.shard_size * block_pages <= self.prefix_pages
        return prefix_fits and chunk_pages <= self.chunk_pages

    def check_fits(self, block_pages: int, chunk_pages: int) -> None:
        """Refuse a batch that the regions cannot hold.

        Raises:
            ValueError: the padded prefix span is over max_prefix_tokens, or the chunk is over
                chunk_tokens; the message has both numbers.
        """
        if self.fits(block_pages, chunk_pages):
            return
        if self.spec.shard_size * block_pages > self.prefix_pages:
            raise ValueError(
                f"block_pages={block_pages} on {self.spec.shard_size} ranks need "
                f"{self.gathered_rows(block_pages).stop} prefix tokens, over "
                f"max_prefix_tokens={self.spec.max_prefix_tokens}; admit fewer requests "
                f"(ScratchBudget.fits)"
            )
        raise ValueError(
            f"the chunk needs {chunk_pages * self.page_size} tokens in whole pages, over "
            f"chunk_tokens={self.spec.chunk_tokens}; admit fewer tokens (ScratchBudget.fits)"
        )
