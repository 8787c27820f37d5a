"""Arguments and results of the tree and the cache, receipts, and the ``Req`` protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from alloc import BaseTokenToKVPoolAllocator, PageIds, ReqToTokenPool, Slots
from radix.components import ComponentType
from radix.key import RadixKey
from radix.node import NodeId


@dataclass(frozen=True, slots=True)
class CacheInitParams:
    """What a ``UnifiedRadixCache`` is built from.

    Attributes:
        disable: share nothing; every call still works.
        req_to_token_pool: rows of requests; None when only match, insert and evict are used.
        token_to_kv_pool_allocator: where pages come from and go back to.
        page_size: tokens of a page; that of the allocator.
        eviction_policy: lru, lfu, fifo, mru, filo, priority or slru.
        tree_components: kinds of layers that nodes hold.
        is_bigram: requests are keyed by pairs of neighbouring tokens.
        rotation: policy of rotation bases on a sharded pool, chain or seam.
        use_leases: under chain, give requests in flight that share an uncached first page the
            same base; False only to measure what declines cost.
        aimed_eviction: make room class by class (``EvictParams.class_deficits``); False evicts in
            policy order alone, to compare.
    """

    disable: bool
    req_to_token_pool: ReqToTokenPool | None
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    page_size: int
    eviction_policy: str = "lru"
    tree_components: tuple[ComponentType, ...] = (ComponentType.FULL,)
    is_bigram: bool = False
    rotation: str = "chain"
    use_leases: bool = True
    aimed_eviction: bool = True


@dataclass(slots=True)
class MatchPrefixParams:
    """A look-up.

    Attributes:
        key: what to match; a rest that is not a whole page is ignored.
        peek: change nothing: no split, no stamp, no hit.
        count_hit: False for a repeated look-up on behalf of one request.
    """

    key: RadixKey
    peek: bool = False
    count_hit: bool = True


@dataclass(slots=True)
class InsertParams:
    """An insert; exactly one of ``value`` and ``pages``.

    Attributes:
        key: the tokens; a rest that is not a whole page is ignored.
        value: int[>= len(key)] slots of the tokens, whole consecutive pages.
        pages: int64[>= whole pages of key] page ids, host.
        rotation_base: base of the request's own pages; None unsharded, or derived from the pages.
        priority: eviction priority; nodes keep the highest.
        handle: from the match of a prefix of this key; saves the walk. A stale one is ignored.
    """

    key: RadixKey
    value: Slots | None = None
    pages: PageIds | None = None
    rotation_base: int | None = None
    priority: int = 0
    handle: MatchHandle | None = None


@dataclass(slots=True)
class MatchHandle:
    """Where a match ended; plain data that an insert can continue from.

    Attributes:
        node_id: deepest matched node.
        end: pages from the root to the end of the match.
        key: the key that was matched; its first ``end`` pages are the path.
        parts: payloads along the match, page ids as bytes.
    """

    node_id: NodeId
    end: int
    key: RadixKey
    parts: list[bytes]


@dataclass(slots=True)
class InsertResult:
    """What an insert found and did.

    Attributes:
        prefix_len: units of the key that were there already.
        last_device_node: the node where the key now ends; the deepest match when declined.
        rotation_tail_declined: the whole insert was refused and nothing changed.
        duplicate_pages: int64[n] pages of the value that the tree had already under other ids;
            released when ``UnifiedRadixCache.insert`` returns.
        pages: int64[whole pages of the key] canonical page ids; the caller's own when declined.
    """

    prefix_len: int
    last_device_node: NodeId
    rotation_tail_declined: bool
    duplicate_pages: PageIds
    pages: PageIds


@dataclass(frozen=True, slots=True)
class EvictParams:
    """A request for room.

    Attributes:
        num_tokens: this much, rounded up to whole pages.
        class_deficits: pages wanted of each class; eviction then aims at these classes, frees no
            more than the aim needs, and ``num_tokens`` is not looked at.
    """

    num_tokens: int
    class_deficits: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class EvictResult:
    """What an eviction freed, in tokens."""

    num_tokens_evicted: int = 0


class LockReceipt:
    """Proof of one lock. Give it to ``dec_lock_ref`` once; it has no finalizer.

    Attributes:
        node_id: the node that was locked.
        serial: number of the lock in its tree.
    """

    __slots__ = ("node_id", "serial")

    def __init__(self, node_id: NodeId, serial: int) -> None:
        self.node_id = node_id
        self.serial = serial

    def __repr__(self) -> str:
        return f"LockReceipt(node_id={self.node_id}, serial={self.serial})"


class ReqKv(Protocol):
    """The KV bookkeeping of a request. ``allocated_len`` (int, tokens) is optional.

    Attributes:
        req_pool_idx: its row, or None.
        cache_protected_len: tokens at the front that the cache owns and the request's lock holds.
    """

    req_pool_idx: int | None
    cache_protected_len: int


class Req(Protocol):
    """What the cache reads and writes of a request. Session and window fields are optional.

    Attributes:
        origin_input_ids: the prompt's tokens.
        output_ids: generated tokens.
        kv: see ``ReqKv``.
        extra_key: namespace of its key.
        cache_salt: namespace of its key.
        prefix_indices: slots of the tokens that have KV; written by the cache.
        last_node: deepest cached node of the request; None is the root.
        lock_receipt: its lock; None is none.
        priority: eviction priority of what it inserts.
        kv_rotation_base: base of its own pages; None unsharded or not placed yet.

    The cache also keeps a ``kv_rotation_lease`` on the request while a chain is in flight.
    """

    kv: Any
    extra_key: Any
    cache_salt: Any
    prefix_indices: Any
    last_node: NodeId | None
    lock_receipt: LockReceipt | None
    priority: int
    kv_rotation_base: int | None

    @property
    def origin_input_ids(self) -> Sequence[int]:
        """The prompt's tokens."""

    @property
    def output_ids(self) -> Sequence[int]:
        """Generated tokens."""

    def get_fill_ids(self) -> Sequence[int]:
        """Return the tokens that have KV, up to the chunk just computed."""


class MatchResult:
    """What a key found. Indices are built on first use and kept.

    Without a lock they are valid only until the next evict or free.

    Attributes:
        last_device_node: deepest matched node, the root when nothing matched; with peek the deepest
            node that the key reaches, which may reach past the match.
        device_prefix_len: matched units, whole pages.
        handle: for ``InsertParams.handle``.
        receipt: the lock, from ``match_and_lock``; else None.
    """

    __slots__ = (
        "_expand",
        "_indices",
        "_pages",
        "device_prefix_len",
        "handle",
        "last_device_node",
        "receipt",
    )

    def __init__(
        self,
        handle: MatchHandle,
        page_size: int,
        expand: Any,
        receipt: LockReceipt | None = None,
    ) -> None:
        self.handle = handle
        self.last_device_node = handle.node_id
        self.device_prefix_len = handle.end * page_size
        self.receipt = receipt
        self._expand = expand
        self._pages: PageIds | None = None
        self._indices: Slots | None = None

    def __repr__(self) -> str:
        return (
            f"MatchResult(device_prefix_len={self.device_prefix_len}, "
            f"last_device_node={self.last_device_node}, receipt={self.receipt})"
        )

    @property
    def pages(self) -> PageIds:
        """The matched page ids: int64[device_prefix_len / page_size], host, read-only."""
        if self._pages is None:
            self._pages = np.frombuffer(b"".join(self.handle.parts), dtype=np.int64)
        return self._pages

    @property
    def device_indices(self) -> Slots:
        """The matched slots: int64[device_prefix_len]; a tensor if the cache has a device."""
        if self._indices is None:
            self._indices = self._expand(self.pages)
        return self._indices


def row_len(req: Req, pool: ReqToTokenPool) -> int:
    """Return the tokens that a request's row has pages for.

    That is ``kv.allocated_len`` where the request says it, 0 included; else how far the row was
    written through the pool; else the tokens that have KV.
    """
    allocated: int | None = getattr(req.kv, "allocated_len", None)
    if allocated is not None:
        return allocated
    return pool.mirrored_len(req.kv.req_pool_idx) or len(req.get_fill_ids())
