"""Eviction in two steps: the runs that left the tree as data, then the release of their pages."""

import numpy as np
import pytest

from alloc import PageState
from radix import EvictParams
from tests.builders import make_world


def tokens(run):
    return run.key.tokens().tolist()


def test_detached_runs_tell_path_pages_and_start_of_what_evict_would_free():
    world, twin = (make_world(page_size=2, num_pages=12) for _ in range(2))
    for w in (world, twin):
        w.insert([1, 1, 2, 2, 3, 3])
        w.insert([1, 1, 2, 2, 4, 4, 5, 5])
    paths = {
        (1, 1, 2, 2, 3, 3): world.match([1, 1, 2, 2, 3, 3], peek=True).pages.tolist(),
        (1, 1, 2, 2, 4, 4, 5, 5): world.match([1, 1, 2, 2, 4, 4, 5, 5], peek=True).pages.tolist(),
    }
    runs = world.cache.detach(EvictParams(8))
    assert [(tokens(run), run.start) for run in runs] == [
        ([1, 1, 2, 2, 3, 3], 2),
        ([1, 1, 2, 2, 4, 4, 5, 5], 2),
        ([1, 1, 2, 2], 1),
    ]
    for run in runs[:2]:
        assert run.pages.tolist() == paths[tuple(tokens(run))]
    assert runs[2].pages.tolist() == runs[0].pages.tolist()[:2]
    dropped = np.concatenate([run.dropped() for run in runs])
    assert world.allocator.free_list.all_in(dropped, PageState.CACHED)
    assert world.cache.release_runs(runs).num_tokens_evicted == 8
    assert twin.cache.evict(EvictParams(8)).num_tokens_evicted == 8
    assert world.cache.state_digest() == twin.cache.state_digest()
    world.cache.check_invariants()


def test_detach_aims_as_evict_does():
    world, twin = (make_world(page_size=1, num_pages=4, shard_size=2) for _ in range(2))
    for w in (world, twin):
        w.insert([1, 2, 3], base=0)
        w.insert([7, 8], base=1)
    params = EvictParams(1, class_deficits=(1, 0))
    runs = world.cache.detach(params)
    assert world.cache.release_runs(runs) == twin.cache.evict(params)
    assert world.cache.state_digest() == twin.cache.state_digest()


def test_a_trimmed_leaf_gives_its_tail_and_keeps_dead_bytes_out_of_the_key():
    world = make_world(page_size=1, num_pages=8)
    world.insert([1, 2, 3, 4], extra_key="lora")
    for stop in (4, 3, 2, 1):
        (run,) = world.cache.detach(EvictParams(1))
        assert (tokens(run), run.start) == ([1, 2, 3, 4][:stop], stop - 1)
        assert run.key.extra_key == "lora"
        world.cache.release_runs([run])
    assert world.cache.detach(EvictParams(1)) == []
    assert world.cache.release_runs([]).num_tokens_evicted == 0


def test_detach_refuses_what_evict_refuses():
    world = make_world(page_size=1, num_pages=4)
    with pytest.raises(ValueError, match="must not be negative"):
        world.cache.detach(EvictParams(-1))
