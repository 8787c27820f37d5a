"""Memory follows what is cached: nothing grows per request, and nothing dead is kept alive."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc

import numpy as np
import pytest

from radix import alloc_for_extend
from tests.builders import FakeReq, World, make_req, make_world

CAPACITY = 64


def retained_bytes(world: World) -> int:
    """Return the bytes of keys and page ids that the nodes keep alive."""
    return sum(sys.getsizeof(n.key) + sys.getsizeof(n.pages) for n in world.core.nodes())


def serve(world: World, req: FakeReq) -> None:
    """Take a request through its whole life, evicting what it needs."""
    req.fill_len = len(req.tokens())
    world.cache.match_req(req)
    assert alloc_for_extend(world.cache, [req]) is not None
    world.cache.cache_unfinished_req(req)
    world.finish(req)


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "mru", "slru"])
def test_nodes_are_bounded_by_cached_pages(policy):
    """Many distinct suffixes under few prefixes: splits and evictions leave no empty node."""
    world = make_world(4, CAPACITY, policy, context=128)
    rng = random.Random(3)
    for i in range(1_500):
        prefix = [rng.randrange(4)] * 4 * rng.randrange(1, 5)
        serve(world, make_req([*prefix, *range(10 + i, 10 + i + rng.randrange(1, 30))]))
        assert world.core.num_nodes() <= len(world.cached_pages())
    assert world.core.num_nodes() <= CAPACITY
    assert len(world.core.frontier_ids()) <= world.core.num_nodes()
    world.check()


@pytest.mark.parametrize(
    ("lives", "options"),
    [
        (2_000, {}),
        (600, {"shard_size": 4}),
        (600, {"shard_size": 4, "rotation": "seam"}),
        (600, {"disable": True}),
    ],
)
def test_a_life_leaves_no_trace(lives, options):
    """After a warm-up, many lives more keep less than one small object each."""
    world = make_world(4, CAPACITY, context=128, **options)
    rng = random.Random(5)

    def live(count: int) -> int:
        """Serve some requests; returns the bytes in use once nothing is cached any more."""
        for _ in range(count):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 60))]
            serve(world, make_req(tokens))
        world.evict(world.cache.total_size())
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    live(300)
    tracemalloc.start()
    grown = -live(300) + live(lives)
    tracemalloc.stop()
    assert grown < 10_000, f"{grown} bytes more after {lives} requests"
    assert len(world.cache.leases) == 0
    assert world.core.receipts() == []
    world.check()


def test_locks_that_come_and_go_leave_no_trace():
    """Lock, fail to evict, unlock, a thousand times: the candidates stay one."""
    world = make_world(1)
    world.insert(range(8))
    for _ in range(1_000):
        receipt = world.lock(range(8))
        assert world.evict(8) == 0
        world.cache.dec_lock_ref(receipt)
    assert len(world.core.frontier_ids()) == 1
    assert world.core.receipts() == []
    assert world.evict(8) == 8


def test_a_trimmed_leaf_does_not_keep_what_it_lost():
    """Trimmed from megabytes to one page, in one step or in many."""
    total = 200_000
    for steps in (1, 50):
        world = make_world(1, total)
        world.insert(np.arange(total))
        full = retained_bytes(world)
        for _ in range(steps):
            world.evict((total - 1) // steps)
        left = world.cache.total_size()
        assert left < total // 100
        assert retained_bytes(world) <= 2 * full * left // total + 200


def test_a_slow_trim_copies_little():
    """Page by page, a long leaf is recut only when half of it is dead."""
    world = make_world(1, 4096)
    node = world.core.node_by_id(world.insert(np.arange(4096)).last_device_node)
    keys = set()
    while world.evict(1):
        keys.add(id(node.key))
        assert len(node.key) <= 2 * max(1, node.num_pages) * 8
    assert len(keys) <= 14


def test_a_split_shares_no_bytes():
    """After many splits the nodes keep what they hold, and evicting the rest frees it."""
    total, page = 65_536, 64
    world = make_world(page, total // page)
    world.insert(np.arange(total))
    for pages in range(1, 65):
        world.match(np.arange(pages * page))
    held = total // page * (page * 8 + 8)
    assert retained_bytes(world) < held + 200 * world.core.num_nodes()
    receipt = world.lock(np.arange(page))
    world.evict(total)
    assert world.cache.total_size() == page
    assert retained_bytes(world) < page * 8 + 300
    world.cache.dec_lock_ref(receipt)


def test_the_callers_arrays_are_not_kept():
    """Slots and tokens are copied: what the tree keeps follows from the key, not the buffer."""
    world = make_world(1, 64)
    tokens, slots = np.arange(1_000_000), world.allocator.alloc(10)
    tracemalloc.start()
    world.insert(tokens[:10], slots)
    del tokens
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 20_000


def test_a_reset_forgets_everything():
    """Nodes, receipts, leases and candidates."""
    world = make_world(4, shard_size=4)
    world.insert(range(8), base=1)
    world.lock(range(8))
    req = make_req(range(50, 60), fill_len=10)
    world.cache.match_req(req)
    assert alloc_for_extend(world.cache, [req]) is not None
    assert len(world.cache.leases) == 1
    world.cache.reset()
    world.cache.abort(req)
    assert (world.core.num_nodes(), len(world.cache.leases)) == (0, 0)
    assert (world.core.receipts(), world.core.frontier_ids()) == ([], [])
    world.check()
