"""The host path, the torch path and one token at a time give the same slots."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import ExtendBatch
from tests.alloc.alloc_builders import decode, extend, ints, make_paged, pages_of, unchanged
from tests.models.naive_allocator import naive_extend

torch = pytest.importorskip("torch")

SHAPES = {
    "one long request": (1, 32_768),
    "few long requests": (7, 32_768),
    "a chunk each": (33, 2_048),
    "many short requests": (512, 130),
    "many that mostly decode": (511, 2),
}


def random_requests(rng, num_requests, longest, page_size, shuffled_pages):
    """Make (prefix, seq, last_loc) requests; a third extends by nothing or by one page's rest."""
    prefix = rng.integers(0, 3 * page_size + 2, num_requests)
    grown = rng.integers(0, longest + 1, num_requests)
    grown[rng.random(num_requests) < 0.2] = 0
    rest = -prefix % page_size
    grown = np.where(rng.random(num_requests) < 0.15, rest, grown)
    prefix[rng.random(num_requests) < 0.3] = 0
    last = shuffled_pages[:num_requests] * page_size + (prefix - 1) % page_size
    last[prefix == 0] = -1
    return [tuple(row) for row in np.stack([prefix, prefix + grown, last], axis=1).tolist()]


def make_scattered(num_pages, page_size, rng, device):
    """Make a pool whose free list is in random order."""
    pool = make_paged(num_pages, page_size, device=device)
    for page in rng.permutation(pages_of(pool, pool.alloc(num_pages * page_size))):
        pool.free_pages(np.array([page]))
    return pool


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_paths_agree_on_large_batches(shape, page_size):
    """1 to 512 requests, extends 0 to 32k, ps 1 to 256; B18, C199-C203, C209."""
    num_requests, longest = SHAPES[shape]
    rng = np.random.default_rng([num_requests, page_size])
    requests = random_requests(rng, num_requests, longest, page_size, rng.permutation(1000))
    tokens = sum(seq - prefix for prefix, seq, _ in requests)
    num_pages = tokens // page_size + num_requests + 1
    seed = int(rng.integers(2**31))
    outs, pools = [], []
    for device in (None, "cpu"):
        if tokens < 40_000:
            pool = make_scattered(num_pages, page_size, np.random.default_rng(seed), device)
        else:
            pool = make_paged(num_pages, page_size, device=device)
        drawn = pool.get_all_free_pages()
        outs.append(np.asarray(extend(pool, requests)))
        pools.append(pool)
    pages = ints(drawn)[: ExtendBatch.of(*lengths(requests), page_size).num_new_pages]
    assert np.array_equal(outs[0], outs[1])
    assert np.array_equal(outs[0], np.array(naive_extend(requests, pages, page_size)))
    assert pools[0].state_digest() == pools[1].state_digest()


def lengths(requests):
    return [prefix for prefix, _, _ in requests], [seq for _, seq, _ in requests]


@st.composite
def small_batches(draw):
    page_size = draw(st.sampled_from([1, 2, 3, 4, 7]))
    requests = []
    for page in range(draw(st.integers(1, 6))):
        prefix = draw(st.integers(0, 2 * page_size))
        seq = prefix + draw(st.integers(0, 3 * page_size))
        last = (100 + page) * page_size + (prefix - 1) % page_size if prefix else -1
        requests.append((prefix, seq, last))
    return page_size, requests


@given(small_batches(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_all_paths_agree_on_every_small_batch(batch, debug):
    """Hypothesis shrinks a disagreement to a few requests; zero extends included; B18."""
    page_size, requests = batch
    outs = []
    for device in (None, "cpu"):
        pool = make_paged(24, page_size, device=device, debug=debug)
        pool.free(pool.alloc(24 * page_size)[::2])
        pages = ints(pool.get_all_free_pages())
        outs.append(extend(pool, requests))
    new = sum(-(-seq // page_size) - -(-prefix // page_size) for prefix, seq, _ in requests)
    if new > len(pages):
        assert outs == [None, None]
    else:
        assert [ints(out) for out in outs] == [naive_extend(requests, pages, page_size)] * 2
        assert 24 - pool.available_size() // page_size == 24 - len(pages) + new


@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
@pytest.mark.parametrize("num_requests", [1, 2, 511, 512])
def test_decode_paths_agree(num_requests, page_size):
    """alloc_decode on the host and with torch equals one token at a time; B17, B18, C208."""
    rng = np.random.default_rng([num_requests, page_size])
    seq = rng.integers(1, 4 * page_size + 2, num_requests).tolist()
    last = [
        (1000 + i) * page_size + (s - 2) % page_size if s > 1 else -1 for i, s in enumerate(seq)
    ]
    outs = []
    for device in (None, "cpu"):
        pool = make_paged(num_requests, page_size, device=device)
        pages = ints(pool.get_all_free_pages())
        outs.append(ints(decode(pool, list(zip(seq, last, strict=True)))))
    requests = [(s - 1, s, slot) for s, slot in zip(seq, last, strict=True)]
    assert outs == [naive_extend(requests, pages, page_size)] * 2


def test_the_batch_arithmetic_is_that_of_one_request_at_a_time():
    """new_pages, prefix_pages and the starts of each request's run; C203."""
    batch = ExtendBatch.of([0, 5, 8, 8], [9, 6, 8, 13], 4)
    assert ints(batch.extend_lens) == [9, 1, 0, 5]
    assert ints(batch.prefix_pages) == [0, 2, 2, 2]
    assert ints(batch.new_pages) == [3, 0, 0, 2]
    assert ints(batch.token_starts) == [0, 9, 10, 10]
    assert ints(batch.page_starts) == [0, 3, 3, 3]
    assert (batch.num_tokens, batch.num_new_pages) == (15, 5)


def test_int32_last_slots_and_host_last_slots_are_accepted_on_a_device():
    """last_loc may be an int32 tensor or live on the host."""
    outs = []
    for last in (torch.tensor([9], dtype=torch.int32), np.array([9]), [9]):
        pool = make_paged(device="cpu")
        extend(pool, [(0, 6, -1)])
        outs.append(ints(pool.alloc_extend([6], [6], [9], [9], last, 3)))
    assert outs == [[10, 11, 12]] * 3


@pytest.mark.parametrize(
    "last",
    [
        [9.0],
        [float("nan")],
        [True],
        [None],
        np.array([9.0]),
        torch.tensor([9.0]),
        torch.tensor([9.0], dtype=torch.bfloat16),
        torch.tensor([True]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("debug", [False, True])
def test_last_slots_that_are_not_integers_are_refused(last, device, debug):
    """In host mode and on a device alike, before a page is drawn."""
    pool = make_paged(device=device, debug=debug)
    extend(pool, [(0, 6, -1)])
    for call in (
        lambda: pool.alloc_extend([6], [6], [9], [9], last, 3),
        lambda: pool.alloc_decode([7], [7], last),
    ):
        with unchanged(pool), pytest.raises(ValueError, match="last_loc has dtype"):
            call()


def test_the_result_shares_no_memory_with_the_pool():
    """Writing to returned slots, or to the caller's lengths, changes no later result."""
    for device in (None, "cpu"):
        pool, twin = make_paged(device=device), make_paged(device=device)
        out = extend(pool, [(0, 9, -1)])
        extend(twin, [(0, 9, -1)])
        out[:] = 0
        assert pool.state_digest() == twin.state_digest()
        assert ints(pool.alloc(8)) == ints(twin.alloc(8))
