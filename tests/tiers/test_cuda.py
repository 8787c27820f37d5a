"""The copies on CUDA: a side stream, layer by layer, with nobody waiting on the host."""

import pytest
import torch

from radix import EvictParams
from tests.tiers.tier_worlds import LAYERS, CopyTransfer, make_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = list(range(12))
OTHERS = [100 + i for i in range(16)]
CYCLES = 50_000_000
"""Tens of milliseconds: whoever forgets to wait is seen."""


class Slow(CopyTransfer):
    """A transfer whose stream is busy before every copy."""

    def busy(self):
        with torch.cuda.stream(self._side):
            torch.cuda._sleep(CYCLES)

    def store(self, device_pages, host_pages):
        self.busy()
        return super().store(device_pages, host_pages)

    def load(self, host_pages, device_pages):
        self.busy()
        return super().load(host_pages, device_pages)


@pytest.mark.parametrize("kind", ["mla", "mha"])
@pytest.mark.parametrize("transfer", [CopyTransfer, Slow])
def test_bytes_survive_although_streams_run_late(kind, transfer):
    rank = make_rank(kind=kind, device="cuda", transfer=transfer)
    moves = rank.cache.host.transfer
    for _ in range(3):
        torch.cuda._sleep(CYCLES)  # the rows are written late
        rank.serve(TOKENS)
        rank.cache.evict(EvictParams(1000))
        rank.serve(OTHERS)  # and their pages are written anew at once
        rank.cache.evict(EvictParams(1000))
        assert rank.load(TOKENS) == 12
        for layer in range(LAYERS):
            moves.wait_layer(layer)
            assert rank.wrong_pages(TOKENS, layers=[layer]) == []
        torch.cuda.synchronize()
        assert rank.cache.poll() == 1
        rank.cache.check_invariants()
        rank.cache.evict(EvictParams(1000))
    assert rank.cache.host.transfer.drain() is None


def test_a_layer_is_readable_before_the_next_one_has_arrived():
    """Copies are cut between layers by a busy stream, which ends only after layer 0 was read."""

    class Halting(CopyTransfer):
        def load(self, host_pages, device_pages):
            layers, self._layers = self._layers, self._layers[:1]
            super().load(host_pages, device_pages)
            with torch.cuda.stream(self._side):
                torch.cuda._sleep(20 * CYCLES)
            self._layers = layers
            first, self._filled[0] = self._filled[0], None
            ticket = super().load(host_pages, device_pages)
            self._filled[0] = first
            return ticket

    rank = make_rank(device="cuda", transfer=Halting)
    rank.serve(TOKENS)
    rank.cache.evict(EvictParams(1000))
    rank.serve(OTHERS)
    rank.cache.evict(EvictParams(1000))
    torch.cuda.synchronize()
    assert rank.load(TOKENS) == 12
    rank.cache.host.transfer.wait_layer(0)
    assert rank.wrong_pages(TOKENS, layers=[0]) == []
    assert rank.cache.poll() == 0, "layer 0 was read while later layers were on their way"
    rank.cache.host.transfer.wait_layer(1)
    assert rank.wrong_pages(TOKENS) == []
    torch.cuda.synchronize()
    assert rank.cache.poll() == 1


def test_eviction_does_not_wait_for_the_device():
    rank = make_rank(device="cuda", transfer=Slow)
    rank.serve(TOKENS)
    torch.cuda.synchronize()
    start = torch.cuda.Event()
    rank.cache.evict(EvictParams(1000))
    start.record()
    assert not start.query(), "the compute stream waits for the copy; the host is here already"
    torch.cuda.synchronize()


def test_host_memory_is_pinned():
    rank = make_rank(device="cuda")
    host = rank.cache.host.transfer._host
    assert all(part.is_pinned() for parts in host.layer_rows() for part in parts)


@pytest.mark.parametrize("kind", ["mla", "mha"])
@pytest.mark.parametrize("scattered", [False, True])
def test_long_runs_and_scattered_pages_arrive_alike(kind, scattered):
    rank = make_rank(kind=kind, device="cuda", pages=100, host_pages=200)
    tokens = list(range(120))
    held = rank.allocator.alloc_pages(100)
    order = held[::-1] if scattered else held
    for page in order:  # the next draws come in this order
        rank.allocator.free_pages(held[held == page])
    rank.serve(tokens)
    rank.cache.evict(EvictParams(1000))
    rank.serve([500 + i for i in range(200)])
    rank.cache.evict(EvictParams(1000))
    assert rank.load(tokens) == 120
    for layer in range(LAYERS):
        rank.cache.host.transfer.wait_layer(layer)
    assert rank.wrong_pages(tokens) == []
