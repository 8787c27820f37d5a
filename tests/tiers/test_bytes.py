"""Bytes come back as they were, on every rank and layout; and the fault that this prevents."""

import numpy as np
import pytest

from radix import EvictParams
from tests.tiers.tier_worlds import CopyTransfer, check, make_ranks
from tiers import TieredCache
from tiers.transfer import DONE

WORLDS = [
    pytest.param(ranks, layout, kind, id=f"{ranks}-{layout}-{kind}")
    for ranks in (1, 2, 4)
    for layout in ("interleave", "lanes")
    for kind in ("mla", "mha")
]
FIRST = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
SECOND = [*FIRST[:6], 9, 9, 8, 8, 7, 7]


def all_of(ranks, call):
    """Make a call on every rank; all say the same."""
    results = [call(rank) for rank in ranks]
    assert all(result == results[0] for result in results), results
    return results[0]


@pytest.mark.parametrize(("ranks", "layout", "kind"), WORLDS)
def test_demoted_and_reloaded_bytes_equal_those_before(ranks, layout, kind):
    world = make_ranks(ranks, layout=layout, kind=kind, pages=12, host_pages=40)
    for rank in world:
        rank.serve(FIRST, base=1 % ranks)
        rank.serve(SECOND, base=1 % ranks)
    gone = all_of(world, lambda r: r.cache.evict(EvictParams(1000)))
    assert (gone.num_tokens_kept, gone.num_tokens_dropped) == (18, 0)
    for rank in world:
        # Other requests overwrite every device row in between.
        rank.serve([100 + i for i in range(12 * rank.ps * ranks)])
        rank.cache.evict(EvictParams(1000))
    for tokens in (SECOND, FIRST):
        assert all_of(world, lambda r, t=tokens: r.load(t)) == len(tokens)
        assert all_of(world, lambda r, t=tokens: r.wrong_pages(t)) == []
    check(world)
    all_of(world, lambda r: r.cache.poll())
    check(world)
    assert all_of(world, lambda r: r.cache.in_flight()) == []


class Unguarded(CopyTransfer):
    """A transfer that copies whatever lies on this rank on both sides, as a naive one would."""

    def load(self, host_pages, device_pages):
        mine = self._layout.class_of(device_pages) == self._host.rank
        stored = self._host.layout.class_of(host_pages) == self._host.rank
        both = mine & stored
        return super().load(host_pages[both], device_pages[both])


class PlainAllocation(TieredCache):
    """A load-back that takes any free pages, as if their owner did not matter."""

    def _draw(self, classes):
        return self.device.allocator.alloc_pages(len(classes))


def demote_and_disturb(ranks, **settings):
    """Cache a chain, demote it, and leave the free lanes out of step with it."""
    world = make_ranks(ranks, layout="lanes", pages=8, host_pages=16, **settings)
    for rank in world:
        rank.serve(FIRST, owners=[0, 1, 1, 0, 0, 1])
        rank.cache.evict(EvictParams(1000))
        rank.serve([50 + i for i in range(6)], owners=[0, 0, 0])
    return world


def test_a_plain_allocation_reads_rows_that_were_never_loaded_and_ours_does_not():
    plain = demote_and_disturb(2, transfer=Unguarded, cache_class=PlainAllocation)
    for rank in plain:
        assert rank.load(FIRST) == len(FIRST)
        rank.cache.check_invariants()  # the bookkeeping sees nothing wrong
    assert any(rank.wrong_pages(FIRST) for rank in plain)

    ours = demote_and_disturb(2, transfer=Unguarded)
    for rank in ours:
        assert rank.load(FIRST) == len(FIRST)
        assert rank.wrong_pages(FIRST) == []
    check(ours)


def test_the_transfer_refuses_pages_of_other_owners_and_nothing_changes():
    world = demote_and_disturb(2, cache_class=PlainAllocation)
    for rank in world:
        before = rank.device.allocator.state_digest(), rank.device.total_size()
        with pytest.raises(ValueError, match="draw pages of the recorded owners"):
            rank.load(FIRST)
        assert rank.device.total_size() == before[1]
        assert rank.device.allocator.free_list.counts().sum() == 16 - before[1] // 2
        assert rank.cache.host.cache.tree_core.receipts() == []


@pytest.mark.parametrize(("ranks", "layout", "kind"), [w.values for w in WORLDS if w.values[0] > 1])
def test_a_reloaded_page_has_the_owner_of_its_original(ranks, layout, kind):
    world = make_ranks(ranks, layout=layout, kind=kind)
    for rank in world:
        rank.serve(FIRST, base=1)
        owners = owners_of(rank, FIRST)
        rank.cache.evict(EvictParams(1000))
        rank.load(FIRST)
        assert owners_of(rank, FIRST) == owners


def owners_of(rank, tokens):
    pages = rank.cache.match(rank.key(tokens), lock=False).device.pages
    return rank.allocator.layout.class_of(pages).tolist()


def test_layers_become_readable_one_by_one():
    loads = []

    class OneLayerAtATime(CopyTransfer):
        """Fills a layer when somebody waits for it."""

        def load(self, host_pages, device_pages):
            loads.append((self, *self._own_pages(device_pages, host_pages)))
            return DONE

        def wait_layer(self, layer_id):
            for moves, local, copies in loads:
                for device, host in moves._layers[layer_id]:
                    width = 2 * device.shape[1]
                    device.view(-1, width)[local] = host.view(-1, width)[copies]

    (rank,) = make_ranks(1, transfer=OneLayerAtATime)
    rank.serve(FIRST)
    rank.cache.evict(EvictParams(1000))
    rank.serve([30 + i for i in range(16)])
    rank.cache.evict(EvictParams(1000))
    rank.load(FIRST)
    transfer = rank.cache.host.transfer
    for layer in range(3):
        assert rank.wrong_pages(FIRST, layers=[layer]) == list(range(6))
        transfer.wait_layer(layer)
        assert rank.wrong_pages(FIRST, layers=[layer]) == []
    rank.cache.check_invariants()


def test_offload_and_load_a_thousand_times_keeps_every_tier_whole():
    (rank,) = make_ranks(1, pages=2, host_pages=2)
    tokens = FIRST[:2]
    rank.serve(tokens)
    for _ in range(1000):
        rank.cache.evict(EvictParams(2))
        rank.load(tokens)
        rank.cache.poll()
        for allocator in (rank.allocator, rank.cache.host.allocator):
            census = allocator.page_census()
            assert sum(census.values()) == 2
            assert allocator.free_list.counts().sum() == 1
    assert rank.wrong_pages(tokens) == []
    assert rank.cache.counters.loaded == 1000
    assert rank.cache.counters.stored == 1
    rank.cache.check_invariants()


def test_a_run_of_any_shape_is_copied_as_it_is():
    from tiers.copy_transfer import _runs

    sources, targets = np.array([3, 4, 5, 9, 2, 3]), np.array([1, 2, 4, 5, 6, 7])
    assert list(_runs(sources, targets)) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert list(_runs(sources[:0], targets[:0])) == []
