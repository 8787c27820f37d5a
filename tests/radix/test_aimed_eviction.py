"""Evicting for the classes that are short (DECISIONS 22)."""

from __future__ import annotations

import numpy as np
import pytest

from radix import EvictParams
from tests.builders import World, make_world


def evict_classes(world: World, *deficits: int) -> list[int]:
    """Evict for deficits; returns the pages freed of each class."""
    before = world.allocator.free_list.counts()
    result = world.cache.evict(EvictParams(0, deficits))
    freed = world.allocator.free_list.counts() - before
    assert result.num_tokens_evicted == int(freed.sum()) * world.page_size
    world.check()
    return freed.tolist()


def test_a_leaf_that_ends_in_the_wanted_class_goes_before_an_older_one():
    """Inside the window the aim comes before recency."""
    world = make_world(1, 8, shard_size=4)
    world.insert([1], base=0)
    world.insert([2], base=2)
    assert evict_classes(world, 0, 0, 1, 0) == [0, 0, 1, 0]
    assert [world.peek_len([1]), world.peek_len([2])] == [1, 0]


def test_equal_leaves_go_in_policy_order():
    """The aim does not replace recency."""
    world = make_world(1, 8, shard_size=4)
    for token in (1, 2, 3):
        world.insert([token], base=2)
    world.match([1])
    assert evict_classes(world, 0, 0, 2, 0) == [0, 0, 2, 0]
    assert world.peek_len([1]) == 1


def test_outside_the_window_nothing_is_looked_at():
    """If none of the window helps, the first leaf goes."""
    world = make_world(1, 64, shard_size=4)
    for token in range(32):
        world.insert([token], base=0)
    world.insert([99], base=2)
    freed = evict_classes(world, 0, 0, 1, 0)
    assert freed == [1, 0, 1, 0]
    assert world.peek_len([0]) == 0


@pytest.mark.parametrize("seed", range(5))
def test_every_deficit_is_met_as_far_as_it_can_be(seed):
    """At most N - 1 other pages go for each wanted one, but for pages that no window helps."""
    rng = np.random.default_rng(seed)
    world = make_world(1, 16, shard_size=4)
    for token in range(12):
        world.insert([token, *range(100, 100 + int(rng.integers(0, 4)))], base=int(rng.integers(4)))
    receipt = world.lock([0])
    evictable = world.core.component.evictable_by_class()
    deficits = rng.integers(0, 4, 4)
    freed = evict_classes(world, *deficits.tolist())
    wanted = np.minimum(deficits, evictable)
    assert (np.array(freed) >= wanted).all()
    assert sum(freed) <= 4 * int(wanted.sum())
    world.cache.dec_lock_ref(receipt)


def test_a_class_with_nothing_evictable_is_given_up_at_once():
    """The tree is not drained for it."""
    world = make_world(1, 8, shard_size=4)
    for token in range(4):
        world.insert([token], base=0)
    assert evict_classes(world, 0, 3, 0, 0) == [0, 0, 0, 0]
    assert world.cache.total_size() == 4


@pytest.mark.parametrize("deficits", [(1,), (1, 0, 0), (0, 0, 0, -1), (0, 0, 0, 0, 0)])
def test_deficits_must_be_one_count_a_class(deficits):
    """Nothing changed."""
    world = make_world(1, 8, shard_size=4)
    world.insert([1], base=0)
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match="class_deficits"):
        world.cache.evict(EvictParams(1, deficits))
    assert before == world.cache.state_digest()


def test_no_deficit_frees_nothing():
    """Whatever ``num_tokens`` says."""
    world = make_world(1, 8, shard_size=4)
    world.insert([1], base=0)
    assert world.cache.evict(EvictParams(100, (0, 0, 0, 0))).num_tokens_evicted == 0
