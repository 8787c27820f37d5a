"""Frees: a page comes back once, whatever list of slots named it, and in groups by value."""

from __future__ import annotations

import numpy as np
import pytest

from tests.alloc.alloc_builders import extend, ints, make_interleave, make_paged, unchanged

BOTH = pytest.mark.parametrize("need_sort", [False, True])


@BOTH
def test_a_second_free_never_hands_a_page_out_twice(need_sort):
    """H1, H2: a double free made two live requests share a page, in one of two modes."""
    allocator = make_paged(16, 4, need_sort=need_sort)
    slots = allocator.alloc(8)
    allocator.free(slots)
    with unchanged(allocator), pytest.raises(ValueError, match="cannot free page"):
        allocator.free(slots)
    assert allocator.available_size() == 64
    everything = [page for _ in range(16) for page in allocator.alloc_pages(1).tolist()]
    assert sorted(everything) == list(range(1, 17))
    assert allocator.alloc(4) is None


@BOTH
def test_a_page_named_in_parts_is_freed_once(need_sort):
    """H2, H3: two ranges that meet inside a page released it twice."""
    allocator = make_paged(16, 4, need_sort=need_sort)
    row = extend(allocator, [(0, 12, -1)])
    allocator.free(row[:6])
    with unchanged(allocator), pytest.raises(ValueError, match="cannot free page"):
        allocator.free(row[6:])
    assert allocator.available_size() == 60
    allocator.free(row[8:])
    assert allocator.available_size() == 64


@pytest.mark.parametrize("slot", [0, 3, 68, -1])
def test_padding_and_foreign_slots_are_refused(slot):
    """H4: unmapped entries pointed at the padding slot and were freed with the rest."""
    allocator = make_paged(16, 4)
    slots = ints(allocator.alloc(8))
    with unchanged(allocator), pytest.raises(ValueError, match="cannot free page"):
        allocator.free(np.array([*slots, slot]))
    assert allocator.available_size() == 56


@pytest.mark.parametrize("lengths", [[25], [10, 15], [16, 1]])
@BOTH
def test_a_batch_that_overflows_takes_nothing(lengths, need_sort):
    """H5: the list was read past its end before anybody noticed that it was too short."""
    allocator = make_paged(16, 1, need_sort=need_sort)
    allocator.free(allocator.alloc(5))
    with unchanged(allocator):
        assert extend(allocator, [(0, length, -1) for length in lengths]) is None


def test_repeats_inside_one_call_count_once_and_padding_refuses_it():
    """H9: repeats and placeholders in one call corrupted the list."""
    allocator = make_paged(16, 4)
    p, q = ints(allocator.alloc(8))[::4]
    with unchanged(allocator), pytest.raises(ValueError, match="page 0"):
        allocator.free(np.array([p, p, 0, q]))
    allocator.free(np.array([p, p, q]))
    assert allocator.available_size() == 64


def test_a_group_frees_what_was_named_not_what_the_row_says_later():
    """I1: frees in a group were views of a row that changed before its end."""
    allocator = make_paged(16, 4)
    row = np.array(ints(allocator.alloc(16)))
    with allocator.free_group():
        allocator.free(row[:8])
        row[:8] = row[8:]
        assert allocator.available_size() == 48
        with pytest.raises(RuntimeError, match="already open"):
            allocator.free_group_begin()
    assert allocator.available_size() == 56
    allocator.free(row[8:])
    assert allocator.available_size() == 64


def test_a_group_survives_an_exception_and_a_clear():
    """I1: an exception lost the group's frees, and a clear freed them again later."""
    allocator = make_paged(16, 4)
    slots = allocator.alloc(8)

    def free_and_fail() -> None:
        with allocator.free_group():
            allocator.free(slots)
            raise KeyError

    with pytest.raises(KeyError):
        free_and_fail()
    assert allocator.available_size() == 64
    slots = allocator.alloc(8)
    allocator.free_group_begin()
    allocator.free(slots)
    allocator.clear()
    assert allocator.available_size() == 64
    allocator.free_group_end()
    assert allocator.available_size() == 64
    allocator.check_invariants()


def test_many_small_frees_are_one_ascending_run_at_the_next_draw():
    """I2: each small free copied all that was waiting."""
    allocator = make_paged(10_000, 1, need_sort=True)
    pages = allocator.alloc_pages(10_000)
    for i in range(9_999, -1, -1):
        allocator.free_pages(pages[i : i + 1])
    assert allocator.available_size() == 10_000
    assert allocator.alloc_pages(10_000).tolist() == list(range(1, 10_001))


def test_a_row_frees_the_same_pages_in_any_order_and_as_a_segment():
    """I3: a page allocator that is given slots had to sort them first."""
    digests = []
    for how in ("row", "shuffled", "segment"):
        allocator = make_paged(300, 16)
        row = allocator.alloc(4_096)
        if how == "segment":
            allocator.free_segment(row, start_pos=0)
        else:
            allocator.free(np.random.default_rng(1).permutation(row) if how != "row" else row)
        assert allocator.available_size() == 4_800
        digests.append(allocator.state_digest())
    assert len(set(digests)) == 1


@pytest.mark.parametrize("size", [-4, 6])
def test_sizes_that_are_not_whole_pages_are_refused(size):
    """PR7: a negative size handed out almost the whole pool."""
    allocator = make_paged(16, 4)
    with unchanged(allocator), pytest.raises(ValueError, match="need_size"):
        allocator.alloc(size)
    assert len(allocator.alloc(0)) == 0


def test_a_sharded_page_is_freed_once():
    """PR10: a class held more free pages than it has."""
    allocator = make_interleave(16, 4)
    row = extend(allocator, [(0, 16, -1)], [0])
    allocator.free(row)
    with unchanged(allocator), pytest.raises(ValueError, match="cannot free page"):
        allocator.free(row)
    assert allocator.class_free_page_counts() == [16] * 4


def test_one_page_of_one_class_lowers_the_floor_by_a_group():
    """PR12: one page taken, and four pages fewer are available; the sum says one."""
    allocator = make_interleave(16, 4)
    allocator.alloc_cyclic_pages(0, 1)
    assert allocator.available_size() == 15 * 4 * 4
    assert allocator.aggregate_free_size() == 63 * 4
