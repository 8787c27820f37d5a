"""Copies under one rotation base, a chain on the device under another."""

import numpy as np

from radix import MatchPrefixParams
from tests.tiers.by_hand import evict, make
from tiers import MemoryStore, TieredEvictResult


def test_copies_under_another_rotation_base_than_the_chain_are_a_miss():
    rank = make(ranks=2, ps=1)
    rank.serve([1, 2, 3, 4], base=0)
    evict(rank)
    rank.serve([1, 2], base=1)
    assert rank.load([1, 2, 3, 4]) == 2
    assert rank.cache.counters.missed == 2
    evict(rank)
    assert rank.load([1, 2, 3, 4]) == 4
    rank.cache.check_invariants()


def test_copies_under_another_base_are_neither_kept_nor_a_hit_until_the_chain_has_gone():
    rank = make(ranks=2, ps=1)
    rank.serve([1, 2, 3, 4], base=0)
    evict(rank)
    rank.serve([1, 2, 3, 4], base=1)
    assert evict(rank, 1) == TieredEvictResult(1, 0, 1)
    match = rank.cache.match(rank.key([1, 2, 3, 4]), lock=False)
    assert (match.device.device_prefix_len, match.host_hit_length) == (3, 0)
    assert rank.cache.load_back(match) is None
    assert evict(rank) == TieredEvictResult(3, 3, 0)
    assert rank.cache.match(rank.key([1, 2, 3, 4]), lock=False).host_hit_length == 4
    assert rank.load([1, 2, 3, 4]) == 4


def test_files_count_as_a_hit_only_as_far_as_they_can_be_loaded():
    rank = make(ranks=2, ps=1, blobs=MemoryStore(10))
    rank.serve([1, 2, 3, 4], base=0)
    evict(rank)
    rank.cache.host._evict(np.array([2, 2]))
    rank.serve([1, 2], base=1)
    match = rank.cache.match(rank.key([1, 2, 3, 4]), lock=False)
    assert (match.host_hit_length, match.file_hit_length) == (0, 0)
    evict(rank)
    assert rank.cache.match(rank.key([1, 2, 3, 4]), lock=False).host_hit_length == 4


def test_under_seams_every_run_of_a_path_comes_back_under_its_own_base():
    rank = make(ranks=2, ps=1, rotation="seam")
    rank.serve([1, 2, 3, 4], base=0)
    rank.serve([1, 2, 9, 8], base=1)
    evict(rank)
    assert rank.load([1, 2, 9, 8]) == 4
    core = rank.device.tree_core
    end = core.node_by_id(
        rank.device.match_prefix(MatchPrefixParams(rank.key([1, 2, 9, 8]))).last_device_node
    )
    assert (end.rotation_base, end.parent.rotation_base) == (1, 0)
    rank.cache.check_invariants()
