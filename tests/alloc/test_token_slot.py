"""The allocator of single token slots."""

import pytest

from alloc import TokenToKVPoolAllocator
from tests.alloc.alloc_builders import decode, extend, ints, make_token, unchanged
from tests.contract.allocator_contract import AllocatorContract


class TestTokenContract(AllocatorContract):
    """A page is one token."""

    def make(self, **kwargs):
        return make_token(16, **kwargs)

    def draw(self, allocator, num_pages, like=None):
        return allocator.alloc(num_pages)

    def draw_pages(self, allocator, num_pages):
        return allocator.alloc_pages(num_pages)


def test_slots_run_from_one_to_size():
    """Slot 0 is the padding slot; size counts what can be handed out; C194."""
    allocator = make_token(5)
    assert ints(allocator.alloc(5)) == [1, 2, 3, 4, 5]
    assert (allocator.size, allocator.page_size) == (5, 1)


def test_available_size_counts_slots():
    """No multiplication by a page; C195."""
    allocator = make_token(5)
    allocator.alloc(2)
    assert allocator.available_size() == 3


def test_the_constructor_takes_the_established_order():
    """size, dtype, device, kvcache, need_sort."""
    pool = object()
    allocator = TokenToKVPoolAllocator(8, "bf16", None, pool, True)
    assert (allocator.dtype, allocator.device, allocator.need_sort) == ("bf16", None, True)
    assert allocator.get_kvcache() is pool


@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_pool_is_refused(size):
    """A pool has at least one slot."""
    with pytest.raises(ValueError, match=f"size={size}"):
        make_token(size)


@pytest.mark.parametrize("need_size", [-1, -4])
def test_a_negative_size_is_an_error(need_size):
    """alloc(-4) hands out nothing; PR7."""
    allocator = make_token()
    with unchanged(allocator), pytest.raises(ValueError, match=f"need_size={need_size}"):
        allocator.alloc(need_size)


def test_a_short_draw_merges_the_staged_slots_first():
    """need_sort: merge only if short; None if still short; C196, C197."""
    allocator = make_token(4, need_sort=True)
    slots = allocator.alloc(4)
    allocator.free(slots[2:])
    allocator.free(slots[:1])
    assert ints(allocator.free_list.staged_pages_of(0)) == [3, 4, 1]
    with unchanged(allocator):
        assert allocator.alloc(4) is None
    assert ints(allocator.alloc(2)) == [1, 3]


def test_extend_and_decode_are_for_paged_allocators():
    """Both raise NotImplementedError that names the call to use; C192."""
    allocator = make_token()
    for call in (
        lambda: extend(allocator, [(0, 4, -1)]),
        lambda: decode(allocator, [(1, -1)]),
    ):
        with unchanged(allocator), pytest.raises(NotImplementedError, match=r"paged.*\.alloc"):
            call()
