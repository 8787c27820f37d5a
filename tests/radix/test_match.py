"""Matching (BEHAVIOUR 37; CONTRACT 52, 55, 56, 63, 64)."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from alloc import PagedTokenToKVPoolAllocator, ReqToTokenPool
from radix import (
    CacheInitParams,
    ComponentType,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    UnifiedRadixCache,
)
from tests.builders import make_world


def test_the_field_s_own_call_shapes_work():
    """Constructor, insert and match as the field writes them."""
    allocator = PagedTokenToKVPoolAllocator(64, 4, None, None, None, False)
    cache = UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, 64, None),
            token_to_kv_pool_allocator=allocator,
            page_size=4,
            eviction_policy="lru",
            tree_components=(ComponentType.FULL,),
        )
    )
    tokens = array("q", range(8))
    value = allocator.alloc(8)
    result = cache.insert(InsertParams(key=RadixKey(tokens), value=value))
    match = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
    assert (result.prefix_len, result.rotation_tail_declined) == (0, False)
    assert value.tolist() == match.device_indices.tolist()
    assert result.last_device_node == match.last_device_node
    node = cache.tree_core.node_by_id(match.last_device_node)
    assert cache.tree_core.root() is node.parent
    assert [node] == list(node.parent.children.values())


@pytest.mark.parametrize(("page_size", "length"), [(1, 5), (4, 16), (4, 19), (16, 33), (3, 10)])
def test_a_match_is_whole_pages_of_what_was_inserted(page_size, length):
    """Every prefix of the key matches its whole pages with the same slots."""
    world = make_world(page_size)
    pages = world.insert(range(length)).pages.tolist()
    for n in range(length + 1):
        match = world.match(range(n), peek=True)
        whole = n // page_size
        assert whole * page_size == match.device_prefix_len
        assert pages[:whole] == match.pages.tolist()
        assert world.slots(pages[:whole]) == match.device_indices.tolist()


@pytest.mark.parametrize("tokens", [[], [0], [0, 1, 2], [9, 9, 9, 9, 9], [0, 1, 2, 9, 4]])
def test_unknown_and_short_keys_match_nothing_at_the_root(tokens):
    """No node is made, none is split."""
    world = make_world(4)
    world.insert(range(8))
    match = world.match(tokens)
    assert 0 == match.device_prefix_len == len(match.device_indices) == len(match.pages)
    assert world.core.root_node_handle() == match.last_device_node
    assert world.core.num_nodes() == 1


def test_a_match_inside_an_edge_splits_at_the_page_boundary():
    """The matched node ends where the match does; the tail keeps its id."""
    world = make_world(4)
    lower = world.insert(range(16)).last_device_node
    match = world.match([*range(10), 99, 99])
    assert match.device_prefix_len == 8
    upper = world.core.node_by_id(match.last_device_node)
    assert (upper.start, upper.end) == (0, 2)
    assert (world.core.node_by_id(lower).start, world.core.node_by_id(lower).end) == (2, 4)
    assert world.core.node_by_id(lower).parent is upper
    assert world.core.num_nodes() == 2
    world.check()


def test_a_match_refreshes_the_matched_part_only():
    """What lies past the match keeps its stamp and hits."""
    world = make_world(2)
    lower = world.core.node_by_id(world.insert(range(8)).last_device_node)
    before = (lower.last_access, lower.hits)
    upper = world.node(range(4))
    world.match(range(4))
    upper = world.node(range(4))
    assert before == (lower.last_access, lower.hits)
    assert before[0] < upper.last_access
    assert before[1] + 1 == upper.hits


def test_a_match_through_several_nodes_joins_their_slots():
    """Indices run over the whole path in order."""
    world = make_world(2)
    pages = world.insert(range(12)).pages.tolist()
    for n in (4, 8, 10):
        world.match(range(n))
    assert world.core.num_nodes() == 4
    assert world.slots(pages) == world.match(range(12)).device_indices.tolist()


def test_a_peek_changes_nothing():
    """No split, no stamp, no hit; the answer is the match's."""
    world = make_world(4)
    world.insert(range(16))
    before = world.cache.state_digest()
    peeked = world.match(range(10), peek=True)
    assert before == world.cache.state_digest()
    assert world.match(range(10)).pages.tolist() == peeked.pages.tolist()


def test_a_repeated_look_up_counts_no_hit():
    """``count_hit=False`` refreshes and counts nothing."""
    world = make_world()
    world.insert(range(4))
    for _ in range(3):
        world.match(range(4), count_hit=False)
    assert world.node(range(4)).hits == 0
    world.match(range(4))
    assert world.node(range(4)).hits == 1


def test_indices_are_built_later_from_the_moment_of_the_match():
    """A split or trim after the match does not change what it said."""
    world = make_world(2)
    pages = world.insert(range(12)).pages.tolist()
    match = world.match(range(12))
    world.match(range(4))
    world.evict(6)
    assert world.slots(pages) == match.device_indices.tolist()
    assert match.device_indices is match.device_indices


def test_pages_of_a_match_are_read_only():
    """A caller can't write into the tree."""
    world = make_world()
    world.insert(range(4))
    with pytest.raises(ValueError, match="read-only"):
        world.match(range(4)).pages[0] = 7


def test_host_mode_gives_numpy_int64():
    """``device=None``: slots are arrays."""
    world = make_world(4)
    world.insert(range(8))
    indices = world.match(range(8)).device_indices
    assert (np.ndarray, np.int64) == (type(indices), indices.dtype)


def test_with_a_device_indices_are_an_int64_tensor():
    """``device="cpu"``: slots are tensors, values and matches."""
    torch = pytest.importorskip("torch")
    world = make_world(4, device="cpu")
    value = world.allocator.alloc(8)
    world.cache.insert(InsertParams(world.key(range(8)), value=value))
    indices = world.match(range(8)).device_indices
    assert (torch.int64, "cpu") == (indices.dtype, indices.device.type)
    assert value.tolist() == indices.tolist()
    assert torch.int64 == world.match([77]).device_indices.dtype
    assert world.match([77]).device_indices.numel() == 0


def test_match_and_lock_is_one_operation():
    """The receipt protects the match from the start."""
    world = make_world(2)
    world.insert(range(8))
    match = world.cache.match_and_lock(MatchPrefixParams(world.key(range(4))))
    assert world.sizes() == (4, 4)
    assert world.evict(100) == 4
    world.cache.dec_lock_ref(match.receipt)
    assert world.sizes() == (4, 0)
    world.check()


def test_match_and_lock_refuses_to_peek():
    """A lock is a change."""
    world = make_world()
    with pytest.raises(ValueError, match="peek"):
        world.cache.match_and_lock(MatchPrefixParams(world.key([1]), peek=True))
