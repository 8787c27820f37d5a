"""Kernels, twins and the reference on the host write the same slots.

The kernels run compiled where there is a GPU, under Triton's interpreter elsewhere.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import ExtendBatch, ReqToTokenPool
from alloc.extend import fill_extend
from tests.alloc.alloc_builders import ints, make_paged, slots_of

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from alloc import kernels  # noqa: E402
from alloc.kernels import twins  # noqa: E402
from alloc.tensors import TensorSlots  # noqa: E402

PAGE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
FAR = 2**40  # slots and pages beyond int32


@pytest.fixture(scope="module")
def launch(kernel_device):
    from alloc.kernels import launch

    return launch


@pytest.fixture(scope="module")
def paths(launch, kernel_device):
    """Both ways to run, each with its device."""
    return [(launch, kernel_device), (twins, torch.device("cpu")), (twins, kernel_device)]


def tensor(values, device, dtype=torch.int64):
    return torch.tensor(np.asarray(values), dtype=dtype, device=device)


def fresh(num_tokens, device):
    """Return an output in which an unwritten entry shows."""
    return torch.full((num_tokens,), -7, dtype=torch.int64, device=device)


# Page expansion


@given(
    page_size=st.sampled_from(PAGE_SIZES),
    pages=st.lists(st.integers(0, FAR), max_size=24),
)
@settings(max_examples=40, deadline=None)
def test_expanding_pages(kernel_device, page_size, pages):
    """On every device page * ps + offset, also beyond int32; B18."""
    expected = [page * page_size + offset for page in pages for offset in range(page_size)]
    for device in (kernel_device, torch.device("cpu")):
        out = fresh(len(expected), device)
        TensorSlots(device).fill_pages(out, np.array(pages, dtype=np.int64), page_size)
        assert ints(out) == expected


# Extend


def run_extend(path, device, batch, last, pages, last_dtype=torch.int64):
    starts = batch.token_starts
    heads = batch.prefix_pages * batch.page_size - batch.prefix_lens
    plan = tensor(np.stack([starts, starts + heads, batch.page_starts]), device)
    out = fresh(batch.num_tokens, device)
    path.extend_slots(
        out,
        plan,
        tensor(last, device, last_dtype),
        tensor([*pages, 0], device),
        batch.page_size,
    )
    return np.asarray(out.cpu())


def check_extend(paths, page_size, prefix, seq, last, pages, last_dtype=torch.int64):
    batch = ExtendBatch.of(prefix, seq, page_size)
    pages = np.asarray(pages[: batch.num_new_pages], dtype=np.int64)
    expected = np.empty(batch.num_tokens, dtype=np.int64)
    fill_extend(expected, batch, np.asarray(last, dtype=np.int64), pages)
    for path, device in paths:
        found = run_extend(path, device, batch, last, pages, last_dtype)
        assert np.array_equal(found, expected), (path.__name__, device)


@st.composite
def extends(draw):
    """Prefix, extend and last slot of each request; zero extends and full pages are common."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    some = st.one_of(
        st.sampled_from([0, 0, 1, page_size - 1, page_size, page_size + 1]),
        st.integers(0, 3 * page_size),
    )
    requests = draw(st.lists(st.tuples(some, some, st.integers(1, 2**33)), min_size=1, max_size=9))
    prefix = [p for p, _, _ in requests]
    seq = [p + grown for p, grown, _ in requests]
    last = [page * page_size + (p - 1) % page_size if p else -1 for p, _, page in requests]
    return page_size, prefix, seq, last


@given(extends(), st.integers(0, FAR))
@settings(max_examples=60, deadline=None)
def test_extending_a_batch(paths, batch, first_page):
    """Kernel, twin and host reference agree on any small batch; B16, B18, C199-C209."""
    page_size, prefix, seq, last = batch
    new = ExtendBatch.of(prefix, seq, page_size).num_new_pages
    pages = np.random.default_rng(new).permutation(new) + first_page
    check_extend(paths, page_size, prefix, seq, last, pages)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_requests", [1, 2, 3, 31, 32, 33, 255, 511, 512, 700])
def test_extending_batches_of_every_size(paths, num_requests, page_size):
    """1 to 512 requests and more, page 1 to 256; B18, C204."""
    rng = np.random.default_rng([num_requests, page_size])
    prefix = rng.integers(0, 2 * page_size + 1, num_requests)
    seq = prefix + rng.integers(0, min(3 * page_size, 6000 // num_requests) + 1, num_requests)
    last = np.where(prefix > 0, (1000 + np.arange(num_requests)) * page_size, 0)
    last = last + (prefix - 1) % page_size * (prefix > 0) - (prefix == 0)
    pages = rng.permutation(20_000)
    check_extend(paths, page_size, prefix, seq, last, pages)


def test_one_long_request_and_its_neighbours(paths):
    """An extend of 32k tokens between requests that extend by nothing or one token; B18."""
    check_extend(
        paths,
        64,
        [0, 63, 10, 64, 5],
        [0, 64, 10 + 32_768, 64, 6],
        [-1, 6462, 1289, 6527, 644],
        np.arange(9000, 10_000),
    )


def test_last_slots_may_be_int32(paths):
    """A device table of int32 gives int32 last slots."""
    check_extend(paths, 4, [6, 3], [17, 3], [9, 2], np.array([7, 3, 5]), torch.int32)


def test_a_batch_without_tokens_launches_nothing(paths):
    """No request, or none that grows."""
    check_extend(paths, 4, [], [], [], np.array([], dtype=np.int64))
    check_extend(paths, 4, [6, 0], [6, 0], [9, -1], np.array([], dtype=np.int64))


# Decode


@given(
    page_size=st.sampled_from(PAGE_SIZES),
    requests=st.lists(st.tuples(st.integers(1, 600), st.integers(0, 2**33)), max_size=40),
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
@settings(max_examples=40, deadline=None)
def test_decoding_a_batch(paths, page_size, requests, dtype):
    """A new page's first slot exactly on a page boundary, else last + 1; B17, B18, C208."""
    if dtype is torch.int32:
        requests = [(seq, page % 1000) for seq, page in requests]
    seq = np.array([s for s, _ in requests], dtype=np.int64)
    last = np.array([page * page_size + (s - 2) % page_size for s, page in requests], np.int64)
    batch = ExtendBatch.of(seq - 1, seq, page_size)
    pages = FAR + np.arange(batch.num_new_pages, dtype=np.int64)[::-1]
    expected = np.empty(len(seq), dtype=np.int64)
    fill_extend(expected, batch, last, pages)
    first = np.full(len(seq), -1, dtype=np.int64)
    first[batch.new_pages > 0] = pages * page_size
    for path, device in paths:
        out = fresh(len(seq), device)
        path.decode_slots(out, tensor(first, device), tensor(last, device, dtype))
        assert np.array_equal(out.cpu(), expected)


# Request rows


@st.composite
def row_runs(draw):
    """Distinct rows of a table, each with a start page and a number of tokens."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    columns = draw(st.integers(1, 4)) * page_size + draw(st.integers(0, page_size - 1))
    rows = draw(st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=8))
    runs = []
    for row in rows:
        start = draw(st.integers(0, (columns - 1) // page_size)) * page_size
        runs.append((row, start, draw(st.integers(0, columns - start))))
    return page_size, columns, runs


@given(row_runs())
@settings(max_examples=60, deadline=None)
def test_writing_rows(paths, given_runs):
    """Only the named ranges of the int32 table are written, with the slots of their pages."""
    page_size, columns, runs = given_runs
    starts = np.array([row * columns + start for row, start, _ in runs])
    lens = np.array([length for _, _, length in runs])
    counts = -(-lens // page_size)
    pages = np.random.default_rng(1).permutation(int(counts.sum()))
    plan = np.stack([lens.cumsum() - lens, starts, counts.cumsum() - counts])
    expected = np.full((8, columns), -7, dtype=np.int32)
    first = 0
    for (row, start, length), count in zip(runs, counts.tolist(), strict=True):
        slots = [p * page_size + o for p in pages[first : first + count] for o in range(page_size)]
        expected[row, start : start + length] = slots[:length]
        first += count
    for path, device in paths:
        table = torch.full((8, columns), -7, dtype=torch.int32, device=device)
        total = int(lens.sum())
        path.write_rows(table, tensor(plan, device), tensor(pages, device), total, page_size)
        assert np.array_equal(table.cpu(), expected)


def test_the_largest_slot_of_an_int32_table(paths):
    """Slot 2^31 - 1 is written exactly, from int64 arithmetic."""
    page_size = 256
    page = 2**31 // page_size - 1
    for path, device in paths:
        table = torch.zeros((2, page_size), dtype=torch.int32, device=device)
        plan = tensor([[0], [page_size], [0]], device)
        path.write_rows(table, plan, tensor([page], device), page_size, page_size)
        assert ints(table.cpu()[1]) == slots_of(make_paged(1, page_size), [page])
        assert ints(table.cpu()[0]) == [0] * page_size


# What is chosen, and how it is called


@pytest.mark.parametrize(
    ("page_size", "device", "expected"),
    [
        (16, "cuda", "alloc.kernels.launch"),
        (1, "cuda", "alloc.kernels.launch"),
        (256, "cuda", "alloc.kernels.launch"),
        (512, "cuda", "alloc.kernels.twins"),
        (3, "cuda", "alloc.kernels.twins"),
        (16, "cpu", "alloc.kernels.twins"),
    ],
)
def test_the_tensor_chooses_the_path(launch, page_size, device, expected):
    """A CUDA tensor with a page of a power of two up to 256 gets the kernel; nothing else does."""

    class Written:
        is_cuda = device == "cuda"

    assert kernels._paths_of(Written(), page_size).__name__ == expected


@pytest.fixture
def slots_through_kernels(launch, kernel_device, monkeypatch):
    """Every call of an allocator goes through the kernels, on the device where they can run."""
    monkeypatch.setattr(kernels, "_paths_of", lambda written, page_size: launch)
    return kernel_device


@pytest.mark.parametrize("on_device", [True, False], ids=["device last", "host last"])
def test_an_allocator_over_the_kernels_equals_the_host(slots_through_kernels, on_device):
    """alloc, alloc_extend, alloc_decode: equal slots and states, last slots from either side."""
    device = slots_through_kernels
    real, host = make_paged(64, 8, device=device), make_paged(64, 8)
    first = [ints(pool.alloc(24)) for pool in (real, host)]
    assert first[0] == first[1]
    prefix, seq, last = [5, 0, 8], [9, 17, 8], [12, -1, 23]
    out = []
    for pool in (real, host):
        given = tensor(last, device) if on_device and pool is real else np.array(last)
        out.append(ints(pool.alloc_extend(prefix, prefix, seq, seq, given, 21)))
        given = tensor([15, 23], device) if on_device and pool is real else np.array([15, 23])
        out[-1] += ints(pool.alloc_decode([17, 9], [17, 9], given))
    assert out[0] == out[1]
    assert real.state_digest() == host.state_digest()


def test_request_rows_over_the_kernels_equal_the_host(slots_through_kernels):
    """write and write_pages fill table and mirror alike."""
    pools = [ReqToTokenPool(4, 50, device, page_size=8) for device in (slots_through_kernels, None)]
    for pool in pools:
        rows = pool.alloc(3)
        pool.write_pages(rows, [0, 8, 48], [np.array([5, 9]), np.array([], int), np.array([3])])
        pool.write(rows[1], 4, pool.io.from_host(np.array([12, 13, 14, 15, 72])))
    tables = [np.asarray(pool.req_to_token.tolist()) for pool in pools]
    assert np.array_equal(*tables)
    assert pools[0].state_digest() == pools[1].state_digest()
