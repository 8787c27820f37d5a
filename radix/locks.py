"""Locks: receipts, and the pins that they put on nodes.

A receipt pins its node; a node whose pins leave 0 pins its parent. So a node is pinned exactly when
it or anything below it is locked, a lock under a path that is locked already stops at once, and a
split needs no more than one pin on the new upper half.
"""

from __future__ import annotations

from radix.components import TreeComponent
from radix.node import TreeNode
from radix.params import LockReceipt


class LockTable:
    """The receipts of one tree that are out.

    Args:
        component: told when a node becomes protected or evictable.
    """

    __slots__ = ("_component", "_next_serial", "_receipts")

    def __init__(self, component: TreeComponent) -> None:
        self._component = component
        self._next_serial = 0
        self._receipts: dict[int, tuple[LockReceipt, TreeNode]] = {}

    def lock(self, node: TreeNode) -> LockReceipt:
        """Pin a node. Cost: O(nodes that were not pinned before)."""
        receipt = LockReceipt(node.id, self._next_serial)
        self._next_serial += 1
        self._receipts[receipt.serial] = (receipt, node)
        pinned: TreeNode | None = node
        while pinned is not None:
            pinned.pins += 1
            if pinned.pins > 1:
                break
            self._component.lock(pinned)
            pinned = pinned.parent
        return receipt

    def node_of(self, receipt: LockReceipt) -> TreeNode:
        """Return the node that a receipt locks.

        Raises:
            ValueError: the receipt was used already, is from before a reset, or is another tree's.
        """
        if type(receipt) is not LockReceipt:
            raise ValueError(f"{receipt!r} is no LockReceipt")
        held = self._receipts.get(receipt.serial)
        if held is None or held[0] is not receipt:
            raise ValueError(
                f"{receipt!r} can't be released: it was used already, is from before a reset, "
                f"or belongs to another tree"
            )
        return held[1]

    def unlock(self, receipt: LockReceipt, node: TreeNode) -> None:
        """Release a receipt of which ``node_of`` said that it locks ``node``."""
        del self._receipts[receipt.serial]
        pinned: TreeNode | None = node
        while pinned is not None:
            pinned.pins -= 1
            if pinned.pins:
                break
            self._component.unlock(pinned)
            pinned = pinned.parent

    def receipts(self) -> list[LockReceipt]:
        """Return the receipts that are out, oldest first."""
        return [receipt for receipt, _ in self._receipts.values()]

    def clear(self) -> None:
        """Make every receipt stale; pins are the caller's business."""
        self._receipts.clear()
