"""Scratch bytes, and whether a batch fits; B71, C108."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloc import PageShardSpec
from scratch import ScratchBudget, ShardExtendPlanner, padded_block_pages
from tests.scratch.scratch_builders import group_pages, make_spec, page_table


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
