"""The nodes of the tree: data only. What may happen to them is ``tree_core``'s business."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NewType

import numpy as np

from alloc import PageIds
from radix.key import PLAIN, Namespace

NodeId = NewType("NodeId", int)
"""Handle of a node: the number of its tree above 40 bits, a counter below; never reused."""

TREE_SHIFT = 40
PAGE_BYTES = 8
"""Bytes of one page id in a payload."""

ChildMap = Mapping[Any, "TreeNode"]
NO_CHILDREN: ChildMap = MappingProxyType({})
"""Shared by all leaves, so that a leaf has no map of its own."""


class TreeNode:
    """A run of whole pages under its parent.

    Attributes:
        id: the ``NodeId``; a split leaves it on the lower part.
        parent: None for the root.
        children: first page's bytes -> child; at the root ``(namespace, first page)``, but for
            the plain namespace.
        namespace: that of every key through this node.
        key: the run's units as bytes; a trimmed leaf may keep dead bytes past ``num_pages``.
        pages: the run's page ids, int64 as bytes; may keep dead bytes likewise.
        num_pages: live pages of the run.
        end: pages from the root to the end of the run.
        pins: receipts on this node, plus children that are pinned themselves; 0 is evictable.
        last_access: tick of the last use.
        hits: matches that used the node.
        created: tick of the insert that made it.
        priority: highest priority of any insert through it.
        rotation_base: class of position-page 0 if the run were cyclic from there; None unsharded.
    """

    __slots__ = (
        "children",
        "created",
        "end",
        "hits",
        "id",
        "key",
        "last_access",
        "namespace",
        "num_pages",
        "pages",
        "parent",
        "pins",
        "priority",
        "rotation_base",
    )

    def __init__(
        self,
        node_id: NodeId,
        parent: TreeNode | None,
        namespace: Namespace,
        key: bytes,
        pages: bytes,
        end: int,
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.children: ChildMap = NO_CHILDREN
        self.namespace = namespace
        self.key = key
        self.pages = pages
        self.num_pages = len(pages) // PAGE_BYTES
        self.end = end
        self.pins = 0
        self.last_access = 0
        self.hits = 0
        self.created = 0
        self.priority = 0
        self.rotation_base: int | None = None

    @property
    def start(self) -> int:
        """Pages from the root to the start of the run."""
        return self.end - self.num_pages

    def page_ids(self) -> PageIds:
        """Return the live page ids: int64[num_pages], read-only."""
        return np.frombuffer(self.pages, dtype=np.int64, count=self.num_pages)

    def live_pages(self) -> bytes:
        """Return the live page ids as bytes."""
        stop = self.num_pages * PAGE_BYTES
        return self.pages if len(self.pages) == stop else self.pages[:stop]

    def child_at(self, namespace: Namespace, first_page: bytes) -> TreeNode | None:
        """Return the root's child of a namespace that starts with a page."""
        return self.children.get(
            first_page if namespace is PLAIN or namespace == PLAIN else (namespace, first_page),
        )

    def child_key(self, child: TreeNode, page_bytes: int) -> Any:
        """Return what a child is filed under: its first page, and at the root its namespace."""
        first_page = child.key[:page_bytes]
        if self.parent is not None or child.namespace == PLAIN:
            return first_page
        return (child.namespace, first_page)

    def add_child(self, child: TreeNode, page_bytes: int) -> None:
        """File a child under its first page; the first one gives the node a map of its own."""
        if not isinstance(self.children, dict):
            self.children = {}
        self.children[self.child_key(child, page_bytes)] = child

    def remove_child(self, child: TreeNode, page_bytes: int) -> None:
        """Take a child out; the last one takes the map with it."""
        assert isinstance(self.children, dict), "a parent has a map of its own"
        del self.children[self.child_key(child, page_bytes)]
        if not self.children:
            self.children = NO_CHILDREN

    def copy_marks(self, other: TreeNode) -> None:
        """Take over what a split gives to both halves: stamps, hits, priority and base."""
        self.last_access = other.last_access
        self.hits = other.hits
        self.created = other.created
        self.priority = other.priority
        self.rotation_base = other.rotation_base

    def compact(self, key_bytes: int) -> None:
        """Cut off dead bytes, of which only a trimmed leaf has any; ``key_bytes`` are live."""
        if len(self.key) != key_bytes:
            self.key = self.key[:key_bytes]
        self.pages = self.live_pages()

    def __repr__(self) -> str:
        return (
            f"TreeNode(id={self.id & (2**TREE_SHIFT - 1)}, pages=[{self.start}, {self.end}), "
            f"pins={self.pins}, children={len(self.children)})"
        )
