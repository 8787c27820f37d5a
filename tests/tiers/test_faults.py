"""Whatever raises in the middle of a call, locks and pages go back."""

import numpy as np
import pytest

from radix import EvictParams
from tests.tiers.by_hand import A, ByHand, evict, make, moves_of
from tiers import MemoryStore


class Faulty(ByHand):
    """A transfer that breaks when told to, other than by a refusal."""

    broken = None

    def store(self, device_pages, host_pages):
        if self.broken == "store":
            raise RuntimeError("device lost")
        ticket = super().store(device_pages, host_pages)
        if self.broken == "fence":
            ticket.fence = self.drain
        return ticket

    def drain(self):
        for *_, ticket in [*self.stores, *self.loads]:
            ticket.done = True
        if self.broken == "fence":
            raise RuntimeError("device lost")


def untouched(rank):
    """Nothing is held or locked by anyone."""
    rank.cache.check_invariants([])
    assert rank.device.protected_size() == rank.cache.host.cache.protected_size() == 0
    assert rank.cache.in_flight() == []


def test_a_match_whose_write_fails_keeps_no_lock():
    rank = make(write="write_through", transfer=Faulty)
    rank.serve(A)
    moves_of(rank).broken = "store"
    with pytest.raises(RuntimeError, match="device lost"):
        rank.cache.match(rank.key(A))
    untouched(rank)


def test_an_eviction_whose_fence_fails_gives_the_host_pages_back():
    rank = make(transfer=Faulty)
    rank.serve(A)
    moves_of(rank).broken = "fence"
    with pytest.raises(RuntimeError, match="device lost"):
        rank.cache.evict(EvictParams(1000))
    untouched(rank)
    assert rank.host_len(A) == 0


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_fetch_whose_agreement_fails_gives_pages_and_locks_back(fails_at):
    calls = []

    def agree(values):
        calls.append(values)
        if len(calls) == fails_at:
            raise RuntimeError("peer closed")
        return values

    rank = make(blobs=MemoryStore(10), agree=agree)
    rank.serve(A)
    evict(rank, 4)
    rank.cache.host._evict(np.array([4]))
    with pytest.raises(RuntimeError, match="peer closed"):
        rank.cache.match(rank.key(A))
    untouched(rank)
    assert rank.load(A) == 8


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_load_that_cannot_be_inserted_is_waited_for_before_its_pages_are_freed(fails_at):
    rank = make(ranks=2, ps=1, rotation="seam", transfer=Faulty)
    rank.serve([1, 2, 3, 4], base=0)
    rank.serve([1, 2, 9, 8], base=1)
    evict(rank)
    insert, calls = rank.device.insert, []

    def insert_some(params):
        calls.append(params)
        if len(calls) == fails_at:
            raise MemoryError
        return insert(params)

    rank.device.insert = insert_some
    with pytest.raises(MemoryError):
        rank.cache.load_back(rank.cache.match(rank.key([1, 2, 9, 8]), lock=False))
    assert moves_of(rank).loads[-1][-1].done
    untouched(rank)
    assert rank.device_len([1, 2, 9, 8]) == 2 * (fails_at - 1)
    rank.device.insert = insert
    assert rank.load([1, 2, 9, 8]) == 4
