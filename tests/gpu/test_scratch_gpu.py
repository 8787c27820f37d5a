"""The sharded prefill on one GPU: bit-exact, ordered by streams, and without waiting; B66-B69.

An in-process group puts all ranks on the device. Nothing is compared before a batch has ended, so
that no copy to the host orders what streams and events have to.
"""

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from alloc import PageLayout, PageShardSpec
from scratch import InProcessGroup, ShardExtendPlanner, SoloGroup
from tests.scratch.scratch_builders import page_table, row_pool, slot_table
from tests.scratch.scratch_worlds import (
    Conversation,
    Reference,
    check_persisted,
    is_exact,
    make_pool,
    prefill,
    read,
    write,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
LONG_PAUSE = 2_000_000
"""Device cycles, about a millisecond."""


def make_world(kind, n, ps, *, dtype=torch.bfloat16, seed=0, layers=(0, 4), pages=24):
    specs = [PageShardSpec(rank, n, ps, 16 * n * ps, 16 * ps) for rank in range(n)]
    groups = InProcessGroup.create(n, timeout_s=10) if n > 1 else [SoloGroup()]
    pools = [
        make_pool(kind, spec, group, dtype=dtype, size=pages * ps, layers=layers, device="cuda")
        for spec, group in zip(specs, groups, strict=True)
    ]
    layout = pools[0].shard.planner.layout
    reference = Reference(kind, dtype, layout, range(*layers), seed)
    return pools, Conversation(specs[0], layout, np.random.default_rng(seed)), reference


def pause():
    torch.cuda._sleep(LONG_PAUSE)


@contextmanager
def no_waiting():
    """Make every wait for the device an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("ps", [1, 3, 16, 64])
def test_every_rank_reads_what_was_written(kind, n, ps):
    """Batches in a row over shared, fragmented and reused pages with partial chunks."""
    for seed in range(2):
        pools, conversation, reference = make_world(kind, n, ps, seed=seed)
        for index_dtype in (torch.int64, torch.int32) * 3:
            batch = conversation.batch()
            prefill(pools, kind, reference, batch, index_dtype=index_dtype)
            check_persisted(pools, kind, reference, batch.locs(ps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_every_dtype_travels_bit_for_bit(kind, dtype):
    pools, conversation, reference = make_world(kind, 2, 16, dtype=dtype)
    for _ in range(6):
        prefill(pools, kind, reference, conversation.batch())


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("side", [False, True])
def test_slow_writers_and_readers_are_waited_for(kind, side):
    """A gather packs after the last write, and takes a slot after its last reader; B68.

    Also where the engine computes on a stream of its own.
    """
    with torch.cuda.stream(torch.cuda.Stream() if side else None):
        pools, conversation, reference = make_world(kind, 2, 16, layers=(0, 5))
        for _ in range(5):
            prefill(pools, kind, reference, conversation.batch(), pause=pause)


def test_batches_overlap_nothing_of_each_other():
    """Tables, send lists and slots of one plan outlive their readers when the next is made."""
    pools, conversation, reference = make_world("mla", 2, 16)
    for _ in range(3):
        prefill(pools, "mla", reference, conversation.batch())
    prepared, found = [], []
    for _ in range(4):
        batch = conversation.batch()
        loc, chunk = batch.locs(16), batch.locs(16, chunk_only=True)
        drawn = [reference.draw(layer_id, chunk, "cuda") for layer_id in range(4)]
        expected = [[reference.part(i, loc, part) for part in (0, 1)] for i in range(4)]
        prepared.append((batch, loc.cuda(), chunk.cuda(), drawn, expected))
    for batch, loc, chunk, drawn, expected in prepared:
        rows = range(len(batch.tables))
        for pool in pools:
            table = page_table(batch.tables)
            pool.begin_shard_extend(table, rows, batch.prefix_lens, batch.seq_lens)
        for layer_id in range(4):
            for pool in pools:
                pause()
                write(pool, "mla", layer_id, chunk, drawn[layer_id])
            for pool in pools:
                pause()
                found.append((expected[layer_id], read(pool, "mla", layer_id, loc)))
    for expected, got in found:
        for want, parts in zip(expected, got, strict=True):
            assert torch.equal(want.expand_as(parts), parts.cpu())


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_batch_never_waits_for_the_device(kind):
    """Plan, translate, store, gather, read and end, with pages given on the host."""
    pools, conversation, reference = make_world(kind, 2, 16)
    for _ in range(4):
        prefill(pools, kind, reference, conversation.batch())
    batch = conversation.batch()
    while not any(batch.prefix_lens):
        prefill(pools, kind, reference, batch)
        batch = conversation.batch()
    chunk, loc = batch.locs(16, chunk_only=True), batch.locs(16)
    chunk_on_device, on_device = chunk.cuda(), loc.cuda()
    drawn = [reference.draw(layer_id, chunk, "cuda") for layer_id in range(4)]
    source, rows, found = page_table(batch.tables), range(len(batch.tables)), []
    with no_waiting():
        for pool in pools:
            pool.begin_shard_extend(source, rows, batch.prefix_lens, batch.seq_lens)
        for layer_id in range(4):
            for pool in pools:
                write(pool, kind, layer_id, chunk_on_device, drawn[layer_id])
            for pool in pools:
                found.append((layer_id, read(pool, kind, layer_id, on_device)))
        for pool in pools:
            pool.end_shard_extend()
    for layer_id, got in found:
        assert is_exact(got, reference, layer_id, loc)


def test_a_write_outside_a_plan_never_waits_either():
    pools, _, reference = make_world("mha", 2, 16)
    loc = torch.arange(32, 96)
    on_device, drawn = loc.cuda(), reference.draw(1, loc, "cuda")
    for pool in pools:
        write(pool, "mha", 1, on_device, drawn)
    with no_waiting():
        for pool in pools:
            write(pool, "mha", 1, on_device, drawn)
    for layer_id in (0, 2, 3):
        drawn = reference.draw(layer_id, loc, "cuda")
        for pool in pools:
            write(pool, "mha", layer_id, on_device, drawn)
    check_persisted(pools, "mha", reference, loc)


def test_a_plan_on_the_device_equals_one_on_the_host():
    """Table, send list and undo, from any source of pages."""
    n, ps = 4, 16
    layout = PageLayout.interleave(ps, n, 40)
    spec = PageShardSpec(1, n, ps, 16 * n * ps, 16 * ps)
    twins = [ShardExtendPlanner(spec, layout=layout, device=device) for device in ("cuda", "cpu")]
    conversation = Conversation(spec, layout, np.random.default_rng(3))
    sources = (
        page_table,
        lambda tables: row_pool(tables, ps, "cuda"),
        lambda tables: slot_table(tables, ps).cuda(),
    )
    for turn in range(12):
        batch = conversation.batch()
        rows = list(range(len(batch.tables)))
        source = sources[turn % 3](batch.tables)
        plans = []
        for planner, given in zip(twins, (source, page_table(batch.tables)), strict=True):
            indices = torch.tensor(rows, device="cuda") if turn % 2 else rows
            args = (given, indices, batch.prefix_lens, batch.seq_lens)
            plans.append(planner.begin_shard_extend(*args))
        assert plans[0].digest() == plans[1].digest()
        assert torch.equal(twins[0].page_pos.cpu(), twins[1].page_pos)
        if plans[0].send_pages is not None:
            assert torch.equal(plans[0].send_pages.cpu(), plans[1].send_pages)
            assert torch.equal(plans[0].send_rows.cpu(), plans[1].send_rows)
        loc = batch.locs(ps)
        on_device = twins[0].translate_loc_to_scratch(loc.cuda())
        assert torch.equal(on_device.cpu(), twins[1].translate_loc_to_scratch(loc))
        pages = torch.tensor([page for table in batch.tables for page in table])
        by_page = twins[0].translate_pages(pages.cuda())
        assert torch.equal(by_page.cpu(), twins[1].translate_pages(pages))
        twins[0].check_invariants()


def test_large_shapes_of_real_models():
    """512 + 64 and 8 x 128 rows, pages of 64, thousands of tokens."""
    from scratch.kernels import pack_pages, store_rows, twins

    pages, ps = 512, 64
    generator = torch.Generator("cuda").manual_seed(0)
    for widths in ((512, 64), (1024, 1024)):
        values = [
            torch.randn(8192, w, generator=generator, device="cuda").bfloat16() for w in widths
        ]
        pool_rows = torch.randperm(pages * ps, generator=generator, device="cuda")[:8192]
        pool_rows[torch.rand(8192, generator=generator, device="cuda") < 0.875] = -1
        scratch_rows = torch.randperm(9000, generator=generator, device="cuda")[:8192]
        for stored in (torch.bfloat16, torch.float8_e4m3fn):
            results = []
            for store in (store_rows, twins.store_rows):
                dtype = {1: torch.uint8, 2: torch.int16}[stored.itemsize]
                pool = torch.zeros(pages * ps, sum(widths), dtype=dtype, device="cuda")
                targets = list(pool.split(list(widths), dim=1))
                scratch = torch.zeros(9000, sum(widths), dtype=dtype, device="cuda")
                store(values, stored, targets, pool_rows, scratch, scratch_rows)
                results.append((pool, scratch))
            for ours, twin in zip(*results, strict=True):
                assert torch.equal(twin, ours)
        parts = [
            torch.randint(-9, 9, (pages * ps, w), device="cuda").to(torch.int16) for w in widths
        ]
        send = torch.randperm(pages, generator=generator, device="cuda")[:300]
        ours = torch.zeros(300 * ps, sum(widths), dtype=torch.int16, device="cuda")
        twin = ours.clone()
        pack_pages(ours, parts, send, ps)
        twins.pack_pages(twin, parts, send, ps)
        assert torch.equal(twin, ours)
