"""What each rank of a real group does; every case is a function of the world and the rank."""

import os
import time
import traceback
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from alloc import PageShardSpec
from scratch import ShardGroup, get_kv_shard_group
from tests.scratch.scratch_builders import page_table
from tests.scratch.scratch_worlds import (
    Batch,
    Conversation,
    Reference,
    check_persisted,
    is_exact,
    make_pool,
    prefill,
    read,
    write,
)

PS = 4
SHORT_S = 2.5


def make_world(rank, size, kind, *, timeout_s=15.0, layers=(0, 4), dtype=torch.bfloat16):
    """This rank's pool on a communicator of its own, and the reference that every rank keeps."""
    spec = PageShardSpec(rank, size, PS, 8 * size * PS, 8 * PS)
    group = ShardGroup.dedicated(timeout_s=timeout_s)
    device = f"cuda:{rank}" if dist.get_backend() == "nccl" else "cpu"
    pool = make_pool(kind, spec, group, layers=layers, dtype=dtype, device=device)
    layout = pool.shard.planner.layout
    return pool, Reference(kind, dtype, layout, range(*layers), 7)


def conversation_of(pool, seed):
    planner = pool.shard.planner
    return Conversation(planner.spec, planner.layout, np.random.default_rng(seed))


def conversation_is_exact(rank, size, kind, dtype=torch.bfloat16):
    """Several plans in a row over fragmented, shared and reused pages with partial chunks."""
    for seed in range(3):
        pool, reference = make_world(rank, size, kind, dtype=dtype)
        conversation = conversation_of(pool, seed)
        for _ in range(8):
            batch = conversation.batch()
            prefill([pool], kind, reference, batch)
            check_persisted([pool], kind, reference, batch.locs(PS))


def fragmented_groups_are_exact(rank, size, kind):
    """Whole groups of pages in no order, then a partial chunk."""
    pool, reference = make_world(rank, size, kind)
    first = [group * size + owner for group in (5, 2, 9) for owner in range(size)]
    second = [group * size + owner for group in (7, 3) for owner in range(size)]
    one, three = size * PS, 3 * size * PS
    prefill([pool], kind, reference, Batch([first[: 2 * size]], [0], [2 * one]))
    prefill([pool], kind, reference, Batch([second[:size]], [0], [one]))
    batch = Batch([first, second], [2 * one, one], [three - 3, 2 * one - 1])
    prefill([pool], kind, reference, batch)


def sub_ranges_are_exact(rank, size):
    """Any part of the prefix, in any order, in every layer."""
    pool, reference = make_world(rank, size, "mla")
    table = [(4 - i // size) * size + i % size for i in range(2 * size)]
    tokens = len(table) * PS
    prefill([pool], "mla", reference, Batch([table], [0], [tokens]))
    table.append(11 * size)
    pool.begin_shard_extend(page_table([table]), [0], [tokens], [tokens + 2])
    loc = Batch([table], [tokens], [tokens + 2]).locs(PS)
    for layer_id in range(4):
        write(pool, "mla", layer_id, loc[-2:], reference.draw(layer_id, loc[-2:]))
        for some in (loc[1:3], loc[PS : PS + 5], loc.flip(0), loc[[0, -1, 0]]):
            assert is_exact(read(pool, "mla", layer_id, some), reference, layer_id, some)
    pool.end_shard_extend()


def plan_errors_leave_no_half_state(rank, size):
    """All ranks refuse the same batch between two layers, and the old plan goes on."""
    pool, reference = make_world(rank, size, "mha")
    table = list(range(size, 3 * size))
    tokens = len(table) * PS
    prefill([pool], "mha", reference, Batch([table], [0], [tokens]))
    batch = Batch([table], [tokens], [tokens])
    pool.begin_shard_extend(page_table([table]), [0], [tokens], [tokens])
    digest = pool.shard.planner.plan.digest()
    loc = batch.locs(PS)
    for layer_id in range(4):
        for bad in (([0], [tokens - 1], [tokens]), ([0], [tokens], [9 * tokens]), ([1], [0], [1])):
            with pytest.raises(ValueError, match=r"prefix_len|seq_len|row"):
                pool.begin_shard_extend(page_table([table]), *bad)
        with pytest.raises(ValueError, match="cyclic"):
            pool.begin_shard_extend(page_table([table[::2]]), [0], [size * PS], [size * PS])
        assert is_exact(read(pool, "mha", layer_id, loc), reference, layer_id, loc)
    pool.end_shard_extend()
    assert pool.shard.planner.plan.digest() == digest
    agreed = [None] * size
    dist.all_gather_object(agreed, digest)
    assert len(set(agreed)) == 1
    prefill([pool], "mha", reference, Batch([table[:1]], [PS], [PS]))


def overlapping_pools_do_not_mix(rank, size):
    """Two pools with gathers in flight at once, each on its own communicator."""
    worlds = [make_world(rank, size, kind) for kind in ("mha", "mla")]
    table = list(range(size, 3 * size))
    tokens = len(table) * PS
    batch = Batch([table], [tokens], [tokens])
    for (pool, reference), kind in zip(worlds, ("mha", "mla"), strict=True):
        prefill([pool], kind, reference, Batch([table], [0], [tokens]))
    for pool, _ in worlds:
        pool.begin_shard_extend(page_table([table]), [0], [tokens], [tokens])
    loc = batch.locs(PS)
    order = worlds if rank % 2 else worlds[::-1]
    kinds = ("mha", "mla") if rank % 2 else ("mla", "mha")
    for layer_id in range(4):
        for (pool, reference), kind in zip(order, kinds, strict=True):
            assert is_exact(read(pool, kind, layer_id, loc), reference, layer_id, loc)
    for pool, _ in worlds:
        pool.end_shard_extend()


def groups_are_what_they_wrap(rank, size):
    """Sizes and ranks; subgroups; the choice of group takes process groups as they are."""
    whole = ShardGroup()
    assert (whole.rank, whole.size) == (rank, size)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    mine = pairs[rank // 2]
    chosen = get_kv_shard_group(use_mla=False, cp_group=mine, tp_group=dist.group.WORLD)
    assert (chosen.rank, chosen.size) == (rank % 2, 2)
    chosen = get_kv_shard_group(use_mla=True, cp_group=None, tp_group=dist.group.WORLD)
    assert chosen.size == size
    own = ShardGroup.dedicated(mine)
    assert (own.rank, own.size) == (rank % 2, 2)
    assert own.process_group is not mine
    blocks = torch.full((4, 3), -1)
    blocks[2 * own.rank : 2 * own.rank + 2] = rank
    own.all_gather(blocks).wait()
    assert blocks[::2, 0].tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    if size > 2:
        with pytest.raises(ValueError, match="not a rank"):
            ShardGroup(pairs[1 - rank // 2])
    with pytest.raises(ValueError, match="timeout_s=0"):
        ShardGroup(timeout_s=0)


def no_warnings(rank, size):
    """The gather goes by the name that this torch does not deprecate."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*(all_gather|deprecated).*")
        pool, reference = make_world(rank, size, "mla")
        table = list(range(size, 2 * size))
        prefill([pool], "mla", reference, Batch([table], [0], [size * PS]))
        prefill([pool], "mla", reference, Batch([table], [size * PS], [size * PS]))


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
    pool, reference = make_world(rank, size, "mla", timeout_s=SHORT_S)
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
    pool, reference = make_world(rank, size, "mha", timeout_s=SHORT_S)
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


def cases(rank, size):
    """The cases in order; the last ones break their groups."""
    for kind in ("mha", "mla"):
        yield f"conversation {kind}", lambda kind=kind: conversation_is_exact(rank, size, kind)
        yield f"fragments {kind}", lambda kind=kind: fragmented_groups_are_exact(rank, size, kind)
    fp8 = torch.float8_e4m3fn
    yield "conversation fp8", lambda: conversation_is_exact(rank, size, "mla", fp8)
    for case in (
        sub_ranges_are_exact,
        plan_errors_leave_no_half_state,
        overlapping_pools_do_not_mix,
        groups_are_what_they_wrap,
        no_warnings,
        a_late_rank_is_an_error,
    ):
        yield case.__name__, lambda case=case: case(rank, size)


def run_nccl_cases(rank, report):
    """Run on GPUs what needs no broken group; report each as ok or with its traceback."""
    size = dist.get_world_size()
    for name, run in (
        ("conversation mha", lambda: conversation_is_exact(rank, size, "mha")),
        ("conversation mla", lambda: conversation_is_exact(rank, size, "mla")),
        ("fragments mha", lambda: fragmented_groups_are_exact(rank, size, "mha")),
        ("fragments mla", lambda: fragmented_groups_are_exact(rank, size, "mla")),
        ("no_warnings", lambda: no_warnings(rank, size)),
    ):
        try:
            run()
            report(name, "ok")
        except BaseException:
            report(name, traceback.format_exc())
            return


def run_cases(rank, report):
    """Run all cases on this rank; report each as ok or with its traceback."""
    size = dist.get_world_size()
    for name, run in cases(rank, size):
        try:
            run()
            report(name, "ok")
        except BaseException:
            report(name, traceback.format_exc())
            return  # the others are out of step from here on
    try:
        a_dead_rank_is_an_error(rank, size, report)
        report("a_dead_rank_is_an_error", "ok")
    except BaseException:
        report("a_dead_rank_is_an_error", traceback.format_exc())
