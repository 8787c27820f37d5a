"""Eviction policies (BEHAVIOUR 41; DECISIONS 14)."""

from __future__ import annotations

import pytest

from radix import POLICIES
from tests.builders import World, make_world
from tests.contract.policy_contract import PolicyContract


class TestLru(PolicyContract):
    policy = "lru"


class TestLfu(PolicyContract):
    policy = "lfu"


class TestFifo(PolicyContract):
    policy = "fifo"


class TestMru(PolicyContract):
    policy = "mru"


class TestFilo(PolicyContract):
    policy = "filo"


class TestPriority(PolicyContract):
    policy = "priority"


class TestSlru(PolicyContract):
    policy = "slru"


def make_abc(policy: str) -> World:
    """Insert A, B, C; hit A twice, then B once, then A's priority rises."""
    world = make_world(1, 16, policy)
    for letter, priority in (("a", 0), ("b", 1), ("c", 0)):
        world.insert([ord(letter)], priority=priority)
    for letter in "aab":
        world.match([ord(letter)])
    world.insert([ord("c")])
    return world


def victims(world: World) -> str:
    order = ""
    while world.cache.total_size():
        before = {letter for letter in "abc" if world.peek_len([ord(letter)])}
        world.evict(1)
        order += (before - {letter for letter in "abc" if world.peek_len([ord(letter)])}).pop()
    return order


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", "abc"),
        ("lfu", "cba"),
        ("fifo", "abc"),
        ("mru", "cba"),
        ("filo", "cba"),
        ("priority", "acb"),
        ("slru", "bca"),
    ],
)
def test_each_policy_has_its_order(policy, expected):
    """A and B are hit twice and once, C is used last, B has priority."""
    assert expected == victims(make_abc(policy))


def test_every_registered_policy_is_tested_here():
    """A new policy needs a subclass of the contract."""
    tested = {cls.policy for cls in PolicyContract.__subclasses__()}
    assert set(POLICIES) == tested


@pytest.mark.parametrize("name", ["LRU", "", "random", None, 3, ["lru"]])
def test_an_unknown_policy_is_refused_at_construction(name):
    """The message lists the names that there are."""
    with pytest.raises(ValueError, match="lru, lfu, fifo, mru, filo, priority, slru"):
        make_world(policy=name)


def test_what_counts_as_a_hit():
    """A match counts one on each node of its path; peeks, inserts and re-matches count none."""
    world = make_world(1)
    world.insert([1, 2, 3])
    world.insert([1, 2, 3])
    world.match([1, 2, 3], peek=True)
    world.match([1, 2, 3], count_hit=False)
    assert world.node([1, 2, 3]).hits == 0
    world.match([1, 2])
    assert [world.node([1, 2]).hits, world.node([1, 2, 3]).hits] == [1, 0]
    world.match([1, 2, 3])
    assert [world.node([1, 2]).hits, world.node([1, 2, 3]).hits] == [2, 1]
