"""Namespaces: the same tokens under other extra keys and salts are other entries."""

from __future__ import annotations

from typing import Any

import pytest

from tests.builders import make_req, make_world


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("c", "ab"), ("bc", "a")),
        (("X", None), (None, "X")),
        (("lora:X", None), (("lora", "X"), None)),
        ((None, None), ("", None)),
        ((None, None), (None, "")),
        (("", None), (None, "")),
        ((("lora", "a", 1), None), (("lora", "a", 2), None)),
        (("None", None), (None, None)),
    ],
)
def test_no_pair_of_names_meets_in_the_middle(one: tuple[Any, Any], other: tuple[Any, Any]):
    """K1, K3: parts were joined as strings, so a crafted name reached another tenant's pages."""
    world = make_world(4)
    tokens = [1, 2, 3, 4]
    world.insert(tokens, extra_key=one[0], cache_salt=one[1])
    assert world.peek_len(tokens, *one) == 4
    assert world.peek_len(tokens, *other) == 0
    world.insert(tokens, extra_key=other[0], cache_salt=other[1])
    assert world.match(tokens, *one).pages.tolist() != world.match(tokens, *other).pages.tolist()
    assert world.core.num_nodes() == 2
    world.check()


def test_a_salt_reaches_the_tree_through_a_request():
    """K2: the field was accepted and dropped on its way to the cache."""
    world = make_world(4, 64, rows=16)
    salts = ["a", "b", "c", "d", "e", None, ""]
    for expected in (0, 8):
        for salt in salts:
            req = make_req(range(9), cache_salt=salt)
            assert world.run(req) == expected
            world.finish(req)
    assert len(world.cached_pages()) == 2 * len(salts)
    world.check()


def test_a_split_stays_in_its_namespace():
    """K1: every node below a name keeps it."""
    world = make_world(4)
    for space in ("a", "b"):
        world.insert(range(12), extra_key=space)
        world.match(range(4), space)
        world.insert([*range(8), 50, 51, 52, 53], extra_key=space)
    spaces = [node.namespace[0] for node in world.core.nodes()]
    assert sorted(spaces) == ["a"] * 4 + ["b"] * 4
    assert world.evict(100) == 32
    world.check()
