"""Requests of one chain that are in flight together always take one rotation base."""

from __future__ import annotations

import pickle

import pytest

from radix import InsertParams, RadixKey, alloc_for_extend
from tests.builders import FakeReq, World, make_req, make_world

CHAIN = list(range(8))


def place(world: World, tokens: list[int], stop: int | None = None) -> FakeReq:
    """Match a request and place its first chunk, which ends at ``stop``."""
    req = make_req(tokens, fill_len=len(tokens))
    world.cache.match_req(req)
    req.fill_len = stop or len(tokens)
    assert alloc_for_extend(world.cache, [req]) is not None
    return req


def attaches(world: World, req: FakeReq) -> bool:
    """Finish a request; says whether its pages got into the tree."""
    world.finish(req, kv_len_to_handle=req.fill_len)
    return world.peek_len(req.tokens()[: req.fill_len]) >= len(req.tokens()) - 1


def test_a_request_whose_match_was_capped_takes_the_cached_chains_base():
    """A one-page prompt matches nothing, yet its page is cached and its insert must not decline."""
    world = make_world(4, shard_size=4)
    world.insert(CHAIN, base=2)
    req = place(world, CHAIN[:4])
    assert len(req.prefix_indices) == 0
    assert req.kv_rotation_base == 2
    own = world.row(req)
    assert attaches(world, req)
    assert own[0] not in world.cached_pages()
    world.check()


def test_a_chain_evicted_under_a_request_in_flight_keeps_its_base():
    """The next request of the chain starts it anew, under the base that is still in flight."""
    world = make_world(4, shard_size=4)
    world.insert(CHAIN, base=2)
    capped = place(world, CHAIN[:4])
    assert world.evict(100) == 8
    later = place(world, CHAIN)
    assert [capped.kv_rotation_base, later.kv_rotation_base] == [2, 2]
    assert attaches(world, capped)
    assert attaches(world, later)
    assert len(world.cache.leases) == 0
    world.check()


def test_a_bigram_chunk_of_one_page_knows_its_chain():
    """Its first page ends with a token of the next chunk; two of them still share a base."""
    world = make_world(4, shard_size=4, is_bigram=True)
    reqs = [place(world, [*CHAIN, 9], stop=4) for _ in range(2)]
    assert reqs[0].kv_rotation_base == reqs[1].kv_rotation_base
    for req in reqs:
        world.cache.cache_unfinished_req(req)
        req.fill_len = 9
    assert alloc_for_extend(world.cache, reqs) is not None
    assert [attaches(world, req) for req in reqs] == [True, True]
    world.check()


@pytest.mark.parametrize("leave", ["finish", "abort", "retract"])
def test_a_lease_ends_with_the_last_request_that_holds_it(leave):
    """Two hold one; the table is empty when both are gone, whichever way."""
    world = make_world(4, shard_size=4)
    reqs = [place(world, CHAIN) for _ in range(2)]
    assert len(world.cache.leases) == 1
    for req, left in zip(reqs, (1, 0), strict=True):
        if leave == "finish":
            world.finish(req, is_insert=False)
        else:
            getattr(world.cache, leave)(req)
        assert left == len(world.cache.leases)
    world.check()


def test_a_key_from_another_process_finds_what_its_equal_cached():
    """A pickled key has a namespace of its own that is equal, not the same object."""
    world = make_world(4)
    world.insert(CHAIN)
    key = pickle.loads(pickle.dumps(RadixKey(CHAIN)))
    result = world.cache.insert(InsertParams(key, pages=world.draw(2)))
    assert result.prefix_len == 8
    assert world.core.num_nodes() == 1
    world.check()
