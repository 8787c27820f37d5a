"""Scratch bytes, and whether a batch fits; B71, C108."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloc import PageLayout, PageShardSpec
from scratch import ScratchBudget, ShardExtendPlanner, SoloGroup, padded_block_pages
from tests.scratch.scratch_builders import group_pages, make_spec, page_table
from tests.scratch.scratch_worlds import make_pool


def test_scratch_bytes_are_two_slots_of_one_layer():
    budget = ScratchBudget(PageShardSpec(0, 4, 16, 256, 64), row_bytes=1152)
    assert budget.scratch_bytes == 2 * (256 + 64 + 16) * 1152


def test_rows_without_bytes_are_refused():
    with pytest.raises(ValueError, match="row_bytes=0"):
        ScratchBudget(make_spec(), row_bytes=0)


def test_padding_counts():
    """Three one-page prefixes on 4 ranks take 3 blocks: 12 pages of the region."""
    assert padded_block_pages([1, 1, 1], 4) == 3
    budget = ScratchBudget(PageShardSpec(0, 4, 16, 256, 64), row_bytes=2)
    assert budget.fits([16] * 4, [16] * 4)
    assert not budget.fits([16] * 5, [16] * 5)
    assert budget.fits([16] * 5, [16] * 5, block_pages=4)
    assert not budget.fits([16] * 4, [16] * 4, block_pages=5)


def test_chunks_count_in_whole_pages():
    budget = ScratchBudget(PageShardSpec(0, 4, 16, 256, 64), row_bytes=2)
    assert budget.fits([0, 0, 0, 0], [1, 1, 1, 1])
    assert not budget.fits([0, 0, 0, 0], [17, 1, 1, 1])
    assert budget.fits([], [])


@pytest.mark.parametrize(
    ("prefix", "seq", "message"),
    [([8], [20], "prefix_len=8"), ([32], [20], "seq_len=20"), ([16], [], "1 prefix_lens and 0")],
)
def test_lengths_are_checked(prefix, seq, message):
    with pytest.raises(ValueError, match=message):
        ScratchBudget(make_spec(), row_bytes=2).fits(prefix, seq)


@given(
    st.sampled_from([1, 2, 4]),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), max_size=5),
)
def test_what_fits_plans_and_what_does_not_is_refused(n, batch):
    """The scheduler's answer is the planner's, with disjoint pages."""
    spec = make_spec(0, n, 16, groups=3, chunk_pages=4)
    fits = ScratchBudget(spec, row_bytes=2).fits(
        [16 * count for count, _ in batch], [16 * count + tokens for count, tokens in batch]
    )
    tables, group = [], 1
    for count, tokens in batch:
        total = count + -(-tokens // 16)
        groups = list(range(group, group + total // n + 1))
        tables.append(group_pages(n, groups, count=total))
        group = groups[-1] + 1
    planner = ShardExtendPlanner(spec, num_pages=n * (group + 1))
    args = (
        page_table(tables),
        range(len(batch)),
        [16 * count for count, _ in batch],
        [16 * count + tokens for count, tokens in batch],
    )
    if fits:
        planner.begin_shard_extend(*args)
    else:
        with pytest.raises(ValueError, match="admit fewer"):
            planner.begin_shard_extend(*args)


# From pages


def test_shared_pages_count_once_and_one_rank_s_pages_all_count():
    spec = PageShardSpec(0, 4, 16, 256, 64)
    exact = ScratchBudget(spec, row_bytes=2, exact_blocks=True)
    shared = np.arange(4, 20)
    assert exact.fits_pages([shared] * 4, [260] * 4)
    assert not exact.fits_pages([shared, np.arange(20, 21)], [260, 20])
    assert exact.fits_pages([np.array([5, 9, 13, 17])], [80])
    assert not exact.fits_pages([np.array([5, 9, 13, 17, 21])], [100])


def test_chunks_and_batches_without_a_prefix_are_counted_from_pages_too():
    exact = ScratchBudget(PageShardSpec(0, 4, 16, 256, 64), row_bytes=2, exact_blocks=True)
    none = np.empty(0, dtype=np.int64)
    assert exact.fits_pages([], [])
    assert exact.fits_pages([none] * 4, [16] * 4)
    assert not exact.fits_pages([none] * 4, [17, 16, 16, 16])
    assert not exact.fits_pages([np.array([5])], [16 + 65])


def test_pages_and_lengths_must_agree():
    budget = ScratchBudget(make_spec(), row_bytes=2, exact_blocks=True)
    with pytest.raises(ValueError, match="seq_len=20"):
        budget.fits_pages([np.array([4, 5])], [20])
    with pytest.raises(ValueError, match="1 prefix_lens and 2"):
        budget.fits_pages([np.array([4, 5])], [40, 40])


def test_sizes_are_the_budget_s_and_owners_the_planner_s():
    """Non-cyclic owners fit by size and plan with exact blocks only."""
    spec = make_spec(0, 2, groups=2, chunk_pages=2)
    args = page_table([[8, 10]]), [0], [32], [32]
    for exact_blocks in (False, True):
        assert ScratchBudget(spec, 2, exact_blocks=exact_blocks).fits_pages([args[0][0]], [32])
    ShardExtendPlanner(spec, num_pages=64, exact_blocks=True).begin_shard_extend(*args)
    with pytest.raises(ValueError, match="cyclic"):
        ShardExtendPlanner(spec, num_pages=64).begin_shard_extend(*args)


def test_the_caller_s_pages_stay_as_they_are():
    pages = np.array([9, 5, 9, 5])
    ScratchBudget(make_spec(), row_bytes=2, exact_blocks=True).fits_pages([pages], [64])
    assert pages.tolist() == [9, 5, 9, 5]


@pytest.mark.parametrize("exact_blocks", [False, True])
def test_a_pool_s_budget_knows_its_planner(exact_blocks):
    spec = make_spec(0, 1, 4)
    layout = PageLayout.owner_lanes(4, 1, 12)
    pool = make_pool("mla", spec, SoloGroup(), layout=layout, exact_blocks=exact_blocks)
    assert pool.scratch_budget == ScratchBudget(spec, pool.row_bytes, layout, exact_blocks)


@given(
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_what_fits_by_pages_is_what_plans(n, exact_blocks, owner_lanes, batch, random):
    """The answer is the planner's over shared prefixes, and with exact blocks over any owners."""
    spec = make_spec(0, n, 16, groups=2, chunk_pages=4)
    make = PageLayout.owner_lanes if owner_lanes else PageLayout.interleave
    layout = make(16, n, 24)
    planner = ShardExtendPlanner(spec, layout=layout, exact_blocks=exact_blocks)
    budget = ScratchBudget(spec, 2, layout, exact_blocks)
    pages = list(range(layout.first_page, layout.num_pages))
    shared, fresh = pages[: 10 * n], pages[10 * n :]
    if exact_blocks:
        random.shuffle(shared)
    tables, prefixes, seq_lens = [], [], []
    for count, tokens in batch:
        start = random.randrange(n + 1)
        chunk = [fresh.pop() for _ in range(-(-tokens // 16))]
        prefixes.append(np.array(shared[start : start + count], dtype=np.int64))
        tables.append([*shared[start : start + count], *chunk])
        seq_lens.append(16 * count + tokens)
    args = page_table(tables), range(len(batch)), [16 * count for count, _ in batch], seq_lens
    if budget.fits_pages(prefixes, seq_lens):
        planner.begin_shard_extend(*args)
    else:
        with pytest.raises(ValueError, match=r"admit fewer|exact_blocks"):
            planner.begin_shard_extend(*args)
