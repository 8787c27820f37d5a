"""Real 2- and 4-rank groups: what is demoted and reloaded is read bit for bit by every rank.

Ranks agree although their transfers finish at other moments and their files differ.
"""

import os
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from radix import EvictParams, MatchPrefixParams
from scratch import ShardGroup
from tests.distributed.gloo_ranks import run_ranks
from tests.scratch.scratch_builders import page_table
from tests.tiers.tier_worlds import HEAD_DIM, HEADS, LAYERS, CopyTransfer, make_rank, rows_of
from tiers import FileStore, agreement_over

PS = 2
TOKENS = list(range(100, 124))
OTHER = [*TOKENS[:8], *range(10)]
NOISE = list(range(500, 548))


def world(rank, size, layout, kind, **settings):
    """This rank on communicators of its own."""
    return make_rank(
        rank,
        size,
        layout=layout,
        kind=kind,
        pages=12,
        host_pages=40,
        ps=PS,
        group=ShardGroup.dedicated(timeout_s=15.0),
        agree=agreement_over(dist.new_group()),
        **settings,
    )


def same_everywhere(value):
    """All ranks have the same value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert len(set(values)) == 1, values


def sound(rank):
    rank.cache.check_invariants()
    same_everywhere(rank.cache.state_digest())


def read_whole_prefix(rank, tokens):
    """Gather a cached prefix as a prefill does; every row of every rank's pages is right."""
    match = rank.device.match_and_lock(MatchPrefixParams(rank.key(tokens)))
    assert match.device_prefix_len == len(tokens)
    count = len(match.pages)
    chunk = rank.draw(count, 1, owners=[count % rank.allocator.layout.num_classes])
    pages = np.concatenate([match.pages, chunk])
    pool, transfer = rank.pool, rank.cache.host.transfer
    transfer.wait_layer(0)
    pool.begin_shard_extend(page_table([pages.tolist()]), [0], [len(tokens)], [len(tokens) + PS])
    loc = torch.from_numpy((match.pages[:, None] * PS + np.arange(PS)).reshape(-1))
    for layer in range(LAYERS):
        if layer + 1 < LAYERS:
            transfer.wait_layer(layer + 1)
        want = rows_of(rank.kind, tokens, layer)
        rows = pool.translate_loc_to_scratch(loc)
        got = pool.get_key_buffer(layer)[rows].reshape(len(tokens), -1)
        if rank.kind == "mha":
            values = pool.get_value_buffer(layer)[rows].reshape(len(tokens), HEADS * HEAD_DIM)
            got = torch.cat([got, values], 1)
        assert torch.equal(got, want), f"layer {layer}"
    pool.end_shard_extend()
    rank.allocator.free_pages(chunk)
    rank.device.dec_lock_ref(match.receipt)


def reload_is_exact(rank, size, folder, layout, kind):
    """Demote, overwrite the device, reload, and read through the gather."""
    ours = world(rank, size, layout, kind)
    for tokens in (TOKENS, OTHER):
        ours.serve(tokens, base=1)
    read_whole_prefix(ours, TOKENS)
    assert ours.cache.evict(EvictParams(1000)).num_tokens_dropped == 0
    ours.serve(NOISE[: 2 * PS * size])
    sound(ours)
    for tokens in (OTHER, TOKENS):
        assert ours.load(tokens) == len(tokens)
        read_whole_prefix(ours, tokens)
        sound(ours)
    ours.cache.poll()
    sound(ours)


class Late:
    """A ticket that is done after some looks, on this rank."""

    def __init__(self, looks):
        self.looks = looks

    def is_done(self):
        self.looks -= 1
        return self.looks < 0

    def fence(self):
        pass


def ranks_that_finish_at_other_moments_agree(rank, size, folder, layout, kind):
    """Copies become visible at the same step everywhere: when the slowest rank has them."""

    class LateHere(CopyTransfer):
        def store(self, device_pages, host_pages):
            super().store(device_pages, host_pages)
            return Late(2 * rank)

        def load(self, host_pages, device_pages):
            super().load(host_pages, device_pages)
            return Late(size - rank)

    ours = world(rank, size, layout, kind, write="write_through", transfer=LateHere)
    for tokens in (TOKENS, OTHER):
        ours.serve(tokens)
        ours.cache.match(ours.key(tokens), lock=False)
    polls = 0
    while ours.cache.in_flight():
        ours.cache.poll()
        sound(ours)
        polls += 1
    assert polls > 2 * (size - 1)
    ours.cache.evict(EvictParams(1000))
    ours.load(TOKENS)
    read_whole_prefix(ours, TOKENS)
    while ours.cache.in_flight():
        ours.cache.poll()
        sound(ours)


def files_that_differ_are_loaded_as_far_as_all_have_them(rank, size, folder, layout, kind):
    """After a restart; one rank lacks a file and another's is damaged."""
    where = f"{folder}/{layout}-{kind}-{rank}"
    for damage, expected in ((None, 24), ("last rank lacks group 4", 16), ("first rank, 1", 4)):
        store = FileStore(where, 10**6, sync=False)
        ours = world(rank, size, layout, kind, blobs=store)
        names = list(ours.cache.host.groups.names(ours.key(TOKENS)))
        if damage is None:
            ours.serve(TOKENS, base=1)
            ours.cache.evict(EvictParams(1000))
            tier = ours.cache.host
            tier._evict(tier.cache.tree_core.component.evictable_by_class())
            assert len(store) == 6
        elif damage.startswith("last") and rank == size - 1:
            os.unlink(f"{where}/{names[4]}.kv")
        elif damage.startswith("first") and rank == 0:
            os.truncate(f"{where}/{names[1]}.kv", 30)
        dist.barrier()
        ours.serve(NOISE[: 2 * PS * size])
        assert ours.load(TOKENS) == expected, damage
        sound(ours)
        read_whole_prefix(ours, TOKENS[:expected])
        store.close()


CASES = [
    reload_is_exact,
    ranks_that_finish_at_other_moments_agree,
    files_that_differ_are_loaded_as_far_as_all_have_them,
]


def run_cases(rank, report):
    size = dist.get_world_size()
    folder = os.environ["TIERS_FOLDER"]
    for case in CASES:
        for layout in ("interleave", "lanes"):
            for kind in ("mla", "mha"):
                try:
                    case(rank, size, folder, layout, kind)
                    text = "ok"
                except BaseException:
                    text = traceback.format_exc()
                report(f"{case.__name__}-{layout}-{kind}", text)
                dist.barrier()


@pytest.mark.parametrize("world_size", [2, 4])
def test_tiers_on_real_ranks(world_size, tmp_path, monkeypatch):
    monkeypatch.setenv("TIERS_FOLDER", str(tmp_path))
    reports = run_ranks(world_size, run_cases, tmp_path / "store", deadline_s=90)
    for rank, report in reports.items():
        wrong = {name: text for name, text in report.items() if text != "ok"}
        assert not wrong, "\n".join(f"rank {rank}, {name}: {text}" for name, text in wrong.items())
        assert len(report) == 4 * len(CASES)


def test_a_layer_that_no_pool_has_is_refused():
    transfer = make_rank().cache.host.transfer
    with pytest.raises(ValueError, match="layer_id=3"):
        transfer.wait_layer(3)
    assert SimpleNamespace(x=transfer.drain()).x is None
