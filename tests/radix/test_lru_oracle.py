"""The cache under lru is exactly the block-level oracle (DECISIONS 13)."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix import InsertParams, MatchPrefixParams
from tests.builders import World, make_world


class BlockLru:
    """Blocks by their whole path, least recently used first; a prompt is used deepest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def request(self, ids: list[int]) -> int:
        """Serve one prompt; returns how many leading blocks were cached."""
        paths = [tuple(ids[: i + 1]) for i in range(min(len(ids), self.capacity))]
        hit = 0
        while hit < len(paths) and paths[hit] in self.blocks:
            hit += 1
        for path in reversed(paths):
            self.blocks[path] = None
            self.blocks.move_to_end(path)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)
        return hit


def serve(world: World, ids: list[int]) -> int:
    """Serve one prompt as replay does: match and lock, evict the shortfall, insert, unlock."""
    ids = ids[: world.num_pages]
    key = world.key([token for block in ids for token in [block] * world.page_size])
    match = world.cache.match_and_lock(MatchPrefixParams(key))
    hit = len(match.pages)
    new = len(ids) - hit
    world.evict(max(0, new - world.free_pages()) * world.page_size)
    pages = np.concatenate([match.pages, world.draw(new)])
    world.cache.insert(InsertParams(key, pages=pages, handle=match.handle))
    world.cache.dec_lock_ref(match.receipt)
    return hit


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=40)


@settings(max_examples=150, deadline=None)
@given(prompts, st.integers(1, 12), st.sampled_from([1, 4]))
def test_hits_are_those_of_the_block_oracle(requests, capacity, page_size):
    """Prompt by prompt, and the same blocks are cached after each."""
    world, oracle = make_world(page_size, capacity), BlockLru(capacity)
    for ids in requests:
        assert oracle.request(ids) == serve(world, ids)
        assert len(oracle.blocks) == len(world.cached_pages())
        for path in oracle.blocks:
            tokens = [t for t in path for _ in range(page_size)]
            assert world.peek_len(tokens) == len(tokens)
    world.check()


@pytest.mark.parametrize("capacity", [1, 3, 8, 20])
def test_a_long_random_run_agrees_with_the_oracle(capacity):
    """Deeper chains and more evictions than a shrunk example has."""
    rng = np.random.default_rng(capacity)
    world, oracle = make_world(1, capacity), BlockLru(capacity)
    for _ in range(400):
        ids = rng.integers(0, 2, rng.integers(1, 12)).tolist()
        assert oracle.request(ids) == serve(world, ids)
    world.check()


@settings(max_examples=60, deadline=None)
@given(prompts)
def test_a_larger_cache_never_hits_less(requests):
    """LRU is a stack algorithm, and stays one here."""
    worlds = [make_world(1, capacity) for capacity in (2, 5, 9, 30)]
    for ids in requests:
        hits = [serve(world, ids) for world in worlds]
        assert sorted(hits) == hits
