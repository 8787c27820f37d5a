"""Splits: both halves are whole nodes with the marks, locks and counts of the one they were."""

from __future__ import annotations

from tests.builders import World, make_world


def assert_filed(world: World) -> None:
    """Every child hangs under its own first page at the parent that it names."""
    for node in world.core.nodes():
        page = world.page_size * 8
        assert node.num_pages > 0
        assert node.parent.children[node.parent.child_key(node, page)] is node
    world.check()


def test_many_splits_retain_no_more_than_what_is_cached():
    """B1: halves were views of one buffer, so evicting one of them freed no memory."""
    world = make_world(64, 1024)
    world.insert(range(65_536))
    for pages in range(1, 65):
        world.match(range(64 * pages))
    world.lock(range(64))
    world.evict(65_536)
    (left,) = world.core.nodes()
    assert world.cache.total_size() == 64
    assert len(left.key) == 64 * 8
    assert len(left.pages) == 8


def test_a_lock_covers_both_halves_and_leaves_both():
    """B2: the new half had no lock, and the release walked past it."""
    world = make_world()
    world.insert(range(8))
    receipt = world.lock(range(8))
    world.match(range(3))
    assert world.sizes() == (0, 8)
    nested = world.lock(range(3))
    world.cache.dec_lock_ref(receipt)
    assert world.sizes() == (5, 3)
    world.cache.dec_lock_ref(nested)
    assert [node.pins for node in world.core.nodes()] == [0, 0]
    assert world.evict(8) == 8
    world.check()


def test_a_lock_protects_what_was_matched_and_no_more():
    """B4: a match inside an edge locked the whole edge, and the rest of it for good."""
    world = make_world()
    world.insert(range(8))
    receipt = world.lock(range(5))
    assert world.sizes() == (3, 5)
    world.insert([*range(5), 50, 51])
    world.cache.dec_lock_ref(receipt)
    assert world.sizes() == (10, 0)
    assert world.evict(100) == 10
    assert world.core.num_nodes() == 0
    world.check()


def test_split_nodes_are_filed_under_their_own_keys():
    """B5: a half was filed under another key, and its eviction failed much later."""
    world = make_world(4)
    world.insert(range(12))
    assert world.match(range(6)).device_prefix_len == 4
    assert_filed(world)
    world.insert([*range(8), 50, 51, 52, 53])
    assert_filed(world)
    while world.evict(4):
        assert_filed(world)
    assert len(world.core.root().children) == 0


def test_sizes_stay_whole_through_splits_locks_and_evictions():
    """B7: adding a child took the parent's size off, and the counter went below zero."""
    world = make_world()
    world.insert(range(1, 9))
    world.insert([1, 2, 3, 9, 10])
    assert world.sizes() == (10, 0)
    receipt = world.lock([1, 2, 3, 9, 10])
    assert world.sizes() == (5, 5)
    world.cache.dec_lock_ref(receipt)
    assert world.evict(2) == 2
    receipt = world.lock(range(1, 9))
    assert sum(world.sizes()) == 8
    world.cache.dec_lock_ref(receipt)
    assert world.sizes() == (8, 0)
    world.check()


def test_children_follow_a_split_of_their_parent():
    """Grandchildren went on naming the node above the split as their parent."""
    world = make_world()
    world.insert([1, 2, 3, 4, 5])
    world.insert([1, 2, 3, 4, 6])
    world.insert([1, 2, 9])
    lower = world.node([1, 2, 3, 4])
    assert [child.parent for child in lower.children.values()] == [lower, lower]
    assert lower.parent is world.node([1, 2])
    assert_filed(world)
    for _ in range(7):
        assert world.evict(1) == 1
        assert_filed(world)
    assert world.core.num_nodes() == 0


def test_a_look_that_only_asks_does_not_split():
    """PR9: asking for two lengths of one entry cut it in three."""
    world = make_world()
    world.insert([1] * 8)
    for length in (3, 5):
        assert world.peek_len([1] * length) == length
    assert world.core.num_nodes() == 1
