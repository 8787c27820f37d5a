"""Eviction order: policies as keys of nodes, and one ordered frontier of unlocked leaves.

A policy is a function from a node to a tuple; the smallest goes first and the NodeId breaks ties,
so the order is creation order between equals. The frontier holds one entry per candidate and no
stale ones: whoever changes a field that a key reads takes the node out first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeAlias

from sortedcontainers import SortedList

from radix.node import NodeId, TreeNode

EvictionKey: TypeAlias = tuple[Any, ...]
Policy: TypeAlias = Callable[[TreeNode], EvictionKey]

SLRU_PROTECTED_HITS = 2
"""Hits that lift a node from the probationary to the protected segment."""


def _lru(node: TreeNode) -> EvictionKey:
    return (node.last_access, node.id)


def _lfu(node: TreeNode) -> EvictionKey:
    return (node.hits, node.last_access, node.id)


def _fifo(node: TreeNode) -> EvictionKey:
    return (node.created, node.id)


def _mru(node: TreeNode) -> EvictionKey:
    return (-node.last_access, node.id)


def _filo(node: TreeNode) -> EvictionKey:
    return (-node.created, node.id)


def _priority(node: TreeNode) -> EvictionKey:
    return (node.priority, node.last_access, node.id)


def _slru(node: TreeNode) -> EvictionKey:
    return (node.hits >= SLRU_PROTECTED_HITS, node.last_access, node.id)


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
    """Return a policy's key function. Raises ValueError that lists the names."""
    try:
        return POLICIES[name]
    except (KeyError, TypeError):
        known = ", ".join(POLICIES)
        raise ValueError(f"eviction_policy={name!r} is unknown; choose one of {known}") from None


class Frontier:
    """The eviction candidates in the order in which a policy gives them up.

    Args:
        policy: the key function.

    Cost: ``add`` and ``discard`` are O(log n) in the candidates, whatever their history.
    """

    __slots__ = ("_entries", "_policy")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._entries = SortedList()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[NodeId]:
        return (entry[-1] for entry in self._entries)

    def add(self, node: TreeNode) -> None:
        """Make a node a candidate."""
        self._entries.add(self._policy(node))

    def discard(self, node: TreeNode) -> None:
        """Take a candidate out. Its fields must be those it was added with."""
        self._entries.remove(self._policy(node))

    def first(self) -> NodeId | None:
        """Return the candidate that goes first; None when there is none."""
        entries = self._entries
        return entries[0][-1] if entries else None

    def window(self, size: int) -> list[NodeId]:
        """Return the first ``size`` candidates in order."""
        return [entry[-1] for entry in islice(self._entries, size)]

    def clear(self) -> None:
        """Take every candidate out."""
        self._entries.clear()
