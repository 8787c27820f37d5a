"""Eviction until a draw fits, on real allocators and a tree that is a stub."""

import pytest

from radix import EvictResult, evict_until_allocatable
from tests.alloc.alloc_builders import make_interleave, make_paged, new_chain, unchanged


class StubTree:
    """Frees one batch of slots a round; nothing but ``evict`` is asked of it."""

    def __init__(self, allocator, rounds):
        self.allocator = allocator
        self.rounds = list(rounds)
        self.asked = []

    def evict(self, params):
        self.asked.append(params)
        if not self.rounds:
            return EvictResult(num_tokens_evicted=0)
        slots = self.rounds.pop(0)
        self.allocator.free(slots)
        return EvictResult(num_tokens_evicted=len(slots))


@pytest.fixture
def drained():
    """N=4, 4 pages a rank: class 3 is empty, the others are full."""
    allocator = make_interleave(4, 16, 4)
    tight = [allocator.alloc_cyclic(3, 16) for _ in range(4)]
    return allocator, tight


def test_a_floor_of_two_pages_takes_two_rounds_of_one_tight_page(drained):
    """The size is read again after each round; C46, C47, C49."""
    allocator, tight = drained
    tree = StubTree(allocator, [tight[0], tight[1], tight[2]])
    assert evict_until_allocatable(tree, allocator, 2 * 64)
    assert (len(tree.asked), allocator.available_size()) == (2, 2 * 64)


def test_a_round_aims_at_the_classes_that_are_short(drained):
    """class_deficits name the short class and num_tokens their sum."""
    allocator, tight = drained
    tree = StubTree(allocator, tight)
    evict_until_allocatable(tree, allocator, 2 * 64)
    assert [(asked.num_tokens, asked.class_deficits) for asked in tree.asked] == [
        (32, (0, 0, 0, 2)),
        (16, (0, 0, 0, 1)),
    ]


def test_a_round_that_frees_nothing_ends_it(drained):
    """One call, need unmet, no exception and no hang; C48, C50."""
    allocator, _ = drained
    tree = StubTree(allocator, [])
    with unchanged(allocator):
        assert not evict_until_allocatable(tree, allocator, 64)
    assert len(tree.asked) == 1


def test_a_covered_need_evicts_nothing():
    """The floor is asked before the tree; C46."""
    allocator = make_interleave(4, 16, 4)
    tree = StubTree(allocator, [])
    assert evict_until_allocatable(tree, allocator, allocator.available_size())
    assert tree.asked == []


def test_a_stock_allocator_is_served_too():
    """With one class the need is the shortage in tokens; D24, C51."""
    allocator = make_paged(4, 16)
    slots = allocator.alloc(64)
    tree = StubTree(allocator, [slots[:16], slots[16:48]])
    assert evict_until_allocatable(tree, allocator, 32)
    assert [asked.num_tokens for asked in tree.asked] == [32, 16]


def test_the_floor_moves_by_whole_groups():
    """One page taken from a class lowers the floor by a page of every class; PR12."""
    allocator = make_interleave(16, 4, 4)
    before = allocator.available_size()
    new_chain(allocator, 4, 2)
    assert before - allocator.available_size() == 4 * 4
