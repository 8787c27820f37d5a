"""Slots to scratch rows, and the memo of a plan; B62, B63, C115-C124."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scratch import ShardExtendPlanner
from scratch.translate import SlotTranslator
from tests.scratch.scratch_builders import group_pages, make_spec, page_table, slots_of

PREFIX, CHUNK = group_pages(4, [5, 2])[:7], [38, 39]


@pytest.fixture
def planner():
    """7 prefix pages and 2 chunk pages on 4 ranks of 16-token pages."""
    planner = ShardExtendPlanner(make_spec(1), num_pages=4096)
    planner.begin_shard_extend(page_table([PREFIX + CHUNK]), [0], [112], [138])
    return planner


def test_prefix_chunk_and_the_rest_have_their_regions(planner):
    """C115, C118: prefix below N * block * ps, chunk in its region, all else in the trash page."""
    spec = planner.spec
    prefix = planner.translate_loc_to_scratch(slots_of(PREFIX, 16))
    chunk = planner.translate_loc_to_scratch(slots_of(CHUNK, 16))
    assert prefix.min() >= 0
    assert prefix.max() < 4 * planner.plan.block_pages * 16
    base = spec.max_prefix_tokens
    assert torch.equal(torch.arange(base, base + 32), chunk)
    trash = base + spec.chunk_tokens
    off_plan = torch.tensor([0, 1, 63, 3000, 3001])
    expected = [trash + loc % 16 for loc in off_plan.tolist()]
    assert expected == planner.translate_loc_to_scratch(off_plan).tolist()
    assert planner.translate_loc_to_scratch(torch.tensor([0])).item() == trash


def test_planned_slots_have_distinct_rows(planner):
    """C117."""
    rows = planner.translate_loc_to_scratch(slots_of(PREFIX + CHUNK, 16))
    assert len(rows.unique()) == len(rows)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_integer_slots_give_int64(planner, dtype):
    """C119; the shape is kept and nothing is changed."""
    loc = slots_of(PREFIX, 16).to(dtype)
    before = loc.clone()
    rows = planner.translate_loc_to_scratch(loc)
    assert rows.dtype == torch.int64
    assert torch.equal(planner.translate_loc_to_scratch(loc.long()), rows)
    assert torch.equal(before, loc)
    assert planner.translate_loc_to_scratch(loc.view(7, 16)).shape == (7, 16)
    assert planner.translate_loc_to_scratch(loc[:0]).shape == (0,)


def test_page_starts_stay_page_starts(planner):
    """C120: a kernel that divides by the page size gets whole pages."""
    rows = planner.translate_loc_to_scratch(torch.tensor(PREFIX + CHUNK) * 16)
    assert not (rows % 16).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_other_dtypes_are_refused(planner, dtype):
    for translate in (planner.translate_loc_to_scratch, planner.translate_cached):
        with pytest.raises(ValueError, match=f"loc has dtype {dtype}"):
            translate(torch.zeros(3, dtype=dtype))
    with pytest.raises(ValueError, match="pages has dtype"):
        planner.translate_pages(torch.zeros(3, dtype=dtype))


@settings(max_examples=50)
@given(st.integers(1, 70), st.data())
def test_by_slot_and_by_page_equal_the_formula(ps, data):
    """Any page size, any order, repeats, both dtypes; C124."""
    spec = make_spec(0, 2, ps, groups=8, chunk_pages=4)
    planner = ShardExtendPlanner(spec, num_pages=64)
    count = data.draw(st.integers(0, 16))
    pages = group_pages(2, data.draw(st.permutations(range(1, 32))), count=count)
    planner.begin_shard_extend(page_table([pages]), [0], [count * ps], [count * ps])
    locs = data.draw(st.lists(st.integers(0, 64 * ps - 1), max_size=30))
    table = planner.page_pos.tolist()
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    expected = [table[loc // ps] * ps + loc % ps for loc in locs]
    assert expected == planner.translate_loc_to_scratch(torch.tensor(locs, dtype=dtype)).tolist()
    some = data.draw(st.lists(st.integers(0, 63), max_size=8))
    by_slot = planner.translate_loc_to_scratch(slots_of(some, ps))
    assert torch.equal(by_slot, planner.translate_pages(torch.tensor(some, dtype=dtype)))


def test_the_same_tensor_is_translated_once_per_plan(planner):
    """C122, C123: identity within a plan; a new plan forgets, since pages have moved."""
    loc = slots_of(CHUNK, 16)
    rows = planner.translate_cached(loc)
    assert planner.translate_cached(loc) is rows
    assert planner.translate_cached(loc.clone()) is not rows
    planner.begin_shard_extend(page_table([group_pages(4, [9], start=2)]), [0], [32], [32])
    moved = planner.translate_cached(loc)
    assert moved is not rows
    assert moved.max() < planner.spec.max_prefix_tokens


def test_the_memo_holds_the_tensor_and_not_its_address(planner):
    """A dead tensor's address or id may be reused; a held tensor's cannot."""
    for start in range(50):
        loc = torch.arange(start, start + 5)
        expected = planner.translate_loc_to_scratch(loc)
        assert torch.equal(expected, planner.translate_cached(loc))
        del loc


def test_the_memo_drops_the_oldest_beyond_its_slots():
    translator = SlotTranslator(torch.zeros(8, dtype=torch.int32), 4, max_slots=10)
    first, second, third = (torch.arange(4) for _ in range(3))
    rows = [translator.translate_cached(loc) for loc in (first, second)]
    assert translator.translate_cached(first) is rows[0]
    translator.translate_cached(third)
    assert translator.translate_cached(second) is rows[1]
    assert translator.translate_cached(first) is not rows[0]
    large = torch.arange(30)
    assert translator.translate_cached(large) is translator.translate_cached(large)


def test_as_many_sub_ranges_as_fill_the_prefix_are_remembered():
    """A model that reads its prefix in many small pieces in every layer translates each once."""
    planner = ShardExtendPlanner(make_spec(0, 2), num_pages=64)
    pieces = [torch.arange(i, i + 16) for i in range(planner.spec.max_prefix_tokens // 16)]
    rows = [planner.translate_cached(piece) for piece in pieces]
    assert all(planner.translate_cached(p) is r for p, r in zip(pieces, rows, strict=True))


def test_slots_beyond_the_table_are_refused_on_the_host(planner):
    with pytest.raises((IndexError, ValueError)):
        planner.translate_loc_to_scratch(torch.tensor([4096 * 16]))


def test_a_table_of_slots_beyond_2_31_is_exact():
    """int64 arithmetic throughout; B5."""
    ps = 1 << 20
    table = torch.tensor([9, 5000, 3], dtype=torch.int32)
    translator = SlotTranslator(table, ps, max_slots=100)
    loc = torch.tensor([ps + 7, 2 * ps + (ps - 1)])
    assert translator.translate(loc).tolist() == [5000 * ps + 7, 3 * ps + ps - 1]
    assert translator.translate_pages(torch.tensor([1]))[-1] == 5001 * ps - 1
    assert np.iinfo(np.int32).max < 5000 * ps
