"""What the planner refuses, with the values in the message and the previous plan intact; B60."""

import numpy as np
import pytest
import torch

from alloc import PageLayout, PageShardSpec, ReqToTokenPool
from scratch import ShardExtendPlanner
from tests.scratch.scratch_builders import make_spec, page_table, row_pool, slot_table

GOOD = page_table([[8, 9, 10, 11]])


def make_planner(**kwargs):
    planner = ShardExtendPlanner(make_spec(0, 2, groups=2, chunk_pages=2), num_pages=64, **kwargs)
    planner.begin_shard_extend(GOOD, [0], [32], [48])
    return planner


CASES = {
    "unaligned prefix": ((GOOD, [0], [19], [40]), "prefix_len=19.*page_size=16"),
    "negative prefix": ((GOOD, [0], [-16], [40]), "prefix_len=-16"),
    "prefix longer than sequence": ((GOOD, [0], [48], [40]), r"prefix_len=48.*seq_len=40"),
    "prefix over the scratch": (
        (page_table([[8, 9, 10, 11, 12, 13]]), [0], [96], [96]),
        "max_prefix_tokens=64",
    ),
    "chunk over the scratch": ((GOOD, [0], [0], [48]), "chunk_tokens=32"),
    "owners not cyclic": ((page_table([[8, 10]]), [0], [32], [32]), "request 0.*cyclic"),
    "owners of a later request not cyclic": (
        (page_table([[8, 9], [], [11, 13]]), [0, 1, 2], [32, 0, 32], [32, 0, 32]),
        "request 2.*cyclic",
    ),
    "reserved page": ((page_table([[0, 1]]), [0], [32], [32]), r"page 0 is not in \[2, 64\)"),
    "page beyond the table": ((page_table([[64, 65]]), [0], [32], [32]), "page 65"),
    "negative page": ((np.array([[-3]]), [0], [0], [5]), "page -3"),
    "prefix page twice": (
        (page_table([[], [8, 9, 8, 9]]), [0, 1], [0, 64], [0, 64]),
        "page 8 is in the prefix of request 1 in the batch twice",
    ),
    "chunk page twice": (
        (page_table([[8], [8]]), [0, 1], [0, 0], [5, 5]),
        "page 8 is in the batch's chunk twice",
    ),
    "chunk page of another's prefix": (
        (page_table([[8, 9], [8]]), [0, 1], [32, 0], [32, 5]),
        "page 8 is in one request's prefix and another's chunk",
    ),
    "row out of range": ((GOOD, [1], [32], [32]), "row 1"),
    "negative row": ((GOOD, [-1], [32], [32]), "row -1"),
    "sequence longer than the row": ((GOOD, [0], [32], [80]), "seq_len=80"),
    "missing row": ((GOOD, [], [32], [32]), "0 rows for 1"),
    "missing prefix": ((GOOD, [0], [], [32]), "0 prefix_lens and 1 seq_lens"),
    "float lengths": ((GOOD, [0], [32.0], [48]), "32.0. are not integers"),
    "one-dimensional table": ((GOOD[0], [0], [32], [32]), "page table is int32"),
    "float table": ((GOOD.astype(float), [0], [32], [32]), "float64"),
    "a list": (([[8, 9]], [0], [32], [32]), "list; pass a ReqToTokenPool"),
    "float slots": ((torch.zeros(1, 64), [0], [32], [32]), "slot table is torch.float32"),
    "slots off their page": (
        (torch.arange(130, 194, dtype=torch.int32)[None], [0], [32], [32]),
        "slot 130 at position 0",
    ),
    "pool of another page size": (
        (row_pool([[8, 9]], 8), [0], [16], [16]),
        "pages of 8 tokens",
    ),
    "pool row that is free": ((ReqToTokenPool(2, 64, None, page_size=16), [0], [0], [5]), "row 0"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("debug", [False, True])
def test_a_refused_batch_leaves_the_previous_plan(name, debug):
    args, message = CASES[name]
    planner = make_planner(debug=debug)
    plan, table = planner.plan, planner.page_pos.clone()
    with pytest.raises(ValueError, match=message):
        planner.begin_shard_extend(*args)
    assert planner.plan is plan
    assert planner.active
    assert planner.epoch == 1
    assert torch.equal(table, planner.page_pos)
    planner.check_invariants()
    assert planner.begin_shard_extend(GOOD, [0], [32], [48]).epoch == 2


@pytest.mark.parametrize("written", [0, 1, 2])
def test_an_interrupted_commit_leaves_no_plan_and_the_next_one_is_whole(written):
    """An interrupt in the middle of the table's writes; B60."""

    class Interrupting:
        def __init__(self, table):
            self.table, self.writes = table, 0

        def __setitem__(self, pages, places):
            if self.writes == written:
                raise KeyboardInterrupt
            self.writes += 1
            self.table[pages] = places

    planner = make_planner()
    table = planner._positions._host
    planner._positions._host = Interrupting(table)
    args = page_table([[20, 21, 22]]), [0], [32], [48]
    if written < 2:
        with pytest.raises(KeyboardInterrupt):
            planner.begin_shard_extend(*args)
        assert not planner.active
    planner._positions._host = table
    planner.begin_shard_extend(page_table([[30, 31]]), [0], [16], [32])
    assert planner.active
    planner.check_invariants()


def test_exact_blocks_take_what_the_default_refuses():
    """Owners that are not cyclic plan with exact blocks; the bound is still the scratch."""
    planner = make_planner(exact_blocks=True)
    plan = planner.begin_shard_extend(page_table([[8, 10]]), [0], [32], [32])
    assert plan.block_pages == 2
    with pytest.raises(ValueError, match="max_prefix_tokens"):
        planner.begin_shard_extend(page_table([[8, 10, 12]]), [0], [48], [48])


def test_cyclic_prefixes_never_overfill_a_default_block():
    """N pages of one owner among short cyclic prefixes stay within Σ ceil(K_i / N)."""
    planner = ShardExtendPlanner(make_spec(0, 4), num_pages=64)
    tables = [[4], [8], [12]]
    plan = planner.begin_shard_extend(page_table(tables), [0, 1, 2], [16] * 3, [16] * 3)
    assert plan.rank_counts.tolist() == [3, 0, 0, 0]
    assert plan.block_pages == 3


def test_debug_compares_every_slot_of_a_slot_table():
    """A page whose later slots are foreign is found in debug; results never differ else."""
    slots = slot_table([[8, 9, 10]], 16)
    slots[0, 20] = 7
    planner = make_planner()
    planner.begin_shard_extend(slots, [0], [32], [48])
    with pytest.raises(ValueError, match="slot 7 at position 20"):
        make_planner(debug=True).begin_shard_extend(slots, [0], [32], [48])


@pytest.mark.parametrize("exact_blocks", [False, True])
def test_debug_tells_a_repeat_in_one_prefix_from_pages_that_requests_share(exact_blocks):
    shared = page_table([[8, 9, 10], [8, 9, 12]]), [0, 1], [32, 48], [48, 48]
    repeated = page_table([[10, 11], [8, 9, 8]]), [0, 1], [32, 48], [32, 48]
    spec = make_spec(0, 2, groups=3, chunk_pages=2)
    planners = [
        ShardExtendPlanner(spec, num_pages=64, exact_blocks=exact_blocks, debug=debug)
        for debug in (False, True)
    ]
    assert len({planner.begin_shard_extend(*shared).digest() for planner in planners}) == 1
    planners[0].begin_shard_extend(*repeated)
    with pytest.raises(ValueError, match="page 8 is in the prefix of request 1"):
        planners[1].begin_shard_extend(*repeated)


def test_a_row_written_behind_the_mirror_is_read_from_its_table():
    pool = row_pool([[8, 9, 10]], 16, "cpu")
    pool.req_to_token[0, :48] = slot_table([[20, 21, 22]], 16)[0]
    pool.forget_mirror(0)
    plan = make_planner().begin_shard_extend(pool, [0], [32], [48])
    assert plan.pages.tolist() == [20, 21, 22]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "num_pages=None"),
        ({"num_pages": 0}, "num_pages=0"),
        ({"layout": PageLayout.interleave(8, 2, 4)}, "pages of 8 tokens"),
        ({"layout": PageLayout.interleave(16, 4, 4)}, "4 classes"),
        ({"layout": PageLayout.interleave(16, 2, 4), "num_pages": 11}, "num_pages=11"),
    ],
)
def test_a_planner_refuses_a_table_that_does_not_fit_its_spec(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ShardExtendPlanner(make_spec(0, 2), **kwargs)


def test_one_rank_is_a_group_too():
    planner = ShardExtendPlanner(PageShardSpec(0, 1, 16, 64, 32), num_pages=20)
    plan = planner.begin_shard_extend(page_table([[7, 3, 9]]), [0], [32], [40])
    assert plan.prefix_pages.tolist() == [3, 7]
    assert plan.send_pages.tolist() == [3, 7]
