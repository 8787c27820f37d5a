"""What must hold of tree, allocator and requests, as lists of sentences; digests and text.

Everything is recomputed from the nodes through public calls. Cost: O(pool + tree).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from alloc import PageState, ceil_div
from radix.key import TOKEN_BYTES, unit_bytes_of
from radix.node import TREE_SHIFT, TreeNode
from radix.params import Req, row_len
from radix.tree_core import UnifiedTreeCore

if TYPE_CHECKING:
    from radix.tree_cache import TreeCache

_COUNTER_MASK = (1 << TREE_SHIFT) - 1
_MAX_INDENT = 32


def tree_violations(core: UnifiedTreeCore) -> list[str]:
    """Return the broken rules of a tree alone."""
    if core.interrupted():
        return ["a commit was interrupted; the tree is unusable"]
    nodes = list(core.nodes())
    found = [line for node in nodes for line in _node_violations(core, node)]
    if len(nodes) != core.num_nodes():
        found.append(f"{core.num_nodes()} nodes are registered, {len(nodes)} hang on the root")
    found += _pin_violations(core, nodes)
    candidates = sorted(node.id for node in nodes if not node.children and not node.pins)
    if sorted(core.frontier_ids()) != candidates:
        found.append("the eviction frontier differs from the unlocked leaves")
    return found + core.component.violations(nodes)


def cache_violations(cache: TreeCache, reqs: list[Req] | None) -> list[str]:
    """Return the broken rules of a cache, its allocator and, if given, all live requests."""
    found = tree_violations(cache.tree_core) + cache.allocator.violations()
    cached = np.sort(
        np.concatenate(
            [np.empty(0, dtype=np.int64), *(node.page_ids() for node in cache.tree_core.nodes())]
        )
    )
    if not np.array_equal(cached, cache.allocator.pages_in(PageState.CACHED)):
        found.append("the pages of the nodes differ from those the allocator calls cached")
    found += _path_base_violations(cache)
    if reqs is not None:
        found += _request_violations(cache, reqs)
    return found


def tree_digest(core: UnifiedTreeCore) -> str:
    """Return a hash of a tree's whole state, equal on replicas."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((core.page_size, core.eviction_policy, core.clock())).encode())
    for node in core.nodes():
        parent = node.parent
        assert parent is not None, "nodes() leaves the root out"
        fields = (
            node.id & _COUNTER_MASK,
            parent.id & _COUNTER_MASK,
            node.namespace,
            node.num_pages,
            node.end,
            node.pins,
            node.last_access,
            node.hits,
            node.created,
            node.priority,
            node.rotation_base,
        )
        digest.update(repr(fields).encode())
        digest.update(node.key[: _live_bytes(core, node)])
        digest.update(node.live_pages())
    receipts = [(receipt.serial, receipt.node_id & _COUNTER_MASK) for receipt in core.receipts()]
    digest.update(repr(receipts).encode())
    return digest.hexdigest()


def cache_digest(cache: TreeCache) -> str:
    """Return a hash of tree, allocator, rows and leases."""
    pool = cache.req_to_token_pool
    leases = repr(cache.leases.digest_items()).encode()
    return "-".join(
        (
            tree_digest(cache.tree_core),
            cache.allocator.state_digest(),
            "" if pool is None else pool.state_digest(),
            hashlib.blake2b(leases, digest_size=8).hexdigest(),
        )
    )


def tree_text(core: UnifiedTreeCore) -> str:
    """Return one line a node: id, page range, locks, last use, hits, base, first tokens.

    Indented by depth up to a limit, so that the text of a deep chain stays linear in its nodes.
    """
    lines = [f"root: {core.num_nodes()} nodes"]
    depth: dict[int, int] = {core.root_node_handle(): 0}
    for node in core.nodes():
        parent = node.parent
        assert parent is not None, "nodes() leaves the root out"
        depth[node.id] = depth[parent.id] + 1
        live = node.key[: min(_live_bytes(core, node), 4 * TOKEN_BYTES)]
        tokens = np.frombuffer(live, dtype=np.int64).tolist()
        base = "" if node.rotation_base is None else f" base={node.rotation_base}"
        indent = "  " * min(depth[node.id], _MAX_INDENT)
        lines.append(
            f"{indent}#{node.id & _COUNTER_MASK} pages [{node.start}, {node.end}) "
            f"pins={node.pins} used={node.last_access} hits={node.hits}{base} {tokens}..."
        )
    return "\n".join(lines)


def _live_bytes(core: UnifiedTreeCore, node: TreeNode) -> int:
    return node.num_pages * core.page_size * unit_bytes_of(node.namespace)


def _node_violations(core: UnifiedTreeCore, node: TreeNode) -> list[str]:
    found: list[str] = []
    parent = node.parent
    assert parent is not None, "nodes() leaves the root out"
    page = core.page_size * unit_bytes_of(node.namespace)
    if parent is not core.root() and parent.namespace != node.namespace:
        found.append(f"{node!r} is in another namespace than its parent")
    if parent.children.get(parent.child_key(node, page)) is not node:
        found.append(f"{node!r} is not filed under its first page at its parent")
    if node.num_pages < 1:
        found.append(f"{node!r} is empty")
    if node.start != parent.end:
        found.append(f"{node!r} does not start where its parent ends ({parent.end})")
    if len(node.key) < node.num_pages * page or len(node.live_pages()) != node.num_pages * 8:
        found.append(f"{node!r} has fewer tokens or page ids than pages")
    if node.children and len(node.key) != node.num_pages * page:
        found.append(f"{node!r} has children below dead tokens")
    if parent.parent is not None and parent.last_access < node.last_access:
        found.append(f"{node!r} was used after its parent")
    return found


def _pin_violations(core: UnifiedTreeCore, nodes: list[TreeNode]) -> list[str]:
    receipts = Counter(receipt.node_id for receipt in core.receipts())
    found: list[str] = []
    for node in [core.root(), *nodes]:
        children = sum(1 for child in node.children.values() if child.pins)
        if node.pins != receipts[node.id] + children:
            found.append(
                f"{node!r} has {node.pins} pins, but {receipts[node.id]} receipts and {children} "
                f"pinned children"
            )
    known = {core.root_node_handle(), *(node.id for node in nodes)}
    gone = [str(receipt) for receipt in core.receipts() if receipt.node_id not in known]
    if gone:
        found.append(f"receipts hold nodes that are gone: {', '.join(gone)}")
    return found


def _path_base_violations(cache: TreeCache) -> list[str]:
    """Along a root path no node may have a base that its parent's policy would have declined."""
    found: list[str] = []
    root = cache.tree_core.root()
    for node in cache.tree_core.nodes():
        parent = node.parent
        if parent is None or parent is root:
            continue
        if cache.rotation.declines(parent.rotation_base, node.rotation_base):
            found.append(
                f"{node!r} has base {node.rotation_base} below base {parent.rotation_base}"
            )
    return found


def _request_violations(cache: TreeCache, reqs: list[Req]) -> list[str]:
    """Check that held pages are exactly those of the requests' rows past their prefixes."""
    found: list[str] = []
    owned = [np.empty(0, dtype=np.int64)]
    pool = cache.req_to_token_pool
    for i, req in enumerate(reqs):
        row = req.kv.req_pool_idx
        if pool is None or row is None:
            continue
        protected = ceil_div(req.kv.cache_protected_len, cache.page_size)
        pages = pool.pages(row, 0, row_len(req, pool))
        owned.append(pages[protected:])
        shared = pages[:protected]
        if not cache.allocator.free_list.all_in(shared, PageState.CACHED):
            found.append(f"request {i}: a page of its protected prefix is not cached")
        if protected and req.lock_receipt is None:
            found.append(f"request {i} has a protected prefix and no lock")
    held = np.sort(np.concatenate(owned))
    if not np.array_equal(held, cache.allocator.pages_in(PageState.HELD)):
        found.append("the pages of the requests differ from those the allocator calls held")
    return found
