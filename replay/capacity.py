"""The grammar of `--capacity`, and its conversion to whole pages.

    capacities := item ("," item)*
    item       := amount | amount ":" amount ":" step | "unbounded"
    step       := amount (added) | "x" number (multiplied)
    amount     := number [k | M | G | Ki | Mi | Gi] [p]

An amount is in tokens, or in pages with a final `p`. A range includes its stop where a step
lands on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from replay.errors import ReplayError

MAX_CAPACITIES = 100
MAX_PAGES = 1 << 27

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(k|M|G|Ki|Mi|Gi)?(p)?", re.ASCII)
_SCALE = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_FORMS = "give tokens (500k, 5M), pages (1000p), a range (1M:5M:1M, 1M:16M:x2) or unbounded"


@dataclass(frozen=True, slots=True)
class Capacity:
    """One capacity as the user gave it.

    Attributes:
        amount: Tokens or pages; None for unbounded.
        in_pages: Whether `amount` counts pages.
        text: What the user wrote, for error messages.
    """

    amount: int | None
    in_pages: bool
    text: str

    def pages(self, page_size: int, working_set: int) -> int:
        """Return the capacity in whole pages, rounded down.

        Args:
            page_size: Tokens in a page.
            working_set: Pages that an unbounded pool needs.

        Raises:
            ReplayError: If less than one page, or more than `MAX_PAGES`, results.
        """
        if self.amount is None:
            return max(1, working_set)
        pages = self.amount if self.in_pages else self.amount // page_size
        if pages < 1:
            raise ReplayError(
                f"--capacity {self.text}: less than one page of {page_size} tokens; "
                f"give at least {page_size}"
            )
        if pages > MAX_PAGES:
            raise ReplayError(
                f"--capacity {self.text}: {pages} pages of {page_size} tokens; at most "
                f"{MAX_PAGES} pages can be replayed, use larger pages or 'unbounded'"
            )
        return pages


UNBOUNDED = Capacity(None, False, "unbounded")


def parse_capacities(text: str) -> tuple[Capacity, ...]:
    """Read a list of capacities.

    Raises:
        ReplayError: If an item is not of the grammar, is zero, or too many result.

    >>> [c.amount for c in parse_capacities("500k,1.5M")]
    [500000, 1500000]
    >>> [c.amount for c in parse_capacities("1M:8M:x2")]
    [1000000, 2000000, 4000000, 8000000]
    >>> [(c.amount, c.in_pages) for c in parse_capacities("10p:30p:10p")]
    [(10, True), (20, True), (30, True)]
    """
    capacities: dict[tuple[int | None, bool], Capacity] = {}
    for item in text.split(","):
        for capacity in _parse_item(item.strip()):
            capacities.setdefault((capacity.amount, capacity.in_pages), capacity)
            if len(capacities) > MAX_CAPACITIES:
                raise ReplayError(
                    f"--capacity {item.strip()}: more than {MAX_CAPACITIES} capacities; "
                    "use a larger step"
                )
    return tuple(capacities.values())


def _parse_item(item: str) -> Iterator[Capacity]:
    if item == UNBOUNDED.text:
        yield UNBOUNDED
        return
    parts = item.split(":")
    if len(parts) == 1:
        yield _amount(item, item)
    elif len(parts) == 3:
        yield from _parse_range(item, parts)
    else:
        raise ReplayError(f"--capacity {item!r}: a range is start:stop:step; {_FORMS}")


def _amount(text: str, item: str) -> Capacity:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ReplayError(f"--capacity {item!r}: {text!r} is no amount; {_FORMS}")
    number, scale, in_pages = match.groups()
    amount = int(Fraction(number) * _SCALE[scale or ""])
    if amount < 1:
        raise ReplayError(f"--capacity {item!r}: a capacity must be at least one page; {_FORMS}")
    return Capacity(amount, in_pages is not None, text)


def _parse_range(item: str, parts: list[str]) -> Iterator[Capacity]:
    start, stop = _amount(parts[0], item), _amount(parts[1], item)
    first, last = _of(start), _of(stop)
    if start.in_pages != stop.in_pages or first > last:
        raise ReplayError(f"--capacity {item!r}: needs start <= stop, in one unit; {_FORMS}")
    value = Fraction(first)
    add, factor = _step(parts[2], item, start)
    while value <= last:
        amount = int(value)
        yield Capacity(amount, start.in_pages, f"{amount}{'p' if start.in_pages else ''}")
        value = value * factor + add


def _of(capacity: Capacity) -> int:
    assert capacity.amount is not None, "a range is made of amounts"
    return capacity.amount


def _step(text: str, item: str, start: Capacity) -> tuple[int, Fraction]:
    """Return what a step adds and what it multiplies by."""
    if not text.startswith("x"):
        step = _amount(text, item)
        if step.in_pages != start.in_pages:
            raise ReplayError(f"--capacity {item!r}: start and step differ in unit; {_FORMS}")
        return _of(step), Fraction(1)
    if not re.fullmatch(r"\d+(\.\d+)?", text[1:], re.ASCII) or Fraction(text[1:]) <= 1:
        raise ReplayError(f"--capacity {item!r}: {text!r} must be x and a number above 1; {_FORMS}")
    return 0, Fraction(text[1:])
