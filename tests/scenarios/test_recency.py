"""What counts as a use, and who goes first because of it."""

from __future__ import annotations

import time

import pytest

from radix import POLICIES
from tests.builders import World, make_req, make_world

A, B, C = [1] * 4, [2] * 4, [3] * 4


def make_three(policy: str = "lru") -> World:
    world = make_world(4, 64, policy)
    for tokens in (A, B, C):
        world.insert(tokens)
    return world


def gone(world: World) -> list[str]:
    return [name for name, tokens in (("A", A), ("B", B), ("C", C)) if world.peek_len(tokens) == 0]


def test_a_hit_refreshes_an_entry():
    """F2: the hit path did not reorder, so the policy was first in, first out."""
    world = make_three()
    world.match(A)
    world.evict(4)
    assert gone(world) == ["B"]


def test_hits_count_in_the_policies_that_weigh_them():
    """F3: the count never rose, so frequency meant nothing."""
    world = make_three("lfu")
    for _ in range(5):
        world.match(A)
    world.match(C)
    world.match(B)
    world.match(B)
    world.evict(4)
    assert gone(world) == ["C"]


def test_twice_hit_entries_outlive_a_flood_of_new_ones():
    """F3: one-shot entries pushed out what had proved itself."""
    world = make_world(4, 6, "slru")
    world.insert(A)
    for _ in range(2):
        world.match(A)
    for i in range(10):
        world.evict(max(0, 4 - world.free_pages() * 4))
        world.insert([10 + i] * 4)
    assert world.peek_len(A) == 4


def test_chunks_of_one_request_are_one_hit():
    """F3: each chunk of a prompt counted as another use."""
    world = make_world(4, 64, "lfu")
    world.run(make_req(range(13)), chunk=4)
    world.run(make_req(range(13)), chunk=4)
    assert world.node(range(12)).hits == 1


def test_a_request_that_waits_counts_once():
    """F5: a burst of look-ups of one request promoted what was used once."""
    world = make_world(4, 64, "slru")
    world.insert(A)
    req = make_req([*A, 5], fill_len=5)
    for _ in range(10):
        assert world.cache.match_req(req) == 4
    assert world.node(A).hits == 1
    world.cache.abort(req)
    world.insert(B)
    world.evict(4)
    assert world.peek_len(A) == 0


def test_every_policy_can_be_chosen_and_no_other():
    """F6: names were listed in two places, and a wrong one failed late."""
    for policy in POLICIES:
        world = make_three(policy)
        assert world.evict(100) == 12
    with pytest.raises(ValueError, match="lru, lfu, fifo, mru, filo, priority, slru"):
        make_world(policy="newest")


@pytest.mark.parametrize("clock", ["stands still", "runs back"])
def test_order_is_that_of_the_calls_whatever_the_clock(monkeypatch, clock):
    """F7: entries of one second were victims in any order."""
    now = iter(range(10**6, 0, -1))
    read = (lambda: 1.0) if clock == "stands still" else (lambda: float(next(now)))
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, read)
    world = make_three()
    world.match(A)
    order = []
    for _ in range(3):
        world.evict(4)
        order.append(gone(world))
    assert order == [["B"], ["B", "C"], ["A", "B", "C"]]


def test_a_candidate_that_was_skipped_comes_back():
    """G2: an entry passed over once was never offered again."""
    world = make_world()
    world.insert(range(8))
    for _ in range(1_000):
        with world.cache.locked(world.match(range(8)).last_device_node):
            assert world.evict(8) == 0
    assert len(world.core.frontier_ids()) == 1
    assert world.evict(8) == 8


def test_the_candidates_are_the_unlocked_leaves():
    """G3: a node counted as a leaf while a child still held something."""
    world = make_world()
    world.insert(range(4))
    world.insert(range(8))
    parent, leaf = world.node(range(4)), world.node(range(8))
    assert world.core.frontier_ids() == [leaf.id]
    world.evict(3)
    assert world.core.frontier_ids() == [leaf.id]
    world.evict(1)
    assert world.core.frontier_ids() == [parent.id]


def test_a_page_that_is_used_again_has_no_past():
    """H7: a recycled page kept the hits and the priority of what it held before."""
    world = make_world(4, 1, "priority")
    world.insert(A, priority=9, extra_key="session")
    for _ in range(5):
        world.match(A, "session")
    (page,) = world.cached_pages()
    world.evict(4)
    world.insert(B, priority=1)
    node = world.node(B)
    assert world.cached_pages() == [page]
    assert (node.hits, node.priority, node.namespace[0]) == (0, 1, None)
    assert world.peek_len(A, "session") == 0
    assert world.core.num_nodes() == 1
