"""Leases: requests in flight that share an uncached first page get one rotation base.

Two requests that are planned before either inserts would otherwise start their chains in different
classes, and the second insert would be declined. A lease holds the base of a chain that is not in
the tree yet, from planning until the first insert that attaches, or finish, abort and retract.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Chain:
    """A chain in flight: its base and the requests that hold it."""

    base: int
    holders: int = 0


@dataclass(slots=True, eq=False)
class RotationLease:
    """One request's share of a chain's base. Given back once; a second time does nothing.

    Attributes:
        first_page: namespace and first page of the chain.
        chain: what the share is of.
        live: False once given back.
    """

    first_page: Hashable
    chain: _Chain
    live: bool = True

    @property
    def base(self) -> int:
        """The chain's rotation base."""
        return self.chain.base


class LeaseTable:
    """Bases of chains in flight, counted by request. Every call is O(1)."""

    __slots__ = ("_chains",)

    def __init__(self) -> None:
        self._chains: dict[Hashable, _Chain] = {}

    def __len__(self) -> int:
        return len(self._chains)

    def base_of(self, first_page: Hashable) -> int | None:
        """Return the base that requests in flight hold for a chain; None without any."""
        chain = self._chains.get(first_page)
        return None if chain is None else chain.base

    def take(self, first_page: Hashable, base: int) -> RotationLease:
        """Hold a chain's base for one more request.

        Raises:
            ValueError: requests in flight hold another base for this chain.
        """
        chain = self._chains.get(first_page) or _Chain(base)
        if chain.base != base:
            raise ValueError(
                f"base {base} contradicts the lease of base {chain.base} on this chain"
            )
        self._chains[first_page] = chain
        chain.holders += 1
        return RotationLease(first_page, chain)

    def give_back(self, lease: RotationLease | None) -> None:
        """Release one request's share; the chain goes when the last holder does."""
        if lease is None or not lease.live:
            return
        lease.live = False
        lease.chain.holders -= 1
        if not lease.chain.holders and self._chains.get(lease.first_page) is lease.chain:
            del self._chains[lease.first_page]

    def clear(self) -> None:
        """Forget every chain; leases from before give back nothing."""
        self._chains.clear()

    def digest_items(self) -> list[tuple[Hashable, tuple[int, int]]]:
        """Return the chains in order of their first lease."""
        return [(page, (chain.base, chain.holders)) for page, chain in self._chains.items()]
