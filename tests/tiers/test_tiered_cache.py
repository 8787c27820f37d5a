"""What is copied, dropped, loaded and missed, with no bytes involved."""

import numpy as np
import pytest

from alloc import PageState
from radix import CacheInitParams, EvictParams, MatchPrefixParams, UnifiedRadixCache
from tests.tiers.by_hand import A, evict, make, moves_of
from tests.tiers.tier_worlds import make_allocator
from tiers import (
    HostTier,
    TieredCache,
    TieredEvictResult,
    WriteInFlight,
    WritePolicy,
    host_layout,
)
from tiers.transfer import DONE

B = [1, 2, 3, 4, 15, 16, 17, 18]


# Write-back


def test_eviction_demotes_and_a_match_reports_what_the_host_has():
    rank = make()
    rank.serve(A)
    assert evict(rank, 4) == TieredEvictResult(4, 4, 0)
    match = rank.cache.match(rank.key(A))
    assert match.device.device_prefix_len == 4
    assert match.host_hit_length == 4
    host = rank.cache.host.cache.tree_core.node_by_id(match.last_host_node)
    assert host.end == 4
    loaded = rank.cache.load_back(match)
    assert loaded.device.device_prefix_len == 8
    assert loaded.host_hit_length == 0
    rank.cache.check_invariants()
    rank.device.dec_lock_ref(loaded.device.receipt)


def test_a_tail_takes_the_prefix_above_it_along_and_later_tails_find_it_there():
    rank = make()
    rank.serve(A)
    rank.serve(B)
    evict(rank, 2)
    assert rank.host_len(A) == 8
    assert len(moves_of(rank).stores[-1][0]) == 4
    evict(rank)
    assert (rank.host_len(A), rank.host_len(B)) == (8, 8)
    assert [len(store[0]) for store in moves_of(rank).stores] == [4, 2]
    assert rank.cache.counters.stored == rank.cache.counters.kept == 6


def test_stores_are_fenced_before_their_pages_are_released():
    rank = make()
    rank.serve(A)
    evict(rank)
    assert all(ticket.fenced for *_, ticket in moves_of(rank).stores)


def test_what_is_on_the_host_already_is_not_copied_again():
    rank = make()
    rank.serve(A)
    evict(rank)
    assert rank.load(A) == 8
    moves_of(rank).loads[-1][-1].done = True
    assert rank.cache.poll() == 1
    assert evict(rank) == TieredEvictResult(8, 8, 0)
    assert len(moves_of(rank).stores) == 1


def test_a_host_that_is_too_small_keeps_the_front_and_drops_the_tail():
    rank = make(host_pages=3)
    rank.serve(A)
    assert evict(rank) == TieredEvictResult(8, 6, 2)
    assert rank.host_len(A) == 6
    assert (rank.cache.counters.kept, rank.cache.counters.dropped) == (3, 1)
    assert rank.load(A) == 6


def test_a_full_host_gives_up_its_least_recent_copy():
    rank = make(host_pages=4)
    for first in (0, 10, 20):
        rank.serve([first, first, first + 1, first + 1])
        evict(rank)
    assert rank.host_len([0, 0, 1, 1]) == 0
    assert rank.host_len([10, 10, 11, 11]) == 4
    assert rank.cache.host.counters.evicted == 2


def test_a_copy_that_the_same_eviction_pushes_out_again_does_not_count_as_kept():
    rank = make(host_pages=1)
    rank.serve([1, 1])
    rank.serve([2, 2])
    assert evict(rank) == TieredEvictResult(4, 2, 2)
    assert rank.cache.host.cache.total_size() == 2
    assert (rank.cache.counters.kept, rank.cache.counters.dropped) == (1, 1)


def test_write_back_to_a_host_that_is_full_of_locked_copies_drops_and_counts():
    rank = make(host_pages=4)
    rank.serve(A)
    evict(rank)
    lock = rank.cache.host.lock(rank.key(A))
    rank.serve([30 + i for i in range(8)])
    result = rank.cache.evict(EvictParams(8))
    assert result == TieredEvictResult(8, 0, 8)
    assert rank.allocator.available_size() == 16
    assert (rank.cache.counters.kept, rank.cache.counters.dropped) == (4, 4)
    rank.cache.host.unlock(lock.receipt)
    rank.cache.check_invariants()


def test_a_store_that_fails_for_the_parent_leaves_no_child_below_a_hole():
    rank = make()
    rank.serve(A)
    rank.serve(B)
    moves_of(rank).refuse = True
    assert evict(rank, 4) == TieredEvictResult(4, 0, 4)
    assert (rank.host_len(A), rank.host_len(B)) == (0, 0)
    moves_of(rank).refuse = False
    assert evict(rank, 4) == TieredEvictResult(4, 4, 0)
    assert evict(rank, 4) == TieredEvictResult(4, 4, 0)
    assert (rank.host_len(A), rank.host_len(B)) == (4, 8)
    assert rank.cache.counters.refused_transfers == 1
    rank.cache.check_invariants()


def test_no_policy_copies_nothing():
    rank = make(write="none")
    rank.serve(A)
    assert evict(rank) == TieredEvictResult(8, 0, 8)
    assert moves_of(rank).stores == []


def test_namespaces_stay_apart_on_the_host():
    rank = make()
    rank.serve(A, extra_key="lora")
    evict(rank)
    assert rank.host_len(A) == 0
    assert rank.host_len(A, extra_key="lora") == 8
    assert rank.load(A) == 0
    assert rank.load(A, extra_key="lora") == 8


# Write-through


def test_write_through_copies_after_k_hits_and_shows_the_copy_when_it_is_done():
    rank = make(write="write_through", hits=2)
    rank.serve(A)  # its own match counts nothing: the node came after it
    rank.cache.match(rank.key(A), lock=False)
    assert moves_of(rank).stores == []
    rank.cache.match(rank.key(A), lock=False)
    (store,) = moves_of(rank).stores
    assert len(store[0]) == 4
    rank.cache.match(rank.key(A), lock=False)
    assert len(moves_of(rank).stores) == 1
    assert rank.host_len(A) == 0
    assert rank.evictable() == 0
    rank.cache.check_invariants()
    assert rank.cache.poll() == 0
    store[-1].done = True
    assert rank.cache.poll() == 1
    assert rank.host_len(A) == 8
    assert rank.evictable() == 8
    assert evict(rank) == TieredEvictResult(8, 8, 0)
    rank.cache.check_invariants()


def test_write_through_copies_the_hot_part_of_a_path_only():
    rank = make(write="write_through", hits=2)
    rank.serve(A)
    rank.cache.match(rank.key(A[:4]), lock=False)
    rank.cache.match(rank.key(A), lock=False)
    (store,) = moves_of(rank).stores
    assert len(store[0]) == 2
    assert evict(rank) == TieredEvictResult(4, 0, 4)


def test_a_split_while_a_copy_is_in_flight_changes_nothing_of_it():
    rank = make(write="write_through")
    rank.serve(A)
    rank.cache.match(rank.key(A), lock=False)
    (flight,) = rank.cache.in_flight()
    assert isinstance(flight, WriteInFlight)
    assert (flight.start, len(flight.host_pages)) == (0, 4)
    rank.serve(B)
    assert (rank.device.protected_size(), rank.device.evictable_size()) == (8, 4)
    evict(rank)
    assert rank.device.total_size() == 8
    moves_of(rank).stores[0][-1].done = True
    assert rank.cache.poll() == 1
    assert rank.host_len(A) == 8
    assert rank.host_len(B) == 4
    assert rank.device.protected_size() == 0
    assert rank.device.tree_core.receipts() == []
    rank.cache.check_invariants()
    assert evict(rank) == TieredEvictResult(8, 8, 0)


def test_two_branches_in_flight_share_their_prefix_once_both_are_done():
    rank = make(write="write_through")
    rank.serve(A)
    rank.serve(B)
    rank.cache.match(rank.key(A), lock=False)
    rank.cache.match(rank.key(B), lock=False)
    assert [len(store[0]) for store in moves_of(rank).stores] == [4, 4]
    for *_, ticket in moves_of(rank).stores:
        ticket.done = True
    assert rank.cache.poll() == 2
    assert rank.cache.host.cache.total_size() == 12
    assert rank.cache.host.allocator.pages_in(PageState.HELD).tolist() == []
    rank.cache.check_invariants()


def test_transfers_are_confirmed_in_order_and_as_far_as_every_rank_says():
    said = []
    rank = make(
        write="write_through", agree=lambda v: (said.append(v.tolist()), np.minimum(v, 1))[1]
    )
    for first in (0, 10):
        rank.serve([first, first])
        rank.cache.match(rank.key([first, first]), lock=False)
    assert rank.cache.poll() == 0
    for *_, ticket in moves_of(rank).stores:
        ticket.done = True
    assert (rank.cache.poll(), rank.cache.poll(), rank.cache.poll()) == (1, 1, 0)
    assert said == [[0], [2], [1]]


# Load-back


def test_a_load_in_flight_is_locked_on_both_sides_and_readable_by_match_at_once():
    rank = make(host_pages=4)
    rank.serve(A)
    evict(rank)
    assert rank.load(A) == 8
    assert rank.device.protected_size() == 8
    assert rank.cache.host.cache.protected_size() == 8
    evict(rank)
    assert rank.device_len(A) == 8
    moves_of(rank).loads[0][-1].done = True
    assert rank.cache.poll() == 1
    assert rank.device.protected_size() == 0
    rank.cache.check_invariants()


def test_loads_of_one_prefix_by_two_requests_happen_once():
    rank = make()
    rank.serve(A)
    evict(rank)
    first, second = (rank.cache.match(rank.key(A)) for _ in range(2))
    assert first.host_hit_length == second.host_hit_length == 8
    assert rank.cache.load_back(first) is not None
    assert rank.cache.load_back(second) is None
    assert len(moves_of(rank).loads) == 1
    assert rank.cache.counters.missed == 0
    rank.cache.check_invariants()


def test_a_refused_load_is_a_miss_that_holds_nothing():
    rank = make()
    rank.serve(A)
    evict(rank)
    moves_of(rank).refuse = True
    assert rank.load(A) == 0
    assert rank.cache.counters.missed == 4
    assert rank.allocator.available_size() == 16
    assert rank.device.tree_core.receipts() == rank.cache.host.cache.tree_core.receipts() == []
    rank.cache.check_invariants()


def test_a_load_that_is_refused_after_room_was_made_says_so_in_the_counters():
    rank = make(pages=4)
    rank.serve(A)
    evict(rank)
    rank.serve([30 + i for i in range(8)])
    moves_of(rank).refuse = True
    match = rank.cache.match(rank.key(A), lock=False)
    assert rank.cache.load_back(match) is None
    assert rank.device.total_size() == 0
    counters = rank.cache.counters
    assert (counters.missed, counters.dropped, counters.refused_transfers) == (4, 4, 2)
    rank.cache.check_invariants([])


def test_a_stale_match_loads_what_is_there_now():
    rank = make(host_pages=4)
    rank.serve(A)
    evict(rank)
    match = rank.cache.match(rank.key(A), lock=False)
    rank.serve([40 + i for i in range(6)])
    evict(rank)
    assert rank.host_len(A) == 2
    assert rank.cache.load_back(match).device.device_prefix_len == 2
    rank.cache.check_invariants()


@pytest.mark.parametrize("layout", ["interleave", "lanes"])
def test_a_short_lane_with_something_evictable_is_made_room_in_once_and_aimed(layout):
    rank = make(ranks=2, layout=layout, pages=4, ps=1)
    rank.serve([1, 2, 3, 4], owners=[0, 1, 0, 1])
    evict(rank)
    rank.serve([5, 6, 7, 8], owners=[0, 1, 0, 1])
    rank.serve([9, 10, 11], owners=[1, 0, 1], base=1)
    assert rank.allocator.free_list.counts().tolist() == [1, 0]
    asked = []
    evict_now = rank.cache.evict
    rank.cache.evict = lambda params: (asked.append(params.class_deficits), evict_now(params))[1]
    assert rank.load([1, 2, 3, 4]) == 4
    assert asked == [(1, 2)]
    rank.cache.check_invariants()


@pytest.mark.parametrize("layout", ["interleave", "lanes"])
def test_a_short_lane_with_nothing_evictable_is_a_miss_and_nothing_is_evicted(layout):
    rank = make(ranks=2, layout=layout, pages=2, ps=1)
    rank.serve([1, 2, 3, 4], owners=[0, 1, 0, 1])
    evict(rank)
    rank.serve([5, 6], owners=[0, 1])
    rank.serve([7], owners=[1], base=1)
    lock = rank.device.match_and_lock(MatchPrefixParams(rank.key([7])))
    before = rank.allocator.state_digest(), rank.device.total_size()
    assert rank.allocator.available_size() >= 0
    assert rank.load([1, 2, 3, 4]) == 0
    assert (rank.allocator.state_digest(), rank.device.total_size()) == before
    assert rank.cache.counters.missed == 4
    assert rank.cache.in_flight() == []
    rank.device.dec_lock_ref(lock.receipt)
    rank.cache.check_invariants()
    # The lane is free now: the same call loads.
    assert rank.load([1, 2, 3, 4]) == 4


# Whole


def test_reset_waits_for_what_is_in_flight_and_leaves_both_tiers_empty():
    rank = make(write="write_through")
    rank.serve(A)
    rank.cache.match(rank.key(A), lock=False)
    rank.cache.reset()
    for allocator in (rank.allocator, rank.cache.host.allocator):
        assert allocator.free_list.counts().sum() * 2 == allocator.size
    assert rank.cache.in_flight() == []
    rank.cache.check_invariants()


def test_mistakes_are_refused_at_construction():
    allocator = make_allocator("interleave", 2, 4, 2)
    device = UnifiedRadixCache(CacheInitParams(False, None, allocator, 2))
    other = make_allocator("interleave", 4, 4, 2)
    with pytest.raises(ValueError, match="4"):
        TieredCache(device, HostTier(host_layout(other.layout, 4)))
    with pytest.raises(ValueError, match="pages_per_class=0"):
        host_layout(allocator.layout, 0)
    disabled = UnifiedRadixCache(CacheInitParams(True, None, allocator, 2))
    with pytest.raises(ValueError, match="disabled"):
        TieredCache(disabled, HostTier(host_layout(allocator.layout, 4)))
    with pytest.raises(ValueError, match="write_back"):
        WritePolicy("sometimes")
    with pytest.raises(ValueError, match="hits=0"):
        WritePolicy("write_through", 0)
    with pytest.raises(NotImplementedError, match="alloc_classes"):
        HostTier(host_layout(allocator.layout, 4)).allocator.alloc_pages(1)


def test_the_null_ticket_is_done():
    assert DONE.is_done()


def test_a_host_lock_survives_a_split_and_leaves_nothing_pinned():
    rank = make()
    rank.serve(A)
    evict(rank)
    host = rank.cache.host
    first = host.lock(rank.key(A))
    nested = host.lock(rank.key(A[:6]))  # splits the locked node
    assert (host.cache.protected_size(), host.cache.evictable_size()) == (8, 0)
    host.unlock(first.receipt)
    assert (host.cache.protected_size(), host.cache.evictable_size()) == (6, 2)
    host.unlock(nested.receipt)
    assert (host.cache.protected_size(), host.cache.evictable_size()) == (0, 8)
    assert host.cache.evict(EvictParams(1000)).num_tokens_evicted == 8
    rank.cache.check_invariants()


def test_the_same_calls_leave_the_same_state():
    ranks = [make(ranks=2, layout="lanes", host_pages=3) for _ in range(2)]
    for rank in ranks:
        for tokens, owners in ((A, [0, 1, 1, 0]), (B, [1, 0]), ([7, 7, 8, 8], [1, 1])):
            rank.serve(tokens, owners=owners)
        rank.cache.evict(EvictParams(2, class_deficits=(2, 1)))
        rank.load(A)
    assert ranks[0].cache.state_digest() == ranks[1].cache.state_digest()
    assert ranks[0].cache.counters == ranks[1].cache.counters
