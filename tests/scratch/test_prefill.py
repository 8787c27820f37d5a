"""The whole path on an in-process group: what every rank reads is what was written; B66-B69."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import PageLayout, PageShardSpec
from scratch import InProcessGroup, SoloGroup
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

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


def make_world(
    kind, n, ps, seed, *, dtype=torch.bfloat16, layers=(0, 3), pages=12, owner_lanes=False
):
    specs = [PageShardSpec(rank, n, ps, 8 * n * ps, 8 * ps) for rank in range(n)]
    make_layout = PageLayout.owner_lanes if owner_lanes else PageLayout.interleave
    layout = make_layout(ps, n, pages)
    groups = InProcessGroup.create(n, timeout_s=5) if n > 1 else [SoloGroup()]
    pools = [
        make_pool(
            kind,
            spec,
            group,
            dtype=dtype,
            size=pages * ps,
            layers=layers,
            layout=layout if owner_lanes else None,
            exact_blocks=owner_lanes,
        )
        for spec, group in zip(specs, groups, strict=True)
    ]
    rng = np.random.default_rng(seed)
    reference = Reference(kind, dtype, layout, range(*layers), seed)
    return pools, Conversation(specs[0], layout, rng), reference


@settings(max_examples=60)
@given(
    st.sampled_from(["mha", "mla"]),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 3, 4, 16]),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 2**32),
)
def test_every_rank_reads_what_was_written(kind, n, ps, owner_lanes, index_dtype, seed):
    """Batches in a row: chunks, shared prefixes, partial and reused pages; B69, C133-C142."""
    pools, conversation, reference = make_world(kind, n, ps, seed, owner_lanes=owner_lanes)
    for _ in range(4):
        batch = conversation.batch()
        prefill(pools, kind, reference, batch, index_dtype=index_dtype)
        check_persisted(pools, kind, reference, batch.locs(ps))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_every_dtype_travels_bit_for_bit(kind, dtype):
    pools, conversation, reference = make_world(kind, 2, 4, 3, dtype=dtype)
    for _ in range(5):
        prefill(pools, kind, reference, conversation.batch())


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layers", [(5, 9), (0, 1), (2, 4)])
def test_pools_of_a_pipeline_stage_start_at_their_layer(kind, layers):
    """start_layer and end_layer: the first gather is the first layer's; B65, C99."""
    pools, conversation, reference = make_world(kind, 2, 4, 3, layers=layers)
    for _ in range(4):
        prefill(pools, kind, reference, conversation.batch())


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_fragmented_groups_and_a_partial_chunk(kind):
    """Groups [5, 2, 9] and [7, 3], whole groups a row, the reference's own case; C140, C141."""
    pools, _, reference = make_world(kind, 2, 16, 1)
    first = [page for group in (5, 2, 9) for page in (group * 2, group * 2 + 1)]
    second = [page for group in (7, 3) for page in (group * 2, group * 2 + 1)]
    prefill(pools, kind, reference, Batch([first[:4], second[:2]], [0, 0], [64, 32]))
    prefill(pools, kind, reference, Batch([first, second], [64, 32], [96 - 5, 64 - 15]))


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_without_a_prefix_the_chunk_is_readable_at_once(kind):
    """Nothing is gathered and any layer may be read in order; C138."""
    pools, _, reference = make_world(kind, 2, 16, 1)
    prefill(pools, kind, reference, Batch([[4, 5]], [0], [20]))


def test_sub_ranges_of_the_prefix_are_exact():
    """get_mla_kv_buffer of any slots in any order, also repeated; C136."""
    pools, _, reference = make_world("mla", 4, 4, 2)
    table = [4, 5, 6, 7, 12, 13, 14]
    prefill(pools, "mla", reference, Batch([table], [0], [28]))
    batch = Batch([[*table, 11]], [28], [32])
    for pool in pools:
        pool.begin_shard_extend(np.array([batch.tables[0]]), [0], [28], [32])
    loc, rng = batch.locs(4), np.random.default_rng(0)
    for layer_id in range(3):
        parts = reference.draw(layer_id, loc[28:])
        for pool in pools:
            write(pool, "mla", layer_id, loc[28:], parts)
        for pool in pools:
            for some in (loc[3:9], loc[8:24], loc[[27, 1, 1, 30]], loc[rng.permutation(32)]):
                assert is_exact(read(pool, "mla", layer_id, some), reference, layer_id, some)


def test_padding_rows_go_to_the_trash():
    """Slot 0 pads a batch: its rows touch no page of anybody; B6, C66."""
    pools, _, reference = make_world("mla", 2, 4, 2)
    prefill(pools, "mla", reference, Batch([[2, 3]], [0], [8]))
    for pool in pools:
        pool.begin_shard_extend(np.array([[2, 3, 4]]), [0], [8], [10])
    chunk = torch.tensor([16, 17, 0, 0])
    parts = reference.draw(0, chunk)
    for pool in pools:
        write(pool, "mla", 0, chunk, parts)
    kept = torch.tensor([8, 9, 10, 11, 12, 13, 14, 15, 16, 17])
    for pool in pools:
        assert is_exact(read(pool, "mla", 0, kept), reference, 0, kept)
    check_persisted(pools, "mla", reference, kept[:8])


def test_a_write_outside_a_plan_only_persists():
    """Owner-filtered, and the scratch is not touched; C134."""
    pools, _, reference = make_world("mla", 2, 4, 2)
    loc = torch.arange(8, 24)
    for layer_id in range(3):
        parts = reference.draw(layer_id, loc)
        for pool in pools:
            write(pool, "mla", layer_id, loc, parts)
    check_persisted(pools, "mla", reference, loc)
    for pool in pools:
        pool.begin_shard_extend(np.array([[2, 3, 4, 5]]), [0], [0], [0])
        assert not pool.shard.gather.stage(0).any()


def test_a_local_read_outside_a_plan_finds_own_rows():
    pools, _, reference = make_world("mla", 2, 4, 2)
    prefill(pools, "mla", reference, Batch([[2, 3, 4, 5]], [0], [16]))
    for rank, pool in enumerate(pools):
        own = torch.tensor([8 + 4 * rank, 9 + 4 * rank, 17 + 4 * rank])
        nope, rope = pool.get_mla_kv_buffer(_Layer(1), own)
        assert torch.equal(reference.part(1, own, 0), nope.flatten(1).view(torch.uint8))
        assert torch.equal(reference.part(1, own, 1), rope.flatten(1).view(torch.uint8))
        assert pool.get_key_buffer(1) is pool.kv_buffer[1]


class _Layer:
    def __init__(self, layer_id):
        self.layer_id = layer_id


def test_owner_lane_prefixes_need_exact_blocks():
    """Zigzag owners: consecutive pages of one rank; B57, C178."""
    pools, _, reference = make_world("mla", 2, 4, 2, owner_lanes=True)
    layout = pools[0].shard.planner.layout
    table = [layout.page_at(owner, local) for owner, local in ((0, 3), (1, 2), (1, 5), (0, 1))]
    prefill(pools, "mla", reference, Batch([table], [0], [16]))
    prefill(pools, "mla", reference, Batch([[*table, layout.page_at(1, 1)]], [16], [18]))
