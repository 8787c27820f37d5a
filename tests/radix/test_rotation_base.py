"""Rotation bases in the tree and the decline (BEHAVIOUR 49-54; CONTRACT 57-86; DECISIONS 23)."""

from __future__ import annotations

import numpy as np
import pytest

from radix import InsertParams, RadixKey, UnifiedTreeCore
from tests.builders import FakeReq, World, make_req, make_world

CHAIN = list(range(8))
FULL = list(range(12))
OTHER = [50, 51, 52, 53]


def make_chain(base: int | None = 1, **world) -> World:
    """Make a world of page 4 with an 8-token chain of ``base``."""
    made = make_world(4, **world)
    made.insert(CHAIN, base=base)
    return made


def start_by_hand(world: World, tokens: list[int], base: int | None) -> FakeReq:
    """Make a request that computed all its tokens itself, without matching first."""
    req = make_req(tokens, kv_rotation_base=base)
    req.kv.req_pool_idx = world.pool.alloc(1)[0]
    world.pool.write(req.kv.req_pool_idx, 0, pages=world.draw(len(tokens) // 4, base))
    req.fill_len = req.kv.allocated_len = len(tokens)
    return req


def watch_frees(world: World, monkeypatch) -> list[int]:
    """Record every page that is released through the allocator."""
    seen: list[int] = []
    for name in ("free_pages", "release_cached"):
        original = getattr(world.allocator, name)

        def spy(pages, original=original):
            seen.extend(np.asarray(pages).tolist())
            original(pages)

        monkeypatch.setattr(world.allocator, name, spy)
    return seen


# Stamps


def test_an_insert_stamps_its_base_and_a_split_copies_it():
    """The new node, then both halves."""
    world = make_chain(base=1)
    assert world.node(CHAIN).rotation_base == 1
    world.match(CHAIN[:4])
    upper = world.node(CHAIN[:4])
    assert upper.rotation_base == 1
    assert [child.rotation_base for child in upper.children.values()] == [1]


def test_chains_keep_their_own_bases():
    """A new chain has its own; without a base it is None."""
    world = make_chain(base=1)
    world.insert(OTHER, base=3)
    world.insert([60, 61, 62, 63])
    bases = [world.node(t).rotation_base for t in (CHAIN, OTHER, [60, 61, 62, 63])]
    assert bases == [1, 3, None]


def test_a_longer_insert_stamps_its_tail_only():
    """The prefix is deduplicated and keeps its stamp."""
    world = make_chain(base=None)
    world.insert(FULL)
    world.insert(OTHER, base=2)
    result = world.insert([*OTHER, 1, 2, 3, 4], base=2)
    assert result.prefix_len == 4
    assert world.node([*OTHER, 1, 2, 3, 4]).parent.rotation_base == 2
    assert world.node(FULL).rotation_base is None


@pytest.mark.parametrize("shard_size", [1, 4])
def test_rotation_base_of_reads_through_the_cache(shard_size):
    """None for None and for the root; the base of any other node."""
    world = make_chain(base=3, shard_size=shard_size)
    node = world.node(CHAIN)
    assert world.cache.rotation_base_of(node.id) == 3
    assert world.cache.rotation_base_of(None) is None
    assert world.cache.rotation_base_of(world.core.root_node_handle()) is None


def test_reading_a_base_makes_no_slots():
    """The base is host data; the device is never asked."""
    world = make_chain(base=3)
    world.cache.allocator.io = None
    world.insert(FULL, base=3)
    world.match(CHAIN[:4], peek=False)
    assert world.cache.rotation_base_of(world.node(FULL).id) == 3


# The decline


def test_a_tail_of_a_foreign_base_is_declined():
    """The matched part is reported, the suffix is not cached, nothing is split."""
    world = make_chain(base=1)
    pages = world.draw(3)
    before = world.cache.state_digest()
    result = world.insert(FULL, pages, base=3)
    assert (result.rotation_tail_declined, result.prefix_len) == (True, 8)
    assert before == world.cache.state_digest()
    assert result.duplicate_pages.tolist() == []
    assert pages.tolist() == result.pages.tolist()
    assert world.node(CHAIN).id == result.last_device_node
    assert world.peek_len(FULL) == 8


def test_a_key_without_a_whole_page_is_never_declined():
    """The empty key returns before the check."""
    world = make_chain(base=1)
    result = world.insert([0, 1], base=3)
    assert (result.rotation_tail_declined, result.prefix_len) == (False, 0)


def test_a_tail_of_the_same_base_attaches():
    """Nothing stands in its way."""
    world = make_chain(base=1)
    result = world.insert(FULL, base=1)
    assert (result.rotation_tail_declined, world.peek_len(FULL)) == (False, 12)


def test_where_nothing_matches_nothing_is_declined():
    """Other chains' bases don't matter."""
    world = make_chain(base=1)
    assert not world.insert(OTHER, base=3).rotation_tail_declined
    assert not world.insert([60] * 4, base=0).rotation_tail_declined


def test_a_tail_without_a_base_attaches_to_a_based_chain():
    """None is never declined."""
    world = make_chain(base=1)
    result = world.insert(FULL)
    assert (result.rotation_tail_declined, world.peek_len(FULL)) == (False, 12)
    assert world.node(FULL).rotation_base is None
    world.check()


def test_a_full_match_under_a_foreign_base_is_declined_too():
    """There is no tail, and still the insert is not this chain's."""
    world = make_chain(base=1)
    before = world.cache.state_digest()
    result = world.insert(CHAIN, world.draw(2), base=3)
    assert (result.rotation_tail_declined, result.prefix_len) == (True, 8)
    world.allocator.free_pages(result.pages)
    assert world.core.num_nodes() == 1
    assert before.split("-")[0] == world.cache.state_digest().split("-")[0]


def test_a_partly_matched_node_counts_as_the_deepest():
    """A key that ends or diverges inside an edge is compared with that edge's base."""
    world = make_chain(base=1)
    for tokens in (CHAIN[:4], [*CHAIN[:4], 9, 9, 9, 9]):
        result = world.insert(tokens, base=3)
        assert (result.rotation_tail_declined, result.prefix_len) == (True, 4)
        world.allocator.free_pages(result.pages)
    assert world.core.num_nodes() == 1
    world.check()


def test_a_based_tail_below_a_node_without_base_is_declined():
    """Along a path: one base, then only None."""
    world = make_chain(base=1)
    world.insert(FULL)
    longer = [*FULL, 90, 91, 92, 93]
    assert world.insert(longer, base=1).rotation_tail_declined
    assert world.peek_len(longer) == 12


def test_the_decline_compares_with_the_deepest_node_not_the_first():
    """A chain whose tail has no base refuses the base of its own head."""
    world = make_chain(base=None)
    assert world.insert(FULL, base=1).rotation_tail_declined


# Requests


def test_an_unfinished_request_that_is_declined_stays_on_its_own_pages(monkeypatch):
    """No free, no rewrite, no protection, no lock; its indices are its own slots."""
    world = make_chain(base=1)
    req = start_by_hand(world, FULL, base=3)
    row, protected, digest = world.row(req), world.sizes()[1], world.cache.state_digest()
    frees = watch_frees(world, monkeypatch)
    world.cache.cache_unfinished_req(req)
    assert frees == []
    assert digest == world.cache.state_digest()
    assert row == world.row(req)
    assert world.slots(row) == req.prefix_indices.tolist()
    assert (req.kv.cache_protected_len, req.lock_receipt, req.last_node) == (0, None, None)
    assert protected == world.sizes()[1]
    world.check(req)


def test_a_finished_request_that_is_declined_frees_all_that_is_its_own(monkeypatch):
    """Duplicates of the matched part and the refused tail; the matched part stays cached."""
    world = make_chain(base=1)
    req = start_by_hand(world, FULL, base=3)
    row = world.row(req)
    frees = watch_frees(world, monkeypatch)
    world.cache.cache_finished_req(req, kv_len_to_handle=12)
    assert sorted(row) == sorted(frees)
    assert world.peek_len(FULL) == 8
    world.check()


def test_a_finished_request_of_the_same_base_grafts_its_tail(monkeypatch):
    """Only its duplicates of the matched part are freed; the tail is evictable."""
    world = make_chain(base=1)
    req = start_by_hand(world, FULL, base=1)
    row = world.row(req)
    frees = watch_frees(world, monkeypatch)
    world.cache.cache_finished_req(req, kv_len_to_handle=12)
    assert sorted(row[:2]) == sorted(frees)
    assert world.peek_len(FULL) == 12
    assert world.sizes() == (12, 0)
    world.check()


def test_a_request_may_be_declined_at_every_chunk():
    """Without a leak; its finish releases all."""
    world = make_chain(base=1)
    req = make_req([*FULL, *range(100, 110)], kv_rotation_base=3)
    req.kv.req_pool_idx = world.pool.alloc(1)[0]
    for chunk in (5, 5, 5, 5, 2):
        world.extend(req, chunk)
        world.cache.cache_unfinished_req(req)
        assert req.kv.cache_protected_len == 0
        world.check(req)
    world.finish(req)
    assert world.held_pages() == []
    assert world.peek_len(FULL) == 8
    world.check()


def test_a_declined_request_keeps_the_prefix_that_it_matched_and_locked():
    """Everything past the protected prefix goes, the prefix does not."""
    world = make_chain(base=1)
    world.insert([*CHAIN, *OTHER], base=1)
    req = make_req([*CHAIN, *OTHER, 7, 7, 7, 7])
    world.start(req, 8)
    req.kv_rotation_base = 3  # a planner's mistake
    world.extend(req, 8)
    world.cache.cache_unfinished_req(req)
    assert req.kv.cache_protected_len == 8
    world.check(req)
    world.finish(req)
    assert world.cache.total_size() == 12
    assert world.sizes()[1] == 0
    world.check()


# The gate


def test_a_sharded_cache_refuses_a_core_without_bases(monkeypatch):
    """At construction, naming rotation bases."""
    assert UnifiedTreeCore.supports_rotation_base is True
    monkeypatch.setattr(UnifiedTreeCore, "supports_rotation_base", False)
    with pytest.raises(ValueError, match="rotation bases"):
        make_world(4, shard_size=4)


def test_an_unsharded_cache_takes_any_core(monkeypatch):
    """Bases are labels there."""
    monkeypatch.setattr(UnifiedTreeCore, "supports_rotation_base", False)
    assert make_world(4).insert(range(4)).prefix_len == 0


# Sharded pools


def test_a_sharded_insert_checks_its_pages_against_the_base():
    """A page that does not lie where the base puts it is named; nothing changed."""
    world = make_world(4, shard_size=4)
    pages = world.draw(3, base=2)
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match=r"lies on rank 2, but rotation_base=1 puts it on rank 1"):
        world.cache.insert(InsertParams(RadixKey(FULL), pages=pages, rotation_base=1))
    for base in (-1, 4):
        with pytest.raises(ValueError, match=r"must be in \[0, 4\)"):
            world.cache.insert(InsertParams(RadixKey(FULL), pages=pages, rotation_base=base))
    assert before == world.cache.state_digest()
    world.insert(FULL, pages, base=2)
    world.check()


def test_a_sharded_tail_is_checked_at_its_own_position():
    """Only the pages that the tree adopts have to lie there."""
    world = make_world(4, shard_size=4)
    world.insert(CHAIN, base=1)
    tail = world.draw(1, base=1, start=2)
    elsewhere = world.draw(2, base=3)
    result = world.insert(FULL, [*elsewhere, *tail], base=1)
    assert elsewhere.tolist() == result.duplicate_pages.tolist()
    world.check()


def test_a_sharded_insert_without_a_base_takes_it_from_cyclic_pages():
    """The stamp follows the pages; pages in no cycle give None."""
    world = make_world(4, shard_size=4)
    world.insert(CHAIN, base=3, stamp=False)
    assert world.node(CHAIN).rotation_base == 3
    scattered = np.concatenate([world.draw(1, base=0), world.draw(1, base=2)])
    world.insert([*OTHER, 60, 61, 62, 63], scattered)
    assert world.node([*OTHER, 60, 61, 62, 63]).rotation_base is None
    world.check()


def test_a_sharded_tail_of_another_cycle_is_cached_without_a_base():
    """Cyclic from elsewhere, no base given: attached as None, never declined."""
    world = make_world(4, shard_size=4)
    world.insert(CHAIN, base=1)
    result = world.insert(FULL, [*world.draw(2, base=0), *world.draw(1, base=0)])
    assert not result.rotation_tail_declined
    assert world.node(FULL).rotation_base is None
    world.check()


@pytest.mark.parametrize("shard_size", [2, 4, 8])
def test_owners_along_a_based_path_are_cyclic(shard_size):
    """Whatever is split and extended, counts per rank differ by at most one."""
    world = make_world(2, 16, shard_size=shard_size)
    tokens = list(range(2 * 3 * shard_size + 2))
    for stop in (4, 10, len(tokens)):
        world.insert(tokens[:stop], base=1)
    world.match(tokens[:6])
    layout = world.allocator.layout
    pages = world.match(tokens).pages
    assert layout.cyclic_classes(1, 0, len(pages)).tolist() == layout.class_of(pages).tolist()
    assert np.ptp(layout.count_classes(pages)) <= 1
    world.check()


def test_evictable_pages_are_counted_by_class():
    """Locks and trims move them, for based nodes and others."""
    world = make_world(4, shard_size=4)
    world.insert(FULL, base=2)
    world.insert(OTHER, base=0)
    by_class = world.core.component.evictable_by_class
    assert by_class().tolist() == [2, 0, 1, 1]
    receipt = world.lock(CHAIN)
    assert by_class().tolist() == [2, 0, 0, 0]
    world.evict(4)
    assert by_class().sum() == 1
    world.cache.dec_lock_ref(receipt)
    world.check()


def test_seams_let_any_base_follow_any_other():
    """Under ``seam`` nothing is declined; a node's base says where its own pages lie."""
    world = make_world(4, shard_size=4, rotation="seam")
    world.insert(CHAIN, base=1)
    pages = np.concatenate([world.draw(2, base=1), world.draw(1, base=3, start=2)])
    result = world.cache.insert(InsertParams(RadixKey(FULL), pages=pages, rotation_base=3))
    assert not result.rotation_tail_declined
    assert [world.node(CHAIN).rotation_base, world.node(FULL).rotation_base] == [1, 3]
    world.check()
