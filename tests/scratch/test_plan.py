"""The plan equals the obvious one, for any batch, source, layout and rank; BEHAVIOUR 56-61."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alloc import PageLayout, PageShardSpec
from scratch import ShardExtendPlanner
from tests.models.naive_plan import CannotPlan, naive_plan
from tests.scratch.scratch_builders import (
    group_pages,
    make_spec,
    page_table,
    row_pool,
    slot_table,
    slots_of,
)

SOURCES = {
    "pages": lambda tables, ps: page_table(tables),
    "pages64": lambda tables, ps: page_table(tables).astype(np.int64),
    "host pool": row_pool,
    "cpu pool": lambda tables, ps: row_pool(tables, ps, "cpu"),
    "slots": slot_table,
    "slots64": lambda tables, ps: slot_table(tables, ps).long(),
}


@st.composite
def batches(draw, n, ps, first_page):
    """(tables, prefix_lens, seq_lens) of a small pool; prefixes are often shared."""
    groups = 12
    free = {c: draw(st.permutations(range(groups))) for c in range(n)}

    def take(owner):
        return first_page + free[owner].pop() * n + owner

    tables, prefix_lens, seq_lens = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        owners = draw(st.integers(0, n - 1))
        shared = draw(st.integers(0, len(tables))) if tables else 0
        table = []
        if shared:
            other = shared - 1
            keep = draw(st.integers(0, prefix_lens[other] // ps))
            table = tables[other][:keep]
            if table:
                owners = (table[0] - first_page) % n
        total = draw(st.integers(len(table), len(table) + 5))
        while len(table) < total and free[(owners + len(table)) % n]:
            table.append(take((owners + len(table)) % n))
        count = draw(st.integers(0, len(table)))
        if shared:
            count = max(count, keep)
        tail = draw(st.integers(0, ps - 1)) if len(table) > count else 0
        tables.append(table)
        prefix_lens.append(count * ps)
        seq_lens.append(max(count * ps, len(table) * ps - tail))
    if draw(st.integers(0, 4)) == 0:
        tables = [draw(st.permutations(table)) for table in tables]
    return tables, prefix_lens, seq_lens


def check_against_naive(planner, plan, expected, num_pages):
    ps = planner.spec.page_size
    assert expected.block_pages == plan.block_pages
    assert expected.prefix_order == plan.prefix_pages.tolist()
    assert expected.places == dict(zip(plan.pages.tolist(), plan.places.tolist(), strict=True))
    wanted = [expected.places.get(page, expected.trash_page) for page in range(num_pages)]
    assert wanted == planner.page_pos.tolist()
    if expected.send_pages is None:
        assert plan.send_pages is None
        assert plan.send_rows is None
    else:
        assert expected.send_pages == plan.send_pages.tolist()
        assert expected.send_rows == plan.send_rows.tolist()
        assert plan.send_rows.dtype == torch.int64
    locs = torch.arange(num_pages * ps)
    assert [expected.row(loc) for loc in locs.tolist()] == planner.translate_loc_to_scratch(
        locs
    ).tolist()
    planner.check_invariants()


@settings(max_examples=150)
@given(
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from(sorted(SOURCES)),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_a_plan_equals_the_naive_one_or_both_refuse(n, ps, source, exact, debug, data):
    """Any series of batches on one planner, any source and rank; refused ones change nothing."""
    first_page = data.draw(st.sampled_from([1, n]))
    rank, chunk_pages = data.draw(st.integers(0, n - 1)), data.draw(st.integers(2, 12))
    spec = PageShardSpec(rank, n, ps, 8 * n * ps, chunk_pages * ps)
    layout = PageLayout(ps, n, first_page, 12)
    planner = ShardExtendPlanner(spec, layout=layout, exact_blocks=exact, debug=debug)
    made = 0
    for _ in range(data.draw(st.integers(1, 3))):
        tables, prefix_lens, seq_lens = data.draw(batches(n, ps, first_page))
        before = planner.page_pos.clone()
        args = (SOURCES[source](tables, spec.page_size), range(len(tables)), prefix_lens, seq_lens)
        try:
            expected = naive_plan(
                spec, tables, prefix_lens, seq_lens, first_page=first_page, exact=exact
            )
        except CannotPlan as rule:
            with pytest.raises(ValueError, match=str(rule)):
                planner.begin_shard_extend(*args)
            assert torch.equal(before, planner.page_pos)
            assert made == planner.epoch
            continue
        made += 1
        plan = planner.begin_shard_extend(*args)
        assert made == plan.epoch == planner.epoch
        assert planner.active
        check_against_naive(planner, plan, expected, layout.num_pages)


@settings(max_examples=40)
@given(st.integers(2, 8), st.data())
@example(4, None)
def test_exact_blocks_take_any_owners(size, data):
    """Prefixes over seams: block_pages is the count of the fullest rank."""
    if data is None:
        tables = [[5, 9, 13, 17, 6], [5, 9, 7]]
    else:
        pages = st.lists(st.integers(size, size * 12 - 1), min_size=1, max_size=9, unique=True)
        tables = data.draw(st.lists(pages, min_size=1, max_size=3))
    lens = [len(table) * 16 for table in tables]
    for rank in range(size):
        spec = PageShardSpec(rank, size, 16, 64 * size * 16, 64)
        planner = ShardExtendPlanner(spec, num_pages=size * 12, exact_blocks=True)
        plan = planner.begin_shard_extend(page_table(tables), range(len(tables)), lens, lens)
        expected = naive_plan(spec, tables, lens, lens, exact=True)
        assert plan.block_pages == max(plan.rank_counts)
        check_against_naive(planner, plan, expected, size * 12)


def test_the_reference_example_of_one_request():
    """7 pages on 4 ranks: block 2, owner-major, chunk after the prefix region; C93-C99, C111."""
    pages = group_pages(4, [5, 2])[:7]
    chunk = group_pages(4, [9], start=2)[:2]
    for rank in range(4):
        spec = make_spec(rank)
        planner = ShardExtendPlanner(spec, num_pages=4096)
        table = slot_table([pages + chunk], 16, width=12)
        plan = planner.begin_shard_extend(table, [0], [112], [112 + 16 + 10])
        assert plan.block_pages == 2
        assert plan.epoch == 1
        assert planner.active
        for owner in range(4):
            own = sorted(page for page in pages if page % 4 == owner)
            at = planner.page_pos[own].tolist()
            assert list(range(owner * 2, owner * 2 + len(own))) == at
        base = spec.max_prefix_tokens // 16
        assert [base, base + 1] == planner.page_pos[chunk].tolist()
        own = sorted(page // 4 for page in pages if page % 4 == rank)
        rows = [page * 16 + i for page in own + [0] * (2 - len(own)) for i in range(16)]
        assert rows == plan.send_rows.tolist()
        assert plan.send_rows.numel() == plan.block_pages * 16
        assert planner.page_pos.dtype == torch.int32
        assert planner.page_pos.numel() == 4096


def test_a_shared_page_has_one_place_and_the_block_stays_the_sum():
    """Three requests, 1 + 2 + 1 blocks; C100-C102."""
    first, second = group_pages(4, [5]), group_pages(4, [5, 7])[:6]
    third = group_pages(4, [8])[:2]
    spec = make_spec()
    planner = ShardExtendPlanner(spec, num_pages=256)
    lens = [64, 96, 32]
    plan = planner.begin_shard_extend(page_table([first, second, third]), [0, 1, 2], lens, lens)
    assert plan.block_pages == 1 + 2 + 1
    assert plan.num_prefix_pages == len(set(first + second + third)) == 8
    assert max(plan.rank_counts) <= plan.block_pages
    rows = planner.translate_loc_to_scratch(slots_of(first, 16))
    assert torch.equal(rows, planner.translate_loc_to_scratch(slots_of(second, 16))[:64])
    exact = ShardExtendPlanner(spec, num_pages=256, exact_blocks=True)
    plan = exact.begin_shard_extend(page_table([first, second, third]), [0, 1, 2], lens, lens)
    assert plan.block_pages == 3


def test_order_is_by_local_page_not_by_position():
    """A reused lower page at a later position takes the first place; C103, B59."""
    pages = group_pages(2, [9, 3])
    spec = make_spec(0, 2)
    planner = ShardExtendPlanner(spec, num_pages=64)
    plan = planner.begin_shard_extend(page_table([pages]), [0], [64], [64])
    assert plan.prefix_pages.tolist() == [6, 18, 7, 19]
    assert planner.page_pos[[18, 19, 6, 7]].tolist() == [1, 3, 0, 2]
    assert plan.send_pages.tolist() == [3, 9]


def test_without_a_prefix_nothing_is_sent():
    """Block 0, active, chunk from the chunk region on; C104, B58."""
    spec = make_spec()
    planner = ShardExtendPlanner(spec, num_pages=256)
    plan = planner.begin_shard_extend(page_table([[17, 18]]), [0], [0], [20])
    assert plan.block_pages == 0
    assert plan.send_rows is None
    assert plan.send_pages is None
    assert planner.active
    assert planner.page_pos[[17, 18]].tolist() == [256, 257]


def test_an_empty_batch_is_a_plan():
    planner = ShardExtendPlanner(make_spec(), num_pages=256)
    plan = planner.begin_shard_extend(page_table([]), [], [], [])
    assert plan.block_pages == 0
    assert len(plan.pages) == 0


def test_a_new_plan_sends_old_pages_to_the_trash():
    """The table is reset for every batch; C109. Epochs count up by one; C98."""
    spec = make_spec(0, 2)
    planner = ShardExtendPlanner(spec, num_pages=64)
    table = page_table([[8, 9, 10], [12, 13, 14]])
    planner.begin_shard_extend(table, [0], [32], [48])
    plan = planner.begin_shard_extend(table, [1], [32], [48])
    trash = planner.scratch.trash_page
    assert planner.page_pos[[8, 9, 10]].tolist() == [trash] * 3
    assert plan.epoch == 2
    planner.check_invariants()


def test_rows_are_not_read_past_their_length():
    """Padding past seq_len may be anything; C110."""
    spec = make_spec(0, 2)
    planner = ShardExtendPlanner(spec, num_pages=64)
    table = np.array([[8, 9, 10, -7, 1 << 30]])
    plan = planner.begin_shard_extend(table, [0], [32], [33])
    assert plan.pages.tolist() == [8, 9, 10]
    slots = torch.tensor([[*range(128, 160), *range(64, 80), -1, 999]], dtype=torch.int32)
    plan = planner.begin_shard_extend(slots, [0], [32], [40])
    assert plan.pages.tolist() == [8, 9, 4]


def test_rows_are_picked_by_index_and_indices_may_be_tensors():
    spec = make_spec(0, 2)
    planner = ShardExtendPlanner(spec, num_pages=64)
    table = page_table([[8, 9], [20, 21], [30, 31]])
    for indices in (torch.tensor([2, 0]), np.array([2, 0]), [2, 0], (np.int64(2), 0)):
        plan = planner.begin_shard_extend(table, indices, [32, 16], [32, 32])
        assert plan.prefix_pages.tolist() == [8, 30, 31]
        assert plan.chunk_pages.tolist() == [9]


def test_all_ranks_derive_the_same_table():
    """Only the send list differs between ranks; B61."""
    tables = [group_pages(4, [5, 2, 9])[:10], group_pages(4, [5, 2, 7])[:9]]
    digests, sends, positions = set(), [], []
    for rank in range(4):
        planner = ShardExtendPlanner(make_spec(rank), num_pages=64)
        plan = planner.begin_shard_extend(page_table(tables), [0, 1], [128, 128], [155, 144])
        digests.add(plan.digest())
        sends.append(plan.send_pages)
        positions.append(planner.page_pos)
    assert len(digests) == 1
    assert all(torch.equal(positions[0], other) for other in positions)
    whole = [page * 4 + r for r, pages in enumerate(sends) for page in pages.tolist() if page]
    assert sorted(whole) == sorted(set(tables[0][:8] + tables[1][:8]))


def test_a_plan_is_frozen():
    planner = ShardExtendPlanner(make_spec(), num_pages=64)
    plan = planner.begin_shard_extend(page_table([[8]]), [0], [0], [5])
    with pytest.raises(AttributeError):
        plan.epoch = 3


def test_end_is_idempotent_and_keeps_the_epoch():
    planner = ShardExtendPlanner(make_spec(), num_pages=64)
    planner.begin_shard_extend(page_table([[8]]), [0], [0], [5])
    planner.end_shard_extend()
    planner.end_shard_extend()
    assert not planner.active
    assert planner.epoch == 1


def test_a_table_off_the_host_gets_the_same_in_one_copy(monkeypatch):
    """The device's path, run on a CPU whose memory is called a device's."""
    empty, copies = torch.empty, []

    def staging(*shape, pin_memory, **kwargs):
        assert pin_memory
        copies.append(shape)
        return empty(*shape, **kwargs)

    planners = [ShardExtendPlanner(make_spec(1, 2), num_pages=64) for _ in range(2)]
    planners[1]._positions._on_host = False
    batches = (([[8, 9, 10], [13, 14]], [32, 32], [48, 32]), ([[5]], [0], [3]), ([[7]], [16], [16]))
    for tables, prefix_lens, seq_lens in batches:
        args = (page_table(tables), range(len(tables)), prefix_lens, seq_lens)
        plan = planners[0].begin_shard_extend(*args)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", staging)
            twin = planners[1].begin_shard_extend(*args)
        assert plan.digest() == twin.digest()
        assert torch.equal(planners[0].page_pos, planners[1].page_pos)
        assert (plan.send_pages is None) == (twin.send_pages is None)
        if plan.send_pages is not None:
            assert torch.equal(plan.send_pages, twin.send_pages)
        planners[1].check_invariants()
    assert len(copies) == 3


def test_undo_touches_only_the_last_plan():
    """Entries that no plan named are never written."""
    planner = ShardExtendPlanner(make_spec(0, 2), num_pages=64)
    planner.begin_shard_extend(page_table([[8, 9, 10]]), [0], [32], [48])
    planner.page_pos[40] = 77
    planner.begin_shard_extend(page_table([[20, 21]]), [0], [32], [32])
    assert planner.page_pos[40] == 77
    with pytest.raises(RuntimeError, match=r"page_pos\[40\]=77"):
        planner.check_invariants()


def test_a_page_table_of_the_widest_ids_needs_no_wide_table():
    """Ids near 2**31 are exact: keys widen to int64 where they would not fit."""
    layout = PageLayout.interleave(1, 8, (1 << 31) // 8 - 2)
    from scratch.owner_major import key_dtype, owner_major, sorted_keys

    assert key_dtype(layout) is np.int64
    pages = np.array([layout.num_pages - 1, 8, layout.num_pages - 8], dtype=np.int64)
    order = owner_major(layout, sorted_keys(layout, pages))
    assert order.pages.tolist() == [8, layout.num_pages - 8, layout.num_pages - 1]
