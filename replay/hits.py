"""Definitions of a hit, D1 to D5: what is counted, over what, in integers.

A request has n input tokens and b pages that have an id or are whole; its first k pages were
cached when it arrived. A page holds `page` tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

DEFAULT = "D2"
MEAN_SCALE = 10**9

_TAIL = "the partial tail counts its own length"

MEANINGS = {
    "D1": "cached leading pages / all pages of the prompts; a partial tail with an id is a page",
    "D2": f"cached leading tokens / all input tokens; {_TAIL}",
    "D3": "cached leading tokens in whole pages, the last token always recomputed: "
    "min(k*page, floor((n-1)/page)*page) / all input tokens",
    "D4": "mean over requests of cached leading pages / pages (a prompt without a page is 0)",
    "D5": f"cached leading tokens / all input tokens, second half of the requests only; {_TAIL}",
}
UNITS = {"D1": "pages", "D2": "tokens", "D3": "tokens", "D4": "1e-9 requests", "D5": "tokens"}


@dataclass(frozen=True, slots=True)
class HitCount:
    """Hits over their denominator; `rate` is their quotient.

    Attributes:
        hits: Numerator, in `UNITS` of the definition.
        total: Denominator, in the same unit.
    """

    hits: int
    total: int

    @property
    def rate(self) -> float:
        """Hits over total; 0.0 for an empty trace."""
        return self.hits / self.total if self.total else 0.0


class HitCounter(Protocol):
    """Counts hits request by request."""

    def record(self, cached: int, pages: int, input_length: int) -> None:
        """Count one request.

        Args:
            cached: Leading pages found in the cache (k), at most `pages`.
            pages: Pages of the request (b).
            input_length: Prompt tokens (n).
        """
        ...

    def count(self) -> HitCount:
        """Return the hits so far."""
        ...


class PageCounter:
    """D1: pages over pages."""

    def __init__(self, page_size: int) -> None:
        self._hits = self._total = 0

    def record(self, cached: int, pages: int, input_length: int) -> None:
        """Count one request."""
        self._hits += cached
        self._total += pages

    def count(self) -> HitCount:
        """Return the hits so far."""
        return HitCount(self._hits, self._total)


class TokenCounter:
    """D2: tokens over tokens."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._hits = self._total = 0

    def record(self, cached: int, pages: int, input_length: int) -> None:
        """Count one request."""
        self._hits += min(cached * self._page_size, input_length)
        self._total += input_length

    def count(self) -> HitCount:
        """Return the hits so far."""
        return HitCount(self._hits, self._total)


class EngineCounter:
    """D3: what an engine skips, since it computes at least the last token."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._hits = self._total = 0

    def record(self, cached: int, pages: int, input_length: int) -> None:
        """Count one request."""
        page = self._page_size
        usable = max(input_length - 1, 0) // page
        self._hits += min(cached, usable) * page
        self._total += input_length

    def count(self) -> HitCount:
        """Return the hits so far."""
        return HitCount(self._hits, self._total)


class MeanCounter:
    """D4: mean of the requests' own fractions.

    Keeps cached pages apart by the number of pages of the prompt, so the sum of fractions is
    rounded once, at the end.
    """

    def __init__(self, page_size: int) -> None:
        self._cached_by_pages: dict[int, int] = {}
        self._requests = 0

    def record(self, cached: int, pages: int, input_length: int) -> None:
        """Count one request."""
        self._requests += 1
        if cached:
            self._cached_by_pages[pages] = self._cached_by_pages.get(pages, 0) + cached

    def count(self) -> HitCount:
        """Return the hits so far, in billionths of a request, rounded down."""
        guard = 10**12
        parts = sum(
            cached * MEAN_SCALE * guard // pages for pages, cached in self._cached_by_pages.items()
        )
        return HitCount(parts // guard, self._requests * MEAN_SCALE)


class SecondHalfCounter:
    """D5: D2 over requests `floor(m/2)` to m - 1 of m.

    Keeps 16 bytes a request, since only the end of the trace tells where its second half begins.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._hits = array("q")
        self._lengths = array("q")

    def record(self, cached: int, pages: int, input_length: int) -> None:
        """Count one request."""
        self._hits.append(min(cached * self._page_size, input_length))
        self._lengths.append(input_length)

    def count(self) -> HitCount:
        """Return the hits of the second half so far."""
        half = len(self._hits) // 2
        return HitCount(sum(self._hits[half:]), sum(self._lengths[half:]))


_COUNTERS: dict[str, Callable[[int], HitCounter]] = {
    "D1": PageCounter,
    "D2": TokenCounter,
    "D3": EngineCounter,
    "D4": MeanCounter,
    "D5": SecondHalfCounter,
}


def make_counter(definition: str, page_size: int) -> HitCounter:
    """Return a fresh counter.

    Args:
        definition: `D1` to `D5`.
        page_size: Tokens in a page.
    """
    return _COUNTERS[definition](page_size)
