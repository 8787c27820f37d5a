"""A cache that shares nothing (BEHAVIOUR 46)."""

from __future__ import annotations

import pytest

from radix import MatchPrefixParams
from tests.builders import BareKv, FakeKv, make_req, make_world


def make_disabled(page_size=4):
    return make_world(page_size, disable=True)


def test_nothing_matches_and_nothing_is_kept():
    """Inserts leave the pages with the caller."""
    world = make_disabled()
    pages = world.draw(2)
    result = world.insert(range(8), pages)
    assert (result.prefix_len, result.rotation_tail_declined) == (0, False)
    assert result.duplicate_pages.tolist() == []
    assert sorted(pages.tolist()) == world.held_pages()
    for peek in (False, True):
        assert world.match(range(8), peek=peek).device_prefix_len == 0
    assert world.sizes() == (0, 0)
    assert world.core.num_nodes() == 0
    world.allocator.free_pages(pages)
    world.check()


def test_locks_and_evictions_work_on_nothing():
    """The root can be locked; eviction frees nothing."""
    world = make_disabled()
    match = world.cache.match_and_lock(MatchPrefixParams(world.key(range(8))))
    assert world.evict(8) == 0
    world.cache.dec_lock_ref(match.receipt)
    world.cache.reset()
    world.check()


@pytest.mark.parametrize("kv", [FakeKv, BareKv])
@pytest.mark.parametrize("way", ["finish", "no insert", "abort", "retract"])
@pytest.mark.parametrize("length", [3, 8, 10])
def test_a_request_gives_everything_back(length, way, kv):
    """Same calls, no leak, whichever way it ends."""
    world = make_disabled()
    req = make_req(range(length), kv=kv())
    world.run(req, 3)
    world.cache.cache_unfinished_req(req)
    assert world.slots(world.row(req))[:length] == req.prefix_indices.tolist()
    assert req.kv.cache_protected_len == 0
    world.check(req)
    if way in ("abort", "retract"):
        getattr(world.cache, way)(req)
    else:
        world.finish(req, is_insert=way == "finish")
    assert world.free_pages() == world.num_pages
    assert world.pool.available_size() == world.pool.size
    world.check()
