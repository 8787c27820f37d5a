"""Calls that no careful scheduler makes: refused with nothing changed, or taken at their word."""

from __future__ import annotations

import numpy as np
import pytest

from alloc import PagedTokenToKVPoolAllocator, PageInterleavePoolAllocator, ReqToTokenPool
from radix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    UnifiedRadixCache,
    alloc_for_extend,
    evict_until_allocatable,
)
from tests.builders import make_req, make_world


def unchanged(world, call, error=ValueError, match=None):
    before = world.cache.state_digest()
    with pytest.raises(error, match=match):
        call()
    assert before == world.cache.state_digest()
    world.cache.check_invariants()


def matched(world, tokens):
    """Return a request with a locked prefix and no row, all of its tokens in its chunk."""
    req = make_req(tokens, fill_len=len(tokens))
    world.cache.match_req(req)
    return req


@pytest.fixture
def filled():
    world = make_world(4, 8)
    world.insert(range(16))
    return world


@pytest.mark.parametrize(
    "params",
    [
        EvictParams(10.5),
        EvictParams("4"),
        EvictParams(0, (1.5,)),
        EvictParams(0, (-1,)),
        EvictParams(0, (1, 1)),
    ],
)
def test_an_eviction_takes_whole_numbers_only(filled, params):
    unchanged(filled, lambda: filled.cache.evict(params))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.int64, np.uint64])
def test_an_eviction_takes_any_integer(filled, dtype):
    assert filled.cache.evict(EvictParams(dtype(8))).num_tokens_evicted == 8
    assert type(filled.node(range(8)).num_pages) is int


@pytest.mark.parametrize("base", [1.0, np.float64(1), "x", [1]])
def test_a_rotation_base_is_an_integer(base):
    world = make_world(4, 8, shard_size=4)
    pages = world.draw(2, base=1)
    key = RadixKey(range(8))
    unchanged(world, lambda: world.cache.insert(InsertParams(key, pages=pages, rotation_base=base)))


def test_no_room_is_made_inside_an_open_free_group(filled):
    """Evicted pages would wait for its end: the cache would drain for nothing."""
    allocator = filled.allocator
    allocator.free_group_begin()
    need = allocator.available_size() + 4
    req = make_req(range(100, 100 + need), fill_len=need)
    unchanged(filled, lambda: evict_until_allocatable(filled.cache, allocator, need), RuntimeError)
    unchanged(filled, lambda: alloc_for_extend(filled.cache, [req]), RuntimeError, "free group")
    allocator.free_group_end()
    assert evict_until_allocatable(filled.cache, allocator, need)


def test_a_batch_names_rows_in_use_and_each_once(filled):
    lost, pair = make_req(range(8), fill_len=8), [make_req(range(8), fill_len=8) for _ in "ab"]
    lost.kv.req_pool_idx = 1
    unchanged(filled, lambda: alloc_for_extend(filled.cache, [lost]), match="in use")
    row = filled.pool.alloc(1)[0]
    for req in pair:
        req.kv.req_pool_idx = row
    unchanged(filled, lambda: alloc_for_extend(filled.cache, pair), match="row twice")


def test_a_batch_locks_its_prefixes(filled):
    """Else making room could evict a request's own prefix and hand the pages out again."""
    req = matched(filled, range(24))
    filled.cache.dec_lock_ref(req.lock_receipt)
    req.lock_receipt = None
    unchanged(filled, lambda: alloc_for_extend(filled.cache, [req]), match="lock")


@pytest.mark.parametrize("length", [4, 20])
def test_a_prefix_is_that_of_its_node(filled, length):
    req = matched(filled, range(24))
    req.prefix_indices = np.zeros(length, dtype=np.int64)
    with pytest.raises(ValueError, match="node ends at 16"):
        alloc_for_extend(filled.cache, [req])


@pytest.mark.parametrize("base", [-1, 4, 1.5, "1"])
def test_a_base_is_checked_before_pages_are_drawn(base):
    world = make_world(4, 8, shard_size=4)
    req = make_req(range(8), fill_len=8)
    world.cache.match_req(req, max_prefix_len=0)
    req.kv_rotation_base = base
    unchanged(world, lambda: alloc_for_extend(world.cache, [req]), match="kv_rotation_base")


def test_an_abort_trusts_a_length_of_zero(filled):
    """A row taken and not written yet shows nothing of its last owner."""
    world = filled
    first = make_req(range(100, 108))
    world.start(first)
    assert world.extend(first, 8)
    row = first.kv.req_pool_idx
    world.cache.abort(first)
    second = make_req(range(200, 208))
    world.start(second)
    other = world.pool.alloc(1)[0]
    assert world.extend(second, 8)
    third = make_req(range(300, 308))
    third.kv.req_pool_idx = row if other == row else other
    third.kv.allocated_len = 0
    world.cache.abort(third)
    world.check(second)


def test_a_finished_row_that_names_a_page_twice_is_refused_whole(filled):
    req = make_req(range(50, 60))
    filled.start(req)
    assert filled.extend(req, 10)
    pages = filled.pool.pages(req.kv.req_pool_idx, 0, 10)
    filled.pool.write(req.kv.req_pool_idx, 8, pages=pages[:1])
    before = filled.cache.state_digest()
    with pytest.raises(ValueError, match="twice"):
        filled.cache.cache_finished_req(req)
    assert before == filled.cache.state_digest()


def test_a_refused_cache_leaves_the_rows_as_they_are():
    rows = ReqToTokenPool(2, 64, None, page_size=16)
    allocator = PagedTokenToKVPoolAllocator(64, 4, None, None, None)
    with pytest.raises(ValueError, match="nope"):
        UnifiedRadixCache(CacheInitParams(False, rows, allocator, 4, eviction_policy="nope"))
    assert rows.page_size == 16


def test_rows_are_wide_enough_for_every_slot():
    allocator = PageInterleavePoolAllocator(2**31, 2**24, 4, None, None, None)
    rows = ReqToTokenPool(1, 2**24, None)
    with pytest.raises(ValueError, match="int32"):
        UnifiedRadixCache(CacheInitParams(False, rows, allocator, 2**24))


def test_a_lock_lost_to_a_reset_does_not_hide_an_error(filled):
    def fail():
        with filled.cache.locked(filled.node(range(16)).id):
            filled.cache.reset()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()


def test_a_cleared_allocator_is_noticed_before_anything_changes(filled):
    """The cache's pages are nobody's then; reset makes it usable again."""
    filled.allocator.clear()
    pages = filled.allocator.alloc_pages(1)
    insert = InsertParams(RadixKey(range(50, 54)), pages=pages)
    before = filled.cache.state_digest()
    for call in (
        lambda: filled.cache.evict(EvictParams(4)),
        lambda: filled.cache.detach(EvictParams(4)),
        lambda: filled.cache.insert(insert),
    ):
        with pytest.raises(RuntimeError, match="cleared"):
            call()
    assert before == filled.cache.state_digest()
    filled.cache.reset()
    filled.cache.insert(insert)
    filled.check()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda cache: cache.inc_lock_ref("x"), KeyError),
        (lambda cache: cache.inc_lock_ref([]), KeyError),
        (lambda cache: cache.rotation_base_of(1.5), KeyError),
        (lambda cache: cache.dec_lock_ref(None), ValueError),
        (lambda cache: cache.match_prefix(MatchPrefixParams([1, 2, 3, 4])), ValueError),
        (lambda cache: cache.insert(InsertParams([1, 2, 3, 4], pages=[1])), ValueError),
        (
            lambda cache: cache.insert(InsertParams(RadixKey(range(4)), pages=[1], handle=5)),
            ValueError,
        ),
    ],
)
def test_what_is_no_key_handle_or_receipt_is_called_so(filled, call, error):
    unchanged(filled, lambda: call(filled.cache), error)
