"""Eviction order: policies as ranks of nodes, and one ordered frontier of unlocked leaves.

A policy is a function from a node to an integer: fields from the most to the least significant,
64 bits each, the NodeId last; only the first may be negative or longer. The smallest goes first,
and ties fall in creation order. One integer compares in half the time of a tuple. The frontier
holds one rank per candidate and no stale ones: whoever changes a field of a rank takes the node out
first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeAlias

from sortedcontainers import SortedList

from radix.node import NodeId, TreeNode

Policy: TypeAlias = Callable[[TreeNode], int]

SLRU_PROTECTED_HITS = 2
"""Hits that lift a node from the probationary to the protected segment."""

_ID_MASK = 2**64 - 1


def _lru(node: TreeNode) -> int:
    return node.last_access << 64 | node.id


def _lfu(node: TreeNode) -> int:
    return node.hits << 128 | node.last_access << 64 | node.id


def _fifo(node: TreeNode) -> int:
    return node.created << 64 | node.id


def _mru(node: TreeNode) -> int:
    return -node.last_access << 64 | node.id


def _filo(node: TreeNode) -> int:
    return -node.created << 64 | node.id


def _priority(node: TreeNode) -> int:
    return node.priority << 128 | node.last_access << 64 | node.id


def _slru(node: TreeNode) -> int:
    return (node.hits >= SLRU_PROTECTED_HITS) << 128 | node.last_access << 64 | node.id


POLICIES: dict[str, Policy] = {
    "lru": _lru,
    "lfu": _lfu,
    "fifo": _fifo,
    "mru": _mru,
    "filo": _filo,
    "priority": _priority,
    "slru": _slru,
}


def policy_named(name: str) -> Policy:
    """Return a policy. Raises ValueError that lists the names."""
    try:
        return POLICIES[name]
    except (KeyError, TypeError):
        known = ", ".join(POLICIES)
        raise ValueError(f"eviction_policy={name!r} is unknown; choose one of {known}") from None


class Frontier:
    """The eviction candidates in the order in which a policy gives them up.

    Args:
        policy: the rank of a node.

    Cost: ``add`` and ``discard`` are O(log n) in the candidates, whatever their history.
    """

    __slots__ = ("_policy", "_ranks")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ranks = SortedList()

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[NodeId]:
        return (NodeId(rank & _ID_MASK) for rank in self._ranks)

    def add(self, node: TreeNode) -> None:
        """Make a node a candidate."""
        self._ranks.add(self._policy(node))

    def discard(self, node: TreeNode) -> None:
        """Take a candidate out. Its fields must be those it was added with."""
        self._ranks.remove(self._policy(node))

    def first(self) -> NodeId | None:
        """Return the candidate that goes first; None when there is none."""
        ranks = self._ranks
        return NodeId(ranks[0] & _ID_MASK) if ranks else None

    def window(self, size: int) -> list[NodeId]:
        """Return the first ``size`` candidates in order."""
        return [NodeId(rank & _ID_MASK) for rank in islice(self._ranks, size)]

    def clear(self) -> None:
        """Take every candidate out."""
        self._ranks.clear()
