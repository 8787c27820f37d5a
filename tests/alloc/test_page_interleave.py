"""The classed allocator of a page-interleave pool."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import (
    PageInterleavePlacement,
    PageInterleavePoolAllocator,
    PageShardSpec,
    PageState,
    page_interleave_shard_size,
)
from tests.alloc.alloc_builders import (
    decode,
    extend,
    ints,
    make_interleave,
    make_paged,
    make_token,
    new_chain,
    owners,
    pages_of,
    slots_of,
    snapshot,
    unchanged,
)
from tests.contract.allocator_contract import AllocatorContract
from tests.models.naive_allocator import NaiveAllocator, naive_extend


class InterleaveContract(AllocatorContract):
    """Draws start at class 0, or where the pages of ``like`` start."""

    shard_size: int
    page_size: int

    def make(self, *, kvcache=None, device=None, need_sort=False, debug=False):
        return PageInterleavePoolAllocator(
            8 * self.page_size,
            self.page_size,
            self.shard_size,
            None,
            device,
            kvcache,
            need_sort,
            debug=debug,
        )

    def draw(self, allocator, num_pages, like=None):
        start = 0 if like is None else owners(allocator, like)[0]
        return allocator.alloc_cyclic(start, num_pages * self.page_size)

    def draw_pages(self, allocator, num_pages):
        return allocator.alloc_cyclic_pages(0, num_pages)


class TestInterleaveOfTwoContract(InterleaveContract):
    shard_size, page_size = 2, 4


class TestInterleaveOfFourContract(InterleaveContract):
    shard_size, page_size = 4, 1


class TestInterleaveOfThreeContract(InterleaveContract):
    """An odd number of ranks and an odd page."""

    shard_size, page_size = 3, 5


@pytest.fixture(params=[None, "cpu"], ids=["host", "cpu"])
def device(request):
    if request.param is not None:
        pytest.importorskip("torch")
    return request.param


@pytest.fixture(params=[False, True], ids=["lifo", "need_sort"])
def need_sort(request):
    return request.param


# Construction and sizes


def test_size_is_widened_and_the_page_stays_physical():
    """size counts one rank's slots; the allocator's counts all ranks'; B19, C11, C12."""
    allocator = make_interleave(32, 16, 4)
    assert (allocator.size, allocator.page_size, allocator.shard_size) == (32 * 16 * 4, 16, 4)
    over = PageInterleavePoolAllocator(32 * 16 + 15, 16, 4, None, None, None)
    assert over.size == 32 * 16 * 4


def test_the_shard_size_predicate_is_one_for_every_other_allocator():
    """page_interleave_shard_size tells a sharded pool from a stock one; B19, C13."""
    assert page_interleave_shard_size(make_interleave(shard_size=4)) == 4
    assert page_interleave_shard_size(make_paged()) == 1
    assert page_interleave_shard_size(make_token()) == 1
    assert page_interleave_shard_size(object()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((64, 16, 1), "shard_size=1 must be more than 1"),
        ((64, 16, 0), "shard_size=0"),
        ((64, 16, -2), "shard_size=-2"),
        ((15, 16, 2), "size=15"),
        ((64, 0, 2), "physical_page_size=0"),
    ],
)
def test_a_pool_that_is_not_sharded_is_refused(arguments, words):
    """More than one rank, a page, and at least one page a rank."""
    with pytest.raises(ValueError, match=words):
        PageInterleavePoolAllocator(*arguments, None, None, None)


def test_a_spec_of_another_pool_is_refused():
    """shard_spec, when given, agrees with the other arguments and is kept."""
    spec = PageShardSpec(2, 4, 16, 4096, 512)
    allocator = PageInterleavePoolAllocator(512, 16, 4, None, None, None, shard_spec=spec)
    assert allocator.shard_spec is spec
    for size, shards in ((8, 4), (16, 2)):
        with pytest.raises(ValueError, match="shard_spec"):
            PageInterleavePoolAllocator(512, size, shards, None, None, None, shard_spec=spec)


@pytest.mark.parametrize("shard_size", [2, 4, 8])
def test_class_lists_start_ascending_behind_the_reserved_pages(device, shard_size):
    """Class r holds l % N == r with l // N == 1..pages_per_rank; B20, C14, C15, C16."""
    allocator = make_interleave(5, 4, shard_size, device=device)
    expected = [[r + shard_size * q for q in range(1, 6)] for r in range(shard_size)]
    assert [ints(pages) for pages in allocator.class_free_pages] == expected
    assert allocator.class_free_page_counts() == [5] * shard_size
    for pages in allocator.class_free_pages:
        assert (device is None) == isinstance(pages, np.ndarray)


def test_class_lists_are_copies_in_draw_order_without_staged_pages(device):
    """Arrays are read-only, tensors are copies; staged pages are only counted; B20, D6."""
    allocator = make_interleave(3, 4, 2, device=device, need_sort=True)
    slots = new_chain(allocator, 16, 0)
    allocator.free(slots[:8])
    assert [ints(pages) for pages in allocator.class_free_pages] == [[6], [7]]
    assert allocator.class_free_page_counts() == [2, 2]
    with unchanged(allocator):
        if device is None:
            with pytest.raises(ValueError, match="read-only"):
                allocator.class_free_pages[0][:] = 0
        else:
            allocator.class_free_pages[0][:] = 0


def test_available_is_the_floor_and_aggregate_the_sum():
    """Draining one class makes the floor 0 and leaves the sum large; B24, C25-C28, PR12."""
    allocator = make_interleave(4, 16, 4)
    drained = [allocator.alloc_cyclic(3, 16) for _ in range(4)]
    assert allocator.class_free_page_counts() == [4, 4, 4, 0]
    assert (allocator.available_size(), allocator.aggregate_free_size()) == (0, 12 * 16)
    with unchanged(allocator):
        assert new_chain(allocator, 16, 3) is None
        assert new_chain(allocator, 64, 0) is None
        assert allocator.alloc_cyclic(3, 16) is None
    allocator.free(drained[2])
    assert (allocator.available_size(), allocator.aggregate_free_size()) == (4 * 16, 13 * 16)


def test_the_floor_counts_what_any_chain_can_draw(need_sort):
    """A chain of available_size tokens fits from every base, and one more page need not."""
    for base in range(4):
        allocator = make_interleave(6, 4, 4, need_sort=need_sort)
        allocator.free(new_chain(allocator, 11 * 4, 1)[: 5 * 4])
        floor = allocator.available_size()
        assert floor == 4 * 4 * min(allocator.class_free_page_counts())
        assert len(new_chain(allocator, floor, base)) == floor


def test_least_full_class_is_the_class_with_most_free_pages():
    """Ties go to the lowest id; staged pages count; B23, C17."""
    allocator = make_interleave(4, 4, 4, need_sort=True)
    assert allocator.least_full_class() == 0
    first = allocator.alloc_cyclic(0, 8)
    assert allocator.least_full_class() == 2
    allocator.alloc_cyclic(2, 8)
    assert allocator.least_full_class() == 0
    allocator.free(first[4:])
    assert allocator.least_full_class() == 1


def test_uniform_roots_spread_with_a_skew_of_at_most_one():
    """Roots seeded by least_full_class: 9 on 4 classes of 32 leave 29, 30, 30, 30; B23, C29."""
    allocator = make_interleave(32, 16, 4)
    for _ in range(9):
        new_chain(allocator, 16, allocator.least_full_class())
        counts = allocator.class_free_page_counts()
        assert max(counts) - min(counts) <= 1
    assert counts == [29, 30, 30, 30]


# Draws


def test_a_chain_runs_cyclically_over_the_classes(device):
    """122 tokens at page 16: 8 pages of owners 0..7 mod 4, the last one partial; C18-C20."""
    allocator = make_interleave(32, 16, 4, device=device)
    out = new_chain(allocator, 122, 0)
    assert owners(allocator, out) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [slot % 16 for slot in ints(out)] == [i % 16 for i in range(122)]
    assert ints(out) == slots_of(allocator, range(4, 12))[:122]


@pytest.mark.parametrize("base", [0, 1, 2, 3])
def test_position_page_p_draws_class_base_plus_p(base):
    """Whatever the base, page P lies on (base + P) % N; B21, C19."""
    allocator = make_interleave()
    out = new_chain(allocator, 100, base)
    assert owners(allocator, out) == [(base + P) % 4 for P in range(7)]


def test_a_freed_tail_is_reused_by_the_next_turn_at_once(device):
    """122 tokens, free the 10-token tail, extend 112 to 244; B25, C21-C24."""
    allocator = make_interleave(32, 16, 4, device=device)
    fresh = snapshot(allocator)
    first = new_chain(allocator, 122, 0)
    tail_page = pages_of(allocator, first)[7]
    allocator.free(first[112:122])
    assert allocator.class_free_page_counts() == [30, 30, 30, 31]
    second = extend(allocator, [(112, 244, ints(first)[111])], [0])
    assert pages_of(allocator, second)[0] == tail_page
    assert owners(allocator, second) == [(7 + j) % 4 for j in range(9)]
    allocator.free(first[:112])
    allocator.free(second)
    assert allocator.available_size() == fresh["available"]
    assert allocator.class_free_page_counts() == [32] * 4


@pytest.mark.parametrize("shard_size", [2, 4, 8])
@given(
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    base=st.integers(0, 7),
    noise=st.lists(st.integers(0, 7), max_size=12),
)
@settings(max_examples=30, deadline=None)
def test_owners_stay_cyclic_along_any_page_aligned_growth(shard_size, steps, base, noise):
    """Per-rank counts of a chain differ by at most 1 however it grew; B22, C30."""
    base %= shard_size
    allocator = make_interleave(128, 4, shard_size)
    pages = []
    for i, step in enumerate(steps):
        last = pages[-1] * 4 + 3 if pages else -1
        length = len(pages) * 4
        out = extend(allocator, [(length, length + step * 4, last)], [base])
        pages += pages_of(allocator, out)
        if i < len(noise):
            new_chain(allocator, 4, noise[i] % shard_size)
    found = [page % shard_size for page in pages]
    assert found == [(base + P) % shard_size for P in range(len(pages))]
    counts = [found.count(r) for r in range(shard_size)]
    assert max(counts) - min(counts) <= 1
    assert counts == ints(allocator.layout.cyclic_counts(base, 0, len(pages)))


def test_a_batch_is_the_concatenation_of_its_requests_runs(device):
    """Each request gets its own cyclic run; all slots differ; C39, C42."""
    allocator = make_interleave(32, 16, 4, device=device)
    out = ints(extend(allocator, [(0, 40, -1), (0, 16, -1), (0, 33, -1)], [1, 3, 0]))
    assert len(out) == len(set(out)) == 40 + 16 + 33
    parts = [out[:40], out[40:56], out[56:]]
    assert [owners(allocator, part) for part in parts] == [[1, 2, 3], [3], [0, 1, 2]]


def test_none_bases_are_resolved_in_place_each_at_its_turn(device):
    """N=4, 32 pages a rank, bases [1, None, None]: they become 2 and 1; B21, B26, C40, C41."""
    allocator = make_interleave(32, 16, 4, device=device)
    last = (5 * 4 + 2) * 16 + 15
    bases = [1, None, None]
    out = extend(allocator, [(32, 80, last), (0, 48, -1), (0, 16, -1)], bases)
    assert bases == [1, 2, 1]
    assert owners(allocator, out) == [3, 0, 1, 2, 3, 0, 1]
    assert all(type(base) is int for base in bases)


def test_the_host_twin_returns_the_bases_and_leaves_the_list(need_sort):
    """alloc_extend_pages draws the same pages and resolves to the same bases; D6."""
    slots_pool, pages_pool = (make_interleave(need_sort=need_sort) for _ in range(2))
    filled, kept = [None, 2, None], [None, 2, None]
    out = extend(slots_pool, [(0, 40, -1), (0, 20, -1), (0, 16, -1)], filled)
    drawn = pages_pool.alloc_extend_pages([0, 0, 0], [40, 20, 16], kept)
    assert (drawn.rotation_bases, kept) == (filled, [None, 2, None])
    runs = [out[:40], out[40:60], out[60:]]
    assert ints(drawn.pages) == [page for run in runs for page in pages_of(slots_pool, run)]
    assert pages_pool.state_digest() == slots_pool.state_digest()


def test_a_short_batch_changes_neither_lists_nor_bases(device, need_sort):
    """All or nothing: also the caller's rotation_bases; B21, C43."""
    allocator = make_interleave(2, 16, 4, device=device, need_sort=need_sort)
    allocator.free(new_chain(allocator, 64, 0))
    for requests in ([(0, 16, -1), (0, 16 * 9, -1)], [(0, 10**12, -1), (0, 0, -1)]):
        bases = [None, None]
        with unchanged(allocator):
            assert extend(allocator, requests, bases) is None
        assert bases == [None, None]


def test_shortage_is_judged_on_the_sum_of_the_batch():
    """4 + 5 pages against 8 free: None, although either request alone would fit; C44."""
    allocator = make_interleave(2, 16, 4)
    with unchanged(allocator):
        assert extend(allocator, [(0, 64, -1), (0, 80, -1)], [0, 0]) is None
    assert new_chain(make_interleave(2, 16, 4), 64, 0) is not None
    assert new_chain(make_interleave(2, 16, 4), 80, 0) is not None


def test_one_short_class_stops_the_batch_that_needs_it_only():
    """Other classes still serve; the shortage is per class, not in total; B24."""
    allocator = make_interleave(2, 4, 4)
    allocator.alloc_cyclic(1, 4)
    allocator.alloc_cyclic(1, 4)
    with unchanged(allocator):
        assert extend(allocator, [(0, 4, -1), (0, 4, -1)], [0, 1]) is None
    assert owners(allocator, extend(allocator, [(0, 4, -1), (0, 8, -1)], [0, 2])) == [0, 2, 3]


def test_need_sort_merges_only_the_short_classes():
    """A class that can serve keeps its staged pages; the short one becomes ascending; C36, D4."""
    allocator = make_interleave(3, 4, 2, need_sort=True)
    slots = new_chain(allocator, 6 * 4, 0)
    allocator.free(slots[16:])
    allocator.free(slots[:16])
    allocator.merge_and_sort_free()
    taken = allocator.alloc_cyclic(0, 16)
    allocator.free(taken)
    assert owners(allocator, allocator.alloc_cyclic(1, 4)) == [1]
    out = allocator.alloc_cyclic(0, 8)
    assert owners(allocator, out) == [0, 1]
    seen = snapshot(allocator)
    assert (seen["free"], seen["staged"]) == ([[], [5]], [[2, 4], []])


def test_a_draw_that_is_short_merges_and_stays_cyclic(device):
    """need_sort: staged frees count, and a short draw gets them with cyclic owners; C36."""
    allocator = make_interleave(4, 16, 4, device=device, need_sort=True)
    allocator.free(new_chain(allocator, 16 * 16, 0))
    assert allocator.available_size() == 16 * 16
    assert [len(pages) for pages in allocator.class_free_pages] == [0] * 4
    out = new_chain(allocator, 16 * 16, 1)
    assert owners(allocator, out) == [(1 + P) % 4 for P in range(16)]
    assert pages_of(allocator, out)[3::4] == [4, 8, 12, 16]


def test_alloc_cyclic_takes_whole_pages_at_a_phase(device):
    """Pages of start_class, start_class + 1, ...: one chain's run, for reloads; B28."""
    allocator = make_interleave(4, 16, 4, device=device)
    out = allocator.alloc_cyclic(3, 5 * 16)
    assert pages_of(allocator, out) == [7, 4, 5, 6, 11]
    assert ints(out) == slots_of(allocator, [7, 4, 5, 6, 11])


@pytest.mark.parametrize(
    ("start", "need", "words"),
    [
        (4, 16, "start_class=4"),
        (-1, 16, "start_class=-1"),
        (0, 17, "need_size=17"),
        (0, -16, "need_size=-16"),
    ],
)
def test_alloc_cyclic_rejects_what_is_not_a_phase(device, start, need, words):
    """A class out of range and a size that is not whole pages are errors."""
    allocator = make_interleave(device=device)
    with unchanged(allocator), pytest.raises(ValueError, match=words):
        allocator.alloc_cyclic(start, need)


# Refused calls


def test_calls_without_a_base_name_what_to_use(device):
    """alloc, alloc_pages and alloc_decode raise NotImplementedError; B27, C37, C38."""
    allocator = make_interleave(device=device)
    allocator.alloc_cyclic(0, 64)
    for call in (
        lambda: allocator.alloc(16),
        lambda: allocator.alloc(0),
        lambda: allocator.alloc(-1),
        lambda: allocator.alloc_pages(1),
        lambda: decode(allocator, [(17, 79)]),
    ):
        with unchanged(allocator), pytest.raises(NotImplementedError, match="alloc_extend"):
            call()


def test_a_prefix_that_is_not_whole_pages_is_an_error(device):
    """The message names the request, its prefix and the page size; B27."""
    allocator = make_interleave(device=device)
    out = ints(new_chain(allocator, 40, 0))
    bases = [0, 0]
    with unchanged(allocator), pytest.raises(ValueError, match=r"request 1 .*prefix_len=40.*=16"):
        extend(allocator, [(0, 16, -1), (40, 64, out[-1])], bases)
    assert bases == [0, 0]


@pytest.mark.parametrize("base", [0, 2, 3])
def test_a_base_that_disagrees_with_the_last_page_is_an_error(device, base):
    """The page of last_loc is owned by (base + prefix_pages - 1) % N; B27, C41."""
    allocator = make_interleave(device=device, debug=device is not None)
    last = (5 * 4 + 2) * 16 + 15
    with unchanged(allocator), pytest.raises(ValueError, match=f"base {base} .*last_loc={last}"):
        extend(allocator, [(32, 80, last)], [base])
    assert extend(allocator, [(32, 80, last)], [1]) is not None


def test_minus_one_marks_a_request_without_a_prefix():
    """last_loc of -1 is not looked at; C45."""
    allocator = make_interleave(debug=True)
    assert owners(allocator, extend(allocator, [(0, 16, -1)], [2])) == [2]


@pytest.mark.parametrize("base", [-1, 4, 1.5, "1"])
def test_a_base_out_of_range_is_an_error(base):
    """A base is an integer in [0, N)."""
    allocator = make_interleave()
    with unchanged(allocator), pytest.raises(ValueError, match="request 0 has base"):
        new_chain(allocator, 16, base)


def test_a_continued_prefix_needs_its_base():
    """None is for new chains; a continued prefix without a base is an error; D7."""
    allocator = make_interleave()
    out = ints(new_chain(allocator, 32, 1))
    for bases in ([None], None):
        with unchanged(allocator), pytest.raises(ValueError, match="without a rotation base"):
            extend(allocator, [(32, 64, out[-1])], bases)


def test_new_chains_need_no_list_of_bases():
    """Without rotation_bases every request is a new chain on the least full class."""
    allocator = make_interleave()
    assert owners(allocator, extend(allocator, [(0, 48, -1), (0, 16, -1)], None)) == [0, 1, 2, 3]


def test_bases_that_cannot_be_filled_in_are_refused(device):
    """A tuple would lose the drawn pages when the bases are written back; it raises before."""
    allocator = make_interleave(device=device)
    with unchanged(allocator), pytest.raises(ValueError, match="rotation_bases is a tuple"):
        extend(allocator, [(0, 16, -1)], (None,))


@pytest.mark.parametrize(
    ("bases", "continues"),
    [([0], None), ([0, 0, 0], None), ([0, 0], [True]), ([0, 0], []), ([], None)],
)
def test_one_base_and_one_flag_per_request(device, bases, continues):
    """Lists of another length than the batch are errors, empty ones too."""
    allocator = make_interleave(device=device)
    kept = list(bases)
    with unchanged(allocator), pytest.raises(ValueError, match="2 requests need 2"):
        extend(allocator, [(0, 16, -1), (0, 16, -1)], bases, continues)
    with unchanged(allocator), pytest.raises(ValueError, match="2 requests need 2"):
        allocator.alloc_extend_pages([0, 0], [16, 16], bases, continues)
    assert bases == kept


@pytest.mark.parametrize("last", [[-1], [-1, -1, -1], [[-1, -1]], -1])
def test_a_batch_with_the_wrong_number_of_last_slots_takes_nothing(device, last):
    """One last_loc per request: checked before the draw, on every device."""
    allocator = make_interleave(device=device)
    last = allocator.io.from_host(np.array(last))
    with unchanged(allocator), pytest.raises(ValueError, match="for 2 requests"):
        allocator.alloc_extend([0, 0], [0, 0], [20, 20], [20, 20], last, 40, [0, 1])


@pytest.mark.parametrize(
    ("prefix", "seq", "total", "words"),
    [
        ([32], [16], -16, "prefix_len=32 and seq_len=16"),
        ([-16], [16], 32, "prefix_len=-16"),
        ([0, 0], [16], 16, "prefix_lens has 2 entries"),
        ([0], [16], 17, "extend_num_tokens=17"),
    ],
)
def test_extend_rejects_lengths_that_contradict_each_other(device, prefix, seq, total, words):
    """Every bad batch raises ValueError with the value, and changes nothing."""
    allocator = make_interleave(device=device)
    bases = [None] * len(seq)
    last = allocator.io.from_host(np.full(len(seq), -1))
    with unchanged(allocator), pytest.raises(ValueError, match=words):
        allocator.alloc_extend(prefix, prefix, seq, seq, last, total, bases)
    assert bases == [None] * len(seq)


# Seams


def test_a_seam_takes_its_own_base():
    """continues=False: the new pages need not fit the prefix's last page; D7."""
    allocator = make_interleave(debug=True)
    out = ints(new_chain(allocator, 32, 1))
    bases = [3]
    with unchanged(allocator), pytest.raises(ValueError, match="base 3"):
        extend(allocator, [(32, 80, out[-1])], bases, [True])
    tail = extend(allocator, [(32, 80, out[-1])], bases, [False])
    assert owners(allocator, tail) == [(3 + P) % 4 for P in (2, 3, 4)]


def test_a_seam_without_a_base_starts_on_the_least_full_class():
    """None at a seam resolves to (least_full_class - K) % N; D7."""
    allocator = make_interleave()
    out = ints(new_chain(allocator, 5 * 16, 1))
    assert allocator.least_full_class() == 0
    allocator.alloc_cyclic(0, 16)
    assert (allocator.class_free_page_counts(), allocator.least_full_class()) == (
        [30, 30, 31, 31],
        2,
    )
    bases = [None]
    tail = extend(allocator, [(80, 80 + 32, out[-1])], bases, [False])
    assert owners(allocator, tail) == [2, 3]
    assert bases == [(2 - 5) % 4]


# Plans


def test_pages_by_class_says_what_a_batch_would_draw(need_sort):
    """The counts equal the draw's, None bases on simulated fills, and nothing changes."""
    allocator = make_interleave(need_sort=need_sort)
    arguments = ([32, 0, 0], [80, 48, 20], [1, None, None])
    with unchanged(allocator):
        counts = ints(allocator.pages_by_class(*arguments))
    drawn = allocator.alloc_extend_pages(*arguments)
    found = [page % 4 for page in ints(drawn.pages)]
    assert counts == [found.count(r) for r in range(4)]


def test_class_deficits_are_what_the_classes_lack():
    """max(0, required - free and staged) per class."""
    allocator = make_interleave(3, 4, 4)
    allocator.alloc_cyclic(1, 8)
    assert ints(allocator.class_deficits([4, 4, 2, 0])) == [1, 2, 0, 0]


# Frees


def test_frees_split_by_owner_class(device, need_sort):
    """Pages of owners 3 and 0 lift classes 3 and 0; B26, B29, C31."""
    allocator = make_interleave(device=device, need_sort=need_sort)
    out = new_chain(allocator, 8 * 16, 0)
    before = allocator.class_free_page_counts()
    allocator.free(out[3 * 16 : 5 * 16])
    after = allocator.class_free_page_counts()
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0, 0, 1]


def test_every_way_to_free_reaches_the_class_lists(device, need_sort):
    """free, free_pages, segments and groups give the same class lists; B29, C34, C35."""
    states = []
    for way in ("free", "pages", "segment", "segments", "group"):
        allocator = make_interleave(8, 16, 4, device=device, need_sort=need_sort)
        out = new_chain(allocator, 9 * 16 + 3, 2)
        if way == "free":
            allocator.free(out)
        elif way == "pages":
            allocator.free_pages(np.array(pages_of(allocator, out)))
        elif way == "segment":
            allocator.free_segment(out, start_pos=0)
        elif way == "segments":
            allocator.free_segments([(out[:48], 0), (out[48:], 48)])
        else:
            with allocator.free_group():
                allocator.free(out[:64])
                allocator.free_segment(out[64:], start_pos=64)
        assert allocator.class_free_page_counts() == [8] * 4
        states.append(snapshot(allocator))
    assert states == [states[0]] * 5


def test_a_double_free_of_a_sharded_page_is_an_error(device, need_sort):
    """Class counts never exceed the class: N=4, free twice; PR10."""
    allocator = make_interleave(16, 4, 4, device=device, need_sort=need_sort)
    out = new_chain(allocator, 16, 0)
    allocator.free(out)
    with unchanged(allocator), pytest.raises(ValueError, match="page 4"):
        allocator.free(out)
    assert allocator.class_free_page_counts() == [16] * 4
    assert allocator.available_size() == allocator.aggregate_free_size() == 256


# Whole batches against the naive model


@st.composite
def batches(draw, shard_size, page_size):
    requests, bases, continues = [], [], []
    for _ in range(draw(st.integers(1, 8))):
        prefix = draw(st.integers(0, 6))
        seq = prefix * page_size + draw(st.integers(0, 5 * page_size))
        owner = draw(st.integers(0, shard_size - 1))
        seam = draw(st.booleans())
        base = (owner - prefix + 1) % shard_size
        if seam:
            base = draw(st.integers(0, shard_size - 1))
        if draw(st.booleans()) and (seam or not prefix):
            base = None
        last = (shard_size * 9 + owner) * page_size + page_size - 1 if prefix else -1
        requests.append((prefix * page_size, seq, last))
        bases.append(base)
        continues.append(not seam)
    return requests, bases, continues


@pytest.mark.parametrize("device", [None, "cpu"], ids=["host", "cpu"])
@pytest.mark.parametrize(("shard_size", "page_size"), [(2, 1), (3, 5), (4, 4), (8, 2)])
@given(data=st.data(), need_sort=st.booleans(), debug=st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_batch_equals_the_naive_allocator(
    device, shard_size, page_size, data, need_sort, debug
):
    """Slots, bases, lists and shortage are those of one page at a time."""
    if device is not None:
        pytest.importorskip("torch")
    allocator = make_interleave(
        4, page_size, shard_size, device=device, need_sort=need_sort, debug=debug
    )
    model = NaiveAllocator(shard_size, shard_size, 4, page_size, need_sort)
    for _ in range(3):
        requests, bases, continues = data.draw(batches(shard_size, page_size))
        wanted = [(p, s, base) for (p, s, _), base in zip(requests, bases, strict=True)]
        resolved, classes = model.new_page_classes(wanted)
        given = list(bases)
        out = extend(allocator, requests, bases, continues)
        pages = model.draw(classes)
        if pages is None:
            assert (out, bases) == (None, given)
        else:
            assert ints(out) == naive_extend(requests, pages, page_size)
            assert bases == resolved
            back = data.draw(st.lists(st.sampled_from(pages), unique=True)) if pages else []
            allocator.free(slots_of(allocator, back))
            model.free_pages(back)
        assert snapshot(allocator)["free"] == model.free
        assert snapshot(allocator)["staged"] == model.staged


# The slots against the placement


@pytest.mark.parametrize(("shard_size", "page_size", "size"), [(4, 64, 1024), (3, 5, 32)])
def test_every_slot_has_its_own_row_inside_its_ranks_pool(shard_size, page_size, size):
    """All local rows lie in [ps, size + ps); owner and row are a bijection; AC1."""
    allocator = PageInterleavePoolAllocator(size, page_size, shard_size, None, None, None)
    placement = PageInterleavePlacement(
        PageShardSpec(0, shard_size, page_size, shard_size * page_size, page_size)
    )
    slots = allocator.alloc_cyclic(0, allocator.size)
    rows, ranks = placement.local_index(slots), placement.owner_of(slots)
    whole = size // page_size * page_size
    assert (rows.min(), rows.max()) == (page_size, page_size + whole - 1)
    assert rows.max() < allocator.layout.rank_rows <= size + page_size
    assert len(set(zip(ints(ranks), ints(rows), strict=True))) == allocator.size
    assert ints(placement.loc_of(ranks, rows)) == ints(slots)
    assert ints(allocator.layout.local_row(slots)) == ints(rows)


def test_every_base_operation_works_on_a_sharded_pool(device, need_sort):
    """Backup, groups, segments, merge, clear and reports are all there; AC2."""
    allocator = make_interleave(8, 4, 4, device=device, need_sort=need_sort)
    fresh = snapshot(allocator)
    mark = allocator.backup_state()
    row = new_chain(allocator, 40, 3)
    with allocator.free_group():
        allocator.free_segments([(row[:8], 0), (row[20:24], 20)])
    allocator.merge_and_sort_free()
    assert allocator.page_census()[PageState.HELD] == 7
    allocator.restore_state(mark)
    assert snapshot(allocator) == fresh
    new_chain(allocator, 40, 3)
    allocator.clear()
    assert snapshot(allocator) == fresh
