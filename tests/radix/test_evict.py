"""Evicting (BEHAVIOUR 40; DECISIONS 13, 22)."""

from __future__ import annotations

import numpy as np
import pytest

from alloc import PageState
from radix import EvictParams, EvictResult
from tests.builders import make_world


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("wanted", [0, 1, 3, 4, 5, 16, 17, 63, 64, 65, 10_000])
def test_eviction_frees_the_whole_pages_that_cover_the_need(page_size, wanted):
    """Never a page beyond need, never less while there is some."""
    world = make_world(page_size)
    world.insert(range(64))
    expected = min(64, -(-wanted // page_size) * page_size)
    free = world.allocator.available_size()
    assert expected == world.evict(wanted)
    assert free + expected == world.allocator.available_size()
    assert 64 - expected == world.peek_len(range(64))
    world.check()


def test_a_leaf_is_trimmed_from_its_tail():
    """The front stays, with the same pages."""
    world = make_world(2)
    pages = world.insert(range(8)).pages.tolist()
    assert world.evict(3) == 4
    assert pages[:2] == world.match(range(8)).pages.tolist()
    assert world.allocator.free_list.all_in(np.array(pages[2:]), PageState.FREE)
    assert world.core.num_nodes() == 1
    world.check()


def test_a_parent_is_a_candidate_when_its_last_child_goes():
    """Never an ancestor before its descendants, whatever its stamp."""
    world = make_world(1)
    a = world.insert([1, 2, 3]).pages.tolist()
    b = world.insert([1, 2, 4]).pages.tolist()
    world.match([1, 2, 3])
    assert [p for _ in range(4) for p in evicted(world, 1)] == [b[2], a[2], a[1], a[0]]
    assert world.core.num_nodes() == 0
    world.check()


def evicted(world, num_tokens):
    before = set(world.cached_pages())
    world.evict(num_tokens)
    return sorted(before - set(world.cached_pages()))


def test_the_locked_are_passed_over():
    """The next in order goes instead; when all is locked nothing does."""
    world = make_world(1)
    world.insert([1, 1])
    b = world.insert([2, 2]).pages.tolist()
    receipt = world.lock([1, 1])
    world.match([2, 2])
    assert sorted(b) == evicted(world, 2)
    assert world.evict(1) == 0
    world.cache.dec_lock_ref(receipt)
    assert world.evict(5) == 2


def test_a_trimmed_leaf_is_extended_by_a_new_node():
    """Insert never grows a node in place; the old tail's tokens are forgotten."""
    world = make_world(1)
    node = world.insert([1, 2, 3, 4, 5]).last_device_node
    world.evict(1)
    assert world.peek_len([1, 2, 3, 4, 5]) == 4
    tail = world.insert([1, 2, 3, 4, 5, 6], world.draw(6))
    assert (tail.prefix_len, world.core.num_nodes()) == (4, 2)
    assert world.core.node_by_id(node).num_pages == 4
    assert world.peek_len([1, 2, 3, 4, 5, 6]) == 6
    world.check()


def test_evicted_pages_are_drawn_again_first():
    """Last in, first out: the pool stays warm."""
    world = make_world(4)
    pages = world.insert(range(16)).pages.tolist()
    world.evict(8)
    assert pages[2:] == world.draw(2).tolist()


def test_nothing_is_wanted_nothing_goes():
    """``evict(0)`` changes nothing at all."""
    world = make_world(1)
    world.insert([1, 2])
    before = world.cache.state_digest()
    assert world.evict(0) == 0
    assert before == world.cache.state_digest()


def test_a_negative_need_is_an_error():
    """Nothing changed."""
    world = make_world(1)
    world.insert([1, 2])
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match="num_tokens=-3"):
        world.cache.evict(EvictParams(-3))
    assert before == world.cache.state_digest()


def test_an_empty_tree_gives_nothing():
    """No exception, no hang."""
    assert make_world(1).evict(10) == 0


def test_a_result_can_be_made_by_hand():
    """Stubs of a cache need only the number."""
    assert EvictResult(num_tokens_evicted=3).num_tokens_evicted == 3
    assert EvictResult().num_tokens_evicted == 0


def test_sizes_always_add_up():
    """evictable + protected == cached, at every step."""
    world = make_world(2)
    world.insert(range(12))
    receipt = world.lock(range(4))
    while True:
        assert sum(world.sizes()) == world.cache.total_size() == 2 * len(world.cached_pages())
        world.check()
        if not world.evict(1):
            break
    assert world.sizes() == (0, 4)
    world.cache.dec_lock_ref(receipt)
