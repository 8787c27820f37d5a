"""Two requests that computed the same tokens: one copy stays, and everybody reads that one."""

from __future__ import annotations

import numpy as np

from alloc import PageState
from radix import InsertParams
from tests.builders import make_req, make_world


def test_the_second_request_reads_the_first_ones_pages():
    """J1: duplicates were freed while the request's row still pointed at them."""
    world = make_world(4)
    first, second = make_req(range(17)), make_req(range(17))
    for req in (first, second):
        world.start(req)
        world.extend(req, 16)
    own = np.array(world.row(second))
    world.cache.cache_unfinished_req(first)
    world.cache.cache_unfinished_req(second)
    assert world.row(second) == world.row(first)
    assert second.prefix_indices.tolist() == first.prefix_indices.tolist()
    assert world.allocator.free_list.all_in(own, PageState.FREE)
    world.finish(first, kv_len_to_handle=16)
    assert world.evict(100) == 0
    world.extend(second, 1)
    world.finish(second)
    assert world.evict(100) == 16
    assert world.free_pages() == 64
    world.check()


def test_what_was_inserted_is_found_at_once():
    """J2: insert and match stopped at different places, so live slots counted as duplicates."""
    world = make_world(4)
    world.insert(range(8))
    for tokens in ([*range(8), 50, 51, 52, 53], [*range(4), 60, 61, 62, 63], range(8)):
        result = world.insert(tokens)
        match = world.match(tokens)
        assert match.device_prefix_len == len(list(tokens))
        assert match.pages.tolist() == result.pages.tolist()
        assert match.last_device_node == result.last_device_node
    world.check()


def test_only_pages_that_the_tree_lacks_are_taken_over():
    """PR4: a caller that claimed too long a prefix as the tree's lost its pages for good."""
    world = make_world()
    world.insert(range(4))
    own = world.draw(8)
    result = world.insert(range(8), own)
    assert (result.prefix_len, result.duplicate_pages.tolist()) == (4, own[:4].tolist())
    assert sum(world.sizes()) == 8
    assert world.free_pages() == 56
    world.check()


def test_the_trees_own_pages_in_a_value_are_not_duplicates():
    """PR4: what the caller got from its match goes back in, and nothing of it is freed."""
    world = make_world()
    world.insert(range(4))
    match = world.match(range(8))
    value = np.concatenate([match.device_indices, world.slots(world.draw(4))])
    result = world.cache.insert(InsertParams(world.key(range(8)), value=value))
    assert len(result.duplicate_pages) == 0
    assert sum(world.sizes()) == 8
    world.check()
