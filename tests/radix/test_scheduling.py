"""Placing a batch: bases, room, pages and rows in one step (DECISIONS 24-26; CONTRACT 39-45)."""

from __future__ import annotations

import numpy as np
import pytest

from radix import CacheInitParams, UnifiedRadixCache, alloc_for_extend, preview_extend
from tests.builders import BareKv, FakeReq, World, make_req, make_world

A, B, C = [1] * 4, [2] * 4, [3] * 4


def matched(world: World, tokens: list[int], stop: int | None = None, **fields) -> FakeReq:
    """Make a request that is matched and locked, with its first chunk ending at ``stop``."""
    req = make_req(tokens, fill_len=len(tokens), **fields)
    world.cache.match_req(req)
    req.fill_len = len(tokens) if stop is None else stop
    return req


def owners(world: World, req: FakeReq) -> list[int]:
    return [page % world.shard_size for page in world.row(req)]


@pytest.mark.parametrize("shard_size", [1, 4])
@pytest.mark.parametrize("kv", [None, BareKv])
def test_slots_rows_and_pages_say_the_same(shard_size, kv):
    """Batch order; a cached prefix is written into the row, new pages follow it."""
    world = make_world(4, shard_size=shard_size)
    world.insert(A, base=1)
    fields = {} if kv is None else {"kv": kv()}
    reqs = [matched(world, [*A, *B, 5], **fields), matched(world, [*C, 6, 7])]
    assert [len(req.prefix_indices) for req in reqs] == [4, 0]
    placed = alloc_for_extend(world.cache, reqs)
    rows = [world.row(req) for req in reqs]
    assert placed.pages.tolist() == [*rows[0][1:], *rows[1]]
    expected = [*world.slots(rows[0])[4:9], *world.slots(rows[1])[:6]]
    assert placed.out_cache_loc.tolist() == expected
    assert placed.rotation_bases == [req.kv_rotation_base for req in reqs]
    assert len({*rows[0], *rows[1]}) == 5
    world.check(*reqs)


def test_new_chains_of_a_batch_start_in_different_classes():
    """Each base is resolved at its turn, on the fills that the requests before it leave."""
    world = make_world(4, shard_size=4)
    reqs = [matched(world, [10 + i] * 4 * pages) for i, pages in enumerate((5, 3, 1))]
    placed = alloc_for_extend(world.cache, reqs)
    assert placed.rotation_bases == [0, 1, 0]
    assert world.allocator.class_free_page_counts() == [61, 62, 62, 62]


def test_a_preview_says_what_the_batch_takes():
    """Pages per class, evictable pages per class, rows and bases; and changes nothing."""
    world = make_world(4, 4, shard_size=2)
    world.insert([*A, *B], base=0)
    world.insert([*C, *C, *C], base=1)
    req = matched(world, [*A, 9, 9, 9, 9, 8])
    before = world.cache.state_digest()
    preview = preview_extend(world.cache, [req])
    assert before == world.cache.state_digest()
    assert preview.pages_by_class.tolist() == [1, 1]
    assert preview.free_by_class.tolist() == [2, 1]
    assert preview.evictable_by_class.tolist() == [1, 3]
    assert (preview.rotation_bases, preview.num_rows, preview.free_rows) == ([0], 1, 8)
    assert preview.fits


def test_only_what_is_short_is_evicted():
    """One class lacks a page; the leaf that ends in it gives one, the rest stays."""
    world = make_world(4, 2, shard_size=2)
    world.insert(A, base=0)
    world.insert(B, base=0)
    world.insert(C, base=1)
    req = matched(world, [9] * 8)
    placed = alloc_for_extend(world.cache, [req])
    assert placed.num_tokens_evicted == 4
    assert [world.peek_len(tokens) for tokens in (A, B, C)] == [0, 4, 4]
    world.check(req)


def test_without_aim_the_policy_decides_alone():
    """Older leaves of other classes go first, until the short class has its page."""
    world = make_world(4, 2, shard_size=2)
    params = CacheInitParams(False, world.pool, world.allocator, 4, aimed_eviction=False)
    world.cache = UnifiedRadixCache(params)
    for tokens, base in ((C, 1), (A, 0), (B, 0)):
        world.insert(tokens, base=base)
    req = matched(world, [9] * 8)
    assert alloc_for_extend(world.cache, [req]).num_tokens_evicted == 8
    assert [world.peek_len(tokens) for tokens in (A, B, C)] == [0, 4, 0]
    world.check(req)


@pytest.mark.parametrize("shard_size", [1, 4])
def test_a_request_longer_than_the_pool_is_none(shard_size):
    """Nothing is evicted for what can't be served."""
    world = make_world(4, 4, shard_size=shard_size)
    world.insert(A, base=0)
    req = matched(world, list(range(100, 100 + 17 * 4 * shard_size)))
    before = world.cache.state_digest()
    assert not preview_extend(world.cache, [req]).fits
    assert alloc_for_extend(world.cache, [req]) is None
    assert before == world.cache.state_digest()


def test_a_batch_is_judged_as_a_whole():
    """Four pages and five do not fit eight, though each would."""
    world = make_world(4, 8)
    reqs = [matched(world, [20 + i] * 4 * n) for i, n in enumerate((4, 5))]
    assert alloc_for_extend(world.cache, reqs) is None
    assert world.free_pages() == 8
    for req in reqs:
        assert preview_extend(world.cache, [req]).fits


def test_a_sharded_chunk_ends_on_a_page_or_is_the_last():
    """The request is named; nothing changed. Unsharded chunks end anywhere."""
    sharded, plain = make_world(4, shard_size=2), make_world(4)
    for world in (sharded, plain):
        reqs = [matched(world, [*A, 5]), matched(world, [*B, *C], stop=6)]
        before = world.cache.state_digest()
        if world is plain:
            assert alloc_for_extend(world.cache, reqs) is not None
            continue
        with pytest.raises(ValueError, match=r"request 1: chunk \[0, 6\) of 8"):
            alloc_for_extend(world.cache, reqs)
        assert before == world.cache.state_digest()


def test_an_unsharded_chunk_goes_on_inside_its_page():
    """The second chunk fills the rest of the page before it takes a new one."""
    world = make_world(4)
    req = matched(world, list(range(12)), stop=6)
    alloc_for_extend(world.cache, [req])
    world.cache.cache_unfinished_req(req)
    req.fill_len = 12
    placed = alloc_for_extend(world.cache, [req])
    assert len(placed.pages) == 1
    assert placed.out_cache_loc.tolist() == world.slots(world.row(req))[6:12]
    world.check(req)


def test_a_request_that_does_not_fit_its_row_is_refused():
    """By number, before anything changes."""
    world = make_world(4, context=8)
    req = matched(world, list(range(9)))
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match="request 0: 9 tokens don't fit a row of 8"):
        alloc_for_extend(world.cache, [req])
    assert before == world.cache.state_digest()


@pytest.mark.parametrize("use_leases", [True, False])
def test_leases_are_what_keeps_twins_from_being_declined(use_leases):
    """Two requests of one new chain in flight: without a lease the second one's work is lost."""
    world = make_world(4, shard_size=4)
    params = CacheInitParams(False, world.pool, world.allocator, 4, use_leases=use_leases)
    world.cache = UnifiedRadixCache(params)
    twins = [matched(world, [*A, *tail]) for tail in (B, C)]
    alloc_for_extend(world.cache, twins)
    for req in twins:
        world.finish(req)
    assert world.peek_len([*A, *B]) == 8
    assert world.peek_len([*A, *C]) == (8 if use_leases else 4)
    world.check()


def test_a_chain_without_a_base_takes_any_pages_and_stays_without():
    """It never declines, and its rows need no phase."""
    world = make_world(4, shard_size=4)
    world.insert([*A, *B], np.concatenate([world.draw(1, 0), world.draw(1, 2)]))
    req = matched(world, [*A, *B, *C])
    assert alloc_for_extend(world.cache, [req]).rotation_bases == [None]
    world.finish(req)
    assert world.peek_len([*A, *B, *C]) == 12
    assert world.node([*A, *B, *C]).rotation_base is None
    world.check()


# Seams


def test_a_tail_that_branches_off_takes_a_seam():
    """It starts in the emptiest class; the prefix keeps its base."""
    world = make_world(4, shard_size=4, rotation="seam")
    world.insert([*A, *B], base=0)
    world.draw(1, base=1)
    req = matched(world, [*A, *C, 9])
    alloc_for_extend(world.cache, [req])
    assert owners(world, req) == [0, 2, 3]
    world.finish(req)
    assert world.node(A).rotation_base == 0
    assert world.node([*A, *C]).rotation_base == 1
    world.cache.check_invariants()


def test_a_tail_of_its_own_leaf_goes_on_under_its_base():
    """So a path has few runs, and its pages stay even over the ranks."""
    world = make_world(4, shard_size=4, rotation="seam")
    world.insert([*A, *B], base=2)
    req = matched(world, [*A, *B, *C, *C])
    alloc_for_extend(world.cache, [req])
    assert req.kv_rotation_base == 2
    assert owners(world, req) == [2, 3, 0, 1]


def test_seams_need_no_lease_and_never_decline():
    """Twins start in different classes, and both tails are cached."""
    world = make_world(4, shard_size=4, rotation="seam")
    twins = [matched(world, [*A, *tail]) for tail in (B, C)]
    placed = alloc_for_extend(world.cache, twins)
    assert (placed.rotation_bases, len(world.cache.leases)) == ([0, 2], 0)
    for req in twins:
        world.finish(req)
    assert [world.peek_len([*A, *tail]) for tail in (B, C)] == [8, 8]
    world.check()
