"""Generated chats under one hot system prompt: the traffic that one rotation base suits least."""

from __future__ import annotations

from replay.synthetic import ChatSpec, GeneratedReader, Range

PAGE = 16
SYSTEM_PAGES = 40
CONCURRENT = 200
TURN_PAGES = {"1": Range(1, 1), "1-3": Range(1, 3), "1-9": Range(1, 9)}
"""Pages that a turn adds, by the name that tables show."""


def hot_prompt_chats(turn: str, requests: int, seed: int) -> GeneratedReader:
    """Make 200 chats in flight of 1 to 10 turns each, all behind one prompt of 40 pages.

    Args:
        turn: Key of `TURN_PAGES`.
        requests: Number of prompts.
        seed: Seed of the trace.
    """
    pages = TURN_PAGES[turn]
    spec = ChatSpec(
        systems=1,
        system_tokens=Range(SYSTEM_PAGES * PAGE, SYSTEM_PAGES * PAGE),
        turn_tokens=Range(pages.low * PAGE, pages.high * PAGE),
        answer_tokens=Range(0, 0),
        turns=Range(1, 10),
        concurrent=CONCURRENT,
    )
    return GeneratedReader(
        f"turns of {turn} pages", "chats under one prompt", spec, seed=seed, requests=requests
    )


def pool_pages(turn: str) -> int:
    """Return the pages of a pool, all ranks together, that is under pressure: 4 turns a chat."""
    pages = TURN_PAGES[turn]
    return 4 * CONCURRENT * (pages.low + pages.high) // 2
