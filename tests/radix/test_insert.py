"""Inserting (BEHAVIOUR 38, 42, 43; CONTRACT 54, 59, 64, 65)."""

from __future__ import annotations

import numpy as np
import pytest

from alloc import PageState
from radix import InsertParams
from tests.builders import World, make_world


def insert_slots(world: World, tokens, slots):
    return world.cache.insert(InsertParams(world.key(tokens), value=slots))


@pytest.mark.parametrize(("page_size", "length"), [(1, 3), (4, 8), (4, 11), (16, 40)])
def test_an_insert_adopts_the_whole_pages_of_its_key(page_size, length):
    """A rest that is no whole page stays with the caller."""
    world = make_world(page_size)
    pages = world.draw(-(-length // page_size))
    result = insert_slots(world, range(length), np.array(world.slots(pages)))
    whole = length // page_size
    assert result.prefix_len == 0
    assert pages[:whole].tolist() == result.pages.tolist() == world.cached_pages()
    assert pages[whole:].tolist() == world.held_pages()
    assert result.duplicate_pages.tolist() == []
    assert (whole * page_size, 0) == world.sizes()


def test_a_longer_insert_adds_only_its_tail():
    """The prefix is deduplicated: the caller's own copies of it are free again."""
    world = make_world(4)
    first = world.insert(range(8)).pages.tolist()
    pages = world.draw(4)
    result = world.insert(range(16), pages)
    assert result.prefix_len == 8
    assert pages[:2].tolist() == result.duplicate_pages.tolist()
    assert [*first, *pages[2:].tolist()] == result.pages.tolist()
    assert world.allocator.free_list.all_in(pages[:2], PageState.FREE)
    world.check()


def test_an_insert_of_what_is_there_adopts_nothing():
    """All of it is a duplicate, and gone when the call returns."""
    world = make_world(4)
    node = world.insert(range(8)).last_device_node
    pages = world.draw(2)
    result = world.insert(range(8), pages)
    assert (8, node) == (result.prefix_len, result.last_device_node)
    assert pages.tolist() == result.duplicate_pages.tolist()
    assert world.core.num_nodes() == 1
    world.check()


def test_pages_that_the_tree_holds_are_never_duplicates():
    """A value that is the tree's own pages is released by nobody."""
    world = make_world(4)
    first = world.insert(range(8)).pages
    tail = world.draw(1)
    result = world.insert(range(12), np.concatenate([first, tail]))
    assert result.duplicate_pages.tolist() == []
    assert [*first.tolist(), *tail.tolist()] == world.cached_pages()
    world.check()


def test_an_insert_that_diverges_inside_an_edge_splits_it():
    """Both tails hang below the shared pages."""
    world = make_world(2)
    a = world.insert([0, 1, 2, 3, 4, 5]).pages.tolist()
    b = world.insert([0, 1, 2, 3, 8, 9]).pages.tolist()
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert world.core.num_nodes() == 3
    assert [world.peek_len([0, 1, 2, 3, 4, 5]), world.peek_len([0, 1, 2, 3, 8, 9])] == [6, 6]
    world.check()


def test_an_insert_that_ends_inside_an_edge_splits_it_there():
    """The node of the result ends where the key does."""
    world = make_world(2)
    world.insert(range(8))
    node = world.core.node_by_id(world.insert(range(4)).last_device_node)
    assert (node.start, node.end) == (0, 2)
    world.check()


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_a_key_without_a_whole_page_changes_no_node(tokens):
    """Nothing was there, nothing is kept."""
    world = make_world(4)
    result = world.insert(tokens)
    assert (
        result.prefix_len,
        result.rotation_tail_declined,
        world.core.num_nodes(),
    ) == (0, False, 0)
    assert world.core.root_node_handle() == result.last_device_node
    world.check()


def test_later_changes_of_the_callers_arrays_do_not_reach_the_tree():
    """Slots and pages are stored as copies."""
    world = make_world(2)
    slots = np.array(world.slots(world.draw(2)))
    expected = slots.tolist()
    insert_slots(world, [1, 2, 3, 4], slots)
    pages = world.draw(2)
    kept = world.slots(pages)
    world.insert([5, 6, 7, 8], pages)
    slots[:] = 777
    pages[:] = 777
    assert expected == world.match([1, 2, 3, 4]).device_indices.tolist()
    assert kept == world.match([5, 6, 7, 8]).device_indices.tolist()
    world.check()


def test_exactly_one_of_value_and_pages_is_taken():
    """Neither and both are errors."""
    world = make_world()
    key = world.key([1])
    for params in (InsertParams(key), InsertParams(key, value=[1], pages=np.array([1]))):
        with pytest.raises(ValueError, match="exactly one"):
            world.cache.insert(params)


def test_a_value_shorter_than_its_key_is_refused():
    """Two notions of a node's size can't arise."""
    world = make_world(4)
    slots = np.array(world.slots(world.draw(3)))
    for n in (0, 4, 7):
        with pytest.raises(ValueError, match=f"{n} slots for a key of 8"):
            insert_slots(world, range(8), slots[:n])
    with pytest.raises(ValueError, match="1 pages for the 2 whole pages"):
        world.insert(range(8), slots[:1] // 4)
    world.insert(range(8), slots[::4] // 4)
    assert len(world.cached_pages()) == 2


@pytest.mark.parametrize("slots", [[4, 5, 6, 8], [5, 6, 7, 8], [4, 6, 5, 7], [7, 6, 5, 4]])
def test_slots_that_are_not_whole_consecutive_pages_are_refused(slots):
    """A page's slots are its tokens in order."""
    world = make_world(4)
    world.draw(3)
    with pytest.raises(ValueError, match="consecutive"):
        insert_slots(world, range(4), np.array(slots))


@pytest.mark.parametrize("dtype", [np.float64, np.bool_])
def test_pages_of_another_dtype_are_refused(dtype):
    """Page ids are integers; nothing is truncated."""
    world = make_world()
    world.draw(2)
    with pytest.raises(ValueError, match="dtype"):
        world.cache.insert(InsertParams(world.key([1]), pages=np.ones(1, dtype=dtype)))


def test_a_page_that_the_caller_does_not_hold_is_refused():
    """Free, reserved, foreign and cached pages, and repeats, leave all as it was."""
    world = make_world(1)
    cached = int(world.insert([1]).pages[0])
    mine = int(world.draw(1)[0])
    free = int(world.allocator.get_all_free_pages()[0])
    before = world.cache.state_digest()
    for bad in (free, 0, 10_000, -1, cached, mine):
        with pytest.raises(ValueError, match="cannot cache page"):
            world.insert([2, 3], [mine, bad])
    assert before == world.cache.state_digest()


def test_a_bad_duplicate_is_refused_before_anything_is_adopted():
    """All value pages are checked, also those of the matched part."""
    world = make_world(1)
    world.insert([1, 2])
    mine = world.draw(2)
    free = int(world.allocator.get_all_free_pages()[0])
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match="cannot cache page"):
        world.insert([1, 2, 3], [free, mine[0], mine[1]])
    with pytest.raises(ValueError, match="twice"):
        world.insert([1, 2, 3], [mine[0], mine[0], mine[1]])
    assert before == world.cache.state_digest()


def test_namespaces_never_match_across():
    """Same tokens in two namespaces are two entries."""
    world = make_world(2)
    spaces = [(None, None), ("a", None), (None, "a"), ("a", "a"), ("", None)]
    pages = [world.insert([1, 2], extra_key=e, cache_salt=s).pages[0] for e, s in spaces]
    assert 5 == len(set(pages)) == world.core.num_nodes()
    for (e, s), page in zip(spaces, pages, strict=True):
        assert [page] == world.match([1, 2], e, s).pages.tolist()
    assert world.peek_len([1, 2], "b") == 0
    world.check()


@pytest.mark.parametrize(("page_size", "tokens", "units"), [(1, 5, 4), (4, 9, 8), (4, 8, 4)])
def test_bigram_keys_hold_one_unit_less_than_tokens(page_size, tokens, units):
    """n + 1 tokens give n units, cut to whole pages."""
    world = make_world(page_size, is_bigram=True)
    world.insert(range(tokens))
    assert units == world.peek_len(range(tokens)) == world.cache.total_size()
    world.check()


def test_bigrams_differ_where_their_second_token_does():
    """The unit at a position holds the next token too."""
    world = make_world(1, is_bigram=True)
    world.insert([1, 2, 3, 4])
    assert world.peek_len([1, 2, 9, 4]) == 1


def test_insert_raises_priority_along_its_path_and_never_lowers_it():
    """Nodes keep the highest priority of any insert through them."""
    world = make_world(1)
    world.insert([1, 2, 3, 4], priority=3)
    world.insert([1, 2, 9], priority=5)
    world.insert([1, 2], priority=1)
    assert [world.node(t).priority for t in ([1, 2], [1, 2, 3, 4], [1, 2, 9])] == [5, 3, 5]


def test_inserts_count_no_hits():
    """A chunk that is cached is not a look-up."""
    world = make_world(1)
    world.insert([1, 2])
    world.insert([1, 2, 3])
    assert [world.node([1, 2]).hits, world.node([1, 2, 3]).hits] == [0, 0]
