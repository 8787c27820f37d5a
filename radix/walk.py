"""How a key goes through the tree: the one walk that serves match, insert and the rotation check.

Read-only. A walk is plain data about one moment; nobody suspends or keeps one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alloc import PageIds
from radix.key import RadixKey, common_units
from radix.node import PAGE_BYTES, TreeNode
from radix.params import MatchHandle


@dataclass(slots=True)
class Walk:
    """How far a key goes into the tree.

    Attributes:
        last: the deepest node matched to its end; the root when there is none.
        num_pages: matched pages in all.
        parts: payloads along the match, page ids as bytes; they stay valid.
        partial: the next node, matched only in its first pages; None when the match ends on a
            node's end.
        partial_pages: pages matched in it, at least 1 when it is there.
    """

    last: TreeNode
    num_pages: int
    parts: list[bytes]
    partial: TreeNode | None = None
    partial_pages: int = 0

    def deepest(self) -> TreeNode | None:
        """Return the deepest node that the key reaches; None for the root."""
        if self.partial is not None:
            return self.partial
        return None if self.last.parent is None else self.last


@dataclass(slots=True)
class InsertPlan:
    """What an insert would do; nothing has changed yet.

    Attributes:
        walk: how far the key goes.
        key: the key.
        num_pages: whole pages of the key.
        pages: int64[num_pages] as bytes: the tree's ids up to the match, the caller's after it.
        duplicate_pages: the caller's ids up to the match that differ from the tree's.
        declined: the insert's base is not the chain's; there is nothing to commit.
        rotation_base: stamp of the new node.
        priority: raises that of the path.
    """

    walk: Walk
    key: RadixKey
    num_pages: int
    pages: bytes
    duplicate_pages: PageIds
    declined: bool
    rotation_base: int | None
    priority: int

    def new_pages(self) -> PageIds:
        """Return the page ids that the commit would add: int64[n], read-only."""
        return np.frombuffer(self.pages, dtype=np.int64, offset=self.walk.num_pages * PAGE_BYTES)


def walk_key(root: TreeNode, key: RadixKey, page_size: int) -> Walk:
    """Follow a key from the root as far as it goes. Cost: one memcmp an edge."""
    data = key.data
    page = page_size * key.unit_bytes
    stop = len(data) - len(data) % page
    if not stop:
        return Walk(root, 0, [])
    return _descend(root, root.child_at(key.namespace, data[:page]), data, 0, stop, page, [])


def walk_on(node: TreeNode, handle: MatchHandle, key: RadixKey, page_size: int) -> Walk:
    """Follow a key on from the end of a match that ``handle_holds``.

    The match's payloads are still those of the path: ancestors stay while the node lives, and
    splits cut payloads but don't change them. Cost: O(nodes of the match) to copy references.
    """
    data = key.data
    page = page_size * key.unit_bytes
    stop = len(data) - len(data) % page
    offset = handle.end * page
    parts = handle.parts.copy()
    if offset >= stop:
        return Walk(node, handle.end, parts)
    child = node.children.get(data[offset : offset + page])
    return _descend(node, child, data, offset, stop, page, parts)


def handle_holds(node: TreeNode, handle: MatchHandle, key: RadixKey, page_size: int) -> bool:
    """Say whether ``node`` still ends where the handle says and ``key`` runs through it."""
    end = handle.end
    if node.end != end or node.parent is None or handle.key.namespace != key.namespace:
        return False
    if handle.key is key:
        return True
    matched = end * page_size * key.unit_bytes
    known = handle.key.data
    return len(key.data) >= matched and key.data.startswith(
        known if len(known) == matched else known[:matched]
    )


def starts_with_parts(data: bytes, parts: list[bytes]) -> bool:
    """Say whether ``data`` starts with the concatenation of ``parts``, without building it."""
    offset = 0
    for part in parts:
        if not data.startswith(part, offset):
            return False
        offset += len(part)
    return True


def _descend(
    last: TreeNode,
    node: TreeNode | None,
    data: bytes,
    offset: int,
    stop: int,
    page: int,
    parts: list[bytes],
) -> Walk:
    """Walk on below ``last`` from the child whose first page is the key's page at ``offset``."""
    startswith = data.startswith
    while node is not None:
        matched = node.num_pages
        if not startswith(node.key, offset):
            matched = common_units(data, offset, node.key, matched * page, page)
            if matched < node.num_pages:
                parts.append(node.pages[: matched * PAGE_BYTES])
                return Walk(last, offset // page + matched, parts, node, matched)
        parts.append(node.pages)
        last = node
        offset += matched * page
        if offset >= stop:
            break
        node = node.children.get(data[offset : offset + page])
    if parts and len(last.pages) != last.num_pages * PAGE_BYTES:  # only a leaf may be trimmed
        parts[-1] = last.live_pages()
    return Walk(last, offset // page, parts)
