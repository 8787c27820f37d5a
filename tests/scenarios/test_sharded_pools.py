"""Pools of several ranks: every slot has one row of one rank, in every way to take and free it."""

from __future__ import annotations

import numpy as np
import pytest

from alloc import PageInterleavePlacement, PageShardSpec
from tests.alloc.alloc_builders import extend, ints, make_interleave


def test_every_slot_has_a_row_of_its_own_inside_its_ranks_buffer():
    """AC1: logical slots were used as rows, and the last group had no room in the buffer."""
    ranks, page, size = 4, 64, 1_024
    allocator = make_interleave(size // page, page, ranks)
    slots = np.concatenate([allocator.alloc_cyclic(0, page * ranks) for _ in range(size // page)])
    assert allocator.available_size() == 0
    placement = PageInterleavePlacement(PageShardSpec(0, ranks, page, ranks * page, page))
    owners, rows = placement.owner_of(slots), placement.local_index(slots)
    assert rows.max() < size + page
    assert rows.min() >= page
    assert len(set(zip(owners.tolist(), rows.tolist(), strict=True))) == len(slots)
    assert np.array_equal(placement.loc_of(owners, rows), slots)
    assert ints(allocator.layout.local_row(slots)) == rows.tolist()


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("way", ["free", "group", "segment", "segments"])
def test_every_way_to_free_works_on_a_sharded_pool(need_sort, way):
    """AC2: sharding wrapped one kind of allocator and broke the combinations with the rest."""
    allocator = make_interleave(8, 4, 4, need_sort=need_sort)
    row = extend(allocator, [(0, 30, -1)], [1])
    if way == "free":
        allocator.free(row)
    elif way == "group":
        with allocator.free_group():
            allocator.free(row[:16])
            allocator.free(row[16:])
    elif way == "segment":
        allocator.free_segment(row, start_pos=0)
    else:
        allocator.free_segments([(row[:12], 0), (row[12:], 12)])
    assert allocator.class_free_page_counts() == [8] * 4
    allocator.merge_and_sort_free()
    mark = allocator.backup_state()
    extend(allocator, [(0, 128, -1)], [3])
    assert allocator.available_size() == 0
    allocator.restore_state(mark)
    assert allocator.available_size() == 128
    allocator.check_invariants()


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda a: a.alloc(4), "alloc_extend"),
        (lambda a: a.alloc_decode([1], [1], [-1]), "alloc_extend"),
        (lambda a: a.alloc_pages(1), "alloc_cyclic_pages"),
    ],
)
def test_what_a_sharded_pool_can_not_do_names_what_can(call, instead):
    """AC2: an operation failed deep inside at its first use."""
    with pytest.raises(NotImplementedError, match=instead):
        call(make_interleave(8, 4, 4))
