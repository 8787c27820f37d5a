"""Rows of the contract that have no other home: names, a real pool underneath, whole batches."""

from __future__ import annotations

import importlib
from array import array

import numpy as np
import pytest

from alloc import PagedTokenToKVPoolAllocator, PageInterleavePoolAllocator, ReqToTokenPool
from radix import (
    CacheInitParams,
    ComponentType,
    EvictResult,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    UnifiedRadixCache,
    UnifiedTreeCore,
)
from tests.builders import make_req, make_world

NAMES = {
    "alloc": [
        "PageInterleavePlacement",
        "PageShardSpec",
        "PageInterleavePoolAllocator",
        "page_interleave_shard_size",
        "PagedTokenToKVPoolAllocator",
        "TokenToKVPoolAllocator",
        "ReqToTokenPool",
        "ceil_div",
    ],
    "radix": [
        "EvictResult",
        "EvictParams",
        "InsertParams",
        "MatchPrefixParams",
        "CacheInitParams",
        "LockReceipt",
        "RadixKey",
        "ComponentType",
        "UnifiedTreeCore",
        "UnifiedRadixCache",
        "evict_until_allocatable",
    ],
    "scratch": [
        "get_kv_shard_group",
        "MHATokenToKVPool",
        "MLATokenToKVPool",
        "PageInterleaveMHATokenToKVPool",
        "PageInterleaveMLATokenToKVPool",
        "ShardExtendPlanner",
    ],
}


@pytest.mark.parametrize("package", NAMES)
def test_the_fields_names_are_there(package):
    """C1: everything that a scheduler or a model runner imports, from the package itself."""
    if package == "scratch":
        pytest.importorskip("torch")
    module = importlib.import_module(package)
    assert [name for name in NAMES[package] if name not in module.__all__] == []


@pytest.mark.parametrize("shard_size", [1, 4])
def test_a_cache_over_a_real_pool_on_the_cpu(shard_size):
    """C52-C56, C65: int64 tensors in and out, copies of what the caller gave."""
    torch = pytest.importorskip("torch")
    scratch = importlib.import_module("scratch")
    kvcache = scratch.MHATokenToKVPool(64, 4, torch.float32, 1, 2, layer_num=1, device="cpu")
    if shard_size == 1:
        allocator = PagedTokenToKVPoolAllocator(64, 4, torch.float32, "cpu", kvcache)
        value = allocator.alloc(8)
    else:
        allocator = PageInterleavePoolAllocator(64, 4, shard_size, torch.float32, "cpu", kvcache)
        value = allocator.alloc_cyclic(1, 8)
    rows = ReqToTokenPool(4, 32, "cpu")
    rows.req_to_token[0, :8] = value
    cache = UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=4,
            eviction_policy="lru",
            tree_components=(ComponentType.FULL,),
        )
    )
    expected = value.tolist()
    key = RadixKey(array("q", range(8)))
    base = 1 if shard_size > 1 else None
    result = cache.insert(InsertParams(key=key, value=value, rotation_base=base))
    value.zero_()
    match = cache.match_prefix(MatchPrefixParams(key=key))
    assert allocator.get_kvcache() is kvcache
    assert (match.device_indices.dtype, match.device_indices.tolist()) == (torch.int64, expected)
    assert cache.rotation_base_of(result.last_device_node) == base
    assert cache.rotation_base_of(cache.tree_core.root_node_handle()) is None
    assert cache.rotation_base_of(None) is None


def test_the_built_in_core_supports_bases_and_says_so_on_its_class():
    """C66, C68."""
    assert UnifiedTreeCore.supports_rotation_base is True
    assert make_world(4, shard_size=2).core.supports_rotation_base is True


def test_a_result_needs_only_what_was_evicted():
    """C50."""
    assert EvictResult(num_tokens_evicted=3).num_tokens_evicted == 3
    assert EvictResult().num_tokens_evicted == 0


@pytest.mark.parametrize("seed", range(3))
def test_no_slot_of_a_batch_is_given_twice(seed):
    """C39, C42: each request's run of its own, the concatenation in batch order."""
    rng = np.random.default_rng(seed)
    allocator = PageInterleavePoolAllocator(64, 4, 4, None, None, None)
    seen: set[int] = set()
    for _ in range(6):
        lens = rng.integers(1, 17, size=3).tolist()
        out = allocator.alloc_extend([0] * 3, [0] * 3, lens, lens, [-1] * 3, sum(lens), [None] * 3)
        assert len(out) == sum(lens)
        assert len(seen | set(out.tolist())) == len(seen) + sum(lens)
        seen |= set(out.tolist())


def test_a_decline_inside_an_edge_makes_no_node():
    """C76, C77: decided before the walk changes anything, also for a partly matched node."""
    world = make_world(4, shard_size=4)
    world.insert(range(12), base=1)
    pages = world.draw(3, base=3)
    before = world.cache.state_digest()
    result = world.insert([*range(8), 50, 51, 52, 53], pages, base=3)
    assert (result.rotation_tail_declined, result.prefix_len) == (True, 8)
    assert (before, world.core.num_nodes()) == (world.cache.state_digest(), 1)


@pytest.mark.parametrize("end", ["unfinished", "finished"])
def test_a_request_without_a_node_stands_at_the_root(end):
    """C88: both calls take one that was never matched."""
    world = make_world(4)
    req = make_req(range(10))
    req.kv.req_pool_idx = world.pool.alloc(1)[0]
    world.extend(req, 10)
    if end == "unfinished":
        world.cache.cache_unfinished_req(req)
        assert world.sizes() == (0, 8)
    world.finish(req)
    assert world.sizes() == (8, 0)
    world.check()
