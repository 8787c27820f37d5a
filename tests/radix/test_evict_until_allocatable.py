"""Evicting until a size is there (BEHAVIOUR 55; CONTRACT 46-51)."""

from __future__ import annotations

import pytest

from radix import EvictParams, EvictResult, evict_until_allocatable
from tests.builders import make_allocator, make_world


class OnePageCache:
    """A cache with nothing but ``evict``: frees one given page a call."""

    def __init__(self, allocator, pages):
        self.allocator, self.pages, self.calls = allocator, pages, 0

    def evict(self, params: EvictParams) -> EvictResult:
        self.calls += 1
        if not self.pages:
            return EvictResult(num_tokens_evicted=0)
        self.allocator.free_pages([self.pages.pop(0)])
        return EvictResult(num_tokens_evicted=self.allocator.page_size)


def make_tight():
    """Make a 4-rank allocator whose class 3 is all held; returns it and class 3's pages."""
    allocator = make_allocator(16, 4, shard_size=4)
    pages = [int(allocator.alloc_cyclic_pages(3, 1)[0]) for _ in range(4)]
    return allocator, pages


def test_two_one_page_rounds_lift_the_floor_by_two():
    """The size is read again after each round."""
    allocator, pages = make_tight()
    cache = OnePageCache(allocator, pages)
    assert allocator.available_size() == 0
    assert evict_until_allocatable(cache, allocator, 2 * 4 * 16)
    assert (cache.calls, allocator.available_size()) == (2, 2 * 4 * 16)


def test_a_dry_tree_is_asked_once():
    """No hang, no exception, the need is unmet."""
    allocator, _ = make_tight()
    cache = OnePageCache(allocator, [])
    assert not evict_until_allocatable(cache, allocator, 64)
    assert cache.calls == 1


def test_a_need_that_is_met_evicts_nothing():
    """Not one call."""
    allocator = make_allocator(16, 4, shard_size=4)
    cache = OnePageCache(allocator, [])
    assert evict_until_allocatable(cache, allocator, allocator.available_size())
    assert cache.calls == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_it_works_with_any_allocator(page_size):
    """A stock pool gets exactly the shortfall."""
    world = make_world(page_size, 16)
    world.insert(range(16 * page_size))
    assert evict_until_allocatable(world.cache, world.allocator, 3 * page_size)
    assert world.allocator.available_size() == 3 * page_size
    assert not evict_until_allocatable(world.cache, world.allocator, 17 * page_size)
    world.check()


def test_a_sharded_cache_gives_the_pages_of_the_short_class():
    """The floor covers the need and the other classes keep what they have."""
    world = make_world(1, 4, shard_size=4)
    for letter in range(4):
        world.insert([letter, 9], base=0)
    assert world.allocator.class_free_page_counts() == [0, 0, 4, 4]
    assert evict_until_allocatable(world.cache, world.allocator, 4)
    assert min(world.allocator.class_free_page_counts()) == 1
    assert world.cache.total_size() == 6
    world.check()
