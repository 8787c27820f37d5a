"""What ranks do over Gloo: every case that any backend runs, then those that break their groups."""

import os
import time
import traceback

import pytest
import torch.distributed as dist

from tests.distributed.gather_cases import PS, cases, make_group, make_world, run_in_turn
from tests.scratch.scratch_builders import page_table
from tests.scratch.scratch_worlds import Batch, prefill

SHORT_S = 2.5


def begin_with_prefix(pool, reference, kind="mla"):
    size = pool.shard.planner.spec.shard_size
    table = list(range(size, 2 * size))
    prefill([pool], kind, reference, Batch([table], [0], [size * PS]))
    pool.begin_shard_extend(page_table([table]), [0], [size * PS], [size * PS])


def check_fails_in_time(use):
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"the prefix gather failed on rank \d+ of \d+"):
        use()
    assert time.monotonic() - started < SHORT_S + 10


def a_late_rank_is_an_error(rank, size):
    """Whoever waits gets an error after the timeout; nobody hangs; no plan stays in force."""
    pool, reference = make_world(rank, size, "mla", group=make_group(SHORT_S))
    begin_with_prefix(pool, reference)
    late = size - 1
    if rank != late:
        pool.get_key_buffer(0)
        check_fails_in_time(lambda: pool.get_key_buffer(1))
        pool.end_shard_extend()
        assert not pool.shard.active
    dist.barrier()


def a_dead_rank_is_an_error(rank, size, report):
    """The last rank dies between two layers; the others fail soon, and can say so."""
    pool, reference = make_world(rank, size, "mha", group=make_group(SHORT_S))
    begin_with_prefix(pool, reference, "mha")
    if rank == size - 1:
        report("a_dead_rank_is_an_error", "died as told")
        os._exit(0)
    check_fails_in_time(lambda: [pool.get_key_buffer(layer_id) for layer_id in range(4)])
    pool.end_shard_extend()
    assert not pool.shard.active
    table = list(range(size, 2 * size))
    args = page_table([table]), [0], [size * PS], [size * PS]

    def serve_again():
        pool.begin_shard_extend(*args)
        pool.get_key_buffer(0)

    check_fails_in_time(serve_again)


def gloo_cases(rank, size):
    """Yield the cases that any backend runs, and the first that breaks its group."""
    yield from cases(rank, size)
    yield a_late_rank_is_an_error.__name__, lambda: a_late_rank_is_an_error(rank, size)


def run_gloo_cases(rank, report):
    """Run all cases on this rank; in the last of them a rank dies."""
    size = dist.get_world_size()
    if not run_in_turn(gloo_cases(rank, size), report):
        return
    try:
        a_dead_rank_is_an_error(rank, size, report)
        report("a_dead_rank_is_an_error", "ok")
    except BaseException:
        report("a_dead_rank_is_an_error", traceback.format_exc())
