"""Full attention: every page of every node is needed, so the payload is the run's page ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from alloc import IntArray, PageLayout
from radix.components.base import ComponentType, TreeComponent
from radix.node import PAGE_BYTES, TreeNode


class FullComponent(TreeComponent):
    """Page ids of full-attention layers, in ``TreeNode.pages``.

    Args:
        layout: says each page's class, for the counts per class. A based node's counts are a
            closed form; a node without a base is counted page by page.
    """

    kind = ComponentType.FULL

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._evictable = 0
        self._protected = 0
        self._by_class = np.zeros(layout.num_classes, dtype=np.int64)

    def adopt(self, node: TreeNode) -> None:
        """Count the node's pages as evictable."""
        self._evictable += node.num_pages
        self._by_class += self._class_counts(node, 0)

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
        self._by_class -= self._class_counts(node, 0)

    def unlock(self, node: TreeNode) -> None:
        """Move the node's pages from protected to evictable."""
        self._evictable += node.num_pages
        self._protected -= node.num_pages
        self._by_class += self._class_counts(node, 0)

    def trim(self, node: TreeNode, num_pages: int) -> bytes:
        """Drop tail pages; recut the payload once at most half of it is live."""
        keep = node.num_pages - num_pages
        dropped = node.pages[keep * PAGE_BYTES : node.num_pages * PAGE_BYTES]
        self._evictable -= num_pages
        self._by_class -= self._class_counts(node, keep)
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
        return self._by_class.copy()

    def reset(self) -> None:
        """Forget every node."""
        self._evictable = 0
        self._protected = 0
        self._by_class[:] = 0

    def violations(self, nodes: Iterable[TreeNode]) -> list[str]:
        """Recount everything from the nodes."""
        found: list[str] = []
        evictable = protected = 0
        by_class = np.zeros(self._layout.num_classes, dtype=np.int64)
        owned = [np.empty(0, dtype=np.int64)]
        for node in nodes:
            pages = node.page_ids()
            owned.append(pages)
            counted = self._layout.count_classes(pages)
            if (counted != self._class_counts(node, 0)).any():
                found.append(f"{node!r}: its pages are not cyclic from base {node.rotation_base}")
            if node.pins:
                protected += node.num_pages
            else:
                evictable += node.num_pages
                by_class += counted
        for name, counter, truth in (
            ("evictable", self._evictable, evictable),
            ("protected", self._protected, protected),
        ):
            if counter != truth:
                found.append(f"{name} counter is {counter} pages, the nodes hold {truth}")
        if not np.array_equal(by_class, self._by_class):
            found.append(
                f"evictable pages by class are {self._by_class.tolist()}, the nodes hold "
                f"{by_class.tolist()}"
            )
        all_pages = np.sort(np.concatenate(owned))
        repeated = all_pages[1:][all_pages[1:] == all_pages[:-1]]
        if len(repeated):
            found.append(f"page {int(repeated[0])} is owned twice")
        return found

    def _class_counts(self, node: TreeNode, first: int) -> IntArray | int:
        """Return pages per class of the run from its page ``first`` on."""
        layout, count = self._layout, node.num_pages - first
        if layout.num_classes == 1:
            return count
        if node.rotation_base is None:
            return layout.count_classes(node.page_ids()[first:])
        return layout.cyclic_counts(node.rotation_base, node.start + first, count)
