"""The workloads that the tree is measured on, seeded: prompts as int64 arrays in arrival order.

a    2,000 chats of 5 turns, about 300 tokens a turn, 20 system prompts of 1,000; shuffled
b    200 agents that grow to 64k tokens in steps of 2k
c    unique prompts of 4k tokens; the pool holds a quarter of them
d    20,000 unique prompts of 512 tokens; the pool holds a quarter of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = NDArray[np.int64]
VOCABULARY = 128_000


@dataclass(frozen=True)
class Workload:
    """Prompts and the pool that serves them.

    Attributes:
        name: its letter.
        pool_tokens: tokens that the pool holds.
        prompts: makes the prompts, the same ones at every call.
    """

    name: str
    pool_tokens: int
    prompts: Callable[[], Iterator[Tokens]]


def chats(count: int, turns: int = 5, seed: int = 1) -> Iterator[Tokens]:
    """Yield growing chats under shared system prompts; the chats' turns are interleaved."""
    rng = np.random.default_rng(seed)
    systems = rng.integers(0, VOCABULARY, (20, 1000))
    history = [systems[rng.integers(0, len(systems))] for _ in range(count)]
    order = np.repeat(np.arange(count), turns)
    rng.shuffle(order)
    for chat in order.tolist():
        turn = rng.integers(0, VOCABULARY, int(rng.integers(150, 451)))
        history[chat] = np.concatenate([history[chat], turn])
        yield history[chat]


def agents(count: int, steps: int = 32, step_tokens: int = 2048, seed: int = 2) -> Iterator[Tokens]:
    """Yield contexts that grow step by step, all agents in turn."""
    rng = np.random.default_rng(seed)
    contexts = [rng.integers(0, VOCABULARY, steps * step_tokens) for _ in range(count)]
    for step in range(1, steps + 1):
        for context in contexts:
            yield context[: step * step_tokens]


def unique(count: int, tokens: int, seed: int = 3) -> Iterator[Tokens]:
    """Yield prompts that share nothing."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield rng.integers(0, VOCABULARY, tokens)


def workloads(scale: float) -> dict[str, Workload]:
    """Return the workloads by letter; ``scale`` shrinks the number of chats, agents, prompts."""

    def scaled(count: int) -> int:
        return max(4, int(count * scale))

    a, b, c, d = scaled(2000), scaled(200), scaled(4000), scaled(20_000)
    return {
        "a": Workload("a", a * 5 * 450 + 40_000, lambda: chats(a)),
        "b": Workload("b", b * 65_536 + 4096, lambda: agents(b)),
        "c": Workload("c", c * 4096 // 4, lambda: unique(c, 4096)),
        "d": Workload("d", d * 512 // 4, lambda: unique(d, 512)),
    }
