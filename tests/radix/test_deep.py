"""Deep paths, long keys and wide nodes: nothing recurses, whatever the shape of the tree."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from radix import EvictParams, InsertParams, MatchPrefixParams, RadixKey
from tests.builders import World, make_req, make_world

DEPTH = 100_000


def key_of(num_tokens: int) -> RadixKey:
    """Return the key 0, 1, 2, ... that every path here follows."""
    return RadixKey(range(num_tokens))


def grow(num_nodes: int) -> World:
    """Make a path node by node: each insert goes on from the match of the one before."""
    world = make_world(1, num_nodes + 8)
    key, pages = key_of(num_nodes), world.draw(num_nodes)
    for end in range(1, num_nodes + 1):
        match = world.cache.match_prefix(MatchPrefixParams(key[: end - 1]))
        both = np.concatenate([match.pages, pages[end - 1 : end]])
        world.cache.insert(InsertParams(key[:end], pages=both, handle=match.handle))
    return world


def cut(num_nodes: int) -> World:
    """Make a path out of one node: each match ends a page before the last one."""
    world = make_world(1, num_nodes + 8)
    key = key_of(num_nodes)
    world.cache.insert(InsertParams(key, pages=world.draw(num_nodes)))
    for end in range(num_nodes - 1, 0, -1):
        world.cache.match_prefix(MatchPrefixParams(key[:end]))
    return world


def halve(num_nodes: int) -> World:
    """Make a path out of one node by splitting every node in half until all are one page."""
    world = make_world(1, num_nodes + 8, context=num_nodes + 8)
    world.cache.insert(InsertParams(key_of(num_nodes), pages=world.draw(num_nodes)))
    core = world.core
    todo = list(core.nodes())
    while todo:
        node = todo.pop()
        if node.num_pages > 1:
            todo += [core._split(node, node.num_pages // 2), node]
    return world


@pytest.fixture(scope="module")
def deep() -> World:
    """A path of 100,000 nodes; tests leave it as it is."""
    world = halve(DEPTH)
    assert world.core.num_nodes() == DEPTH
    return world


@pytest.mark.parametrize(("make", "num_nodes"), [(grow, 2_000), (cut, 10_000)])
def test_a_path_of_many_nodes_lives_through_everything(make, num_nodes):
    """Made by calls alone; match, lock, print, evict to the last page."""
    world = make(num_nodes)
    assert world.core.num_nodes() == num_nodes
    match = world.match(key_of(num_nodes).tokens())
    assert match.device_prefix_len == num_nodes
    with world.cache.locked(match.last_device_node):
        assert world.sizes() == (0, num_nodes)
        assert world.evict(num_nodes) == 0
    world.check()
    assert len(world.cache.pretty_print().splitlines()) == num_nodes + 1
    assert world.evict(num_nodes) == num_nodes
    assert world.core.num_nodes() == 0
    world.check()


def test_a_deep_path_is_matched_and_locked_as_one(deep):
    """All of it is found, protected, and evictable again."""
    match = deep.cache.match_and_lock(MatchPrefixParams(key_of(DEPTH)))
    assert match.device_prefix_len == DEPTH
    assert deep.sizes() == (0, DEPTH)
    deep.cache.dec_lock_ref(match.receipt)
    assert deep.sizes() == (DEPTH, 0)
    assert deep.core.path_pages(match.last_device_node).tolist() == match.pages.tolist()


def test_a_deep_path_grows_and_shrinks_at_its_end(deep):
    """An insert below it, with a handle and without; evictions take it away again."""
    key = key_of(DEPTH + 2)
    match = deep.cache.match_prefix(MatchPrefixParams(key))
    for handle in (match.handle, None):
        pages = np.concatenate([match.pages, deep.draw(2)])
        result = deep.cache.insert(InsertParams(key, pages=pages, handle=handle))
        assert result.prefix_len == DEPTH
        assert deep.evict(2) == 2
    assert deep.core.num_nodes() == DEPTH


def test_a_deep_path_is_checked_printed_and_digested(deep):
    """Text stays linear in the nodes; a digest is stable."""
    deep.check()
    text = deep.cache.pretty_print()
    assert len(text.splitlines()) == DEPTH + 1
    assert len(text) < 250 * DEPTH
    assert deep.cache.state_digest() == deep.cache.state_digest()
    assert len(repr(deep.node(range(10)))) < 200


def test_a_request_lives_on_a_deep_path(deep):
    """Matched, extended, cached and finished like any other."""
    req = make_req(range(DEPTH + 3))
    assert deep.start(req) == DEPTH
    assert deep.extend(req, 3)
    deep.cache.cache_unfinished_req(req)
    assert deep.sizes() == (0, DEPTH + 3)
    deep.finish(req)
    assert deep.evict(3) == 3


@pytest.mark.parametrize("how", ["evict", "reset", "drop"])
def test_a_deep_path_goes_away(how):
    """Evicted node by node, reset, or dropped with its cache: no stack overflows."""
    world = halve(DEPTH)
    if how == "evict":
        assert world.evict(DEPTH) == DEPTH
    elif how == "reset":
        world.cache.reset()
    if how != "drop":
        assert world.core.num_nodes() == 0
        assert world.allocator.available_size() == DEPTH + 8
    del world
    gc.collect()


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_key_of_a_million_tokens(page_size):
    """Inserted, matched in part, locked, evicted in part."""
    total = 1_000_000 // 64 * 64
    world = make_world(page_size, total // page_size)
    tokens = np.arange(total)
    assert world.insert(tokens).prefix_len == 0
    changed = tokens.copy()
    changed[600_000] = -1
    match = world.match(changed)
    assert match.device_prefix_len == 600_000 // page_size * page_size
    receipt = world.lock(changed)
    assert world.evict(total) == total - match.device_prefix_len
    assert world.sizes() == (0, match.device_prefix_len)
    world.cache.dec_lock_ref(receipt)
    world.check()


def test_ten_thousand_children_under_one_node():
    """Each is found; they leave in the order of their last use."""
    count = 10_000
    world = make_world(1, count + 1)
    world.insert([7])
    for token in range(count):
        pages = np.concatenate([world.node([7]).page_ids(), world.draw(1)])
        world.insert([7, token], pages)
    assert len(world.node([7]).children) == count
    for token in (0, 4_567, count - 1):
        assert world.match([7, token]).device_prefix_len == 2
    world.check()
    freed = world.cache.evict(EvictParams(count - 3)).num_tokens_evicted
    assert freed == count - 3
    assert [token for token in range(count) if world.peek_len([7, token]) == 2] == [
        0,
        4_567,
        count - 1,
    ]
    assert world.evict(4) == 4
    world.check()
