"""Full attention: every page of every node is needed, so the payload is the run's page ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from alloc import IntArray, PageLayout
from radix.components.base import ComponentType, TreeComponent
from radix.node import PAGE_BYTES, TreeNode


class Tally(Protocol):
    """Evictable pages of each class."""

    def move(self, node: TreeNode, first: int, sign: int) -> None:
        """Count the pages of a node from its page ``first`` on, in (1) or out (-1)."""

    def by_class(self, evictable: int) -> IntArray:
        """Return the counts, of which the sum is ``evictable``: int64[num_classes], a copy."""

    def reset(self) -> None:
        """Forget everything."""


class SingleTally:
    """The tally of a pool with one class: the sum says it all."""

    def move(self, node: TreeNode, first: int, sign: int) -> None:
        """Do nothing."""

    def by_class(self, evictable: int) -> IntArray:
        """Return the sum alone: int64[1]."""
        return np.array([evictable], dtype=np.int64)

    def reset(self) -> None:
        """Do nothing."""


class ClassTally:
    """Counts per class: a closed form for a based node, a count of its pages without a base."""

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._counts = np.zeros(layout.num_classes, dtype=np.int64)

    def move(self, node: TreeNode, first: int, sign: int) -> None:
        """Add or subtract a run's counts."""
        if node.rotation_base is None:
            counts = self._layout.count_classes(node.page_ids()[first:])
        else:
            counts = self._layout.cyclic_counts(
                node.rotation_base, node.start + first, node.num_pages - first
            )
        if sign < 0:
            self._counts -= counts
        else:
            self._counts += counts

    def by_class(self, evictable: int) -> IntArray:
        """Return a copy of the counts."""
        return self._counts.copy()

    def reset(self) -> None:
        """Set every count to 0."""
        self._counts[:] = 0


class FullComponent(TreeComponent):
    """Page ids of full-attention layers, in ``TreeNode.pages``.

    Args:
        layout: says each page's class, for the counts per class.
    """

    kind = ComponentType.FULL

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._evictable = 0
        self._protected = 0
        self._tally: Tally = SingleTally() if layout.num_classes == 1 else ClassTally(layout)

    def adopt(self, node: TreeNode) -> None:
        """Count the node's pages as evictable."""
        self._evictable += node.num_pages
        self._tally.move(node, 0, 1)

    def split(self, upper: TreeNode, lower: TreeNode, num_pages: int) -> None:
        """Cut the page ids in two copies; neither keeps the other's bytes alive."""
        cut = num_pages * PAGE_BYTES
        payload = lower.live_pages()
        upper.pages = payload[:cut]
        lower.pages = payload[cut:]

    def lock(self, node: TreeNode) -> None:
        """Move the node's pages from evictable to protected."""
        self._evictable -= node.num_pages
        self._protected += node.num_pages
        self._tally.move(node, 0, -1)

    def unlock(self, node: TreeNode) -> None:
        """Move the node's pages from protected to evictable."""
        self._evictable += node.num_pages
        self._protected -= node.num_pages
        self._tally.move(node, 0, 1)

    def trim(self, node: TreeNode, num_pages: int) -> bytes:
        """Drop tail pages; recut the payload once at most half of it is live."""
        keep = node.num_pages - num_pages
        dropped = node.pages[keep * PAGE_BYTES : node.num_pages * PAGE_BYTES]
        self._evictable -= num_pages
        self._tally.move(node, keep, -1)
        if 2 * keep * PAGE_BYTES <= len(node.pages):
            node.pages = node.pages[: keep * PAGE_BYTES]
        return dropped

    def evictable_pages(self) -> int:
        """Return the pages in unpinned nodes."""
        return self._evictable

    def protected_pages(self) -> int:
        """Return the pages in pinned nodes."""
        return self._protected

    def evictable_by_class(self) -> IntArray:
        """Return the evictable pages of each class: int64[num_classes], a copy."""
        return self._tally.by_class(self._evictable)

    def reset(self) -> None:
        """Forget every node."""
        self._evictable = 0
        self._protected = 0
        self._tally.reset()

    def violations(self, nodes: Iterable[TreeNode]) -> list[str]:
        """Recount everything from the nodes."""
        found: list[str] = []
        evictable = protected = 0
        by_class = np.zeros(self._layout.num_classes, dtype=np.int64)
        owned = [np.empty(0, dtype=np.int64)]
        for node in nodes:
            pages = node.page_ids()
            owned.append(pages)
            if not self._lies_where_its_base_says(node):
                found.append(f"{node!r}: its pages are not cyclic from base {node.rotation_base}")
            if node.pins:
                protected += node.num_pages
            else:
                evictable += node.num_pages
                by_class += self._layout.count_classes(pages)
        for name, counter, truth in (
            ("evictable pages", self._evictable, evictable),
            ("protected pages", self._protected, protected),
            ("evictable pages by class", self.evictable_by_class().tolist(), by_class.tolist()),
        ):
            if counter != truth:
                found.append(f"the count of {name} is {counter}, the nodes hold {truth}")
        all_pages = np.sort(np.concatenate(owned))
        repeated = all_pages[1:][all_pages[1:] == all_pages[:-1]]
        if len(repeated):
            found.append(f"page {int(repeated[0])} is owned twice")
        return found

    def _lies_where_its_base_says(self, node: TreeNode) -> bool:
        base = node.rotation_base
        if base is None or self._layout.num_classes == 1:
            return True
        classes = self._layout.class_of(node.page_ids())
        return np.array_equal(
            classes, self._layout.cyclic_classes(base, node.start, node.num_pages)
        )
