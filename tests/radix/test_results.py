"""What results say of themselves."""

from __future__ import annotations

from tests.builders import make_world


def test_a_match_says_what_it_found():
    """Length, node and lock, and none of the indices, which may be many."""
    world = make_world(page_size=2)
    world.insert(range(4))
    match = world.match(range(6))
    assert repr(match) == (
        f"MatchResult(device_prefix_len=4, last_device_node={match.last_device_node}, receipt=None)"
    )


def test_a_peek_names_the_node_that_the_key_reaches():
    """A peek splits nothing, so its node may reach past the match."""
    world = make_world(page_size=2)
    world.insert(range(8))
    match = world.match(range(4), peek=True)
    assert match.device_prefix_len == 4
    assert match.last_device_node == world.match(range(8)).last_device_node
