"""Arguments, results and counters of a tiered cache."""

from __future__ import annotations

from dataclasses import dataclass

from radix import EvictResult, MatchResult, NodeId, RadixKey

WRITE_BACK = "write_back"
WRITE_THROUGH = "write_through"
WRITE_NONE = "none"
WRITE_POLICIES = (WRITE_BACK, WRITE_THROUGH, WRITE_NONE)


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """When the device's pages are copied to the host.

    Attributes:
        name: ``write_back``, when they are evicted; ``write_through``, when a path has been
            matched ``hits`` times; ``none``, never.
        hits: see ``write_through``.

    Raises:
        ValueError: an unknown name, or hits below 1.
    """

    name: str = WRITE_BACK
    hits: int = 1

    def __post_init__(self) -> None:
        """Check the name and the hits."""
        if self.name not in WRITE_POLICIES:
            raise ValueError(
                f"write policy {self.name!r} is unknown; choose one of {', '.join(WRITE_POLICIES)}"
            )
        if self.hits < 1:
            raise ValueError(f"hits={self.hits} must be at least 1")


@dataclass(frozen=True, slots=True, eq=False)
class TieredMatch:
    """What a key found on the device, and beyond it on the host.

    Attributes:
        key: what was matched.
        device: the device's match; its receipt, where locked, is the caller's to release.
        host_hit_length: tokens past the device's match that can be loaded back.
        file_hit_length: those of them that this match brought back from blobs.
        last_host_node: the host's deepest node of the key; its root where that is not past the
            device's match.
    """

    key: RadixKey
    device: MatchResult
    host_hit_length: int
    file_hit_length: int
    last_host_node: NodeId


@dataclass(frozen=True, slots=True)
class TieredEvictResult(EvictResult):
    """What an eviction freed, and what became of it; the parts sum to ``num_tokens_evicted``.

    Attributes:
        num_tokens_kept: have a copy on the host that could be loaded back when the eviction ended.
        num_tokens_dropped: have none. Copies under another rotation base than what is left of the
            chain on the device count as none: they come back once that has gone too.
    """

    num_tokens_kept: int = 0
    num_tokens_dropped: int = 0


@dataclass(slots=True)
class TierCounters:
    """What happened since the start, in pages unless it says otherwise.

    Attributes:
        stored: copied to the host.
        kept: evicted from the device with a copy that could be loaded back.
        dropped: evicted from the device without one.
        loaded: copied back to the device.
        missed: wanted back and recomputed: no room, or another rotation base on the device or in
            the leases of requests in flight.
        refused_transfers: transfers that raised ``TransferError``, in calls.
    """

    stored: int = 0
    kept: int = 0
    dropped: int = 0
    loaded: int = 0
    missed: int = 0
    refused_transfers: int = 0
