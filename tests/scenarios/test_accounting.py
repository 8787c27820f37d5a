"""Sizes are those of the tree, always, and a check says which one is not."""

from __future__ import annotations

import pytest

from radix import InsertParams, RadixKey
from tests.builders import make_world


def test_one_page_can_not_be_two_nodes():
    """E1: a page counted in two nodes made the cache larger than the pool."""
    world = make_world()
    pages = world.insert(range(4)).pages
    (own,) = world.draw(1)
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match="it is cached"):
        world.insert([9, 8], [pages[2], own])
    assert before == world.cache.state_digest()
    assert world.free_pages() + len(world.held_pages()) + sum(world.sizes()) == 64


def test_a_value_shorter_than_its_key_changes_nothing():
    """E2: one counter took the key's length and the other the value's."""
    world = make_world()
    slots = world.allocator.alloc(6)
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match="6 slots for a key of 8"):
        world.cache.insert(InsertParams(RadixKey(range(8)), value=slots))
    assert before == world.cache.state_digest()


def test_an_eviction_stops_when_it_has_enough():
    """E3: a loop that never counted its progress wiped everything."""
    world = make_world(1, 512)
    for i in range(100):
        world.insert([i] * 4)
    for wanted, freed in ((4, 4), (5, 5), (0, 0)):
        before = world.cache.evictable_size()
        assert world.evict(wanted) == freed
        assert before - world.cache.evictable_size() == freed
    with pytest.raises(ValueError, match="negative"):
        world.evict(-3)
    assert world.cache.evictable_size() == 391
    world.check()


def test_a_leaf_loses_what_is_wanted_and_no_more():
    """E3: whole leaves went for a part of one."""
    world = make_world(4)
    for i in range(3):
        world.insert([i] * 16)
    assert world.evict(5) == 8
    assert [world.peek_len([i] * 16) for i in range(3)] == [8, 16, 16]


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (lambda w, n: setattr(w.core.component, "_evictable", 3), "count of evictable pages is 3"),
        (lambda w, n: setattr(n, "pins", 2), "has 2 pins, but 0 receipts"),
        (lambda w, n: setattr(n, "pages", n.pages[:8] * 4), "is owned twice"),
    ],
    ids=["counter", "lock", "page"],
)
def test_a_corruption_is_named(corrupt, words):
    """E4: the check was a stub, and drift showed only as wrong output."""
    world = make_world()
    world.insert(range(4))
    world.check()
    corrupt(world, world.node(range(4)))
    with pytest.raises(RuntimeError, match=words):
        world.check()
