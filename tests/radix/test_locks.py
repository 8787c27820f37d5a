"""Locks and receipts (BEHAVIOUR 39)."""

from __future__ import annotations

import copy

import pytest

from tests.builders import make_world


def test_a_lock_protects_its_whole_path():
    """Nothing on the path goes; its siblings may."""
    world = make_world(1)
    world.insert([1, 2, 3, 4])
    world.insert([1, 2, 8, 9])
    receipt = world.lock([1, 2, 3, 4])
    assert world.sizes() == (2, 4)
    assert world.evict(100) == 2
    assert world.peek_len([1, 2, 3, 4]) == 4
    world.cache.dec_lock_ref(receipt)
    assert world.sizes() == (4, 0)
    assert world.evict(100) == 4
    world.check()


def test_locks_of_two_holders_are_counted_apart():
    """The path is free when the last receipt is back."""
    world = make_world(1)
    world.insert([1, 2, 3])
    a, b = world.lock([1, 2, 3]), world.lock([1, 2, 3])
    world.cache.dec_lock_ref(a)
    assert (world.sizes(), world.evict(3)) == ((0, 3), 0)
    world.cache.dec_lock_ref(b)
    assert (world.sizes(), world.evict(3)) == ((3, 0), 3)


def test_a_lock_survives_a_split_of_its_node():
    """Both halves are protected, and one receipt frees both."""
    world = make_world(2)
    world.insert(range(8))
    receipt = world.lock(range(8))
    world.match(range(4))
    assert (world.core.num_nodes(), world.sizes()) == (2, (0, 8))
    world.check()
    world.cache.dec_lock_ref(receipt)
    assert world.sizes() == (8, 0)
    assert world.evict(8) == 8
    world.check()


def test_the_root_can_be_locked():
    """It holds nothing, and costs nothing."""
    world = make_world(1)
    world.insert([1])
    receipt = world.cache.inc_lock_ref(world.core.root_node_handle())
    assert (world.sizes(), world.evict(1)) == ((1, 0), 1)
    world.cache.dec_lock_ref(receipt)
    world.check()


def test_a_receipt_is_good_for_one_unlock():
    """The second one is an error and takes nothing from another holder."""
    world = make_world(1)
    world.insert([1, 2])
    a, b = world.lock([1, 2]), world.lock([1, 2])
    world.cache.dec_lock_ref(a)
    before = world.cache.state_digest()
    with pytest.raises(ValueError, match="used already"):
        world.cache.dec_lock_ref(a)
    assert before == world.cache.state_digest()
    assert world.evict(2) == 0
    world.cache.dec_lock_ref(b)


def test_a_receipt_of_another_tree_or_a_copy_is_refused():
    """A receipt is the object that the lock gave out."""
    world, other = make_world(1), make_world(1)
    for w in (world, other):
        w.insert([1, 2])
    receipt, foreign = world.lock([1, 2]), other.lock([1, 2])
    for bad in (foreign, copy.copy(receipt)):
        with pytest.raises(ValueError, match="another tree"):
            world.cache.dec_lock_ref(bad)
    assert world.sizes() == (0, 2)


def test_a_receipt_from_before_a_reset_is_refused():
    """The new tree's counts are not touched."""
    world = make_world(1)
    world.insert([1, 2])
    receipt = world.lock([1, 2])
    world.cache.reset()
    world.insert([1, 2])
    current = world.lock([1, 2])
    with pytest.raises(ValueError, match="from before a reset"):
        world.cache.dec_lock_ref(receipt)
    assert world.sizes() == (0, 2)
    world.cache.dec_lock_ref(current)
    world.check()


def test_a_stale_node_can_not_be_locked():
    """Evicted, and from before a reset: KeyError that says so, nothing changed."""
    world = make_world(1)
    evicted = world.insert([1]).last_device_node
    world.evict(1)
    flushed = world.insert([2]).last_device_node
    world.cache.reset()
    before = world.cache.state_digest()
    for stale in (evicted, flushed):
        with pytest.raises(KeyError, match="stale"):
            world.cache.inc_lock_ref(stale)
        with pytest.raises(KeyError, match="stale"):
            world.core.node_by_id(stale)
    assert before == world.cache.state_digest()


def test_a_node_of_another_tree_can_not_be_locked():
    """Ids of two trees never meet."""
    world, other = make_world(1), make_world(1)
    world.insert([1])
    foreign = other.insert([1]).last_device_node
    with pytest.raises(KeyError, match="another tree"):
        world.cache.inc_lock_ref(foreign)
    assert world.sizes() == (1, 0)


def test_node_ids_are_never_used_again():
    """Not after an eviction, not after a reset."""
    world = make_world(1)
    seen = [world.core.root_node_handle()]
    for _ in range(3):
        seen.append(world.insert([1, 2]).last_device_node)
        world.match([1])
        seen.append(world.node([1]).id)
        world.evict(2)
    world.cache.reset()
    seen += [world.core.root_node_handle(), world.insert([1]).last_device_node]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("how", ["return", "exception"])
def test_the_context_manager_unlocks_on_every_way_out(how):
    """An exception can't leak a lock."""
    world = make_world(1)
    node = world.insert([1, 2]).last_device_node
    try:
        with world.cache.locked(node):
            assert world.sizes() == (0, 2)
            if how == "exception":
                raise KeyError(how)
    except KeyError:
        pass
    assert world.sizes() == (2, 0)
    world.check()


def test_many_locks_and_unlocks_leave_no_trace():
    """The frontier holds one entry a candidate, whatever its history."""
    world = make_world(1)
    world.insert([1, 2])
    for _ in range(100):
        receipt = world.lock([1, 2])
        assert world.evict(2) == 0
        world.cache.dec_lock_ref(receipt)
    assert len(world.core.frontier_ids()) == 1
    assert world.core.receipts() == []
    assert world.evict(2) == 2
