"""Requests in pieces: chunks, second turns, retraction, and ends that come twice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders import World, make_req, make_world


def shape(world: World) -> list[tuple[Any, ...]]:
    """Return what is cached, without the page ids."""
    return [(node.start, node.end, node.key) for node in world.core.nodes()]


def test_a_chunk_cached_twice_is_cached_once():
    """P1: the second call of one step saw a protected length past its own key and failed."""
    world = make_world(16)
    req = make_req(range(60))
    world.start(req)
    world.extend(req, 40)
    world.cache.cache_unfinished_req(req)
    seen = (world.row(req), world.sizes(), world.free_pages(), req.kv.cache_protected_len)
    world.cache.cache_unfinished_req(req)
    assert seen == (world.row(req), world.sizes(), world.free_pages(), req.kv.cache_protected_len)
    node = world.node(range(32))
    assert (node.pins, node.hits, len(world.core.receipts())) == (1, 0, 1)
    world.check(req)


@pytest.mark.parametrize(
    "ends", [("finish", "finish"), ("finish", "abort"), ("retract", "finish"), ("abort", "abort")]
)
def test_an_end_that_comes_twice_frees_once(ends):
    """P2: the last slot was freed by two code paths."""
    world = make_world(16)
    req = make_req(range(33))
    world.run(req)
    first, second = (getattr(world.cache, END[end]) for end in ends)
    first(req)
    free, sizes = world.free_pages(), world.sizes()
    second(req)
    assert (free, sizes) == (world.free_pages(), world.sizes())
    assert world.held_pages() == []


END = {"finish": "cache_finished_req", "abort": "abort", "retract": "retract"}


@pytest.mark.parametrize(("page_size", "hit"), [(1, 150), (16, 144)])
def test_the_next_turn_finds_what_was_generated(page_size, hit):
    """P3: the key was taken before the output was there, so only the prompt was found."""
    world = make_world(page_size, 512)
    req = make_req(range(100))
    world.run(req)
    req.output_ids += range(500, 550)
    world.extend(req, 50)
    world.finish(req)
    turn = make_req([*range(100), *range(500, 550), *range(900, 950)])
    assert world.start(turn) == hit
    world.cache.abort(turn)


def test_only_committed_tokens_are_cached():
    """P4: slots past the committed length got into the tree."""
    world = make_world(16)
    req = make_req(range(40))
    world.run(req)
    row = world.row(req)
    world.finish(req, kv_len_to_handle=33)
    assert world.cached_pages() == sorted(row[:2])
    assert world.peek_len(range(40)) == 32
    assert world.free_pages() == 62
    world.check()


@pytest.mark.parametrize("chunk", [4, 12, 40])
def test_a_retracted_run_ends_like_an_uninterrupted_one(chunk):
    """P5: marks of progress were reset one by one, and the second run read wrong slots."""
    calm, torn = make_world(4), make_world(4)
    straight = make_req(range(40))
    calm.run(straight, chunk=10)
    calm.finish(straight)
    req = make_req(range(40))
    torn.start(req)
    for _ in range(2):
        torn.extend(req, 10)
        torn.cache.cache_unfinished_req(req)
    torn.cache.retract(req)
    req.fill_len = 0
    assert torn.run(req, chunk=chunk) == 20
    assert torn.slots(torn.row(req)) == torn.pool.req_to_token[req.kv.req_pool_idx, :40].tolist()
    torn.finish(req)
    whole = [torn.match(range(40)).pages.tolist(), torn.sizes(), torn.free_pages()]
    assert whole[1:] == [calm.sizes(), calm.free_pages()]
    assert len(set(whole[0])) == 10
    torn.check()


def test_chunks_in_any_sizes_find_each_other():
    """P5: the same prompt in other chunks is the same entry."""
    world = make_world(4)
    for chunk, hit in ((40, 0), (5, 36), (8, 36)):
        req = make_req(range(40))
        assert world.run(req, chunk=chunk) == hit
        world.finish(req)
    assert world.sizes() == (40, 0)
    assert shape(world)[-1][1] == 10
    world.check()
