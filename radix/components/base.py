"""What a node holds for one kind of attention layer, behind a small interface.

Hooks get nodes and plain data and return plain data. A component knows neither the core, nor the
cache, nor an allocator. The core calls a hook after it has decided and before anybody else sees the
result; hooks can't fail on valid input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import Enum

from alloc import IntArray
from radix.node import TreeNode


class ComponentType(Enum):
    """The kinds of layers whose KV a node may hold."""

    FULL = "full"


class TreeComponent(ABC):
    """The payload of nodes for one kind of layer, and its page counts.

    Evictable pages lie in nodes with ``pins == 0``, protected ones in the others.
    """

    kind: ComponentType

    @abstractmethod
    def adopt(self, node: TreeNode) -> None:
        """Count a node that was just attached, unpinned, with its payload in place."""

    @abstractmethod
    def split(self, upper: TreeNode, lower: TreeNode, num_pages: int) -> None:
        """Give ``upper`` the first ``num_pages`` of the payload of ``lower``, which keeps the rest.

        Counts stay: both halves are pinned, or neither is.
        """

    @abstractmethod
    def lock(self, node: TreeNode) -> None:
        """Count a node as protected: its pins just left 0."""

    @abstractmethod
    def unlock(self, node: TreeNode) -> None:
        """Count a node as evictable: its pins just came back to 0."""

    @abstractmethod
    def trim(self, node: TreeNode, num_pages: int) -> bytes:
        """Drop the last ``num_pages`` of an unpinned node; return their ids as bytes.

        Called before the core lowers ``node.num_pages`` and ``node.end``.
        """

    @abstractmethod
    def evictable_pages(self) -> int:
        """Return the pages in unpinned nodes."""

    @abstractmethod
    def protected_pages(self) -> int:
        """Return the pages in pinned nodes."""

    @abstractmethod
    def evictable_by_class(self) -> IntArray:
        """Return the evictable pages of each class: int64[num_classes], a copy."""

    @abstractmethod
    def reset(self) -> None:
        """Forget every node."""

    @abstractmethod
    def violations(self, nodes: Iterable[TreeNode]) -> list[str]:
        """Return broken rules in words, given every node but the root. Cost: O(pages)."""
