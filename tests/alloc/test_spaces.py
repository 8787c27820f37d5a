"""What counts as an integer: one rule for every size, length, count, row and slot."""

import numpy as np
import pytest

from alloc import (
    CPSharedPagedTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    PageInterleavePoolAllocator,
    PageLayout,
    PageShardSpec,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    build_in_seq_page_compute_owners,
)
from alloc.spaces import as_count, as_int64
from tests.alloc.alloc_builders import (
    make_interleave,
    make_lanes,
    make_paged,
    make_token,
    unchanged,
)

NO_COUNTS = [4.0, 0.5, float("nan"), None, "4", [4], True, np.float64(4), np.bool_(True), 4j]

MAKERS = {
    "token": make_token,
    "paged": make_paged,
    "interleave": make_interleave,
    "lanes": make_lanes,
}


@pytest.mark.parametrize("value", [4, np.int64(4), np.uint8(4), np.array(4), -4, 10**30])
def test_a_count_is_any_integer(value):
    """It comes out as a Python int, whatever its size."""
    count = as_count(value, "count")
    assert (type(count), count) == (int, int(value))


@pytest.mark.parametrize("value", NO_COUNTS, ids=repr)
def test_what_is_no_integer_is_no_count(value):
    """ValueError with name, value and rule: no float, bool, string or list."""
    with pytest.raises(ValueError, match=r"^pages=.* must be an integer$"):
        as_count(value, "pages")


@pytest.mark.parametrize("value", [2**63, 10**19, 10**30])
def test_what_leaves_int64_is_refused(value):
    """A uint64 or a Python integer beyond int64 never wraps."""
    with pytest.raises(ValueError, match=r"slots"):
        as_int64([value], "slots")


def test_a_tensor_that_numpy_cannot_hold_is_refused():
    """bfloat16 has no NumPy dtype: ValueError, as for any float."""
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="slots"):
        as_int64(torch.zeros(2, dtype=torch.bfloat16), "slots")


@pytest.mark.parametrize("value", NO_COUNTS, ids=repr)
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("token", lambda pool, value: pool.alloc(value)),
        ("paged", lambda pool, value: pool.alloc(value)),
        ("lanes", lambda pool, value: pool.alloc(value)),
        ("token", lambda pool, value: pool.alloc_pages(value)),
        ("paged", lambda pool, value: pool.alloc_pages(value)),
        ("lanes", lambda pool, value: pool.alloc_pages(value)),
        ("interleave", lambda pool, value: pool.alloc_cyclic(1, value)),
        ("interleave", lambda pool, value: pool.alloc_cyclic(value, 16)),
        ("interleave", lambda pool, value: pool.alloc_cyclic_pages(1, value)),
        ("interleave", lambda pool, value: pool.alloc_cyclic_pages(value, 1)),
        ("paged", lambda pool, value: pool.free_segment(np.arange(4, 8), start_pos=value)),
        ("paged", lambda pool, value: pool.free_segments([(np.arange(4, 8), value)])),
    ],
)
def test_no_call_takes_a_count_that_is_none(kind, call, value):
    """Every allocator: ValueError, nothing changed."""
    pool = MAKERS[kind]()
    if kind == "paged":
        pool.alloc(4)
    with unchanged(pool), pytest.raises(ValueError, match="must be an integer"):
        call(pool, value)


@pytest.mark.parametrize("value", [np.int64(16), np.uint16(16)], ids=repr)
def test_numpy_counts_draw_like_python_ones(value):
    """The same slots, and the same state afterwards."""
    for make in (make_token, make_paged, make_lanes):
        pool, twin = make(), make()
        assert pool.alloc(value).tolist() == twin.alloc(16).tolist()
        assert pool.state_digest() == twin.state_digest()


CONSTRUCTORS = {
    "token": (lambda size: TokenToKVPoolAllocator(size, None, None, None), (64,)),
    "paged": (lambda *sizes: PagedTokenToKVPoolAllocator(*sizes, None, None, None), (64, 4)),
    "interleave": (
        lambda *sizes: PageInterleavePoolAllocator(*sizes, None, None, None),
        (64, 4, 2),
    ),
    "lanes": (
        lambda logical, physical, page, size, rank: CPSharedPagedTokenToKVPoolAllocator(
            logical, physical, page, None, None, None, False, size, rank
        ),
        (128, 64, 4, 2, 1),
    ),
    "layout": (PageLayout, (4, 2, 2, 8)),
    "spec": (PageShardSpec, (0, 4, 16, 4096, 512)),
    "rows": (
        lambda size, length, page: ReqToTokenPool(size, length, None, page_size=page),
        (4, 32, 4),
    ),
    "owners": (build_in_seq_page_compute_owners, (16, 64, 16, 2)),
}


@pytest.mark.parametrize("kind", CONSTRUCTORS)
def test_no_pool_is_built_from_sizes_that_are_no_counts(kind):
    """A float, a string or a bool in any place is a ValueError."""
    make, sizes = CONSTRUCTORS[kind]
    make(*sizes)
    for place, size in enumerate(sizes):
        for wrong in (float(size), size + 0.5, str(size), None, [size], bool(size)):
            with pytest.raises(ValueError, match="must be an integer"):
                make(*sizes[:place], wrong, *sizes[place + 1 :])


@pytest.mark.parametrize("kind", CONSTRUCTORS)
def test_numpy_sizes_build_the_same_pool(kind):
    """Sizes are kept as Python ints, so that digests don't tell where they came from."""
    make, sizes = CONSTRUCTORS[kind]
    plain, numpy = make(*sizes), make(*map(np.int64, sizes))
    if hasattr(plain, "state_digest"):
        assert numpy.state_digest() == plain.state_digest()
    for name in ("size", "page_size", "shard_size", "cp_size", "cp_rank", "physical_size"):
        assert type(getattr(numpy, name, 0)) is int
    if kind in ("layout", "spec"):
        assert repr(numpy) == repr(plain)


def test_a_length_that_leaves_int64_is_refused():
    """A ValueError, and no overflow inside an array."""
    with pytest.raises(ValueError, match=r"seq_len=10+ < 2\*\*63 must hold"):
        build_in_seq_page_compute_owners(0, 10**30, 16, 2)
