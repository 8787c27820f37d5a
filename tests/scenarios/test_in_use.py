"""What a running request uses is never evicted, and what the tree holds is never freed for it."""

from __future__ import annotations

import numpy as np
import pytest

from alloc import PageState
from tests.builders import make_req, make_world


def test_a_held_parent_stays_when_its_last_child_goes():
    """D2: the clean-up of an evicted child took a parent that somebody still held."""
    world = make_world()
    world.insert(range(8))
    receipt = world.lock(range(4))
    assert world.evict(8) == 4
    parent = world.node(range(4))
    assert (len(parent.children), world.sizes()) == (0, (0, 4))
    assert world.evict(8) == 0
    world.cache.dec_lock_ref(receipt)
    assert world.evict(8) == 4
    assert world.core.num_nodes() == 0
    world.check()


def test_a_chunk_is_locked_by_the_request_that_cached_it():
    """D4: pages inserted in mid-prefill were evicted under the request that went on."""
    world = make_world(4)
    req = make_req(range(32))
    world.start(req)
    world.extend(req, 16)
    world.cache.cache_unfinished_req(req)
    assert world.evict(16) == 0
    assert world.row(req) == world.cached_pages()
    world.extend(req, 16)
    world.finish(req)
    assert world.evict(16) == 16
    world.check()


@pytest.mark.parametrize("leave", ["abort", "retract"])
def test_leaving_in_mid_prefill_keeps_what_the_tree_holds(leave):
    """D5: an abort freed pages that the tree showed to others from then on."""
    world = make_world(4)
    req = make_req(range(20))
    world.start(req)
    world.extend(req, 8)
    world.cache.cache_unfinished_req(req)
    kept = world.row(req)
    world.extend(req, 4)
    (tail,) = world.row(req)[2:]
    getattr(world.cache, leave)(req)
    assert world.match(range(20)).pages.tolist() == kept
    assert world.allocator.free_list.all_in(np.array([tail]), PageState.FREE)
    assert world.held_pages() == []
    world.check()


def test_a_request_dropped_before_its_first_chunk_leaves_nothing():
    """H8: pages of a torn-down request were never returned."""
    world = make_world(4)
    req = make_req(range(12))
    world.start(req)
    world.extend(req, 12)
    world.cache.abort(req)
    assert world.allocator.available_size() == 64 * 4
    assert world.peek_len(range(12)) == 0
    world.check()
