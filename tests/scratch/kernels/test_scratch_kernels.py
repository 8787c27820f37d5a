"""Kernels and twins write the same bits; B62, B66.

The kernels run compiled where there is a GPU, under Triton's interpreter elsewhere.
"""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alloc import PageShardSpec
from scratch import InProcessGroup, kernels
from scratch.kernels import BITS, twins
from tests.scratch.scratch_worlds import (
    Conversation,
    Reference,
    check_persisted,
    make_pool,
    prefill,
)

pytest.importorskip("triton")

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
STORED = [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2]
UNUSUAL = [torch.float64, torch.float8_e4m3fnuz]
KINDS = {
    "mla": [512, 64],
    "heads": [24, 24],
    "one part": [12],
    "odd": [7, 3],
    "wide": [1100, 1],
}


@pytest.fixture(scope="module")
def launch(kernel_device):
    from scratch.kernels import launch

    return launch


def random_bits(*shape, dtype, seed, device):
    """Every bit pattern, NaN and infinities included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.iinfo(BITS[dtype.itemsize])
    drawn = torch.randint(size.min, size.max, shape, generator=generator, dtype=torch.int64)
    return drawn.to(BITS[dtype.itemsize]).to(device)


def random_rows(count, limit, seed, device):
    """Distinct rows in no order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(limit, generator=generator)[:count].to(device)


# Translate


@settings(max_examples=50)
@given(
    st.sampled_from([1, 2, 3, 16, 48, 64, 256]),
    st.lists(st.integers(0, 20), max_size=3),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 2**31),
)
@example(64, [3000], torch.int64, 1)
def test_translation(launch, kernel_device, page_size, shape, dtype, seed):
    """Any shape and page size, both dtypes; B62."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 2**31 - 1, (50,), generator=generator, dtype=torch.int32)
    loc = torch.randint(0, 50 * page_size, shape, generator=generator).to(dtype)
    expected = twins.translate_locs(loc, table, page_size)
    got = launch.translate_locs(loc.to(kernel_device), table.to(kernel_device), page_size)
    assert got.dtype == torch.int64
    assert torch.equal(expected, got.cpu())
    if loc.ndim == 2:
        got = launch.translate_locs(loc.to(kernel_device).T, table.to(kernel_device), page_size)
        assert torch.equal(expected.T, got.cpu())


def test_slots_out_of_range_are_read_as_page_0(launch, kernel_device):
    """Memory beyond the table is never touched."""
    table = torch.tensor([9, 4, 5], dtype=torch.int32, device=kernel_device)
    loc = torch.tensor([3 * 16 + 2, 2**40 * 16, 20], device=kernel_device)
    assert launch.translate_locs(loc, table, 16).tolist() == [9 * 16 + 2, 9 * 16, 4 * 16 + 4]


# Pack


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([1, 3, 16]),
    st.integers(0, 6),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2**31),
)
@example("mla", 64, 3, 2, 0)
@example("heads", 64, 2, 1, 0)
def test_packing(launch, kernel_device, kind, page_size, count, itemsize, seed):
    """Whole pages, also the same page many times, in whatever words the widths allow."""
    dtype = BITS[itemsize]
    parts = [
        random_bits(8 * page_size, width, dtype=dtype, seed=seed + i, device=kernel_device)
        for i, width in enumerate(KINDS[kind])
    ]
    pages = torch.randint(0, 8, (count,), generator=torch.Generator().manual_seed(seed))
    pages = pages.to(kernel_device)
    slot = torch.zeros((count + 2) * page_size, sum(KINDS[kind]), dtype=dtype, device=kernel_device)
    twin = slot.clone()
    rows = slice(page_size, (count + 1) * page_size)
    launch.pack_pages(slot[rows], parts, pages, page_size)
    twins.pack_pages(twin[rows], parts, pages, page_size)
    assert torch.equal(twin, slot)
    if count:
        first = torch.cat([part[int(pages[0]) * page_size] for part in parts])
        assert torch.equal(first, slot[page_size])


def test_pages_beyond_2_31_elements_are_addressed_in_64_bits(launch, kernel_device):
    """A page's offset is computed before it would overflow int32; on a GPU for real."""
    rows = 2**31 // 512 + 64 if kernel_device.type == "cuda" else 128
    part = torch.zeros(rows, 512, dtype=torch.uint8, device=kernel_device)
    part[-64:] = 7
    out = torch.zeros(64, 512, dtype=torch.uint8, device=kernel_device)
    launch.pack_pages(out, [part], torch.tensor([rows // 64 - 1], device=kernel_device), 64)
    assert (out == 7).all()


# Store


def store_both(launch, device, values, dtype, widths, count, *, staged, seed):
    """Run kernel and twin on equal buffers; return what each wrote."""
    results = []
    owned = random_rows(count, 40, seed, device)
    mask = torch.rand(count, generator=torch.Generator().manual_seed(seed)).to(device) < 0.5
    pool_rows = torch.where(mask, owned, -1)
    scratch_rows = random_rows(count, 50, seed + 1, device)
    for path in (launch, twins):
        pool = torch.zeros(40, sum(widths), dtype=BITS[dtype.itemsize], device=device)
        targets = list(pool.split(widths, dim=1))
        scratch = torch.zeros(50, sum(widths), dtype=pool.dtype, device=device)
        to_scratch = (scratch, scratch_rows) if staged else ()
        path.store_rows(values, dtype, targets, pool_rows, *to_scratch)
        results.append((pool, scratch))
    return results


def assert_same_bits(dtype, one, other):
    """Equal bits; a NaN of two bytes or more may be any NaN where it was converted."""
    one, other = one.view(dtype), other.view(dtype)
    if dtype.itemsize == 1:
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    else:
        nan = one.isnan()
        assert torch.equal(nan, other.isnan())
        bits = BITS[dtype.itemsize]
        assert torch.equal(one.view(bits)[~nan], other.view(bits)[~nan])


@settings(max_examples=80)
@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([*FLOATS, torch.float8_e4m3fn, torch.float64]),
    st.sampled_from([*STORED, torch.float8_e4m3fnuz]),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
@example("mla", torch.bfloat16, torch.bfloat16, 20, True, False, 0)
@example("heads", torch.float32, torch.float8_e4m3fn, 20, True, True, 0)
def test_storing(launch, kernel_device, kind, given_dtype, stored, count, staged, strided, seed):
    """Stage and persist, or persist only; rows of a fused projection; B66, C134, C135."""
    widths = KINDS[kind]
    raw = [
        random_bits(count, width, dtype=given_dtype, seed=seed + i, device=kernel_device)
        for i, width in enumerate(widths)
    ]
    if strided:
        raw = list(torch.cat([raw[0][:, :1], *raw], dim=1)[:, 1:].split(widths, dim=1))
    values = [bits.view(given_dtype) for bits in raw]
    (pool, scratch), (twin_pool, twin_scratch) = store_both(
        launch, kernel_device, values, stored, widths, count, staged=staged, seed=seed
    )
    if given_dtype == stored:
        assert torch.equal(twin_pool, pool)
        assert torch.equal(twin_scratch, scratch)
    else:
        assert_same_bits(stored, twin_pool, pool)
        assert_same_bits(stored, twin_scratch, scratch)
    assert staged or not scratch.any()


def test_parts_of_two_dtypes_are_converted_each(launch, kernel_device):
    values = [
        torch.randn(5, 8, device=kernel_device),
        torch.randn(5, 4, device=kernel_device).bfloat16(),
    ]
    (pool, scratch), (twin_pool, twin_scratch) = store_both(
        launch, kernel_device, values, torch.float16, [8, 4], 5, staged=True, seed=1
    )
    assert torch.equal(twin_pool, pool)
    assert torch.equal(twin_scratch, scratch)


def edge_values():
    """Numbers around every rounding, overflow and underflow of the small floats."""
    sizes = [2.0**power for power in range(-30, 20)] + [448.0, 464.0, 480.0, 57344.0, 65504.0]
    edges = [0.0, float("inf"), float("nan"), 1e-45, 3.4e38]
    for size in sizes:
        edges += [size * (1 + step / 64) for step in range(-32, 64)]
        edges += [size + size * 2.0**-24, size * (1 + 2.0**-23)]
    values = torch.tensor(edges + [-edge for edge in edges], dtype=torch.float64)
    return values.to(torch.float32)


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("given_dtype", FLOATS, ids=str)
def test_conversions_round_as_torch_does(launch, kernel_device, given_dtype, stored):
    """Ties to even, subnormals, overflow, infinities, both signs."""
    values = edge_values().to(given_dtype).to(kernel_device)
    values = values[: len(values) // 8 * 8].view(8, -1)
    (pool, scratch), (twin_pool, twin_scratch) = store_both(
        launch, kernel_device, [values], stored, [values.shape[1]], 8, staged=True, seed=3
    )
    assert_same_bits(stored, twin_pool, pool)
    assert_same_bits(stored, twin_scratch, scratch)


def test_padding_rows_hold_one_of_their_values(launch, kernel_device):
    """Rows named twice: every byte is from one write or another."""
    values = torch.arange(4.0, device=kernel_device)[:, None].expand(4, 8).contiguous()
    pool = torch.full((4, 8), -9, dtype=torch.int32, device=kernel_device)
    rows = torch.tensor([1, 1, -1, 2], device=kernel_device)
    launch.store_rows([values], torch.float32, [pool], rows)
    stored = pool.view(torch.float32)
    assert stored[1, 0] in (0.0, 1.0)
    assert (stored[2] == 3.0).all()
    assert (pool[0] == pool[3]).all()


# The whole path


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_prefill_through_the_kernels(launch, kernel_device, kind, monkeypatch):
    """Every read of a sharded conversation is exact when kernels do the work; B69."""
    monkeypatch.setattr(kernels, "_paths_of", lambda tensor: launch)
    groups = InProcessGroup.create(2, timeout_s=10)
    specs = [PageShardSpec(rank, 2, 4, 64, 32) for rank in range(2)]
    pools = [
        make_pool(kind, spec, group, device=kernel_device)
        for spec, group in zip(specs, groups, strict=True)
    ]
    layout = pools[0].shard.planner.layout
    reference = Reference(kind, torch.bfloat16, layout, range(3), 0)
    conversation = Conversation(specs[0], layout, np.random.default_rng(1))
    for _ in range(4):
        batch = conversation.batch()
        prefill(pools, kind, reference, batch)
        check_persisted(pools, kind, reference, batch.locs(4))


# The choice of path


def test_the_tensor_chooses_the_path(kernel_device):
    """A CUDA tensor takes the kernel, any other the twin."""
    expected = "scratch.kernels.launch" if kernel_device.type == "cuda" else twins.__name__
    assert kernels._paths_of(torch.zeros(1, device=kernel_device)).__name__ == expected
    assert kernels._launchers().__name__ == "scratch.kernels.launch"
