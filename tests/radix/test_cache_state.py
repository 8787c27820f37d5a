"""Construction, reset, sizes, checks and text (BEHAVIOUR 47; CONTRACT 52, 53)."""

from __future__ import annotations

import pytest

from alloc import PagedTokenToKVPoolAllocator, PageState
from radix import CacheInitParams, UnifiedRadixCache
from tests.builders import World, make_req, make_world


def test_the_page_sizes_must_agree():
    """Cache and allocator speak of the same pages."""
    allocator = PagedTokenToKVPoolAllocator(64, 4, None, None, None)
    with pytest.raises(ValueError, match="page_size=8 differs"):
        UnifiedRadixCache(CacheInitParams(False, None, allocator, 8))


@pytest.mark.parametrize("components", [(), ("full",), ("FULL", "FULL")])
def test_unknown_components_are_refused_at_construction(components):
    """Not at the first insert."""
    allocator = PagedTokenToKVPoolAllocator(64, 4, None, None, None)
    with pytest.raises(ValueError, match="tree_components"):
        UnifiedRadixCache(CacheInitParams(False, None, allocator, 4, tree_components=components))


def test_an_unknown_rotation_is_refused_at_construction():
    """The message lists the names."""
    with pytest.raises(ValueError, match="chain, seam"):
        make_world(rotation="spiral")


def test_a_reset_drops_the_tree_and_gives_its_pages_back():
    """Pages that requests hold stay theirs."""
    world = make_world(4)
    world.insert(range(12))
    world.insert([9] * 8)
    held = world.draw(3)
    world.cache.reset()
    assert (world.sizes(), world.core.num_nodes()) == ((0, 0), 0)
    assert sorted(held.tolist()) == world.held_pages()
    assert world.peek_len(range(12)) == 0
    world.allocator.free_pages(held)
    assert world.free_pages() == world.num_pages
    world.check()


def test_a_reset_works_while_locks_are_held():
    """The locks are stale afterwards, and hold nothing."""
    world = make_world(4)
    world.insert(range(8))
    world.lock(range(8))
    world.cache.reset()
    assert world.sizes() == (0, 0)
    world.insert(range(8))
    assert world.evict(8) == 8
    world.check()


def test_sizes_are_in_tokens():
    """total = evictable + protected, whatever is locked."""
    world = make_world(4)
    world.insert(range(12))
    world.insert([*range(4), 9, 9, 9, 9])
    world.lock(range(8))
    assert (world.cache.evictable_size(), world.cache.protected_size()) == (8, 8)
    assert world.cache.total_size() == 16


def make_busy() -> World:
    """Make a tree with a split, a lock and two namespaces."""
    world = make_world(2, 16)
    world.insert(range(8))
    world.insert([0, 1, 2, 3, 9, 9])
    world.insert([5, 6], extra_key="a")
    world.lock([0, 1, 2, 3, 9, 9])
    world.check()
    return world


def leaf(world: World):
    return world.node(range(8))


def corrupt_counter(world):
    world.core.component._evictable += 1


def corrupt_protected(world):
    world.core.component._protected -= 1


def corrupt_pins(world):
    world.node(range(4)).pins += 1


def corrupt_page(world):
    leaf(world).pages = world.node([0, 1, 2, 3, 9, 9]).pages * 2


def corrupt_owner(world):
    world.allocator.release_cached(leaf(world).page_ids())


def corrupt_frontier(world):
    world.core._frontier.discard(leaf(world))


def corrupt_child_key(world):
    leaf(world).key = world.key([7, 7, 7, 7]).data


def corrupt_namespace(world):
    leaf(world).namespace = ("b", None, False)


def corrupt_start(world):
    leaf(world).end += 1


def corrupt_stamp(world):
    world.node(range(4)).last_access = 0


def corrupt_empty(world):
    leaf(world).num_pages = 0


def corrupt_registry(world):
    del world.core._nodes[leaf(world).id]


def corrupt_receipt(world):
    receipt = world.core.receipts()[0]
    receipt.node_id = 12345


def corrupt_commit(world):
    world.core._committing = True


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_counter, "count of evictable pages is 7|count of evictable pages"),
        (corrupt_protected, "count of protected pages"),
        (corrupt_pins, "pins, but"),
        (corrupt_page, "owned twice"),
        (corrupt_owner, "differ from those the allocator calls cached"),
        (corrupt_frontier, "frontier differs"),
        (corrupt_child_key, "not filed under its first page"),
        (corrupt_namespace, "another namespace"),
        (corrupt_start, "does not start where its parent ends"),
        (corrupt_stamp, "used after its parent"),
        (corrupt_empty, "is empty"),
        (corrupt_registry, "nodes are registered"),
        (corrupt_receipt, "nodes that are gone"),
        (corrupt_commit, "interrupted"),
    ],
)
def test_every_corruption_is_named(corrupt, message):
    """A clean tree reports nothing; a broken rule is said in words."""
    world = make_busy()
    corrupt(world)
    with pytest.raises(RuntimeError, match=message):
        world.cache.check_invariants()


def test_the_check_knows_the_requests_pages():
    """A held page that is no request's, and one that is two requests', are found."""
    world = make_world(4)
    req = make_req(range(10))
    world.run(req, 5)
    world.check(req)
    with pytest.raises(RuntimeError, match="pages of the requests differ"):
        world.check()
    with pytest.raises(RuntimeError, match="pages of the requests differ"):
        world.check(req, req)
    receipt, req.lock_receipt = req.lock_receipt, None
    with pytest.raises(RuntimeError, match="request 0 has a protected prefix and no lock"):
        world.check(req)
    req.lock_receipt = receipt
    world.cache.check_invariants()


def test_an_interrupted_commit_makes_the_tree_unusable():
    """Every later call says so, and nothing else is done."""
    world = make_busy()
    receipt = world.core.receipts()[0]
    world.core._committing = True
    for call in (
        lambda: world.match([1]),
        lambda: world.insert([1], [1]),
        lambda: world.evict(1),
        lambda: world.cache.inc_lock_ref(world.core.root_node_handle()),
        lambda: world.cache.dec_lock_ref(receipt),
        world.cache.reset,
    ):
        with pytest.raises(RuntimeError, match="build a new cache"):
            call()


def test_pretty_print_is_stable():
    """One line a node: range, locks, last use, hits and first tokens."""
    world = make_busy()
    world.evict(2)
    assert world.cache.pretty_print().splitlines() == [
        "root: 4 nodes",
        "  #2 pages [0, 2) pins=1 used=4 hits=0 [0, 1, 2, 3]...",
        "    #1 pages [2, 3) pins=0 used=1 hits=0 [4, 5]...",
        "    #3 pages [2, 3) pins=1 used=4 hits=0 [9, 9]...",
        "  #4 pages [0, 1) pins=0 used=3 hits=0 [5, 6]...",
    ]
    assert make_world().cache.pretty_print() == "root: 0 nodes"


def test_pretty_print_shows_bases():
    """Where a chain starts is part of the picture."""
    world = make_world(4)
    world.insert(range(8), base=3)
    assert "base=3" in world.cache.pretty_print()


def test_a_digest_tells_states_apart_and_leaves_them_alone():
    """Every kind of change shows; reading does not."""
    world = make_world(4)
    seen = [world.cache.state_digest()]
    steps = [
        lambda: world.insert(range(8)),
        lambda: world.match(range(4)),
        lambda: world.lock(range(4)),
        lambda: world.evict(4),
        lambda: world.pool.alloc(1),
        lambda: world.draw(1),
        world.cache.reset,
    ]
    for step in steps:
        step()
        seen.append(world.cache.state_digest())
        assert seen[-1] == world.cache.state_digest()
    assert len(seen) == len(set(seen))


def test_equal_calls_on_two_caches_of_one_process_give_equal_digests():
    """Nothing of the process, like the number of the tree, is in it."""

    def run() -> str:
        world = make_busy()
        req = make_req(range(7))
        world.run(req, 3)
        world.evict(4)
        return world.cache.state_digest()

    assert run() == run()


def test_the_census_covers_the_pool():
    """Every page is in exactly one place."""
    world = make_busy()
    census = world.allocator.page_census()
    assert sum(census.values()) == 16
    assert census[PageState.CACHED] * 2 == world.cache.total_size()
