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
        path: nodes matched to their end, root left out, top first.
        num_pages: matched pages in all.
        partial: the next node, matched only in its first pages; None when the match ends on a
            node's end.
        partial_pages: pages matched in it, at least 1 when it is there.
    """

    path: list[TreeNode]
    num_pages: int
    partial: TreeNode | None = None
    partial_pages: int = 0

    def parts(self) -> list[bytes]:
        """Return the payloads along the match, as bytes of page ids; they stay valid."""
        parts = [node.pages for node in self.path]
        if self.path:
            parts[-1] = self.path[-1].live_pages()
        if self.partial is not None:
            parts.append(self.partial.pages[: self.partial_pages * PAGE_BYTES])
        return parts

    def deepest(self) -> TreeNode | None:
        """Return the deepest node that the key reaches; None for the root."""
        if self.partial is not None:
            return self.partial
        return self.path[-1] if self.path else None


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
        return Walk([], 0)
    child = root.children.get((key.namespace, data[:page]))
    return _descend(child, data, 0, stop, page, [])


def walk_on(node: TreeNode, key: RadixKey, page_size: int) -> Walk:
    """Follow a key that runs through the whole of ``node``, without looking at what is above."""
    data = key.data
    page = page_size * key.unit_bytes
    stop = len(data) - len(data) % page
    path: list[TreeNode] = []
    above: TreeNode | None = node
    while above is not None and above.parent is not None:
        path.append(above)
        above = above.parent
    path.reverse()
    offset = node.end * page
    if not path:
        return walk_key(node, key, page_size)
    if offset >= stop:
        return Walk(path, node.end)
    child = node.children.get(data[offset : offset + page])
    return _descend(child, data, offset, stop, page, path)


def handle_holds(node: TreeNode, handle: MatchHandle, key: RadixKey, page_size: int) -> bool:
    """Say whether ``node`` still ends where the handle says and ``key`` runs through it."""
    if node.end != handle.end or handle.key.namespace != key.namespace:
        return False
    matched = handle.end * page_size * key.unit_bytes
    if len(key.data) < matched:
        return False
    known = handle.key.data
    return handle.key is key or key.data.startswith(
        known if len(known) == matched else known[:matched]
    )


def _descend(
    node: TreeNode | None, data: bytes, offset: int, stop: int, page: int, path: list[TreeNode]
) -> Walk:
    """Walk on from the child whose first page is the key's page at ``offset``."""
    startswith = data.startswith
    while node is not None:
        matched = node.num_pages
        if not startswith(node.key, offset):
            matched = common_units(data, offset, node.key, matched * page, page)
            if matched < node.num_pages:
                return Walk(path, offset // page + matched, node, matched)
        path.append(node)
        offset += matched * page
        if offset >= stop:
            break
        node = node.children.get(data[offset : offset + page])
    return Walk(path, offset // page)
