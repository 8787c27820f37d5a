"""Match handles: data that saves a walk, never changes a result (DECISIONS 15)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix import MatchHandle
from tests.builders import World, make_world

SHORT, LONG = [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8]


def assert_same_as_without(make, handle_of) -> None:
    """Insert LONG with and without a handle into equal worlds; both end in one state."""
    digests = []
    for use in (True, False):
        world: World = make()
        handle = handle_of(world)
        result = world.insert(LONG, handle=handle if use else None)
        assert world.peek_len(LONG) == len(LONG)
        assert world.match(LONG, peek=True).pages.tolist() == result.pages.tolist()
        world.check()
        digests.append(world.cache.state_digest())
    assert digests[0] == digests[1]


def make_short(page_size: int = 2, **kwargs) -> World:
    world = make_world(page_size, **kwargs)
    world.insert(SHORT)
    return world


def matched(world: World) -> MatchHandle:
    return world.match(LONG).handle


def peeked(world: World) -> MatchHandle:
    return world.match(LONG, peek=True).handle


def peeked_inside_an_edge(world: World) -> MatchHandle:
    return world.match([1, 2, 9, 9], peek=True).handle


def of_the_root(world: World) -> MatchHandle:
    return world.match([9, 9]).handle


def split_since(world: World) -> MatchHandle:
    handle = world.match(LONG).handle
    world.match(SHORT[:2])
    return handle


def extended_since(world: World) -> MatchHandle:
    handle = world.match(LONG).handle
    world.insert(LONG[:6])
    return handle


def branched_since(world: World) -> MatchHandle:
    handle = world.match(LONG).handle
    world.insert([*SHORT, 9, 9])
    return handle


def trimmed_since(world: World) -> MatchHandle:
    handle = world.match(LONG).handle
    world.evict(2)
    return handle


def trimmed_and_grown_since(world: World) -> MatchHandle:
    handle = world.match(LONG).handle
    world.evict(2)
    world.insert([1, 2, 9, 9])
    return handle


def evicted_since(world: World) -> MatchHandle:
    handle = world.match(LONG).handle
    world.evict(4)
    return handle


def evicted_and_cached_again(world: World) -> MatchHandle:
    handle = world.match(LONG).handle
    world.evict(4)
    world.insert(SHORT)
    return handle


def flushed_since(world: World) -> MatchHandle:
    handle = world.match(LONG).handle
    world.cache.reset()
    return handle


def of_another_tree(world: World) -> MatchHandle:
    return make_short().match(LONG).handle


def of_another_namespace(world: World) -> MatchHandle:
    world.insert(SHORT, extra_key="a")
    return world.match(LONG, "a").handle


def of_another_key(world: World) -> MatchHandle:
    world.insert([9, 9, 9, 9])
    return world.match([9, 9, 9, 9]).handle


def of_a_longer_key(world: World) -> MatchHandle:
    longer = [*LONG, 9, 9]
    world.insert(longer[:6])
    return world.match(longer).handle


def of_a_part_of_its_key(world: World) -> MatchHandle:
    match = world.match(SHORT[:2])
    return replace(match.handle, key=world.key(SHORT))


@pytest.mark.parametrize(
    "handle_of",
    [
        matched,
        peeked,
        peeked_inside_an_edge,
        of_the_root,
        split_since,
        extended_since,
        branched_since,
        trimmed_since,
        trimmed_and_grown_since,
        evicted_since,
        evicted_and_cached_again,
        flushed_since,
        of_another_tree,
        of_another_namespace,
        of_another_key,
        of_a_longer_key,
        of_a_part_of_its_key,
    ],
)
def test_an_insert_with_a_handle_equals_one_without(handle_of):
    """A valid one saves the walk, a stale one is ignored; the state is the same to the byte."""
    assert_same_as_without(make_short, handle_of)


def test_a_valid_handle_is_used():
    """The walk does not look above the handle's end."""
    world = make_short()
    handle = matched(world)
    world.core.root().children = {}
    assert world.core.walk(world.key(LONG), handle).num_pages == 2
    assert world.core.walk(world.key(LONG)).num_pages == 0


def test_a_handle_works_for_an_equal_key_object():
    """Tokens are compared, not objects."""
    world = make_short()
    handle = matched(world)
    world.core.root().children = {}
    assert world.core.walk(world.key(list(LONG)), handle).num_pages == 2
    assert world.core.walk(world.key([1, 2, 3, 9, 5, 6]), handle).num_pages == 0


def test_a_bigram_handle_never_serves_a_plain_key():
    """Namespaces hold the kind of unit."""
    world = make_world(1, is_bigram=True)
    world.insert([1, 2, 3])
    handle = world.match([1, 2, 3]).handle
    world.cache.is_bigram = False
    assert world.core.walk(world.key([1, 2, 2, 3]), handle).num_pages == 0


def test_peek_and_match_end_in_the_same_place():
    """Where the match ends on a node's end the handles are equal."""
    world = make_short()
    peek, match = peeked(world), matched(world)
    assert (peek.node_id, peek.end) == (match.node_id, match.end)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_handle_ever_changes_a_result(data):
    """Random histories: whatever the handle, the state equals that of a plain walk."""
    worlds = make_world(1, 12), make_world(1, 12)
    handles: list[list[MatchHandle]] = [[], []]
    keys = st.lists(st.integers(0, 1), min_size=1, max_size=5)
    for _ in range(data.draw(st.integers(1, 12))):
        tokens, act = data.draw(keys), data.draw(st.integers(0, 3))
        pick = data.draw(st.integers(0, 20))
        for i, world in enumerate(worlds):
            if act == 0:
                world.evict(1 + pick % 3)
            elif act == 1:
                handles[i].append(world.match(tokens, peek=bool(pick % 2)).handle)
            else:
                world.evict(max(0, len(tokens) - world.free_pages()))
                handle = handles[i][pick % len(handles[i])] if handles[i] and not i else None
                world.insert(tokens, handle=handle)
                world.check()
    assert worlds[0].cache.state_digest() == worlds[1].cache.state_digest()
