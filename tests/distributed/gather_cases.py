"""What each rank of a real group does, over any backend: every case is a function of rank and size.

Over NCCL rank r has GPU r, over Gloo a CPU. The cases here leave their groups whole, so that one
spawned group runs them all in turn.
"""

import traceback
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from alloc import PageShardSpec
from radix import alloc_for_extend
from scratch import ShardGroup, get_kv_shard_group
from scratch.kernels import pack_pages
from tests.builders import make_req
from tests.builders import make_world as make_cache_world
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
POOL_PAGES = 12
"""Pages of each rank's pool."""


def device_of(rank):
    """Return where this rank's tensors are."""
    return torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")


def make_group(timeout_s=None):
    """Return a communicator of its own; a GPU's first batch also compiles kernels."""
    default = 60.0 if dist.get_backend() == "nccl" else 15.0
    return ShardGroup.dedicated(timeout_s=timeout_s or default)


def make_world(rank, size, kind, *, group=None, layers=(0, 4), dtype=torch.bfloat16, exact=False):
    """This rank's pool, on a communicator of its own by default, and every rank's reference."""
    spec = PageShardSpec(rank, size, PS, 8 * size * PS, 8 * PS)
    pool = make_pool(
        kind,
        spec,
        group or make_group(),
        size=POOL_PAGES * PS,
        layers=layers,
        dtype=dtype,
        device=device_of(rank),
        exact_blocks=exact,
    )
    return pool, Reference(kind, dtype, pool.shard.planner.layout, range(*layers), 7)


def conversation_of(pool, seed):
    planner = pool.shard.planner
    return Conversation(planner.spec, planner.layout, np.random.default_rng(seed))


def conversation_is_exact(rank, size, kind, dtype=torch.bfloat16):
    """Several plans in a row over fragmented, shared and reused pages with partial chunks."""
    group = make_group()
    for seed in range(3):
        pool, reference = make_world(rank, size, kind, group=group, dtype=dtype)
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
    for table in (first[: 2 * size], second[:size]):
        write_prefix(pool, kind, reference, table)
    batch = Batch([first, second], [2 * one, one], [three, 2 * one])
    if 2 * size > 8:  # the chunk's room: less than a group each
        batch.tables = [first[: 2 * size + 4], second[: size + 4]]
        batch.seq_lens = [2 * one + 4 * PS, one + 4 * PS]
    batch.seq_lens = [batch.seq_lens[0] - 3, batch.seq_lens[1] - 1]
    prefill([pool], kind, reference, batch)


def write_prefix(pool, kind, reference, table):
    """Write a chain's pages, a chunk's worth a batch."""
    for start in range(0, len(table), 8):
        end = min(start + 8, len(table))
        prefill([pool], kind, reference, Batch([table[:end]], [start * PS], [end * PS]))


def sub_ranges_are_exact(rank, size, kind):
    """Any part of the prefix, in any order, in every layer."""
    pool, reference = make_world(rank, size, kind)
    device = device_of(rank)
    table = [(4 - i // size) * size + i % size for i in range(2 * size)]
    tokens = len(table) * PS
    write_prefix(pool, kind, reference, table)
    table.append(11 * size)
    loc = Batch([table], [tokens], [tokens + 2]).locs(PS)
    with pool.shard_extend(page_table([table]), [0], [tokens], [tokens + 2]):
        for layer_id in range(4):
            drawn = reference.draw(layer_id, loc[-2:], device)
            write(pool, kind, layer_id, loc[-2:].to(device), drawn)
            for some in (loc[1:3], loc[PS : PS + 5], loc.flip(0), loc[[0, -1, 0]]):
                found = read(pool, kind, layer_id, some.to(device))
                assert is_exact(found, reference, layer_id, some)


def evicted_pages_are_exact_when_they_come_back(rank, size, kind, rotation):
    """A cache decides the pages: shared starts, splits, evictions and reuse between plans."""
    pool, reference = make_world(rank, size, kind, exact=rotation == "seam")
    world = make_cache_world(PS, POOL_PAGES, shard_size=size, rotation=rotation)
    rng, written, reused, cached = np.random.default_rng(5), {}, 0, 0
    stems = [rng.integers(0, 9, 11).tolist() for _ in range(3)]
    for _ in range(16 + 8 * size):
        reqs = [make_req(_prompt(rng, stems)) for _ in range(2)]
        for req in reqs:
            req.fill_len = len(req.origin_input_ids)
            world.cache.match_req(req)
        assert alloc_for_extend(world.cache, reqs) is not None
        batch = Batch(
            [world.row(req) for req in reqs],
            [len(req.prefix_indices) for req in reqs],
            [req.fill_len for req in reqs],
        )
        prefill([pool], kind, reference, batch)
        for req, table, prefix in zip(reqs, batch.tables, batch.prefix_lens, strict=True):
            for i, page in enumerate(table):
                tokens = tuple(req.origin_input_ids[: (i + 1) * PS])
                if i < prefix // PS:
                    assert written[page] == tokens
                    cached += 1
                reused += written.setdefault(page, tokens) != tokens
                written[page] = tokens
            world.finish(req)
        world.check()
    assert cached > 10
    assert reused > 10


def _prompt(rng, stems):
    """Draw a prompt of up to four pages: some of a stem, then tokens of its own."""
    stem = stems[int(rng.integers(len(stems)))][: int(rng.integers(0, 12))]
    return [*stem, *rng.integers(10, 99, int(rng.integers(1, 17 - len(stem)))).tolist()]


def graphed_reads_are_exact(rank, size, kind):
    """A batch's translation and reads, replayed from two graphs under many plans.

    Captured, one graph for each scratch slot: slots to scratch rows through the planner's table,
    and reading those rows. Plans, writes and gathers stay outside, since what they launch depends
    on the batch. On a CPU the same functions are called.
    """
    pool, reference = make_world(rank, size, kind)
    device, planner = device_of(rank), pool.shard.planner
    conversation, replays = conversation_of(pool, 3), {}
    loc = torch.zeros(planner.scratch.num_rows, dtype=torch.int64, device=device)
    for _ in range(8):
        batch = conversation.batch()
        chunk, everything, found = batch.locs(PS, chunk_only=True), batch.locs(PS), []
        loc.zero_()[: len(everything)].copy_(everything)
        with pool.shard_extend(*plan_arguments(batch)):
            for layer_id in range(4):
                drawn = reference.draw(layer_id, chunk, device)
                write(pool, kind, layer_id, chunk.to(device), drawn)
                scratch = pool.shard.read(layer_id)
                if scratch.data_ptr() not in replays:
                    out = torch.empty_like(scratch)

                    def read_rows(scratch=scratch, out=out):
                        rows = planner.translate_loc_to_scratch(loc)
                        torch.index_select(scratch, 0, rows, out=out)

                    replays[scratch.data_ptr()] = graphed(read_rows, device), out
                replay, out = replays[scratch.data_ptr()]
                replay()
                found.append(out[: len(everything)].clone())
        for layer_id, rows in enumerate(found):
            assert torch.equal(rows.cpu().view(torch.uint8), reference.rows[layer_id][everything])
    assert len(replays) == 2


def graphed_packing_is_exact(rank, size, kind):
    """One graph packs whatever pages the plans send; captured: the pack of one layer."""
    pool, reference = make_world(rank, size, kind)
    device, scratch = device_of(rank), pool.shard.planner.scratch
    conversation, parts = conversation_of(pool, 4), pool.layer_rows()[0]
    send = torch.zeros(scratch.prefix_pages, dtype=torch.int64, device=device)
    width = sum(part.shape[1] for part in parts)
    packed = torch.zeros((len(send) * PS, width), dtype=parts[0].dtype, device=device)
    replay = graphed(lambda: pack_pages(packed, parts, send, PS), device)
    for _ in range(8):
        batch = conversation.batch()
        with pool.shard_extend(*plan_arguments(batch)) as plan:
            send.zero_()
            if plan.send_pages is not None:
                send[: plan.block_pages].copy_(plan.send_pages)
            replay()
        rows = (send[:, None] * PS + torch.arange(PS, device=device)).view(-1)
        assert torch.equal(packed, torch.cat([part[rows] for part in parts], dim=1))
        prefill([pool], kind, reference, batch)


def plan_arguments(batch):
    """Return what a plan of a batch is made from."""
    rows = range(len(batch.tables))
    return page_table(batch.tables), rows, batch.prefix_lens, batch.seq_lens


def graphed(run, device):
    """Return a CUDA graph of ``run`` to replay; on a CPU ``run`` itself."""
    if device.type == "cpu":
        return run
    warm_up = torch.cuda.Stream(device)
    warm_up.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(warm_up):
        run()
    torch.cuda.current_stream(device).wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    # The process group's watchdog thread asks about its events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def plan_errors_leave_no_half_state(rank, size):
    """All ranks refuse the same batch between two layers, and the old plan goes on."""
    pool, reference = make_world(rank, size, "mha")
    table = list(range(size, 3 * size))
    tokens = len(table) * PS
    write_prefix(pool, "mha", reference, table)
    loc = Batch([table], [tokens], [tokens]).locs(PS)
    pool.begin_shard_extend(page_table([table]), [0], [tokens], [tokens])
    digest = pool.shard.planner.plan.digest()
    for layer_id in range(4):
        for bad in (([0], [tokens - 1], [tokens]), ([0], [tokens], [99 * tokens]), ([1], [0], [1])):
            with pytest.raises(ValueError, match=r"prefix_len|seq_len|row"):
                pool.begin_shard_extend(page_table([table]), *bad)
        if size > 1:
            with pytest.raises(ValueError, match="cyclic"):
                pool.begin_shard_extend(page_table([table[::size]]), [0], [2 * PS], [2 * PS])
        found = read(pool, "mha", layer_id, loc.to(device_of(rank)))
        assert is_exact(found, reference, layer_id, loc)
    pool.end_shard_extend()
    assert pool.shard.planner.plan.digest() == digest
    agreed = [None] * size
    dist.all_gather_object(agreed, digest)
    assert len(set(agreed)) == 1
    prefill([pool], "mha", reference, Batch([table[:1]], [PS], [PS]))


def overlapping_pools_do_not_mix(rank, size):
    """Two pools with gathers in flight at once, each on its own communicator."""
    kinds = ("mha", "mla")
    worlds = [(kind, *make_world(rank, size, kind)) for kind in kinds]
    table = list(range(size, 3 * size))
    tokens = len(table) * PS
    loc = Batch([table], [tokens], [tokens]).locs(PS)
    for kind, pool, reference in worlds:
        write_prefix(pool, kind, reference, table)
    for _, pool, _ in worlds:
        pool.begin_shard_extend(page_table([table]), [0], [tokens], [tokens])
    # Two communicators of one GPU must be used in one order, or ranks may wait for each other.
    order = worlds if rank % 2 or dist.get_backend() == "nccl" else worlds[::-1]
    for layer_id in range(4):
        for kind, pool, reference in order:
            found = read(pool, kind, layer_id, loc.to(device_of(rank)))
            assert is_exact(found, reference, layer_id, loc)
    for _, pool, _ in worlds:
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
    blocks = torch.full((4, 3), -1, device=device_of(rank))
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


def cases(rank, size):
    """Yield each case's name and what it does; all ranks run them in this order."""
    for kind in ("mha", "mla"):
        yield f"conversation {kind}", lambda kind=kind: conversation_is_exact(rank, size, kind)
        yield f"fragments {kind}", lambda kind=kind: fragmented_groups_are_exact(rank, size, kind)
        yield f"sub-ranges {kind}", lambda kind=kind: sub_ranges_are_exact(rank, size, kind)
        yield f"graphed reads {kind}", lambda kind=kind: graphed_reads_are_exact(rank, size, kind)
        yield f"graphed packs {kind}", lambda kind=kind: graphed_packing_is_exact(rank, size, kind)
        for rotation in ("chain", "seam"):
            yield (
                f"evictions {kind} {rotation}",
                lambda kind=kind, rotation=rotation: evicted_pages_are_exact_when_they_come_back(
                    rank, size, kind, rotation
                ),
            )
    fp8 = torch.float8_e4m3fn
    yield "conversation fp8", lambda: conversation_is_exact(rank, size, "mla", fp8)
    for case in (plan_errors_leave_no_half_state, overlapping_pools_do_not_mix, no_warnings):
        yield case.__name__, lambda case=case: case(rank, size)
    if size % 2 == 0:
        yield groups_are_what_they_wrap.__name__, lambda: groups_are_what_they_wrap(rank, size)


def run_in_turn(named, report):
    """Run cases on this rank until one fails; report each as ok or with its traceback."""
    for name, run in named:
        try:
            run()
            report(name, "ok")
        except BaseException:
            report(name, traceback.format_exc())
            return False  # the others are out of step from here on
    return True


def run_gather_cases(rank, report):
    """Run all cases of this file on this rank."""
    run_in_turn(cases(rank, dist.get_world_size()), report)


def check_reports(reports, expected):
    """Fail with every traceback unless each rank reports what is expected of it.

    Args:
        reports: what ``run_ranks`` returned.
        expected: by rank, texts by name.
    """
    wrong = [
        f"rank {rank}, {name}: {text}"
        for rank, report in reports.items()
        for name, text in report.items()
        if text != expected[rank].get(name, "ok")
    ]
    assert not wrong, "\n".join(wrong)
    assert reports == expected


def all_ok(size):
    """Return what ``check_reports`` expects where every case holds on every rank."""
    return {rank: {name: "ok" for name, _ in cases(rank, size)} for rank in range(size)}
