"""What is not a whole page: never matched, never stranded, never shown from an old owner."""

from __future__ import annotations

import random

import pytest

from alloc import PageState
from tests.alloc.alloc_builders import extend, ints, make_paged
from tests.builders import FakeReq, World, make_req, make_world


@pytest.mark.parametrize(("length", "matched"), [(7, 0), (15, 0), (16, 16), (47, 32)])
def test_a_key_matches_whole_pages_only(length, matched):
    """A1: a key shorter than a page crashed, or was walked as an empty key."""
    world = make_world(16)
    world.insert(range(32))
    match = world.match([*range(32), *range(100, 200)][:length])
    assert match.device_prefix_len == matched
    assert (match.last_device_node == world.core.root_node_handle()) == (matched == 0)
    assert world.core.num_nodes() == (2 if matched == 16 else 1)
    assert world.sizes() == (32, 0)
    world.check()


@pytest.mark.parametrize("length", range(17, 33))
def test_releasing_any_recorded_length_gives_whole_pages_back(length):
    """A3: the pool shrank by the rest of a page for every request that recorded less."""
    allocator = make_paged(4, 16)
    out = extend(allocator, [(0, min(20, length), -1)])
    if length > 20:
        more = extend(allocator, [(20, length, int(out[-1]))])
        out = [*ints(out), *ints(more)]
    assert allocator.available_size() == 32
    allocator.free(out)
    assert allocator.available_size() == 64


def test_the_rest_of_a_last_page_is_its_new_owners():
    """A4: positions past a request's end still showed the slots of the row's last user."""
    world = make_world(16, 8)
    first = make_req(range(30))
    world.run(first)
    row = first.kv.req_pool_idx
    world.finish(first, is_insert=False)
    world.draw(1)
    second = make_req(range(50, 70))
    world.run(second)
    assert second.kv.req_pool_idx == row
    slots = world.pool.req_to_token[row, :32].tolist()
    assert slots == world.slots(world.row(second))
    assert set(world.row(second)) <= set(world.held_pages())


def step(world: World, rng: random.Random, running: list[FakeReq]) -> None:
    """Do one random thing to a request or the tree."""
    act, page = rng.randrange(6), world.page_size
    tokens = [rng.randrange(2)] * rng.randrange(1, 4 * page)
    if act == 0 and len(running) < 6:
        req = make_req(tokens)
        world.start(req)
        running.append(req)
    elif act == 1 and running:
        req = rng.choice(running)
        req.output_ids.append(3)
        world.extend(req, rng.randrange(len(req.tokens()) - req.fill_len + 1))
    elif act == 2 and running:
        world.cache.cache_unfinished_req(rng.choice(running))
    elif act == 3 and running:
        req = running.pop(rng.randrange(len(running)))
        world.finish(req, kv_len_to_handle=req.fill_len, is_insert=rng.random() < 0.7)
    elif act == 4 and running:
        world.cache.abort(running.pop(rng.randrange(len(running))))
    else:
        world.match(tokens)
        world.evict(rng.randrange(2 * page))


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_at_idle_nothing_is_missing_and_nothing_is_too_much(page_size):
    """A6: a leak check at idle found some pages short, or more pages than the pool has."""
    world, rng = make_world(page_size, 12, context=64 * page_size), random.Random(page_size)
    running: list[FakeReq] = []
    for i in range(1_500):
        step(world, rng, running)
        if i % 50 == 0:
            world.check(*running)
            census = world.allocator.page_census()
            assert sum(census.values()) == 12
            assert sum(world.sizes()) == census[PageState.CACHED] * page_size
    for req in running:
        world.cache.abort(req)
    assert world.free_pages() * page_size + sum(world.sizes()) == 12 * page_size
    assert world.cache.protected_size() == 0
    world.check()


def test_one_page_too_few_evicts_one_page():
    """PR8: a wish for one token cost a whole leaf of four pages."""
    world = make_world(16)
    world.insert(range(64))
    assert world.evict(1) == 16
    assert world.peek_len(range(64)) == 48
