"""The allocator of a context-parallel pool: pages lie on the rank that computes them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import (
    CPSharedPagedTokenToKVPoolAllocator,
    PageState,
    build_in_seq_page_compute_owners,
    page_interleave_shard_size,
)
from alloc.owner_lanes import _fullest_first, _taken_from
from tests.alloc.alloc_builders import (
    as_slots,
    decode,
    extend,
    ints,
    make_lanes,
    pages_of,
    slots_of,
    snapshot,
    unchanged,
)
from tests.contract.allocator_contract import AllocatorContract
from tests.models.naive_allocator import naive_extend


def lane(allocator, page):
    """Return a page's owner by the rule ``(l - 1) % cp_size``."""
    return (page - 1) % allocator.cp_size


def lanes_of(allocator, slots):
    return [lane(allocator, page) for page in pages_of(allocator, slots)]


def own_extend(allocator, prefix, seq, last, owners):
    """Call alloc_extend_compute_owner for one request."""
    return allocator.alloc_extend_compute_owner(
        prefix_lens=as_slots(allocator, [prefix]),
        prefix_lens_cpu=[prefix],
        seq_lens=as_slots(allocator, [seq]),
        seq_lens_cpu=[seq],
        last_loc=as_slots(allocator, [last]),
        extend_num_tokens=seq - prefix,
        page_compute_owners=owners,
    )


class StockContract(AllocatorContract):
    """Stock draws; ``like`` names the lanes."""

    cp_size: int
    page_size: int

    def make(self, **kwargs):
        return make_lanes(12, self.page_size, self.cp_size, **kwargs)

    def draw(self, allocator, num_pages, like=None):
        if like is not None:
            return allocator.alloc_pages_with_owners(lanes_of(allocator, like))
        return allocator.alloc(num_pages * self.page_size)

    def draw_pages(self, allocator, num_pages):
        return allocator.alloc_pages(num_pages)


class TestTwoLanesContract(StockContract):
    cp_size, page_size = 2, 4


class TestThreeLanesContract(StockContract):
    """An odd number of ranks and an odd page."""

    cp_size, page_size = 3, 5


class TestFourLanesOfOneTokenContract(StockContract):
    cp_size, page_size = 4, 1


class TestOneLaneContract(StockContract):
    """A group of one rank is a paged pool."""

    cp_size, page_size = 1, 4


@pytest.fixture(params=[None, "cpu"], ids=["host", "cpu"])
def device(request):
    if request.param is not None:
        pytest.importorskip("torch")
    return request.param


@pytest.fixture(params=[False, True], ids=["lifo", "need_sort"])
def need_sort(request):
    return request.param


# Construction


def test_sizes_and_ranks_are_kept():
    """The logical size is the pool's; page 0 alone is reserved; B30, C145, C151, D8."""
    pool = object()
    allocator = CPSharedPagedTokenToKVPoolAllocator(64, 16, 4, None, None, pool, True, 4, 3)
    assert (allocator.size, allocator.physical_size, allocator.page_size) == (64, 16, 4)
    assert (allocator.cp_size, allocator.cp_rank, allocator.need_sort) == (4, 3, True)
    assert allocator.num_pages == 16
    assert sorted(ints(allocator.get_all_free_pages())) == list(range(1, 17))
    assert allocator.get_kvcache() is pool
    assert page_interleave_shard_size(allocator) == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"logical_size": 66}, "logical_size must be page aligned, got 66 for pages of 4"),
        ({"physical_size": 17}, "physical_size must be page aligned, got 17"),
        (
            {"logical_size": 60},
            "logical_size must equal physical_size . cp_size, got "
            "logical_size=60 physical_size=16 cp_size=4",
        ),
        ({"cp_rank": 4}, r"cp_rank must be in \[0, 4\), got 4"),
        ({"cp_rank": -1}, r"cp_rank must be in \[0, 4\), got -1"),
        ({"logical_size": 0, "cp_size": 0, "cp_rank": 0}, r"in \[0, 0\)"),
        ({"logical_size": 0, "physical_size": 0}, "physical_size=0"),
        ({"page_size": 0}, "page_size=0"),
        # all of these at once: the first rule in this order is named
        ({"logical_size": 65, "physical_size": 17, "cp_rank": 9}, "logical_size must be page"),
        ({"physical_size": 17, "cp_rank": 9}, "physical_size must be page"),
        ({"logical_size": 60, "cp_rank": 9}, "must equal"),
    ],
)
def test_sizes_that_disagree_are_refused(changed, words):
    """ValueError with the values, in a fixed order; B30, C146-C150."""
    arguments = {
        "logical_size": 64,
        "physical_size": 16,
        "page_size": 4,
        "dtype": None,
        "device": None,
        "kvcache": None,
        "need_sort": False,
        "cp_size": 4,
        "cp_rank": 0,
    }
    with pytest.raises(ValueError, match=words):
        CPSharedPagedTokenToKVPoolAllocator(**arguments | changed)


def test_where_a_page_lies():
    """Owner (l - 1) % cp, local page (l - 1) // cp + 1, page 0 to 0; B31, C151, D8."""
    layout = make_lanes(3, 4, 2).layout
    pages = np.arange(7)
    assert ints(layout.class_of(pages[1:])) == [0, 1, 0, 1, 0, 1]
    assert ints(layout.local_page(pages)) == [0, 1, 1, 2, 2, 3, 3]
    assert layout.local_row(5 * 4 + 3) == 3 * 4 + 3
    assert layout.rank_rows == 4 * 4


# Lane statistics


def test_lane_stats_count_free_and_staged_pages():
    """required, available, deficits per lane, as lists; B32, C152-C154."""
    allocator = make_lanes(2, 4, 4, need_sort=True)
    slots = allocator.alloc_pages_with_owners([3, 3, 1, 0])
    allocator.free(slots[:4])
    with unchanged(allocator):
        stats = allocator.compute_owner_lane_stats([3, 3, 0, 2, 3])
    assert stats == ([1, 0, 1, 3], [1, 1, 2, 1], [0, 0, 0, 2])
    assert all(type(count) is int for counts in stats for count in counts)


def test_stats_of_no_owners_are_what_is_available():
    """Zero required, zero missing, real availability; C156."""
    allocator = make_lanes(2, 4, 2)
    allocator.alloc_pages_with_owners([1])
    with unchanged(allocator):
        assert allocator.compute_owner_lane_stats([]) == ([0, 0], [2, 1], [0, 0])


@pytest.mark.parametrize("owner", [-1, 4, 10**12])
def test_an_owner_out_of_range_is_an_error(owner):
    """ValueError with the range and the value, from every call with owners; B32, C155."""
    allocator = make_lanes()
    words = rf"compute owner must be in \[0, 4\), got {owner}"
    for call in (
        allocator.compute_owner_lane_stats,
        allocator.alloc_pages_with_owners,
        allocator.alloc_owner_pages,
        lambda owners: own_extend(allocator, 0, 8, -1, owners),
    ):
        with unchanged(allocator), pytest.raises(ValueError, match=words):
            call([0, owner])


@pytest.mark.parametrize("owners", [[0.5], [True], [[0, 1]]])
def test_owners_that_are_not_a_row_of_integers_are_an_error(owners):
    """Floats, bools and tables are refused."""
    allocator = make_lanes()
    with unchanged(allocator), pytest.raises(ValueError, match="page_compute_owners"):
        allocator.alloc_pages_with_owners(owners)


# Draws with owners


def test_pages_follow_the_given_owners(device, need_sort):
    """Page i lies on owners[i]; slots are whole pages in input order; B33, C160, C171."""
    allocator = make_lanes(4, 4, 4, device=device, need_sort=need_sort, debug=True)
    owners = [2, 0, 2, 3, 2, 0]
    slots = allocator.alloc_pages_with_owners(owners)
    assert pages_of(allocator, slots) == [3, 1, 7, 4, 11, 5]
    assert ints(slots) == slots_of(allocator, pages_of(allocator, slots))
    assert str(slots.dtype).endswith("int64")
    assert lanes_of(allocator, slots) == owners


def test_owners_may_be_any_integers(device):
    """Lists, narrow arrays and tensors name the same lanes."""
    found = []
    kinds = [list, np.array, lambda owners: np.array(owners, dtype=np.int8)]
    if device is not None:
        import torch

        kinds.append(torch.tensor)
    for kind in kinds:
        found.append(ints(make_lanes(device=device).alloc_pages_with_owners(kind([3, 1, 3]))))
    assert found == [found[0]] * len(kinds)


def test_no_owners_give_an_empty_result(device):
    """Empty in, empty int64 out, also from a dry pool; B33, C157, C172."""
    allocator = make_lanes(1, 4, 2, device=device)
    for _ in range(2):
        with unchanged(allocator):
            empty = allocator.alloc_pages_with_owners([])
            assert (ints(empty), str(empty.dtype).split(".")[-1]) == ([], "int64")
            assert ints(allocator.alloc_owner_pages([])) == []
        allocator.alloc(8)


def test_a_short_lane_gives_none_and_never_another_lane(device, need_sort):
    """One lane short: None, nothing changed, however full the others; B33, C159, C173."""
    allocator = make_lanes(2, 4, 4, device=device, need_sort=need_sort)
    allocator.alloc_pages_with_owners([1])
    with unchanged(allocator):
        assert allocator.alloc_pages_with_owners([0, 1, 1]) is None
        assert allocator.alloc_owner_pages([0, 1, 1]) is None
        assert own_extend(allocator, 0, 12, -1, [0, 1, 1]) is None
    assert allocator.available_size() == 7 * 4
    assert lanes_of(allocator, allocator.alloc_pages_with_owners([0, 1])) == [0, 1]


def test_free_pages_go_before_staged_ones_and_nothing_merges():
    """Free order, then staged order of release; the rest stays as it was; D4, C158, C163, C175."""
    allocator = make_lanes(4, 1, 2, need_sort=True)
    first = ints(allocator.alloc_owner_pages([0, 0, 0]))
    assert first == [1, 3, 5]
    for page in (5, 1, 3):
        allocator.free_pages(np.array([page]))
    assert snapshot(allocator)["staged"] == [[5, 1, 3], []]
    assert ints(allocator.alloc_owner_pages([0, 1, 0])) == [7, 2, 5]
    assert snapshot(allocator)["staged"] == [[1, 3], []]
    assert snapshot(allocator)["free"] == [[], [4, 6, 8]]
    allocator.check_invariants()
    assert ints(allocator.alloc_owner_pages([0, 0])) == [1, 3]
    assert allocator.alloc_owner_pages([0]) is None


def test_the_last_freed_page_of_a_lane_comes_back_first():
    """Last in, first out holds per lane; D8."""
    allocator = make_lanes(4, 1, 2)
    allocator.alloc_pages(8)
    for page in (1, 2, 3, 4, 7):
        allocator.free_pages(np.array([page]))
    assert ints(allocator.alloc_owner_pages([1, 0, 0, 1, 0])) == [4, 7, 3, 2, 1]


@given(
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=12),
)
@settings(max_examples=80, deadline=None)
def test_owned_draws_and_frees_keep_every_page_on_its_lane(cp_size, need_sort, draws):
    """Whatever is drawn and freed, page i has owner i and nothing is lost; B33."""
    allocator = make_lanes(6, 2, cp_size, need_sort=need_sort, debug=True)
    held = []
    for i, owners in enumerate(draws):
        owners = [owner % cp_size for owner in owners]
        deficits = allocator.compute_owner_lane_stats(owners)[2]
        slots = allocator.alloc_pages_with_owners(owners)
        assert (slots is None) == any(deficits)
        if slots is not None:
            assert lanes_of(allocator, slots) == owners
            held.append(slots)
        if i % 3 == 2 and held:
            allocator.free(held.pop(i % len(held)))
    for slots in held:
        allocator.free(slots)
    assert allocator.available_size() == allocator.size
    allocator.check_invariants()


# Extends with owners


def test_an_extend_fills_the_last_page_then_takes_owned_ones(device):
    """last_loc + 1 first, then whole and partial pages by owner; B34, C164, C167."""
    allocator = make_lanes(8, 4, 2, device=device, debug=True)
    first = own_extend(allocator, 0, 6, -1, [1, 0])
    assert ints(first) == [8, 9, 10, 11, 4, 5]
    second = own_extend(allocator, 6, 17, 5, [0, 1, 0])
    assert ints(second) == [6, 7, *range(12, 16), *range(16, 20), 20]
    assert str(second.dtype).endswith("int64")


def test_an_extend_inside_the_last_page_needs_no_owner(device):
    """Zero new pages work with an empty list; C170."""
    allocator = make_lanes(8, 4, 2, device=device)
    last = ints(own_extend(allocator, 0, 5, -1, [1, 1]))[-1]
    with unchanged(allocator):
        assert ints(own_extend(allocator, 5, 8, last, [])) == [last + 1, last + 2, last + 3]
        assert ints(own_extend(allocator, 5, 5, last, [])) == []


@pytest.mark.parametrize("batch", [0, 2, 3])
def test_only_one_request_at_a_time(batch):
    """Batch 1 only, also for an empty batch; B34, C165."""
    allocator = make_lanes()
    lens, last = [4] * batch, [-1] * batch
    zeros = [0] * batch
    with (
        unchanged(allocator),
        pytest.raises(ValueError, match=f"supports batch size 1 only, got {batch}"),
    ):
        allocator.alloc_extend_compute_owner(zeros, zeros, lens, lens, last, 4 * batch, [0] * batch)


@pytest.mark.parametrize(
    ("prefix", "seq", "last", "owners"),
    [(0, 9, -1, [0, 1]), (0, 8, -1, [0, 1, 2]), (5, 8, 8, [0]), (0, 1, -1, [])],
)
def test_owners_must_match_the_new_pages(prefix, seq, last, owners):
    """ValueError with both numbers; B34, C166."""
    allocator = make_lanes()
    allocator.alloc(8)
    new = -(-seq // 4) - -(-prefix // 4)
    words = f"num_new_pages={new} page_compute_owners={len(owners)}"
    with unchanged(allocator), pytest.raises(ValueError, match=words):
        own_extend(allocator, prefix, seq, last, owners)


def test_lengths_that_contradict_each_other_are_errors(device):
    """The checks of alloc_extend hold here too."""
    allocator = make_lanes(device=device, debug=True)
    allocator.alloc(16)
    owners = [0]
    for prefix, seq, total, last, words in [
        ([4], [3], -1, [7], "prefix_len=4"),
        ([0], [4], 5, [-1], "extend_num_tokens=5"),
        ([0], [4], 4, [-1, -1], "last_loc has shape"),
        ([5], [9], 4, [9], "last_loc=9"),
    ]:
        with unchanged(allocator), pytest.raises(ValueError, match=words):
            allocator.alloc_extend_compute_owner(
                prefix, prefix, seq, seq, as_slots(allocator, last), total, owners
            )


@given(
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 4),
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
@settings(max_examples=80, deadline=None)
def test_chunks_of_a_zigzag_prefill_lie_where_they_are_computed(page_size, cp_size, chunks):
    """Any chunks of one request: each new page on the helper's owner, slots as one by one; B34."""
    allocator = make_lanes(250, page_size, cp_size)
    row = []
    for grown in chunks:
        prefix, seq = len(row), len(row) + grown
        owners = build_in_seq_page_compute_owners(prefix, seq, page_size, cp_size)
        slots = ints(own_extend(allocator, prefix, seq, row[-1] if row else -1, owners))
        new = list(dict.fromkeys(slot // page_size for slot in slots))
        if prefix % page_size:
            new = [page for page in new if page != row[-1] // page_size]
        assert [lane(allocator, page) for page in new] == ints(owners)
        last = row[-1] if row else -1
        assert slots == naive_extend([(prefix, seq, last)], new, page_size)
        row += slots
    assert len(set(row)) == len(row)


# Zigzag owners


def test_even_segments_go_out_and_back():
    """2 * cp equal segments; rank r takes r and 2 * cp - 1 - r; B35, C226."""
    owners = ints(build_in_seq_page_compute_owners(0, 24 * 16, 16, 4))
    assert owners == [r for r in [0, 1, 2, 3, 3, 2, 1, 0] for _ in range(3)]


@pytest.mark.parametrize(
    ("num_pages", "expected"),
    [
        (0, []),
        (1, [0]),
        (3, [0, 1, 1]),
        (4, [0, 1, 1, 0]),
        (5, [0, 0, 1, 1, 0]),
        (6, [0, 0, 1, 1, 1, 0]),
        (7, [0, 0, 1, 1, 1, 1, 0]),
    ],
)
def test_uneven_lengths_give_the_first_segments_a_page_more(num_pages, expected):
    """Segments of pages that differ by at most one, longer ones first."""
    assert ints(build_in_seq_page_compute_owners(0, num_pages, 1, 2)) == expected
    whole = build_in_seq_page_compute_owners(0, num_pages * 64, 64, 2)
    partial = build_in_seq_page_compute_owners(0, max(0, num_pages * 64 - 63), 64, 2)
    assert ints(whole) == ints(partial) == expected


@given(
    st.integers(0, 200), st.integers(0, 3000), st.sampled_from([1, 3, 16, 64]), st.integers(1, 9)
)
@settings(max_examples=150, deadline=None)
def test_laws_of_the_zigzag(prefix, grown, page_size, cp_size):
    """One owner a new page; consecutive segments; no rank two pages ahead of another."""
    seq = prefix + grown
    owners = build_in_seq_page_compute_owners(prefix, seq, page_size, cp_size)
    new = -(-seq // page_size) - -(-prefix // page_size)
    assert (len(owners), owners.dtype) == (new, np.int64)
    counts = np.bincount(owners, minlength=cp_size)
    assert counts.max() - counts.min() <= 1
    shortest, longer = divmod(new, 2 * cp_size)
    lengths = [shortest + (i < longer) for i in range(2 * cp_size)]
    order = [*range(cp_size), *reversed(range(cp_size))]
    assert ints(owners) == [r for r, n in zip(order, lengths, strict=True) for _ in range(n)]


@pytest.mark.parametrize(
    "arguments", [(0, 8, 0, 2), (0, 8, 4, 0), (-1, 8, 4, 2), (9, 8, 4, 2), (0, -1, 4, 2)]
)
def test_lengths_without_a_zigzag_are_errors(arguments):
    """Sizes below 1 and a prefix longer than the sequence raise with the values."""
    with pytest.raises(ValueError, match=r"=-?\d"):
        build_in_seq_page_compute_owners(*arguments)


# Stock draws


def test_a_fresh_pool_gives_one_two_three():
    """Fullest lane first, ties to the lowest: a fresh pool is drawn in order; D8, C177."""
    assert ints(make_lanes(4, 4, 4).alloc_pages(16)) == list(range(1, 17))


def test_a_stock_draw_evens_the_lanes():
    """Lanes 0 and 2 were drained by owners; stock draws take from 1 and 3 until all are even."""
    allocator = make_lanes(4, 1, 4)
    allocator.alloc_owner_pages([0, 0, 0, 2])
    owners = [lane(allocator, page) for page in ints(allocator.alloc_pages(9))]
    assert owners == [1, 3, 1, 2, 3, 1, 2, 3, 0]
    assert ints(allocator.free_list.counts()) == [0, 1, 1, 1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
@settings(max_examples=200, deadline=None)
def test_the_closed_form_takes_what_one_at_a_time_takes(counts, data):
    """The lanes of a draw, in order, for any fills."""
    num_pages = data.draw(st.integers(0, sum(counts)))
    left, expected = list(counts), []
    for _ in range(num_pages):
        expected.append(left.index(max(left)))
        left[expected[-1]] -= 1
    array = np.array(counts, dtype=np.int64)
    assert ints(_fullest_first(array, num_pages)) == expected
    assert ints(array - _taken_from(array, num_pages)) == left


def test_staged_pages_wait_while_free_ones_serve():
    """need_sort: a stock draw merges only when the free pages alone can't serve it; B9, B36."""
    allocator = make_lanes(2, 1, 4, need_sort=True)
    allocator.free_pages(allocator.alloc_pages(1))
    assert ints(allocator.alloc_pages(3)) == [2, 3, 4]
    assert allocator.page_census()[PageState.STAGED] == 1
    assert ints(allocator.alloc_pages(5)) == [1, 5, 6, 7, 8]
    assert allocator.page_census()[PageState.STAGED] == 0


def test_stock_extend_and_decode_work(device, need_sort):
    """alloc_extend and alloc_decode as on a paged pool; B36, C177."""
    allocator = make_lanes(8, 4, 4, device=device, need_sort=need_sort)
    slots = ints(extend(allocator, [(0, 6, -1), (0, 8, -1)]))
    assert slots == [4, 5, 6, 7, 8, 9, *range(12, 20)]
    assert ints(extend(allocator, [(6, 9, 9)])) == [10, 11, 20]
    assert ints(decode(allocator, [(9, 19), (10, 20)])) == [24, 21]


def test_a_stock_draw_that_is_short_takes_nothing(device, need_sort):
    """None over all lanes, nothing changed; B36."""
    allocator = make_lanes(2, 4, 2, device=device, need_sort=need_sort)
    slots = extend(allocator, [(0, 12, -1)])
    with unchanged(allocator):
        assert allocator.alloc(8) is None
        assert extend(allocator, [(0, 1, -1), (0, 4, -1)]) is None
        assert decode(allocator, [(13, ints(slots)[-1]), (13, ints(slots)[-1])]) is None


def test_one_rank_is_a_paged_pool(need_sort):
    """cp_size 1: the same pages and states as the paged allocator's."""
    from tests.alloc.alloc_builders import make_paged

    lanes, paged = make_lanes(8, 4, 1, need_sort=need_sort), make_paged(8, 4, need_sort=need_sort)
    for allocator in (lanes, paged):
        slots = allocator.alloc(24)
        allocator.free(slots[8:16])
        allocator.free(slots[:4])
        allocator.alloc(8)
    assert snapshot(lanes) == snapshot(paged)


def test_the_rank_changes_no_result():
    """Every rank draws the same logical pages; C164."""
    digests = set()
    for rank in range(4):
        allocator = CPSharedPagedTokenToKVPoolAllocator(64, 16, 4, None, None, None, False, 4, rank)
        allocator.alloc_pages_with_owners([1, 3])
        allocator.free(allocator.alloc(12)[:4])
        digests.add(allocator.state_digest())
    assert len(digests) == 1


# What a scheduler asks before it evicts


def test_what_free_pages_lack_is_looked_for_among_the_evictable():
    """pages_by_class fits exactly when free and evictable pages suffice in sum."""
    allocator = make_lanes(4, 4, 2)
    allocator.alloc_pages_with_owners([0, 0, 0, 1])
    ask = {"prefix_lens": [0], "seq_lens": [6 * 4], "rotation_bases": [None]}
    assert ints(allocator.free_list.counts()) == [1, 3]
    for evictable, expected, fits in [
        ([2, 0], [3, 3], True),
        ([0, 1], [2, 4], False),
        ([1, 1], [2, 4], True),
        (None, [3, 3], False),
    ]:
        if evictable is not None:
            evictable = np.array(evictable)
        with unchanged(allocator):
            required = allocator.pages_by_class(**ask, evictable_by_class=evictable)
        room = allocator.free_list.counts() + (0 if evictable is None else evictable)
        assert ints(required) == expected
        assert bool((required <= room).all()) == fits
        assert ints(allocator.class_deficits(required)).count(0) < 2
    ask["seq_lens"] = [3 * 4]
    assert ints(allocator.pages_by_class(**ask)) == [1, 2]
