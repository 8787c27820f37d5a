"""The cache switched off, and flushed with work in flight."""

from __future__ import annotations

import pytest

from alloc import PageState
from radix import alloc_for_extend
from tests.builders import make_req, make_world


@pytest.mark.parametrize("shard_size", [1, 2])
def test_a_cache_that_is_off_serves_every_call_and_keeps_nothing(shard_size):
    """Y1: the path without a cache was another one, and broke."""
    world = make_world(4, disable=True, shard_size=shard_size)
    for _ in range(2):
        req = make_req(range(16), fill_len=16)
        assert world.cache.match_req(req) == 0
        assert alloc_for_extend(world.cache, [req]) is not None
        world.cache.cache_unfinished_req(req)
        assert world.evict(100) == 0
        world.finish(req)
    pages = world.draw(2)
    result = world.insert(range(8), pages)
    assert (result.prefix_len, result.pages.tolist()) == (0, pages.tolist())
    assert world.held_pages() == sorted(pages.tolist())
    with world.cache.locked(world.core.root_node_handle()):
        assert world.match(range(8)).device_prefix_len == 0
    world.allocator.free_pages(pages)
    assert (world.cache.total_size(), world.free_pages()) == (0, world.num_pages)
    world.check()


def test_traffic_without_reuse_keeps_the_pool_whole():
    """Y1: a cache that is on and never hit."""
    world = make_world(4, 8)
    for i in range(50):
        req = make_req(range(100 * i, 100 * i + 10), fill_len=10)
        assert world.cache.match_req(req) == 0
        assert alloc_for_extend(world.cache, [req]) is not None
        world.finish(req)
    assert world.free_pages() + len(world.cached_pages()) == 8
    world.check()


def test_a_lock_from_before_a_flush_is_refused_by_name():
    """Z1: releasing it walked into the tree that was gone."""
    world = make_world()
    world.insert(range(8))
    old = world.lock(range(8))
    world.cache.reset()
    world.insert(range(4))
    with pytest.raises(ValueError, match="before a reset"):
        world.cache.dec_lock_ref(old)
    assert world.sizes() == (4, 0)
    receipt = world.lock(range(4))
    world.cache.dec_lock_ref(receipt)
    assert world.evict(8) == 4
    world.check()


def test_a_flush_does_not_wait_for_requests_that_hold_nothing():
    """Z2: requests in the queue made the cache look busy."""
    world = make_world(4)
    world.insert(range(8))
    queue = [make_req(range(8)) for _ in range(3)]
    world.cache.reset()
    assert world.free_pages() == 64
    assert world.run(queue[0]) == 0
    world.check(queue[0])


def test_a_flush_under_a_running_request_leaves_it_its_pages():
    """Z2: it keeps what it holds, and leaves by abort; the tree's pages are free at once."""
    world = make_world(4)
    world.insert(range(8))
    req = make_req(range(16), fill_len=16)
    assert world.cache.match_req(req) == 8
    assert alloc_for_extend(world.cache, [req]) is not None
    world.cache.reset()
    census = world.allocator.page_census()
    assert (census[PageState.CACHED], census[PageState.HELD]) == (0, 2)
    with pytest.raises(ValueError, match="before a reset"):
        world.cache.cache_finished_req(req)
    world.cache.abort(req)
    assert world.free_pages() == 64
    world.check()


def test_flushing_an_empty_cache_changes_nothing_to_see():
    """PR13: a fresh cache told its listeners that everything had been dropped."""
    world = make_world(4)
    before = world.allocator.state_digest()
    world.cache.reset()
    assert before == world.allocator.state_digest()
    assert (world.sizes(), world.core.num_nodes()) == ((0, 0), 0)
    assert world.insert(range(8)).prefix_len == 0
