"""Aimed eviction: which leaf to trim, and how far, when single classes of pages are short.

Aiming looks at a bounded window of the policy's order: without the bound it would ignore recency
and cost hits. Inside the window the leaf whose tail reaches a wanted page soonest goes first, ties
in policy order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from alloc import IntArray, PageLayout
from radix.node import TreeNode

WINDOW = 32
"""Leaves of the policy's order that an aimed eviction chooses from."""


def aim(layout: PageLayout, leaves: Iterable[TreeNode], deficits: IntArray) -> tuple[TreeNode, int]:
    """Choose a leaf and how many of its tail pages to drop.

    Args:
        layout: says each page's class.
        leaves: candidates in policy order, at least one.
        deficits: int64[num_classes] wanted pages, some above 0.

    Returns:
        The leaf and the pages to drop, at least 1. At most ``num_classes - 1`` pages that nobody
        wants go before each wanted one. When no leaf has a wanted page that near its end, the
        first leaf, one round of classes at most.
    """
    wanted: list[int] = deficits.tolist()
    first = best = None
    best_lead = layout.num_classes
    for leaf in leaves:
        first = first or leaf
        lead = _lead(layout, leaf, wanted, best_lead)
        if lead < best_lead:
            best, best_lead = leaf, lead
            if lead == 0:
                break
    if best is not None:
        return best, _useful_tail(layout, best, wanted)
    assert first is not None, "the caller has a candidate"
    return first, min(first.num_pages, layout.num_classes)


def attainable(wanted: IntArray, evictable: IntArray) -> bool:
    """Give up, in ``wanted``, the classes of which nothing is evictable; say whether one is left.

    Args:
        wanted: int64[num_classes] pages still missing.
        evictable: int64[num_classes] pages in unlocked nodes.
    """
    wanted[evictable == 0] = 0
    return bool((wanted > 0).any())


def _classes_from_end(layout: PageLayout, node: TreeNode) -> Iterator[int]:
    """Yield the classes of a node's pages, its last page first."""
    base, num_pages = node.rotation_base, node.num_pages
    if base is not None:
        for position in range(node.end - 1, node.end - 1 - num_pages, -1):
            yield layout.class_at(base, position)
        return
    pages = node.page_ids()
    # A look at a tail rarely goes further than one round of classes.
    for stop in range(num_pages, 0, -layout.num_classes):
        block = pages[max(0, stop - layout.num_classes) : stop]
        yield from layout.class_of(block)[::-1].tolist()


def _lead(layout: PageLayout, node: TreeNode, deficits: list[int], limit: int) -> int:
    """Return how many unwanted pages end a node, or ``limit`` when it is that many or more."""
    for distance, page_class in enumerate(islice(_classes_from_end(layout, node), limit)):
        if deficits[page_class] > 0:
            return distance
    return limit


def _useful_tail(layout: PageLayout, node: TreeNode, deficits: list[int]) -> int:
    """Return how many tail pages to drop so that the last one dropped is still wanted."""
    wanted = list(deficits)
    missing = sum(wanted)
    useful = 0
    for distance, page_class in enumerate(_classes_from_end(layout, node)):
        if wanted[page_class] > 0:
            wanted[page_class] -= 1
            missing -= 1
            useful = distance + 1
            if not missing:
                break
        elif distance + 1 - useful >= layout.num_classes:
            break
    return useful
