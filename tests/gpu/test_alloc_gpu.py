"""Allocators and request rows on CUDA: equal to the host, without waiting for the device."""

from contextlib import contextmanager

import numpy as np
import pytest

from alloc import ReqToTokenPool
from radix import CacheInitParams, UnifiedRadixCache, alloc_for_extend
from tests.alloc.alloc_builders import ints, make_interleave, make_lanes, make_paged
from tests.builders import make_req

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*debug mode is a prototype"),
]

PAGE_SIZES = [1, 3, 16, 64, 256, 512]


@contextmanager
def never_waiting():
    """Raise in any call that makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batch_of(num_requests, page_size, seed=0):
    """Return prefix and sequence lengths and the last slot of each request."""
    rng = np.random.default_rng([num_requests, page_size, seed])
    prefix = rng.integers(0, 2 * page_size + 1, num_requests)
    seq = prefix + rng.integers(0, max(2, 8000 // num_requests), num_requests)
    last = np.where(prefix > 0, (np.arange(num_requests) + 1) * page_size, 0)
    last = np.where(prefix > 0, last + (prefix - 1) % page_size, -1)
    return prefix, seq, last


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_requests", [1, 8, 33, 512])
def test_extend_and_decode_equal_the_host_without_waiting(num_requests, page_size):
    """Device slots, read after the fact, are the host's; last slots from either side; B18."""
    prefix, seq, last = batch_of(num_requests, page_size)
    total = int((seq - prefix).sum())
    num_pages = 20_000 // page_size + 6 * num_requests + 40
    host = make_paged(num_pages, page_size)
    expected = [
        ints(host.alloc_extend(prefix, prefix, seq, seq, last, total)),
        ints(host.alloc_extend(prefix, prefix, seq, seq, last, total)),
        ints(host.alloc_decode(seq + 1, seq + 1, last_of(seq, page_size))),
    ]
    pool = make_paged(num_pages, page_size, device="cuda")
    on_device = torch.tensor(last, device="cuda")
    narrow = torch.tensor(last_of(seq, page_size), device="cuda", dtype=torch.int32)
    lens = torch.tensor(seq, device="cuda")
    warm = make_paged(num_pages, page_size, device="cuda")
    warm.alloc_extend(lens, prefix, lens, seq, on_device, total)
    warm.alloc_decode(lens, seq + 1, narrow)
    with never_waiting():
        found = [
            pool.alloc_extend(lens, prefix, lens, seq, on_device, total),
            pool.alloc_extend(lens, prefix, lens, seq, last, total),
            pool.alloc_decode(lens, seq + 1, narrow),
        ]
    assert all(slots.is_cuda and slots.dtype == torch.int64 for slots in found)
    assert [slots.tolist() for slots in found] == expected
    assert pool.state_digest() == host.state_digest()


def last_of(seq, page_size):
    """Return a last slot for every request, at its position's offset."""
    at = (np.arange(len(seq)) + 1) * page_size + (seq - 1) % page_size
    return np.where(seq > 0, at, -1)


@pytest.mark.parametrize("make", [make_interleave, make_lanes])
def test_sharded_draws_equal_the_host_without_waiting(make):
    """Chains of a classed pool, owned pages of a pool of lanes."""

    def draw(pool):
        if make is make_interleave:
            bases = [1, None, None]
            last = [pool.page_size - 1 + 5 * pool.page_size, -1, -1]
            seq = [3 * pool.page_size, 40, 1]
            prefix = [2 * pool.page_size, 0, 0]
            # position-page 1 of base 1 lies on class 2
            last[0] = 6 * pool.page_size + pool.page_size - 1
            arguments = (prefix, prefix, seq, seq, np.array(last), None)
            return [pool.alloc_extend(*arguments, rotation_bases=bases), pool.alloc_cyclic(3, 64)]
        return [
            pool.alloc_pages_with_owners([2, 0, 2, 1]),
            pool.alloc_extend_compute_owner([0], [0], [9], [9], np.array([-1]), 9, [3, 1, 0]),
            pool.alloc(pool.page_size * 5),
        ]

    expected = [ints(slots) for slots in draw(make())]
    draw(make(device="cuda"))
    pool = make(device="cuda")
    with never_waiting():
        found = draw(pool)
    assert [slots.tolist() for slots in found] == expected


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_request_rows_equal_the_host_without_waiting(page_size):
    """Rows of a batch are written by one copy and one kernel."""
    pools = [ReqToTokenPool(8, 2100, device, page_size=page_size) for device in (None, "cuda")]
    pages = [np.arange(1, 2 + i) for i in range(4)]
    starts = [0, page_size, 0, page_size]
    for pool in pools:
        pool.write_pages(pool.alloc(4), starts, pages)
        pool.clear()
    for pool in pools:
        rows = pool.alloc(4)
        if pool.device is None:
            pool.write_pages(rows, starts, pages)
        else:
            with never_waiting():
                pool.write_pages(rows, starts, pages)
    assert np.array_equal(pools[0].req_to_token, pools[1].req_to_token.cpu())
    assert pools[0].state_digest() == pools[1].state_digest()


@pytest.mark.parametrize("make", [make_paged, make_interleave, make_lanes])
def test_a_scheduler_step_never_waits(make):
    """Match, place, cache, finish, evict: host bookkeeping alone; what the device gets is right."""

    def serve(device):
        allocator = (
            make(16, 16, device=device) if make is make_paged else make(8, 16, device=device)
        )
        ps = allocator.page_size
        pool = ReqToTokenPool(8, 512, device, page_size=ps)
        cache = UnifiedRadixCache(CacheInitParams(False, pool, allocator, ps))
        found = []
        for start in (0, 1000, 0, 2000, 3000):
            req = make_req(list(range(start, start + 4 * ps + 5)))
            req.fill_len = len(req.tokens())
            cache.match_req(req)
            found.append(req.prefix_indices)
            found.append(alloc_for_extend(cache, [req]).out_cache_loc)
            cache.cache_unfinished_req(req)
            found.append(req.prefix_indices)
            found.append(pool.req_to_token[req.kv.req_pool_idx, : req.fill_len])
            cache.cache_finished_req(req)
            pool.free(req.kv.req_pool_idx)
        return found, cache.state_digest()

    expected, digest = serve(None)
    serve("cuda")
    with never_waiting():
        found, other = serve("cuda")
    assert [slots.tolist() for slots in found] == [ints(slots) for slots in expected]
    assert other == digest


def test_many_batches_in_flight_keep_their_own_numbers():
    """Pinned staging is not written again before its copy is done."""
    pool, host = (make_paged(4096, 16, device=device) for device in ("cuda", None))
    filler = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for _ in range(16):
        filler.random_()  # keeps the stream busy, so that the copies wait behind it
    found = [pool.alloc(16 * (1 + i % 7)) for i in range(200)]
    expected = [ints(host.alloc(16 * (1 + i % 7))) for i in range(200)]
    assert [slots.tolist() for slots in found] == expected
