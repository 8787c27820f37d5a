"""Locks: each belongs to its holder, is given back once, and pins exactly what it covers."""

from __future__ import annotations

import pytest

from radix import alloc_for_extend
from tests.builders import make_req, make_world


def test_the_locked_node_itself_is_kept():
    """C1: the walk up counted only the ancestors, so the node in use was evicted."""
    world = make_world()
    world.insert(range(8))
    world.match(range(4))
    receipt = world.lock(range(8))
    assert world.evict(8) == 0
    assert world.sizes() == (0, 8)
    world.cache.dec_lock_ref(receipt)
    assert world.evict(8) == 8


def test_one_holder_can_not_release_the_others_lock():
    """C4: a second release of one handle took another request's protection away."""
    world = make_world()
    world.insert(range(8))
    first, second = world.lock(range(8)), world.lock(range(8))
    world.cache.dec_lock_ref(first)
    with pytest.raises(ValueError, match="used already"):
        world.cache.dec_lock_ref(first)
    assert world.evict(8) == 0
    world.cache.dec_lock_ref(second)
    assert world.evict(8) == 8


def test_a_release_too_many_does_not_weaken_a_later_lock():
    """PR5: one release too many let the next lock be evicted."""
    world = make_world()
    world.insert(range(8))
    receipt = world.lock(range(8))
    world.cache.dec_lock_ref(receipt)
    with pytest.raises(ValueError, match="used already"):
        world.cache.dec_lock_ref(receipt)
    world.lock(range(8))
    assert world.evict(8) == 0
    assert world.sizes() == (0, 8)


@pytest.mark.parametrize("way", ["return", "raise", "explicit"])
def test_a_prefix_looked_up_and_not_used_is_free_again(way):
    """C5: a look-up pinned pages, and only loading them took the pin off."""
    world = make_world(1, 1000)
    world.insert(range(1000))
    node = world.match(range(1000)).last_device_node

    def look() -> None:
        with world.cache.locked(node):
            if way == "raise":
                raise KeyError("recompute")

    if way == "explicit":
        world.cache.dec_lock_ref(world.cache.inc_lock_ref(node))
    elif way == "raise":
        with pytest.raises(KeyError, match="recompute"):
            look()
    else:
        look()
    assert world.cache.protected_size() == 0
    assert world.evict(1000) == 1000


def test_a_retracted_request_may_reach_the_finish_path():
    """C6: its node had been cleared, and the release crashed on None."""
    world = make_world(4)
    req = make_req(range(10))
    world.run(req)
    world.cache.cache_unfinished_req(req)
    world.cache.retract(req)
    before = world.cache.state_digest()
    world.cache.cache_finished_req(req)
    world.cache.retract(req)
    assert before == world.cache.state_digest()
    req.kv.req_pool_idx = world.pool.alloc(1)[0]
    req.fill_len = 0
    world.cache.cache_unfinished_req(req)
    assert world.sizes() == (8, 0)
    world.cache.abort(req)
    world.check()


@pytest.mark.parametrize("shard_size", [1, 4])
def test_a_failed_admission_costs_nothing(shard_size):
    """C7: a match took something that the failure path did not give back."""
    world = make_world(4, 4, shard_size=shard_size)
    world.insert(range(8), base=0)
    before = world.allocator.state_digest()
    for _ in range(10):
        req = make_req(range(400), fill_len=400)
        assert world.cache.match_req(req) == 8
        assert alloc_for_extend(world.cache, [req]) is None
        world.cache.abort(req)
        assert world.sizes() == (8, 0)
    assert before == world.allocator.state_digest()
    assert len(world.cache.leases) == 0
    world.check()


def test_a_node_of_another_tree_is_refused_by_name():
    """C8: a simulator locked a node of a second tree and crashed later."""
    one, other = make_world(), make_world()
    for world in (one, other):
        world.insert(range(8))
    node = other.match(range(8)).last_device_node
    before = one.cache.state_digest()
    with pytest.raises(KeyError, match="another tree"):
        one.cache.inc_lock_ref(node)
    assert before == one.cache.state_digest()
    assert one.allocator.available_size() == 64 - 8


def test_a_node_that_is_gone_can_not_be_locked():
    """V4, PR6: a match was promised pages that an eviction took before the lock."""
    world = make_world()
    world.insert(range(8))
    node = world.match(range(8)).last_device_node
    assert world.evict(8) == 8
    with pytest.raises(KeyError, match="stale"):
        world.cache.inc_lock_ref(node)
    assert world.sizes() == (0, 0)
    world.check()


def test_a_leaf_shorter_than_its_match_is_locked_as_it_is():
    """V4: after a partial eviction the lock covers what is left, and sizes stay whole."""
    world = make_world()
    world.insert(range(8))
    node = world.match(range(8)).last_device_node
    world.evict(3)
    with world.cache.locked(node):
        assert world.sizes() == (0, 5)
    assert world.sizes() == (5, 0)
