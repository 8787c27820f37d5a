"""Ranks with pools, caches and host tiers, and bytes that say which tokens they are for.

Every row of every rank is a function of the tokens up to it and of the layer, so a page that shows
another prefix's rows, stale rows or rows that were never loaded is seen at once.
"""

import hashlib
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from alloc import (
    CPSharedPagedTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    PageInterleavePoolAllocator,
    PageShardSpec,
    build_in_seq_page_compute_owners,
)
from radix import (
    CacheInitParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    UnifiedRadixCache,
)
from scratch import (
    InProcessGroup,
    MHATokenToKVPool,
    MLATokenToKVPool,
    PageInterleaveMHATokenToKVPool,
    PageInterleaveMLATokenToKVPool,
)
from tiers import (
    CopyTransfer,
    GroupTier,
    HostKVPool,
    HostTier,
    NullTransfer,
    TieredCache,
    WritePolicy,
    host_layout,
)

HEADS, HEAD_DIM = 2, 3
LORA, ROPE = 5, 2
LAYERS = 3


def make_allocator(layout, ranks, pages, ps, rank=0, need_sort=False):
    """An allocator of ``pages`` pages a rank: "interleave" or "lanes"; paged for one rank."""
    if layout == "lanes":
        size = pages * ps
        return CPSharedPagedTokenToKVPoolAllocator(
            size * ranks, size, ps, None, None, None, need_sort, ranks, rank
        )
    if ranks == 1:
        return PagedTokenToKVPoolAllocator(pages * ps, ps, None, None, None, need_sort)
    return PageInterleavePoolAllocator(pages * ps, ps, ranks, None, None, None, need_sort)


def make_pool(kind, allocator, rank, group, device="cpu"):
    """A pool of one rank: plain for one rank, else sharded by the allocator's layout."""
    layout = allocator.layout
    ps, size = layout.page_size, layout.pages_per_class * layout.page_size
    shape = (HEADS, HEAD_DIM) if kind == "mha" else (LORA, ROPE)
    if layout.num_classes == 1:
        plain = MHATokenToKVPool if kind == "mha" else MLATokenToKVPool
        return plain(size, ps, torch.bfloat16, *shape, LAYERS, device)
    sharded = PageInterleaveMHATokenToKVPool if kind == "mha" else PageInterleaveMLATokenToKVPool
    ranks = layout.num_classes
    spec = PageShardSpec(rank, ranks, ps, 8 * ranks * ps, 8 * ps)
    return sharded(
        size,
        ps,
        torch.bfloat16,
        *shape,
        LAYERS,
        device,
        shard_spec=spec,
        shard_group=group,
        exact_blocks=True,
        layout=layout,
    )


def rows_of(kind, tokens, layer, start=0):
    """The rows of positions [start, len(tokens)) in one layer, as the pool's setter takes them."""
    width = HEADS * HEAD_DIM * 2 if kind == "mha" else LORA + ROPE
    rows = []
    state = hashlib.blake2b(bytes([layer]), digest_size=32)
    for position, token in enumerate(tokens):
        state.update(int(token).to_bytes(8, "little", signed=True))
        if position >= start:
            digest = state.digest()
            rows.append([digest[i % 32] - 128 for i in range(width)])
    return torch.tensor(rows, dtype=torch.float32).to(torch.bfloat16).reshape(-1, width)


@dataclass
class Rank:
    """One rank: bookkeeping that equals every other rank's, and bytes of its own."""

    rank: int
    kind: str
    layout: str
    cache: TieredCache
    pool: object

    @property
    def device(self):
        return self.cache.device

    @property
    def allocator(self):
        return self.cache.device.allocator

    @property
    def ps(self):
        return self.cache.page_size

    def key(self, tokens, **namespace):
        return RadixKey(tokens, **namespace)

    def draw(self, start, num_pages, base=0, owners=None):
        """Draw pages for position-pages [start, start + num_pages) as a request would."""
        lanes = self.allocator.layout.num_classes
        if owners is not None:
            return self.allocator.free_list.draw(np.asarray(owners, dtype=np.int64))
        if self.layout == "lanes":
            stop = (start + num_pages) * self.ps
            owners = build_in_seq_page_compute_owners(start * self.ps, stop, self.ps, lanes)
            return self.allocator.free_list.draw((owners + base) % lanes)
        if lanes == 1:
            return self.allocator.alloc_pages(num_pages)
        return self.allocator.alloc_cyclic_pages((base + start) % lanes, num_pages)

    def serve(self, tokens, base=0, owners=None, **namespace):
        """Compute what the device lacks of some tokens, and cache it; returns the hit in tokens.

        The caller has made room.
        """
        key = self.key(tokens, **namespace)
        match = self.device.match_and_lock(MatchPrefixParams(key))
        start = match.handle.end
        count = len(tokens) // self.ps - start
        pages = self.draw(start, count, base, owners)
        assert pages is not None, "the test's pool is too small"
        self.compute(tokens[: (start + count) * self.ps], start, pages)
        sharded = self.device.is_sharded
        self.device.insert(
            InsertParams(
                key,
                pages=np.concatenate([match.pages, pages]),
                rotation_base=base if sharded and count else None,
            )
        )
        self.device.dec_lock_ref(match.receipt)
        return start * self.ps

    def compute(self, tokens, start, pages):
        """Write the rows of position-pages from ``start`` on into the pool."""
        if self.pool is None or not len(pages):
            return
        loc = torch.from_numpy((pages[:, None] * self.ps + np.arange(self.ps)).reshape(-1)).to(
            self.pool.device
        )
        for layer in range(LAYERS):
            rows = rows_of(self.kind, tokens, layer, start * self.ps).to(self.pool.device)
            at = SimpleNamespace(layer_id=layer)
            if self.kind == "mha":
                half = HEADS * HEAD_DIM
                self.pool.set_kv_buffer(at, loc, rows[:, :half], rows[:, half:])
            else:
                self.pool.set_mla_kv_buffer(at, loc, rows[:, :LORA], rows[:, LORA:])

    def owned_rows(self, pages, layer):
        """This rank's rows of some pages in one layer, and the indices of these in ``pages``."""
        layout = self.allocator.layout
        mine = np.flatnonzero(layout.class_of(pages) == self.rank)
        local = layout.local_page(pages[mine])
        rows = torch.from_numpy((local[:, None] * self.ps + np.arange(self.ps)).reshape(-1))
        parts = self.pool.layer_rows()[layer]
        taken = [part.cpu().index_select(0, rows).view(torch.bfloat16) for part in parts]
        return torch.cat(taken, 1), mine

    def wrong_pages(self, tokens, layers=range(LAYERS), **namespace):
        """Return the position-pages of the device's match whose rows here are not right."""
        match = self.device.match_prefix(
            MatchPrefixParams(self.key(tokens, **namespace), peek=True)
        )
        wrong = set()
        for layer in layers:
            got, mine = self.owned_rows(match.pages, layer)
            want = rows_of(self.kind, tokens[: match.device_prefix_len], layer)
            for i, page in enumerate(mine.tolist()):
                ours = got[i * self.ps : (i + 1) * self.ps]
                if not torch.equal(ours, want[page * self.ps : (page + 1) * self.ps]):
                    wrong.add(page)
        return sorted(wrong)

    def device_len(self, tokens, **namespace):
        key = self.key(tokens, **namespace)
        return self.device.match_prefix(MatchPrefixParams(key, peek=True)).device_prefix_len

    def host_len(self, tokens, **namespace):
        return self.cache.host.held_pages(self.key(tokens, **namespace)) * self.ps

    def load(self, tokens, **namespace):
        """Match and load back; unlock; return the device's hit in tokens."""
        match = self.cache.match(self.key(tokens, **namespace))
        match = self.cache.load_back(match) or match
        self.device.dec_lock_ref(match.device.receipt)
        return match.device.device_prefix_len

    def evictable(self):
        return self.device.evictable_size()


def make_rank(
    rank=0,
    ranks=1,
    *,
    layout="interleave",
    kind="mla",
    pages=8,
    host_pages=16,
    ps=2,
    write="write_back",
    hits=1,
    rotation="chain",
    group=None,
    blobs=None,
    group_pages=2,
    agree=None,
    transfer=None,
    bytes_too=True,
    model_id="model",
    cache_class=TieredCache,
    need_sort=False,
    device="cpu",
):
    """One rank of a world. ``transfer`` makes the transfer from pool, layout and host pool."""
    allocator = make_allocator(layout, ranks, pages, ps, rank, need_sort)
    below = host_layout(allocator.layout, host_pages)
    pool, moves, groups = None, NullTransfer(), None
    host_pool = None
    if bytes_too:
        group = group or InProcessGroup.create(ranks)[rank]
        pool = make_pool(kind, allocator, rank, group, device)
        host_pool = HostKVPool(pool, below, rank)
        moves = (transfer or CopyTransfer)(pool, allocator.layout, host_pool)
    elif transfer is not None:
        moves = transfer(None, allocator.layout, None)
    settings = {} if agree is None else {"agree": agree}
    if blobs is not None:
        from tiers import NoRows

        groups = GroupTier(
            blobs,
            host_pool or NoRows(),
            below,
            model_id=model_id,
            rank=rank,
            group_pages=group_pages,
            **settings,
        )
    device_cache = UnifiedRadixCache(CacheInitParams(False, None, allocator, ps, rotation=rotation))
    cache = cache_class(
        device_cache,
        HostTier(below, moves, groups),
        write=WritePolicy(write, hits),
        **settings,
    )
    return Rank(rank, kind, layout, cache, pool)


def make_ranks(ranks, **settings):
    """All ranks of a world, driven in lockstep by one thread."""
    groups = InProcessGroup.create(ranks)
    blobs = settings.pop("blobs", None) or [None] * ranks
    return [make_rank(r, ranks, group=groups[r], blobs=blobs[r], **settings) for r in range(ranks)]


def check(ranks):
    """All ranks hold the same state, and it is sound."""
    assert len({rank.cache.state_digest() for rank in ranks}) == 1
    for rank in ranks:
        rank.cache.check_invariants()
