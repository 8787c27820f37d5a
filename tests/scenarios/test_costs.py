"""What a call costs does not grow with what it does not touch. Counted, never timed."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from radix import InsertParams, MatchPrefixParams, RadixKey
from tests.builders import make_req, make_world


def calls_of(function: Callable[[], Any]) -> int:
    """Return how many functions a call enters, Python's own and built in."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what a collection finalises would be counted too
    sys.setprofile(trace)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def calls_to_evict_one(leaves: int, policy: str) -> int:
    """Return the most calls of any of some one-page evictions."""
    world = make_world(1, leaves, policy)
    for i in range(leaves):
        world.insert([i])
    return max(calls_of(lambda: world.evict(1)) for _ in range(20))


@pytest.mark.parametrize("policy", ["lru", "slru", "priority"])
def test_evicting_a_page_costs_the_same_under_many_leaves(policy):
    """W1: each eviction built a heap of all leaves."""
    assert calls_to_evict_one(5_000, policy) <= calls_to_evict_one(100, policy) + 10


def calls_of_chunks(num_chunks: int, chunk: int) -> list[int]:
    """Return the calls of each insert of a prompt that grows by a chunk, with a handle each."""
    world = make_world(64, num_chunks * chunk // 64)
    key, pages = RadixKey(range(num_chunks * chunk)), world.draw(world.num_pages)
    costs, handle = [], None
    for stop in range(chunk, len(key) + 1, chunk):
        params = InsertParams(key[:stop], pages=pages[: stop // 64], handle=handle)
        costs.append(calls_of(lambda params=params: world.cache.insert(params)))
        handle = world.cache.match_prefix(MatchPrefixParams(key[:stop])).handle
    assert world.core.num_nodes() == num_chunks
    return costs


def test_a_chunk_costs_nodes_and_never_tokens():
    """W2: each chunk copied and boxed all tokens before it."""
    costs = calls_of_chunks(64, 256)
    assert costs == calls_of_chunks(64, 4_096)
    assert all(later - earlier <= 3 for earlier, later in pairwise(costs[1:]))


def test_a_long_key_is_bytes_not_objects():
    """W2: a token was an object of its own somewhere."""
    world, total = make_world(16, 65_536), 2**20
    tokens, pages = np.arange(total), world.draw(65_536)
    tracemalloc.start()
    world.insert(tokens, pages)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 9 * total
    assert peak < 40 * total


def test_asking_about_a_queue_changes_nothing():
    """W3: each step matched the whole queue, and split and refreshed the tree by it."""
    world = make_world(4, 256)
    for i in range(10):
        world.insert([i // 3] * 8 + [i] * 8)
    queue = [make_req([i // 3] * (4 + i % 9) + [i] * 8) for i in range(50)]
    before = (world.cache.state_digest(), world.core.num_nodes(), world.core.frontier_ids())
    lengths = {tuple(world.peek_len(req.tokens()) for req in queue) for _ in range(10)}
    assert len(lengths) == 1
    assert before == (
        world.cache.state_digest(),
        world.core.num_nodes(),
        world.core.frontier_ids(),
    )
