"""A scheduler's calls over a tiered cache: match, place, cache, and demotion on the way."""

import numpy as np
import pytest

from alloc import ReqToTokenPool
from radix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    UnifiedRadixCache,
    alloc_for_extend,
)
from tests.builders import FakeReq
from tests.tiers.tier_worlds import make_allocator
from tiers import HostTier, TieredCache, host_layout


def make(ranks=1, pages=8, ps=2, host_pages=32, layout="interleave", rotation="chain"):
    allocator = make_allocator(layout, ranks, pages, ps)
    pool = ReqToTokenPool(4, 256, None, page_size=ps, debug=True)
    device = UnifiedRadixCache(CacheInitParams(False, pool, allocator, ps, rotation=rotation))
    return TieredCache(device, HostTier(host_layout(allocator.layout, host_pages)))


def serve(cache, tokens, live=()):
    """Serve one request in one chunk; returns its hit, or None where it can't be placed."""
    req = FakeReq(tokens, fill_len=len(tokens))
    cache.poll()
    hit = cache.match_req(req)
    cache.check_invariants([req, *live])
    if cache.alloc_for_extend([req]) is None:
        cache.device.abort(req)
        return None
    cache.check_invariants([req, *live])
    cache.device.cache_finished_req(req)
    cache.device.pool().free(req.kv.req_pool_idx)
    req.kv.req_pool_idx = None
    cache.check_invariants(live)
    return hit


WORLDS = [(1, "interleave"), (2, "interleave"), (4, "interleave"), (2, "lanes")]


@pytest.mark.parametrize("rotation", ["chain", "seam"])
@pytest.mark.parametrize(("ranks", "layout"), WORLDS)
def test_what_a_batch_pushes_out_is_demoted_and_comes_back(ranks, layout, rotation):
    cache = make(ranks, 8 // ranks, layout=layout, rotation=rotation)
    prompts = [[i * 10 + j for j in range(9)] for i in range(4)]
    assert [serve(cache, prompt) for prompt in prompts] == [0] * 4
    assert cache.counters.dropped == 0
    assert [serve(cache, prompt) for prompt in prompts] == [8] * 4
    cache.poll()
    assert cache.counters.missed == 0
    cache.check_invariants([])


def test_an_eviction_for_a_batch_is_reported_and_nothing_is_evicted_twice():
    cache = make()
    serve(cache, list(range(16)))
    req = FakeReq([50 + i for i in range(6)], fill_len=6)
    cache.match_req(req)
    placed = cache.alloc_for_extend([req])
    assert placed.num_tokens_evicted == 6
    assert cache.counters.kept == 3
    assert cache.device.total_size() == 10


def test_a_batch_that_does_not_fit_changes_nothing():
    cache = make()
    serve(cache, list(range(8)))
    req = FakeReq([50 + i for i in range(40)], fill_len=40)
    cache.match_req(req)
    before = cache.state_digest()
    assert cache.alloc_for_extend([req]) is None
    assert cache.state_digest() == before


def test_a_request_that_is_matched_again_keeps_one_lock():
    cache = make()
    serve(cache, list(range(12)))
    cache.evict(EvictParams(100))
    req = FakeReq(list(range(12)), fill_len=12)
    assert cache.match_req(req) == 10
    assert cache.match_req(req) == 10
    assert cache.poll() == 1
    assert len(cache.device.tree_core.receipts()) == 1
    assert alloc_for_extend(cache.device, [req]) is not None
    cache.device.cache_finished_req(req)
    assert cache.device.tree_core.receipts() == []


def test_a_capped_match_loads_no_further_than_its_cap():
    cache = make()
    serve(cache, list(range(12)))
    cache.evict(EvictParams(100))
    req = FakeReq(list(range(12)), fill_len=12)
    assert cache.match_req(req, max_prefix_len=5) == 4
    assert cache.counters.loaded == 2


def test_a_batch_with_owners_pushes_out_what_its_lanes_lack():
    cache = make(2, 2, ps=1, layout="lanes")
    layout = cache.device.allocator.layout
    for tokens, lanes in (([1, 2], [0, 0]), ([3, 4], [1, 1])):
        req = FakeReq(tokens, fill_len=2)
        cache.match_req(req)
        placed = cache.alloc_for_extend([req], page_owners=[lanes])
        assert layout.class_of(placed.pages).tolist() == lanes
        cache.device.cache_finished_req(req)
        cache.device.pool().free(req.kv.req_pool_idx)
    req = FakeReq([7, 8], fill_len=2)
    cache.match_req(req)
    placed = cache.alloc_for_extend([req], page_owners=[[1, 1]])
    assert layout.class_of(placed.pages).tolist() == [1, 1]
    assert placed.num_tokens_evicted == 2
    assert cache.match(RadixKey([3, 4]), lock=False).host_hit_length == 2
    assert cache.match(RadixKey([1, 2]), lock=False).host_hit_length == 0
    cache.check_invariants([req])


@pytest.mark.parametrize("owners", [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0]])
def test_a_batch_pushes_out_what_it_would_without_tiers(owners):
    def left_after(tiered):
        cache = make(2, 4, layout="lanes")
        allocator, device = cache.device.allocator, cache.device
        keys = [RadixKey([i, i]) for i in range(8)]
        for key, owner in zip(keys, owners, strict=True):
            device.insert(InsertParams(key, pages=allocator.free_list.draw(np.array([owner]))))
        req = FakeReq([20] * 6, fill_len=6)
        cache.match_req(req)
        placed = cache.alloc_for_extend([req]) if tiered else alloc_for_extend(device, [req])
        held = [device.match_prefix(MatchPrefixParams(key, peek=True)).handle.end for key in keys]
        return placed.num_tokens_evicted, placed.pages.tolist(), held

    assert left_after(tiered=True) == left_after(tiered=False)


def test_a_load_does_not_start_a_chain_under_another_base_than_a_request_in_flight():
    cache, tokens = make(2, 6), [*range(8), 99]
    allocator, device = cache.device.allocator, cache.device
    serve(cache, tokens)
    cache.evict(EvictParams(1000))
    allocator.free_list.draw(np.array([0]))  # class 1 is the emptiest now
    first, second = (FakeReq(tokens, fill_len=9) for _ in range(2))
    device.match_req(first)  # a miss: the host is not asked
    cache.alloc_for_extend([first])
    assert first.kv_rotation_base == 1
    assert cache.match(RadixKey(tokens), lock=False).host_hit_length == 0
    assert cache.match_req(second) == 0
    assert cache.counters.missed == 4
    assert cache.alloc_for_extend([second]) is not None
    assert not device.cache_finished_req(first).rotation_tail_declined
    assert not device.cache_finished_req(second).rotation_tail_declined
