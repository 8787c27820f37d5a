"""Which rows a rank keeps; B64, C125-C129."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import PageInterleavePlacement, PageLayout
from scratch import LayoutPlacement, WritePlanCache
from scratch.write_plan import NOT_OWNED
from tests.scratch.scratch_builders import group_pages, make_spec, slots_of


def make_cache(rank):
    return WritePlanCache(PageInterleavePlacement(make_spec(rank)), rank)


def test_two_whole_groups_on_rank_2():
    """2 * ps positions, rows of local pages 5 and 6; C125."""
    loc = slots_of(group_pages(4, [5, 6]), 16)
    positions, rows = make_cache(2).get(loc, epoch=1)
    assert positions.tolist() == [*range(32, 48), *range(96, 112)]
    assert rows.tolist() == list(range(80, 112))
    assert positions.dtype == rows.dtype == torch.int64


def test_the_same_tensor_and_epoch_give_the_same_plan():
    """Identity, not equality; C126, C127."""
    cache, loc = make_cache(2), slots_of([6, 7], 16)
    plan = cache.get(loc, epoch=3)
    assert cache.get(loc, epoch=3) is plan
    assert cache.pool_rows(loc, epoch=3) is cache.pool_rows(loc, epoch=3)
    assert cache.get(loc, epoch=4) is not plan
    assert cache.get(loc.clone(), epoch=4) is not cache.get(loc, epoch=4)


def test_a_tensor_that_replaces_another_is_not_taken_for_it():
    """The cache holds the tensor: an address that is reused tells nothing."""
    cache = make_cache(0)
    for start in range(0, 640, 64):
        loc = torch.arange(start, start + 16)
        assert cache.get(loc, epoch=1)[1].tolist() == list(range(start // 4, start // 4 + 16))
        del loc


def test_a_rank_may_own_nothing():
    """10 tokens in owner 0's page, rank 3; C128."""
    positions, rows = make_cache(3).get(torch.arange(64, 74), epoch=1)
    assert positions.shape == rows.shape == (0,)
    positions, rows = make_cache(3).get(torch.arange(0), epoch=1)
    assert positions.shape == rows.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_others_are_marked(dtype):
    cache = make_cache(1)
    rows = cache.pool_rows(torch.arange(72, 88, dtype=dtype), epoch=1)
    assert rows.tolist() == [NOT_OWNED] * 8 + list(range(16, 24))
    assert rows.dtype == torch.int64


def test_slots_beyond_2_31_are_exact():
    page = 1 << 30
    layout = PageLayout.interleave(16, 4, page)
    cache = WritePlanCache(LayoutPlacement(layout), 0)
    _, rows = cache.get(torch.tensor([4 * page * 16 + 3]), epoch=1)
    assert rows.tolist() == [page * 16 + 3]


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 20), st.booleans(), st.lists(st.integers(0, 400)))
def test_the_ranks_share_out_all_slots(n, ps, lanes, locs):
    """Every slot is kept by exactly one rank, in the row that the layout says; any layout."""
    layout = PageLayout(ps, n, 1 if lanes else n, 500)
    loc, seen = torch.tensor(locs, dtype=torch.int64), []
    for rank in range(n):
        cache = WritePlanCache(LayoutPlacement(layout), rank)
        positions, rows = cache.get(loc, epoch=1)
        seen += positions.tolist()
        for at, row in zip(positions.tolist(), rows.tolist(), strict=True):
            assert layout.class_of(locs[at] // ps) == rank
            assert layout.local_row(locs[at]) == row
        dense = torch.full((len(locs),), NOT_OWNED)
        dense[positions] = rows
        assert torch.equal(dense, cache.pool_rows(loc, epoch=1))
    assert sorted(seen) == list(range(len(locs)))


def test_both_placements_agree():
    spec = make_spec(3)
    ours = WritePlanCache(LayoutPlacement(spec.layout(20)), 3)
    loc = torch.arange(0, 1300, 7)
    for mine, theirs in zip(ours.get(loc, epoch=1), make_cache(3).get(loc, epoch=1), strict=True):
        assert torch.equal(mine, theirs)
