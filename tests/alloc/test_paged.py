"""The paged allocator of an unsharded pool."""

import numpy as np
import pytest

from alloc import PagedTokenToKVPoolAllocator, PageState
from tests.alloc.alloc_builders import decode, extend, ints, make_paged, pages_of, unchanged
from tests.contract.allocator_contract import AllocatorContract


class TestPagedContract(AllocatorContract):
    """Pages of 4 tokens."""

    def make(self, *, kvcache=None, need_sort=False, **kwargs):
        return PagedTokenToKVPoolAllocator(
            64, 4, None, kwargs.pop("device", None), kvcache, need_sort, **kwargs
        )

    def draw(self, allocator, num_pages, like=None):
        return allocator.alloc(num_pages * 4)

    def draw_pages(self, allocator, num_pages):
        return allocator.alloc_pages(num_pages)


class TestPagedOfOneTokenContract(TestPagedContract):
    """Pages of one token: the degenerate page size."""

    def make(self, *, kvcache=None, need_sort=False, **kwargs):
        return PagedTokenToKVPoolAllocator(
            13, 1, None, kwargs.pop("device", None), kvcache, need_sort, **kwargs
        )

    def draw(self, allocator, num_pages, like=None):
        return allocator.alloc(num_pages)


@pytest.fixture(params=[None, "cpu"], ids=["host", "cpu"])
def device(request):
    if request.param is not None:
        pytest.importorskip("torch")
    return request.param


# Sizes


def test_what_is_over_a_whole_page_is_not_used():
    """num_pages = size // page_size; C210, C211."""
    allocator = PagedTokenToKVPoolAllocator(67, 16, None, None, None)
    assert (allocator.num_pages, allocator.size, allocator.page_size) == (4, 64, 16)
    assert ints(allocator.get_all_free_pages()) == [1, 2, 3, 4]


@pytest.mark.parametrize(("size", "page_size"), [(15, 16), (0, 1), (-16, 16), (16, 0), (16, -1)])
def test_a_pool_without_a_page_is_refused(size, page_size):
    """Sizes are validated at construction, with the value."""
    with pytest.raises(ValueError, match="size="):
        PagedTokenToKVPoolAllocator(size, page_size, None, None, None)


# alloc


def test_alloc_returns_page_contiguous_slots(device):
    """k pages give k runs of page_size slots; page 0 stays out; B15."""
    allocator = make_paged(4, 4, device=device)
    assert ints(allocator.alloc(8)) == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("need_size", [-4, -1, 1, 6, 65])
def test_a_size_that_is_not_whole_pages_is_an_error(need_size):
    """alloc(-4) and alloc(6) at page 4 raise, with the value and the page size; PR7, C212."""
    allocator = make_paged()
    with unchanged(allocator), pytest.raises(ValueError, match=f"need_size={need_size} .*=4"):
        allocator.alloc(need_size)


# alloc_extend


def test_extend_fills_the_last_page_then_whole_pages_then_part_of_one(device):
    """Rest of the last page from last_loc + 1, whole new pages, a partial one; B16, C200-C202."""
    allocator = make_paged(16, 4, device=device)
    first = ints(extend(allocator, [(0, 6, -1)]))
    assert first == [4, 5, 6, 7, 8, 9]
    assert ints(extend(allocator, [(6, 17, 9)])) == [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


def test_extend_inside_the_last_page_takes_no_page(device):
    """Part 1 may be all; C200."""
    allocator = make_paged(16, 4, device=device)
    extend(allocator, [(0, 5, -1)])
    with unchanged(allocator):
        assert ints(extend(allocator, [(5, 8, 8)])) == [9, 10, 11]


def test_requests_take_consecutive_pages_in_batch_order(device):
    """Results and pages follow the batch; C203."""
    allocator = make_paged(16, 4, device=device)
    slots = extend(allocator, [(0, 5, -1), (0, 0, -1), (0, 4, -1), (0, 1, -1)])
    assert ints(slots) == [4, 5, 6, 7, 8, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("need_sort", [False, True])
def test_extend_takes_exactly_the_pages_it_opens(need_sort):
    """New pages: sum of ceil(seq / ps) - ceil(prefix / ps); C213."""
    allocator = make_paged(64, 16, need_sort=need_sort)
    extend(allocator, [(0, 17, -1), (0, 31, -1), (0, 32, -1)])
    assert allocator.page_census()[PageState.HELD] == 2 + 2 + 2
    extend(allocator, [(17, 20, 32), (31, 33, 62), (32, 33, 95)])
    assert allocator.page_census()[PageState.HELD] == 6 + 0 + 1 + 1


def test_an_extend_that_overflows_takes_nothing(device):
    """The second request of a batch overflows: None, and no request got a page; H5."""
    allocator = make_paged(16, 4, device=device)
    with unchanged(allocator):
        assert extend(allocator, [(0, 100, -1)]) is None
        assert extend(allocator, [(0, 40, -1), (0, 40, -1)]) is None
        assert extend(allocator, [(0, 10**12, -1)]) is None
    assert ints(extend(allocator, [(0, 64, -1)])) == list(range(4, 68))


def test_extend_merges_staged_pages_only_when_short():
    """need_sort: staged pages serve an extend that free ones can't; C213."""
    allocator = make_paged(4, 4, need_sort=True)
    slots = extend(allocator, [(0, 16, -1)])
    allocator.free(slots[8:])
    allocator.free(slots[:4])
    assert pages_of(allocator, extend(allocator, [(0, 8, -1)])) == [1, 3]


def test_an_empty_batch_extends_by_nothing(device):
    """No requests give an empty int64 result."""
    allocator = make_paged(device=device)
    with unchanged(allocator):
        out = allocator.alloc_extend([], [], [], [], [], 0)
    assert (ints(out), str(out.dtype).split(".")[-1]) == ([], "int64")


@pytest.mark.parametrize(
    ("prefix", "seq", "last", "total", "words"),
    [
        ([4], [3], [7], -1, "request 0 has prefix_len=4 and seq_len=3"),
        ([0, -1], [4, 4], [-1, -1], 9, "request 1 has prefix_len=-1"),
        ([0], [4, 4], [-1], 8, "prefix_lens has 1 entries and seq_lens 2"),
        ([0], [4], [-1], 5, "extend_num_tokens=5"),
        ([0, 0], [4, 4], [-1], 8, r"last_loc has shape \(1,\) for 2 requests"),
        ([0], [4], [-1, -1], 4, r"last_loc has shape \(2,\) for 1 requests"),
        ([0, 0], [4, 4], [[-1], [-1]], 8, r"last_loc has shape \(2, 1\)"),
        ([0.5], [4], [-1], None, "prefix_lens have dtype float64"),
    ],
)
def test_extend_rejects_lengths_that_contradict_each_other(device, prefix, seq, last, total, words):
    """Every bad batch raises ValueError with the value, and changes nothing."""
    allocator = make_paged(device=device)
    allocator.alloc(8)
    last = allocator.io.from_host(np.array(last))
    with unchanged(allocator), pytest.raises(ValueError, match=words):
        allocator.alloc_extend(prefix, prefix, seq, seq, last, total)


def test_a_last_slot_at_the_wrong_offset_is_an_error(device):
    """(last_loc + 1) % ps == prefix % ps: checked on the host, and in debug elsewhere; C213."""
    allocator = make_paged(device=device, debug=device is not None)
    allocator.alloc(8)
    with unchanged(allocator), pytest.raises(ValueError, match="request 1 has last_loc=9"):
        extend(allocator, [(0, 4, -1), (5, 7, 9)])


def test_lengths_may_be_any_integers():
    """int32 arrays, lists and tensors on the CPU are lengths."""
    torch = pytest.importorskip("torch")
    outs = []
    for make in (list, np.int32, torch.tensor):
        allocator = make_paged()
        prefix, seq, last = ([0], [9], [-1]) if make is list else (make([0]), make([9]), make([-1]))
        outs.append(ints(allocator.alloc_extend(prefix, prefix, seq, seq, last, None)))
    assert outs == [list(range(4, 13))] * 3


# alloc_decode


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_decode_opens_a_page_exactly_on_a_page_boundary(device, page_size):
    """A new page iff (seq_len - 1) % ps == 0, else last_loc + 1; B17, C208, C215."""
    allocator = make_paged(32, page_size, device=device)
    last, seen = -1, []
    for seq in range(1, 3 * page_size + 2):
        held = allocator.page_census()[PageState.HELD]
        last = ints(decode(allocator, [(seq, last)]))[0]
        opened = allocator.page_census()[PageState.HELD] - held
        assert opened == ((seq - 1) % page_size == 0)
        seen.append(last)
    assert seen == list(range(page_size, page_size + 3 * page_size + 1))


def test_decode_serves_a_mixed_batch_in_order(device):
    """One slot a request; only those on a boundary draw, in batch order."""
    allocator = make_paged(16, 4, device=device)
    slots = ints(extend(allocator, [(0, 4, -1), (0, 2, -1), (0, 8, -1)]))
    out = decode(allocator, [(5, slots[3]), (3, slots[5]), (9, slots[13])])
    assert ints(out) == [20, 10, 24]


def test_a_short_decode_takes_nothing(device):
    """All or none of the batch; C215."""
    allocator = make_paged(3, 4, device=device)
    slots = ints(extend(allocator, [(0, 4, -1), (0, 4, -1)]))
    with unchanged(allocator):
        assert decode(allocator, [(5, slots[3]), (5, slots[7])]) is None


@pytest.mark.parametrize(
    ("seq", "last", "words"),
    [([0], [-1], "seq_len=0"), ([6], [5], "last_loc=5"), ([1.5], [-1], "dtype float64")],
)
def test_decode_rejects_lengths_that_contradict_its_slots(seq, last, words):
    """A sequence of no token, a last slot at another offset and a broken length are errors."""
    allocator = make_paged()
    allocator.alloc(8)
    with unchanged(allocator), pytest.raises(ValueError, match=words):
        allocator.alloc_decode(seq, seq, last)


# Frees


@pytest.mark.parametrize("length", range(17, 33))
def test_a_tail_inside_a_page_is_not_stranded(length):
    """Alloc 20 tokens, grow to any recorded length, free all: two pages come back; A3."""
    allocator = make_paged(16, 16)
    start = min(20, length)
    slots = ints(extend(allocator, [(0, start, -1)]))
    slots += ints(extend(allocator, [(start, length, slots[-1])]))
    allocator.free(np.array(slots))
    assert allocator.available_size() == 256


def test_a_boundary_page_is_released_once():
    """[0, 6) then [6, 12) at page 4: three pages in total, the shared page is refused twice; H3."""
    allocator = make_paged()
    row = ints(extend(allocator, [(0, 12, -1)]))
    allocator.free_segment(row[:6], start_pos=0)
    with unchanged(allocator), pytest.raises(ValueError, match="page 2"):
        allocator.free_segment(row[6:], start_pos=6)
    allocator.free_segment(row[8:], start_pos=8)
    assert allocator.available_size() == 64


def test_a_boundary_page_may_be_shared_by_two_segments_of_one_call():
    """Runs of one call that meet inside a page release it once; H3."""
    allocator = make_paged()
    row = ints(extend(allocator, [(0, 12, -1)]))
    allocator.free_segments([(row[:6], 0), (row[6:], 6)])
    assert allocator.available_size() == 64


def test_a_double_free_hands_no_page_out_twice():
    """page 4, 64 tokens: free twice, then 16 distinct pages and no more; H1."""
    allocator = make_paged()
    slots = allocator.alloc(8)
    allocator.free(slots)
    with pytest.raises(ValueError, match="page 1"):
        allocator.free(slots)
    assert allocator.available_size() == 64
    assert pages_of(allocator, allocator.alloc(64)) == list(range(1, 17))


def test_frees_prepend_ascending_inside_a_call():
    """LIFO by call, ids sorted inside one call; C216."""
    allocator = make_paged(8, 4)
    slots = allocator.alloc(24)
    allocator.free(slots[8:12])
    allocator.free(np.concatenate([slots[20:], slots[:4]]))
    assert ints(allocator.get_all_free_pages()) == [1, 6, 3, 7, 8]


def test_pages_of_a_dropped_request_come_back():
    """A request that leaves before anything was cached returns its pages; H8."""
    allocator = make_paged()
    fresh = allocator.available_size()
    slots = extend(allocator, [(0, 11, -1)])
    allocator.free(slots)
    assert allocator.available_size() == fresh


def test_a_contiguous_row_frees_the_same_pages_as_a_shuffled_one():
    """4096 tokens at page 16: 256 pages either way; I3."""
    ours, other = make_paged(300, 16), make_paged(300, 16)
    row = ours.alloc(4096)
    shuffled = np.random.default_rng(1).permutation(other.alloc(4096))
    ours.free_segment(row, start_pos=0)
    other.free(shuffled)
    assert ours.available_size() == 300 * 16
    assert ours.state_digest() == other.state_digest()


def test_debug_finds_a_segment_that_is_not_one_row():
    """In debug a segment with pages that its heads don't show is refused."""
    allocator = make_paged(debug=True)
    row = allocator.alloc(16)
    torn = np.concatenate([row[:2], row[6:8], row[8:]])
    with unchanged(allocator), pytest.raises(ValueError, match="start_pos=0"):
        allocator.free_segment(torn, start_pos=0)
