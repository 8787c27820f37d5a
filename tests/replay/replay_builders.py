"""Builders and obvious references for the replay tests."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from replay.trace import Request, TraceInfo

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
TRACES_MISSING = f"needs the public traces in {TRACES}"

BLOCK_INFO = TraceInfo("made", "made", "plain", 4, "ceil", "global", "none")
TOKEN_INFO = TraceInfo("made", "made", "plain", 1, "none", "global", "none")


@dataclass
class ListReader:
    """A trace that is a list."""

    info: TraceInfo
    items: Sequence[Request]
    rewindable: bool = True

    def progress(self) -> float:
        return 0.0

    def __iter__(self) -> Iterator[Request]:
        return iter(self.items)


def make_block_reader(prompts: Iterable[tuple[list[int], int]], block_size: int = 4) -> ListReader:
    """Make a ceil block trace from (ids, input_length) pairs."""
    info = replace(BLOCK_INFO, block_size=block_size)
    return ListReader(info, [Request(length, ids) for ids, length in prompts])


def make_token_reader(prompts: Iterable[list[int]]) -> ListReader:
    """Make a token trace."""
    return ListReader(TOKEN_INFO, [Request(len(ids), ids) for ids in prompts])


def write_lines(path: Path, rows: Iterable[object]) -> Path:
    """Write JSON lines; strings go in as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def mooncake(input_length: int, ids: list[int], timestamp: int = 0) -> dict[str, object]:
    """Make one Mooncake line."""
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": 1,
        "hash_ids": ids,
    }


def lru_hits(prompts: Iterable[Sequence[object]], capacity: int) -> list[int]:
    """Return the cached leading pages of each prompt, by a block-level LRU of whole paths.

    A path is touched deepest first, so the leaf is the first victim; of a prompt longer than the
    cache the leading pages stay.
    """
    cached: OrderedDict[tuple[object, ...], None] = OrderedDict()
    hits = []
    for prompt in prompts:
        paths = [tuple(prompt[: i + 1]) for i in range(min(len(prompt), capacity))]
        hit = 0
        while hit < len(paths) and paths[hit] in cached:
            hit += 1
        hits.append(hit)
        for path in reversed(paths):
            cached[path] = None
            cached.move_to_end(path)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits


def seen_hits(prompts: Iterable[Sequence[object]]) -> list[int]:
    """Return the leading pages of each prompt that an earlier one had: no cache does better."""
    seen: set[tuple[object, ...]] = set()
    hits = []
    for prompt in prompts:
        paths = [tuple(prompt[: i + 1]) for i in range(len(prompt))]
        hit = 0
        while hit < len(paths) and paths[hit] in seen:
            hit += 1
        hits.append(hit)
        seen.update(paths)
    return hits


def rate_of(definition: str, rows: Sequence[tuple[int, int, int]], page: int) -> Fraction:
    """Return the hit rate of (cached, pages, input_length) rows straight from the definition."""
    if definition == "D4":
        parts = [Fraction(k, b) if b else Fraction(0) for k, b, _ in rows]
        return sum(parts, Fraction(0)) / len(rows)
    if definition == "D1":
        return _quotient(sum(k for k, _, _ in rows), sum(b for _, b, _ in rows))
    if definition == "D3":
        usable = sum(min(k * page, max(n - 1, 0) // page * page) for k, _, n in rows)
        return _quotient(usable, sum(n for _, _, n in rows))
    counted = rows[len(rows) // 2 :] if definition == "D5" else rows
    return _quotient(sum(min(k * page, n) for k, _, n in counted), sum(n for _, _, n in counted))


def _quotient(hits: int, total: int) -> Fraction:
    return Fraction(hits, total) if total else Fraction(0)
