"""Request rows: table and mirror together, direct writes, misuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import PageState, ReqToTokenPool
from tests.alloc.alloc_builders import extend, ints, make_paged


@pytest.fixture(params=[None, "cpu"], ids=["host", "cpu"])
def device(request):
    if request.param is not None:
        pytest.importorskip("torch")
    return request.param


@pytest.fixture
def pool(device):
    return ReqToTokenPool(4, 32, device, page_size=4)


def seen(pool):
    """Return everything about a pool of rows that a caller can see."""
    return (
        pool.state_digest(),
        ints(pool.req_to_token),
        ints(pool.page_table()),
        [pool.mirrored_len(row) for row in range(pool.size)],
        pool.available_size(),
    )


def refuse(pool, call, words):
    before = seen(pool)
    with pytest.raises(ValueError, match=words):
        call()
    assert seen(pool) == before


# Rows


def test_rows_are_drawn_lowest_first(pool):
    """A fresh pool hands out 0, 1, 2, ..., and says how many are left; D11."""
    assert (pool.available_size(), pool.alloc(3), pool.available_size()) == (4, [0, 1, 2], 1)


def test_rows_come_back_last_freed_first(pool):
    """Ascending inside one call, the last call first."""
    pool.alloc(4)
    pool.free([3, 1])
    pool.free(2)
    assert pool.alloc(3) == [2, 1, 3]


def test_too_many_rows_are_none_and_change_nothing(pool):
    """Exhaustion is None, not an exception; D3."""
    pool.alloc(2)
    before = seen(pool)
    assert pool.alloc(3) is None
    assert seen(pool) == before
    assert pool.alloc(0) == []


def test_a_negative_number_of_rows_is_an_error(pool):
    """alloc(-1) raises with the value."""
    refuse(pool, lambda: pool.alloc(-1), "num_rows=-1")


@pytest.mark.parametrize("rows", [3, [0, 3], [-1], 4, [0, 0], [1, 0, 1], [0.5], 10**9])
def test_a_wrong_free_releases_no_row(pool, rows):
    """Free already, out of range, or named twice: ValueError, nothing changed."""
    pool.alloc(3)
    refuse(pool, lambda: pool.free(rows), "row")


@pytest.mark.parametrize("rows", [1, np.int64(1), [1], (1,), np.array([1], dtype=np.int32)])
def test_rows_may_be_any_integers(pool, rows):
    """One row or several, Python or NumPy."""
    pool.alloc(3)
    pool.free(rows)
    assert pool.alloc(1) == [1]


def test_freeing_no_row_does_nothing(pool):
    """An empty list is fine."""
    before = seen(pool)
    pool.free([])
    assert seen(pool) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 8), "size=0"),
        ((2, 0), "max_context_len=0"),
        ((-1, 8), "size=-1"),
        ((2, 10**30), "max_context_len=10+ must"),
    ],
)
def test_a_pool_without_rows_or_columns_is_refused(device, arguments, words):
    """Sizes are at least 1."""
    with pytest.raises(ValueError, match=words):
        ReqToTokenPool(*arguments, device)
    with pytest.raises(ValueError, match="page_size=0"):
        ReqToTokenPool(2, 8, None, page_size=0)


# Writes and reads


def test_a_write_keeps_table_and_mirror_together(pool, device):
    """The table is int32[size, max_context_len] on the device; pages come from the mirror; D11."""
    (row,) = pool.alloc(1)
    pool.write(row, 0, pages=np.array([3, 7]))
    assert ints(pool.req_to_token[row])[:9] == [12, 13, 14, 15, 28, 29, 30, 31, 0]
    assert str(pool.req_to_token.dtype).endswith("int32")
    assert (device is None) == isinstance(pool.req_to_token, np.ndarray)
    assert tuple(pool.req_to_token.shape) == (4, 32)
    pages = pool.pages(row, 0, 8)
    assert (ints(pages), pages.dtype, pool.mirrored_len(row)) == ([3, 7], np.int64, 8)


def test_slots_and_pages_write_the_same_row(device):
    """A write of slots equals a write of their pages."""
    pools = [ReqToTokenPool(1, 32, device, page_size=4) for _ in range(2)]
    for pool in pools:
        pool.alloc(1)
    pools[0].write(0, 0, pages=np.array([5, 2, 9]))
    locs = np.array([20, 21, 22, 23, 8, 9, 10, 11, 36])
    pools[1].write(0, 0, pools[1].io.from_host(locs))
    assert seen(pools[0]) == seen(pools[1])


def test_the_last_page_is_written_to_its_end(device):
    """Rows past seq_len inside the last page belong to the new owner; A4."""
    allocator = make_paged(8, 16, device=device)
    pool = ReqToTokenPool(2, 64, device, page_size=16)
    (row,) = pool.alloc(1)
    slots = extend(allocator, [(0, 30, -1)])
    pool.write(row, 0, slots)
    pool.free(row)
    allocator.alloc(16)
    allocator.free(slots)
    (row,) = pool.alloc(1)
    pool.write(row, 0, extend(allocator, [(0, 20, -1)]))
    entries = ints(pool.req_to_token[row])[:32]
    pages = ints(pool.pages(row, 0, 20))
    assert entries == [page * 16 + offset for page in pages for offset in range(16)]
    assert set(pages) == set(ints(allocator.pages_in(PageState.HELD))) - {3}


def test_a_row_grows_token_by_token(pool):
    """Decode writes inside a page and over its boundary keep the mirror whole."""
    (row,) = pool.alloc(1)
    locs = [20, 21, 22, 23, 8, 9]
    for position, loc in enumerate(locs):
        pool.write(row, position, pool.io.from_host(np.array([loc])))
        assert ints(pool.pages(row, 0, position + 1)) == [5, 2][: position // 4 + 1]
    assert ints(pool.req_to_token[row])[:8] == [20, 21, 22, 23, 8, 9, 10, 11]


def test_a_read_may_start_on_any_page(pool):
    """[start, stop) gives the pages that hold any of its positions."""
    (row,) = pool.alloc(1)
    pool.write(row, 0, pages=np.array([5, 2, 9]))
    assert ints(pool.pages(row, 4, 9)) == [2, 9]
    assert ints(pool.pages(row, 8, 8)) == []
    assert ints(pool.pages(row, 0, 1)) == [5]


def test_rewriting_the_head_keeps_the_mirror_of_the_tail(pool):
    """The cache rebinds a row's first pages; the rest is still read from the mirror."""
    (row,) = pool.alloc(1)
    pool.write(row, 0, pages=np.array([5, 2, 9]))
    pool.write(row, 0, pages=np.array([6]))
    assert pool.mirrored_len(row) == 12
    assert ints(pool.pages(row, 0, 12)) == [6, 2, 9]


def test_a_write_behind_a_gap_is_read_from_the_table(pool):
    """The mirror holds only a gapless head; the table still answers."""
    (row,) = pool.alloc(1)
    pool.write(row, 8, pages=np.array([9]))
    assert pool.mirrored_len(row) == 0
    assert ints(pool.pages(row, 8, 12)) == [9]
    pool.write(row, 0, pages=np.array([5, 2]))
    assert pool.mirrored_len(row) == 8
    assert ints(pool.pages(row, 0, 12)) == [5, 2, 9]


def test_a_range_written_directly_is_read_from_the_table(pool):
    """req_to_token is the caller's to write: what the mirror lacks is read there; D11."""
    (row,) = pool.alloc(1)
    pool.req_to_token[row, :8] = pool.io.from_host(np.array([20, 21, 22, 23, 8, 9, 10, 11]))
    assert ints(pool.pages(row, 0, 8)) == [5, 2]
    pool.write(row, 0, pages=np.array([7]))
    assert ints(pool.pages(row, 0, 8)) == [7, 2]


def test_debug_finds_a_table_changed_behind_the_mirror(device):
    """Debug compares both on a read, and forget_mirror settles it; D11."""
    pool = ReqToTokenPool(2, 32, device, page_size=4, debug=True)
    (row,) = pool.alloc(1)
    pool.write(row, 0, pages=np.array([5, 2]))
    assert ints(pool.pages(row, 0, 8)) == [5, 2]
    pool.req_to_token[row, 4] = 36
    with pytest.raises(RuntimeError, match=rf"row {row} .*behind the mirror"):
        pool.pages(row, 0, 8)
    pool.forget_mirror(row)
    assert (pool.mirrored_len(row), ints(pool.pages(row, 0, 8))) == (0, [5, 9])


def test_a_reused_row_has_no_mirror_of_its_last_owner(pool):
    """Rows start without a mirror, after a free and after a clear."""
    pool.alloc(1)
    pool.write(0, 0, pages=np.array([5]))
    pool.free(0)
    assert pool.alloc(1) == [0]
    assert pool.mirrored_len(0) == 0
    pool.write(0, 0, pages=np.array([5]))
    pool.clear()
    assert (pool.available_size(), pool.alloc(4)) == (4, [0, 1, 2, 3])
    assert pool.mirrored_len(0) == 0


def test_the_mirror_view_is_read_only(pool):
    """page_table is the mirror itself, int32, and can't be written through."""
    pool.alloc(1)
    pool.write(0, 0, pages=np.array([5, 2]))
    table = pool.page_table()
    assert (ints(table[0]), table.dtype) == ([5, 2, 0, 0, 0, 0, 0, 0], np.int32)
    with pytest.raises(ValueError, match="read-only"):
        table[0, 0] = 1


def test_what_was_written_is_a_copy(pool):
    """The caller may reuse its arrays."""
    pool.alloc(1)
    pages = np.array([5, 2])
    pool.write(0, 0, pages=pages)
    pages[:] = 0
    assert ints(pool.pages(0, 0, 8)) == [5, 2]


def test_a_row_that_ends_inside_a_page_is_cut():
    """max_context_len need not be whole pages; no position outside the row is written."""
    pool = ReqToTokenPool(2, 10, None, page_size=4)
    pool.alloc(1)
    pool.write(0, 0, pages=np.array([1, 2, 3]))
    assert ints(pool.req_to_token) == [[4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [0] * 10]
    assert (ints(pool.pages(0, 0, 10)), pool.mirrored_len(0)) == ([1, 2, 3], 10)
    refuse(pool, lambda: pool.write(0, 0, np.arange(4, 16)), r"\[0, 12\) leave the row of 10")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda pool: pool.write(1, 0, pages=[1]), "row 1 is not in use"),
        (lambda pool: pool.write(-1, 0, pages=[1]), "row -1"),
        (lambda pool: pool.write(9, 0, pages=[1]), "row 9"),
        (lambda pool: pool.write(0, 0), "exactly one"),
        (lambda pool: pool.write(0, 0, [4], pages=[1]), "exactly one"),
        (lambda pool: pool.write(0, 2, pages=[1]), "start=2 must be a multiple"),
        (lambda pool: pool.write(0, -4, pages=[1]), r"\[-4, "),
        (lambda pool: pool.write(0, 32, pages=[1]), "leave the row of 32"),
        (lambda pool: pool.write(0, 0, pages=range(9)), "leave the row of 32"),
        (lambda pool: pool.write(0, -1, [7]), r"\[-1, 0\) leave"),
        (lambda pool: pool.write(0, 28, [4, 5, 6, 7, 8]), r"\[28, 33\) leave"),
        (lambda pool: pool.write(0, 0, [5, 6]), "not consecutive"),
        (lambda pool: pool.write(0, 1, [4, 5]), "not consecutive"),
        (lambda pool: pool.write(0, 0, [4, 5, 7]), "not consecutive"),
        (lambda pool: pool.write(0, 0, [4, 5, 6, 7, 9]), "not consecutive"),
        (lambda pool: pool.write(0, 0, pages=[-1]), "pages -1"),
        (lambda pool: pool.write(0, 0, pages=[2**29]), "int32"),
        (lambda pool: pool.write(0, 0, [2**31]), "int32"),
        (lambda pool: pool.write(0, 0, pages=[1.5]), "dtype float64"),
        (lambda pool: pool.pages(1, 0, 4), "row 1"),
        (lambda pool: pool.pages(0, 2, 4), r"\[2, 4\)"),
        (lambda pool: pool.pages(0, 0, 33), r"\[0, 33\)"),
        (lambda pool: pool.pages(0, 8, 4), r"\[8, 4\)"),
        (lambda pool: pool.pages(0, -4, 4), r"\[-4, 4\)"),
        (lambda pool: pool.forget_mirror(2), "row 2"),
        (lambda pool: pool.forget_mirror(0.0), "row=0.0"),
        (lambda pool: pool.alloc(1.0), "num_rows=1.0"),
        (lambda pool: pool.alloc("1"), "num_rows='1'"),
        (lambda pool: pool.pages("0", 0, 4), "row='0'"),
        (lambda pool: pool.pages(0, 0.0, 4), "start=0.0"),
        (lambda pool: pool.pages(0, 0, None), "stop=None"),
        (lambda pool: pool.pages(0, 0, 10**30), "leave|lie in"),
        (lambda pool: pool.write(0.0, 0, pages=[1]), "row=0.0"),
        (lambda pool: pool.write(0.0, 0, [4]), "row=0.0"),
        (lambda pool: pool.write(0, 0.0, [4]), "start=0.0"),
        (lambda pool: pool.write(0, 4.0, pages=[1]), "start=4.0"),
        (lambda pool: pool.write(0, 10**30, [4]), "leave the row of 32"),
        (lambda pool: pool.write_pages([[0]], [0], [[1]]), r"row=\[0\]"),
        (lambda pool: pool.mirrored_len(4), r"row 4 must be in \[0, 4\)"),
        (lambda pool: pool.mirrored_len(-1), r"row -1 must be in \[0, 4\)"),
        (lambda pool: pool.mirrored_len(0.0), "row=0.0"),
    ],
)
def test_misuse_raises_and_changes_nothing(pool, call, words):
    """Every mistake is a ValueError with the value; table, mirror and rows stay."""
    pool.alloc(1)
    pool.write(0, 0, pages=np.array([5, 2]))
    refuse(pool, lambda: call(pool), words)


def test_the_highest_slot_of_an_int32_table_fits():
    """Slot 2**31 - 1 is written and read exactly; O1."""
    pool = ReqToTokenPool(1, 8, None, page_size=4)
    pool.alloc(1)
    pool.write(0, 0, pages=np.array([2**29 - 1]))
    assert ints(pool.req_to_token[0])[:4] == list(range(2**31 - 4, 2**31))
    assert ints(pool.pages(0, 0, 4)) == [2**29 - 1]
    pool.forget_mirror(0)
    assert ints(pool.pages(0, 0, 4)) == [2**29 - 1]


def test_the_cache_binds_its_page_size(pool):
    """A pool whose rows are free takes any page size."""
    pool.alloc(1)
    pool.write(0, 0, pages=np.array([4, 5]))
    pool.free(0)
    pool.bind_page_size(8)
    pool.alloc(1)
    pool.write(0, 0, pages=np.array([2, 7]))
    assert (pool.page_size, pool.mirrored_len(0)) == (8, 16)
    assert ints(pool.pages(0, 0, 16)) == [2, 7]


def test_rows_in_use_keep_their_page_size(pool):
    """Pages that a request holds in its row are not lost to another page size."""
    pool.alloc(1)
    pool.write(0, 0, pages=np.array([5, 2]))
    pool.bind_page_size(4)
    before = seen(pool)
    with pytest.raises(RuntimeError, match=r"page_size=8 differs .* 4, and rows \[0\] in use"):
        pool.bind_page_size(8)
    assert (seen(pool), pool.page_size) == (before, 4)
    assert (pool.mirrored_len(0), ints(pool.pages(0, 0, 8))) == (8, [5, 2])


@pytest.mark.parametrize("page_size", [0, -4, 1.5, 8.0, "8", None, True])
def test_a_page_size_that_does_not_bind_changes_nothing(pool, page_size):
    """ValueError before anything is assigned."""
    refuse(pool, lambda: pool.bind_page_size(page_size), "page_size=")
    assert pool.page_size == 4


def test_a_pool_of_more_slots_than_the_table_holds_is_refused(pool):
    """The table is int32: slots run to 2**31 - 1; O1."""
    pool.check_slots(2**31)
    pool.check_slots(np.int64(8))
    refuse(pool, lambda: pool.check_slots(2**31 + 1), "num_slots=2147483649 .* int32")
    refuse(pool, lambda: pool.check_slots(8.0), "num_slots=8.0")


def test_equal_calls_give_equal_digests(device):
    """Rows, their order and their mirrors enter the digest; the device does not; D12."""
    digests = []
    for kind in (None, device):
        pool = ReqToTokenPool(3, 16, kind, page_size=4)
        found = [pool.state_digest()]
        pool.alloc(2)
        found.append(pool.state_digest())
        pool.write(1, 0, pages=np.array([3]))
        found.append(pool.state_digest())
        pool.free(0)
        found.append(pool.state_digest())
        digests.append(found)
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 4


@given(
    page_size=st.sampled_from([1, 3, 4]),
    writes=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=8),
    debug=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_reads_equal_a_plain_list_of_pages(page_size, writes, debug):
    """Any series of page writes reads back as a list would, gaps as page 0."""
    pool = ReqToTokenPool(1, 16 * page_size, None, page_size=page_size, debug=debug)
    pool.alloc(1)
    model = [0] * 16
    for i, (start, count) in enumerate(writes):
        pages = list(range(10 * i + 1, 10 * i + 1 + count))
        pool.write(0, start * page_size, pages=np.array(pages, dtype=np.int64))
        model[start : start + count] = pages
        for stop in range(17):
            assert ints(pool.pages(0, 0, stop * page_size)) == model[:stop]
