"""What must hold of a batch's requests before any of them is placed. Changes nothing.

A request is data that the caller may have written to, so its prefix, row, lock and base are held
against tree and rows first: what is drawn afterwards can't be lost to an error half-way.
"""

from __future__ import annotations

from collections.abc import Sequence

from alloc import ExtendBatch
from alloc.spaces import as_count
from radix.params import Req
from radix.unified_cache import UnifiedRadixCache


def check_batch(cache: UnifiedRadixCache, reqs: Sequence[Req], batch: ExtendBatch) -> None:
    """Check every request of a batch.

    Raises:
        ValueError: a request or a row is named twice; a row is not in use; a chunk is longer than a
            row, or (sharded) starts or ends inside a page without being the request's last; a
            prefix is not whole pages, not that of the request's node, or not locked; or a base is
            no class.
        KeyError: the request's node is stale.
    """
    if len({id(req) for req in reqs}) < len(reqs):
        raise ValueError("the batch names a request twice; pass distinct requests")
    rows = [req.kv.req_pool_idx for req in reqs if req.kv.req_pool_idx is not None]
    if len(set(rows)) < len(rows):
        raise ValueError(f"the batch names a row twice: {rows}; every request has its own")
    lens = zip(batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=True)
    for i, (prefix, stop) in enumerate(lens):
        _check_lengths(cache, reqs[i], i, prefix, stop)
        _check_prefix(cache, reqs[i], i, prefix)
        if cache.is_sharded:
            _check_base(cache, reqs[i], i)


def _check_lengths(cache: UnifiedRadixCache, req: Req, i: int, prefix: int, stop: int) -> None:
    longest = cache.pool().max_context_len
    if stop > longest:
        raise ValueError(f"request {i}: {stop} tokens don't fit a row of {longest}")
    if not cache.is_sharded:
        return
    page_size, total = cache.page_size, len(req.origin_input_ids) + len(req.output_ids)
    if prefix % page_size or (stop % page_size and stop < total):
        raise ValueError(
            f"request {i}: chunk [{prefix}, {stop}) of {total} tokens must start and end on pages "
            f"of {page_size} tokens on a sharded pool; round chunk ends down, all but the last"
        )


def _check_prefix(cache: UnifiedRadixCache, req: Req, i: int, prefix: int) -> None:
    """Hold a request's prefix against its row, or against the node that it locks."""
    row = req.kv.req_pool_idx
    if row is not None:
        cache.pool().pages(row, 0, 0)  # raises when the row is not in use
        return
    core = cache.tree_core
    node = core.root() if req.last_node is None else core.node_by_id(req.last_node)
    if prefix != node.end * cache.page_size:
        raise ValueError(
            f"request {i} has no row and a prefix of {prefix} tokens, and its node ends at "
            f"{node.end * cache.page_size}; match it with match_req"
        )
    if not prefix:
        return
    if req.lock_receipt is None or core.check_receipt(req.lock_receipt) is not node:
        raise ValueError(
            f"request {i} doesn't lock the node of its prefix, whose pages could be evicted; "
            f"match it with match_req"
        )


def _check_base(cache: UnifiedRadixCache, req: Req, i: int) -> None:
    base, classes = req.kv_rotation_base, cache.allocator.layout.num_classes
    if base is not None and not 0 <= as_count(base, f"request {i}: kv_rotation_base") < classes:
        raise ValueError(f"request {i} has kv_rotation_base={base!r}; it must be in [0, {classes})")
