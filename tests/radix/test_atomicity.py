"""A call that raises, or is declined, changed nothing (DESIGN invariant 6; DECISIONS 3)."""

from __future__ import annotations

import numpy as np
import pytest

from radix import EvictParams, InsertParams, MatchPrefixParams, RadixKey, alloc_for_extend
from tests.builders import BareKv, FakeReq, World, make_req, make_world


class Busy:
    """A world with everything in it: a chain, a split, locks, held pages, a live request."""

    def __init__(self, shard_size: int) -> None:
        self.world: World = make_world(4, 8, shard_size=shard_size)
        self.world.insert(range(8), base=1)
        self.world.insert([*range(4), 9, 9, 9, 9], base=1)
        self.world.insert(range(4), extra_key="a", base=0)
        self.used = self.world.lock(range(4))
        self.world.cache.dec_lock_ref(self.used)
        self.world.lock(range(8))
        self.req: FakeReq = make_req([*range(8), *range(20, 30)])
        self.world.start(self.req)
        self.world.extend(self.req, 4)
        self.mine = self.world.draw(2, base=1, start=2)
        self.stale = self.world.insert([7, 7, 7, 7], base=0).last_device_node
        self.world.evict(100)

    def insert(self, tokens, pages, **options):
        key = RadixKey(tokens)
        return self.world.cache.insert(
            InsertParams(key, pages=np.asarray(pages, dtype=np.int64), **options)
        )

    def spoil_row(self) -> None:
        """Make the live request's row show a page that it does not hold."""
        cached = self.world.cached_pages()[0]
        self.world.pool.write(self.req.kv.req_pool_idx, 8, pages=[cached])


RAISING = {
    "insert both": lambda b: b.world.cache.insert(
        InsertParams(RadixKey([1]), value=[1], pages=b.mine)
    ),
    "insert short": lambda b: b.insert(range(50, 70), b.mine),
    "insert free page": lambda b: b.insert(
        range(50, 54), b.world.allocator.get_all_free_pages()[:1]
    ),
    "insert reserved page": lambda b: b.insert(range(50, 54), [0]),
    "insert foreign page": lambda b: b.insert(range(50, 54), [10**6]),
    "insert cached page": lambda b: b.insert(range(50, 54), b.world.cached_pages()[:1]),
    "insert page twice": lambda b: b.insert(range(50, 58), [b.mine[0]] * 2),
    "insert scattered slots": lambda b: b.world.cache.insert(
        InsertParams(RadixKey(range(50, 54)), value=np.array([1, 3, 5, 7]))
    ),
    "insert bad duplicate": lambda b: b.insert([*range(8), *range(50, 54)], [*b.mine, 10**6]),
    "insert float priority": lambda b: b.insert(range(50, 58), b.mine, priority=1.5),
    "evict negative": lambda b: b.world.cache.evict(EvictParams(-1)),
    "evict bad deficits": lambda b: b.world.cache.evict(EvictParams(0, (-1,))),
    "lock foreign": lambda b: b.world.cache.inc_lock_ref(make_world().core.root_node_handle()),
    "lock stale": lambda b: b.world.cache.inc_lock_ref(b.stale),
    "unlock used": lambda b: b.world.cache.dec_lock_ref(b.used),
    "lock and peek": lambda b: b.world.cache.match_and_lock(
        MatchPrefixParams(RadixKey(range(4)), peek=True)
    ),
    "finish too long": lambda b: b.world.cache.cache_finished_req(b.req, kv_len_to_handle=99),
    "rowless chunk": lambda b: b.world.cache.cache_unfinished_req(make_req([1, 2], fill_len=2)),
    "match with row": lambda b: b.world.cache.match_req(b.req),
    "free row twice": lambda b: b.world.pool.free([b.req.kv.req_pool_idx] * 2),
    "release held": lambda b: b.world.allocator.release_cached(b.mine),
    "free cached": lambda b: b.world.allocator.free_pages(np.array(b.world.cached_pages()[:1])),
}


@pytest.mark.parametrize("shard_size", [1, 4])
@pytest.mark.parametrize("name", RAISING)
def test_what_raises_changes_nothing(name, shard_size):
    """Tree, allocator and rows are as before, to the byte."""
    busy = Busy(shard_size)
    before = busy.world.cache.state_digest()
    with pytest.raises((ValueError, KeyError)):
        RAISING[name](busy)
    assert before == busy.world.cache.state_digest()
    busy.world.cache.check_invariants()


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.world.cache.cache_finished_req(b.req, kv_len_to_handle=12),
        lambda b: b.world.cache.cache_finished_req(b.req, kv_len_to_handle=12, is_insert=False),
        lambda b: b.world.cache.cache_unfinished_req(b.req),
        lambda b: b.world.cache.abort(b.req),
        lambda b: b.world.cache.retract(b.req),
    ],
    ids=["finish", "finish without insert", "chunk", "abort", "retract"],
)
def test_a_row_with_a_page_of_somebody_else_is_refused_as_a_whole(call):
    """The request keeps its lock, its row and its marks."""
    busy = Busy(1)
    busy.spoil_row()
    before = (
        busy.world.cache.state_digest(),
        busy.req.lock_receipt,
        busy.req.last_node,
        busy.req.kv.req_pool_idx,
        busy.req.kv.cache_protected_len,
    )
    with pytest.raises(ValueError, match="cached"):
        call(busy)
    assert before == (
        busy.world.cache.state_digest(),
        busy.req.lock_receipt,
        busy.req.last_node,
        busy.req.kv.req_pool_idx,
        busy.req.kv.cache_protected_len,
    )


def test_a_finish_whose_tail_is_bad_inserts_nothing():
    """The pages that would be freed are checked before the tree adopts any."""
    world = make_world(4)
    other = world.insert(range(50, 54)).pages
    req = make_req(range(10), kv=BareKv())
    world.start(req)
    world.extend(req, 10)
    tail = world.row(req)[2]
    world.pool.write(req.kv.req_pool_idx, 8, pages=other)
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match="cached"):
        world.cache.cache_finished_req(req)
    assert before == world.cache.state_digest()
    world.pool.write(req.kv.req_pool_idx, 8, pages=[tail])
    world.finish(req)
    world.check()


@pytest.mark.parametrize("shard_size", [1, 4])
def test_a_batch_that_can_not_be_served_changes_nothing(shard_size):
    """None: no eviction, no row, no base, no lease."""
    busy = Busy(shard_size)
    new = make_req(range(60, 60 + 8 * shard_size * 4), fill_len=8 * shard_size * 4)
    busy.world.cache.match_req(new)
    before = busy.world.cache.state_digest()
    assert alloc_for_extend(busy.world.cache, [new]) is None
    assert before == busy.world.cache.state_digest()
    assert (new.kv.req_pool_idx, new.kv_rotation_base) == (None, None)


def test_a_stale_lock_is_refused_before_the_chunk_is_cached():
    """A receipt that somebody gave back already is found first."""
    busy = Busy(1)
    busy.world.cache.dec_lock_ref(busy.req.lock_receipt)
    before = busy.world.cache.state_digest()
    for call in (busy.world.cache.cache_unfinished_req, busy.world.cache.cache_finished_req):
        with pytest.raises(ValueError, match="used already"):
            call(busy.req)
        assert before == busy.world.cache.state_digest()
