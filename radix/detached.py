"""Evicted runs as data: what left the tree, with the path that led there.

``evict`` returns page ids alone, and that is all that most callers need. A caller that copies the
pages elsewhere first asks for the runs: keys and pages of whole paths, read off while the ancestors
are still there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from alloc import PageIds, PageLayout, ceil_div
from alloc.spaces import as_count
from radix.key import RadixKey, unit_bytes_of
from radix.node import TreeNode
from radix.params import EvictParams

if TYPE_CHECKING:
    from radix.tree_core import UnifiedTreeCore


@dataclass(frozen=True, slots=True, eq=False)
class DroppedRun:
    """The tail of one node, as it left the tree.

    Attributes:
        key: the path from the root to the end of the run, whole pages.
        pages: int64[whole pages of key] page ids of that path, host, read-only.
        start: position-page where the run starts; the pages before it belong to ancestors.
    """

    key: RadixKey
    pages: PageIds
    start: int

    def dropped(self) -> PageIds:
        """Return the page ids that left the tree: int64[n], read-only."""
        return self.pages[self.start :]


def dropped_run(node: TreeNode, num_pages: int, page_size: int) -> DroppedRun:
    """Return the last ``num_pages`` of an attached node as a run. Cost: O(path) bytes."""
    width = page_size * unit_bytes_of(node.namespace)
    keys: list[bytes] = []
    pages: list[bytes] = []
    above: TreeNode | None = node
    while above is not None and above.parent is not None:
        keys.append(above.key[: above.num_pages * width])
        pages.append(above.live_pages())
        above = above.parent
    return DroppedRun(
        RadixKey.of_units(b"".join(reversed(keys)), node.namespace),
        np.frombuffer(b"".join(reversed(pages)), dtype=np.int64),
        node.end - num_pages,
    )


def drop_pages(
    core: UnifiedTreeCore,
    layout: PageLayout,
    params: EvictParams,
    runs: list[DroppedRun] | None = None,
) -> PageIds:
    """Take what an eviction asks for out of a tree; returns the page ids.

    Args:
        core: the tree.
        layout: of the pages' allocator.
        params: how much, or of which classes.
        runs: filled with the runs that went, in order, where given.

    Raises:
        ValueError: num_tokens or a deficit is negative, or there is not one deficit a class.
    """
    num_tokens = _count(params.num_tokens, "num_tokens")
    if params.class_deficits is None:
        return core.evict(ceil_div(num_tokens, core.page_size), runs)
    deficits = [_count(count, "class_deficits") for count in params.class_deficits]
    if len(deficits) != layout.num_classes:
        raise ValueError(f"class_deficits={deficits} must be {layout.num_classes} counts >= 0")
    return core.evict_classes(deficits, layout, runs=runs)


def _count(value: object, name: str) -> int:
    """Return a number of tokens or pages, checked."""
    count = as_count(value, name)
    if count < 0:
        raise ValueError(f"{name}={count} must not be negative")
    return count
