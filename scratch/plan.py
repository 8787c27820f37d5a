"""Plan one extend batch: where each prefix page will be gathered to, and each chunk page staged.

The plan is made on the host from page ids and reaches the device in one copy; making it never
waits for the device unless the caller hands over a CUDA tensor. Everything is checked and made
before the first write, so a refused batch leaves the previous plan as it was.

>>> spec = PageShardSpec(0, 2, 16, max_prefix_tokens=128, chunk_tokens=64)
>>> planner = ShardExtendPlanner(spec, num_pages=20)
>>> table = np.array([[2, 5, 4, 9], [2, 5, 8, 0]])      # pages, two requests that share two
>>> plan = planner.begin_shard_extend(table, [0, 1], [48, 32], [64, 40])
>>> plan.block_pages, plan.prefix_pages.tolist(), plan.prefix_places.tolist()
(3, [2, 4, 5], [0, 1, 3])
>>> planner.translate_loc_to_scratch(torch.tensor([5 * 16 + 1, 9 * 16, 0])).tolist()
[49, 128, 192]
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import index
from typing import Any

import numpy as np
import torch

from alloc import IntArray, PageIds, PageLayout, PageShardSpec, ceil_div
from scratch.budget import padded_block_pages, prefix_page_counts
from scratch.kernels import expand_pages
from scratch.layout import ScratchLayout
from scratch.owner_major import (
    Ints,
    NotCyclicError,
    OwnerMajor,
    first_repeat,
    first_shared,
    key_dtype,
    may_be_cyclic,
    owner_major,
    sorted_keys,
    sorted_keys_of_runs,
)
from scratch.page_positions import PagePositions
from scratch.page_source import PageSource, read_page_rows
from scratch.translate import SlotTranslator

MEMO_SCRATCHES = 4
"""How often the translated slots that are remembered per plan may fill the scratch: the chunk, the
whole prefix and its sub-ranges, and as much to spare."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardExtendPlan:
    """One batch's places in the scratch, the same on every rank but for the send list.

    Attributes:
        epoch: 1 for a planner's first plan, then one more each.
        block_pages: scratch pages of each rank's block; 0 without a prefix.
        page_size: tokens of a page.
        pages: int64[n] logical pages, host: prefix pages owner-major, then chunk pages.
        places: int32[n] their scratch pages, host.
        num_prefix_pages: how many of ``pages`` are prefix pages.
        rank_counts: int64[N] distinct prefix pages that each rank owns, host.
        send_pages: int64[block_pages] this rank's prefix pages as local pages in slot order,
            padded with local page 0, on the device; None without a prefix.
    """

    epoch: int
    block_pages: int
    page_size: int
    pages: PageIds
    places: Ints
    num_prefix_pages: int
    rank_counts: IntArray
    send_pages: torch.Tensor | None

    @property
    def prefix_pages(self) -> PageIds:
        """The distinct prefix pages, owner-major."""
        return self.pages[: self.num_prefix_pages]

    @property
    def prefix_places(self) -> Ints:
        """The scratch pages of ``prefix_pages``."""
        return self.places[: self.num_prefix_pages]

    @property
    def chunk_pages(self) -> PageIds:
        """The chunk's pages in batch order."""
        return self.pages[self.num_prefix_pages :]

    @property
    def send_rows(self) -> torch.Tensor | None:
        """``send_pages`` as pool rows: int64[block_pages * page_size]; None without a prefix.

        Built at each use; the gather packs whole pages and never needs it.
        """
        return None if self.send_pages is None else expand_pages(self.send_pages, self.page_size)

    def digest(self) -> str:
        """Return a hash of what must be equal on all ranks: everything but the send list."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.epoch} {self.block_pages} {self.num_prefix_pages} ".encode())
        digest.update(self.pages.tobytes())
        digest.update(self.places.tobytes())
        return digest.hexdigest()


class ShardExtendPlanner:
    """Makes plans, and owns the page table that translates slots to scratch rows.

    Args:
        spec: this rank's shard.
        num_pages: size of the logical page id space; may be left out when ``layout`` is given.
        device: device of ``page_pos`` and of a plan's ``send_pages``.
        debug: check more (every slot of a slot table, every request's prefix for repeats); never
            changes a plan.
        exact_blocks: size the blocks by the largest count of any rank instead of by
            ``Σ ceil(K_i / N)``. Needed where owners are not cyclic (a prefix over rotation seams,
            owner lanes); saves padding where requests share a prefix.
        layout: where pages lie; the page-interleave layout of ``spec`` by default.

    Attributes:
        layout: the pool's ``PageLayout``.
        scratch: the scratch's regions.
        active: a plan is in force, between ``begin_shard_extend`` and ``end_shard_extend``.
        plan: the last plan, or None before the first.

    Raises:
        ValueError: neither num_pages nor layout is given, or they disagree with the spec.
    """

    def __init__(
        self,
        spec: PageShardSpec,
        *,
        num_pages: int | None = None,
        device: Any = "cpu",
        debug: bool = False,
        exact_blocks: bool = False,
        layout: PageLayout | None = None,
    ) -> None:
        self.spec = spec
        self.layout = _checked_layout(spec, num_pages, layout)
        self.num_pages = self.layout.num_pages if num_pages is None else num_pages
        self.scratch = ScratchLayout(spec)
        self.debug = debug
        self.exact_blocks = exact_blocks
        self.active = False
        self.plan: ShardExtendPlan | None = None
        self._key_dtype = key_dtype(self.layout)
        self._positions = PagePositions(self.num_pages, self.scratch.trash_page, device)
        self._translator = SlotTranslator(
            self._positions.tensor, spec.page_size, MEMO_SCRATCHES * self.scratch.num_rows
        )

    @property
    def page_pos(self) -> torch.Tensor:
        """int32[num_pages]: scratch page of each logical page, the trash page off the plan."""
        return self._positions.tensor

    @property
    def epoch(self) -> int:
        """Number of plans made so far."""
        return 0 if self.plan is None else self.plan.epoch

    def begin_shard_extend(
        self,
        req_to_token: PageSource,
        req_pool_indices: Any,
        prefix_lens_cpu: Sequence[int],
        seq_lens_cpu: Sequence[int],
    ) -> ShardExtendPlan:
        """Plan a batch and put its page table in force; a plan in force is replaced.

        Call it on every rank with the same pages and lengths.

        Args:
            req_to_token: the requests' rows. ``ReqToTokenPool``: its host mirror is read. NumPy
                int32 or int64[rows, max pages]: a table of PAGE ids. Tensor int32 or
                int64[rows, max tokens]: a table of token SLOTS; a CUDA tensor costs one copy to
                the host, which waits for the device.
            req_pool_indices: row of each request; a host sequence, or a tensor (a CUDA one is
                copied to the host, which waits).
            prefix_lens_cpu: cached tokens of each request, whole pages.
            seq_lens_cpu: tokens of each request, prefix and chunk together.

        Returns:
            The plan.

        Raises:
            ValueError: a prefix is not page-aligned or longer than its sequence; a page is
                reserved, out of range or planned twice (twice in one request's prefix where others
                have one too, and may share it: in debug only); a rank owns more pages than
                block_pages; without exact_blocks, a request's prefix owners are not cyclic; prefix
                or chunk are over the scratch; or the table does not hold the rows. The previous
                plan is intact.

        Cost: O(pages of this plan and the last) and one sort of the prefix pages; nothing
        depends on num_pages.
        """
        rows = _host_ints(req_pool_indices)
        prefix_lens, seq_lens = _host_ints(prefix_lens_cpu), _host_ints(seq_lens_cpu)
        prefix_counts = prefix_page_counts(prefix_lens, seq_lens, self.spec.page_size)
        if len(rows) != len(seq_lens):
            raise ValueError(f"{len(rows)} rows for {len(seq_lens)} requests; pass one row each")
        tables = read_page_rows(req_to_token, rows, seq_lens, self.spec.page_size, debug=self.debug)
        pages = self._join(tables, prefix_counts)
        num_prefix = sum(prefix_counts)
        order = self._order_prefix(pages[:num_prefix], pages[num_prefix:], prefix_counts)
        block_pages = self._block_pages(order, prefix_counts)
        self.scratch.check_fits(block_pages, len(pages) - num_prefix)
        return self._commit(order, block_pages, pages[num_prefix:])

    def end_shard_extend(self) -> None:
        """Take the plan out of force. The table keeps its places until the next plan."""
        self.active = False

    def translate_loc_to_scratch(self, loc: torch.Tensor) -> torch.Tensor:
        """Return the scratch row of each slot: int64, the shape of ``loc``.

        Args:
            loc: int32 or int64 slots in ``[0, num_pages * page_size)``, on the planner's device.

        Raises:
            ValueError: ``loc`` has another dtype.
        """
        return self._translator.translate(loc)

    def translate_cached(self, loc: torch.Tensor) -> torch.Tensor:
        """Return ``translate_loc_to_scratch(loc)``, computed once per tensor and plan.

        The memo goes by identity and keeps the tensor: don't change ``loc`` under one plan.
        """
        return self._translator.translate_cached(loc)

    def translate_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the scratch rows of whole pages: int64[len(pages) * page_size].

        Args:
            pages: int32 or int64[n] logical pages, on the planner's device.
        """
        return self._translator.translate_pages(pages)

    def check_invariants(self) -> None:
        """Check that the table holds the last plan and the trash page elsewhere.

        Raises:
            RuntimeError: an entry differs; the message names its page. Cost: O(num_pages).
        """
        expected = np.full(self.num_pages, self.scratch.trash_page, dtype=np.int64)
        if self.plan is not None:
            expected[self.plan.pages] = self.plan.places
        wrong = np.flatnonzero(self.page_pos.cpu().numpy() != expected)
        if len(wrong):
            page = int(wrong[0])
            raise RuntimeError(
                f"page_pos[{page}]={int(self.page_pos[page])}, the plan of epoch {self.epoch} "
                f"says {expected[page]}"
            )

    def _join(self, tables: list[Ints], prefix_counts: list[int]) -> Ints:
        """Return all prefix pages, then all chunk pages, each of them one that can be owned."""
        pairs = list(zip(tables, prefix_counts, strict=True))
        parts = [table[:count] for table, count in pairs]
        parts += [table[count:] for table, count in pairs]
        pages = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        if len(pages):
            low, high = np.minimum.reduce(pages), np.maximum.reduce(pages)
            if low < self.layout.first_page or high >= self.num_pages:
                bad = low if low < self.layout.first_page else high
                raise ValueError(
                    f"page {bad} is not in [{self.layout.first_page}, {self.num_pages}); the rows "
                    f"must hold allocated pages up to seq_len"
                )
        return pages.astype(self._key_dtype, copy=False)

    def _order_prefix(self, prefix: Ints, chunk: Ints, counts: list[int]) -> OwnerMajor:
        """Return the prefix pages in owner-major order after checking owners and repeats."""
        layout = self.layout
        runs = _runs(prefix, counts)
        keys = self._prefix_keys(prefix, runs)
        self._check_repeats(keys, runs)
        chunk_keys = sorted_keys(layout, chunk)
        page = first_repeat(layout, chunk_keys)
        if page is not None:
            raise ValueError(
                f"page {page} is in the batch's chunk twice; every request writes to its own pages"
            )
        page = first_shared(layout, chunk_keys, keys)
        if page is not None:
            raise ValueError(
                f"page {page} is in one request's prefix and another's chunk; "
                f"match a page only after the batch that writes it"
            )
        return owner_major(layout, keys)

    def _check_repeats(self, keys: Ints, runs: dict[int, Ints]) -> None:
        """Refuse a page twice in one prefix; among several, which may share pages, in debug."""
        if len(runs) > 1 and not self.debug:
            return
        for request, run in runs.items():
            run_keys = keys if len(runs) == 1 else sorted_keys(self.layout, run)
            page = first_repeat(self.layout, run_keys)
            if page is not None:
                raise ValueError(
                    f"page {page} is in the prefix of request {request} in the batch twice; "
                    f"pass each request's pages once, in order"
                )

    def _prefix_keys(self, prefix: Ints, runs: dict[int, Ints]) -> Ints:
        """Return the sort keys of the prefix pages; without exact blocks, check their owners."""
        if not runs:
            return prefix
        if self.exact_blocks and not all(may_be_cyclic(self.layout, run) for run in runs.values()):
            return sorted_keys(self.layout, prefix)
        try:
            return sorted_keys_of_runs(self.layout, list(runs.values()))
        except NotCyclicError as error:
            if self.exact_blocks:
                return sorted_keys(self.layout, prefix)
            raise ValueError(
                f"the prefix owners of request {list(runs)[error.run]} in the batch are not "
                f"cyclic: blocks of Σ ceil(K_i / N) pages need one rotation base per request; "
                f"plan with exact_blocks=True"
            ) from None

    def _block_pages(self, order: OwnerMajor, prefix_counts: list[int]) -> int:
        """Return the pages of a block, after checking that no rank owns more."""
        fullest = int(order.counts.max())
        if self.exact_blocks:
            return fullest
        block_pages = padded_block_pages(prefix_counts, self.spec.shard_size)
        if fullest > block_pages:
            raise ValueError(
                f"rank {order.counts.argmax()} owns {fullest} prefix pages, over "
                f"block_pages={block_pages}; plan with exact_blocks=True"
            )
        return block_pages

    def _commit(self, order: OwnerMajor, block_pages: int, chunk: Ints) -> ShardExtendPlan:
        """Write the table and put the plan in force: the only place that changes the planner."""
        pages = np.concatenate([order.pages, chunk], dtype=np.int64)
        first = self.scratch.chunk_page
        chunk_places = np.arange(first, first + len(chunk), dtype=np.int32)
        places = np.concatenate([order.places(block_pages), chunk_places])
        send: IntArray | None = None
        if block_pages:
            own = order.local_pages_of(self.spec.shard_rank)
            send = np.zeros(block_pages, dtype=np.int64)
            send[: len(own)] = own
        self.active = False  # an interrupt from here on leaves no plan in force
        send_pages = self._positions.assign(pages, places, send)
        self._translator.forget()
        self.plan = ShardExtendPlan(
            epoch=self.epoch + 1,
            block_pages=block_pages,
            page_size=self.spec.page_size,
            pages=pages,
            places=places,
            num_prefix_pages=len(order.pages),
            rank_counts=order.counts,
            send_pages=send_pages,
        )
        self.active = True
        return self.plan


def _runs(prefix: Ints, counts: list[int]) -> dict[int, Ints]:
    """Return the prefix pages of each request that has some, by its number."""
    spans = enumerate(zip(accumulate(counts), counts, strict=True))
    return {number: prefix[end - count : end] for number, (end, count) in spans if count}


def _host_ints(values: Any) -> list[int]:
    """Return integers of a sequence, array or tensor as a list; a CUDA tensor is copied."""
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    try:
        return [index(value) for value in listed]
    except TypeError as error:
        raise ValueError(f"{listed} are not integers; pass whole rows and lengths") from error


def _checked_layout(
    spec: PageShardSpec, num_pages: int | None, layout: PageLayout | None
) -> PageLayout:
    """Return the layout, made from the spec where none is given."""
    if layout is None:
        if num_pages is None or num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be at least 1 when no layout is given")
        return spec.layout(max(1, ceil_div(num_pages, spec.shard_size) - 1))
    if (layout.page_size, layout.num_classes) != (spec.page_size, spec.shard_size):
        raise ValueError(
            f"the layout has {layout.num_classes} classes of pages of {layout.page_size} tokens, "
            f"the spec shard_size={spec.shard_size} and page_size={spec.page_size}; make both alike"
        )
    if num_pages is not None and num_pages > layout.num_pages:
        raise ValueError(
            f"num_pages={num_pages} is over the layout's {layout.num_pages}; leave it out"
        )
    return layout
