"""What every allocator must do, whatever its classes: run by a thin subclass per allocator.

A subclass says how to make a pool and how to draw from it. Numbers are pages of the subclass's own
pool; where order matters the naive allocator predicts it.
"""

import subprocess
import sys
from itertools import chain, pairwise

import numpy as np
import pytest

from alloc import PageState
from tests.alloc.alloc_builders import ints, pages_of, slots_of, snapshot, unchanged
from tests.models.naive_allocator import NaiveAllocator


class Interrupting(np.ndarray):
    """An array whose next write is hit by Ctrl-C."""

    def __setitem__(self, key, value):
        raise KeyboardInterrupt


class OutOfMemory(np.ndarray):
    """An array whose next write finds no memory."""

    def __setitem__(self, key, value):
        raise MemoryError


class AllocatorContract:
    """At least 12 pages, drawn by ``draw``. Subclasses: ``class TestX(AllocatorContract)``."""

    def make(self, *, need_sort=False, device=None, debug=False, kvcache=None):
        raise NotImplementedError

    def draw(self, allocator, num_pages, like=None):
        """Draw pages as slots; with ``like``, from the classes where those pages came from."""
        raise NotImplementedError

    def draw_pages(self, allocator, num_pages):
        """Draw with the host twin."""
        raise NotImplementedError

    @pytest.fixture(params=[False, True], ids=["lifo", "need_sort"])
    def need_sort(self, request):
        return request.param

    @pytest.fixture(params=[None, "cpu"], ids=["host", "cpu"])
    def device(self, request):
        if request.param is not None:
            pytest.importorskip("torch")
        return request.param

    @pytest.fixture
    def allocator(self, need_sort, device):
        return self.make(need_sort=need_sort, device=device)

    @pytest.fixture
    def lifo(self, device):
        return self.make(need_sort=False, device=device)

    @pytest.fixture
    def sorting(self, device):
        return self.make(need_sort=True, device=device)

    def model_of(self, allocator):
        layout = allocator.layout
        return NaiveAllocator(
            layout.num_classes,
            layout.first_page,
            layout.pages_per_class,
            layout.page_size,
            allocator.need_sort,
        )

    def total(self, allocator):
        return allocator.layout.capacity_pages

    def tokens(self, allocator, num_pages):
        return num_pages * allocator.page_size

    # Draws

    def test_reserved_pages_are_never_handed_out(self, allocator):
        """A pool drawn dry hands out every page but the padding pages, each once."""
        layout = allocator.layout
        pages = []
        for _ in range(layout.pages_per_class):
            pages += pages_of(allocator, self.draw(allocator, layout.num_classes))
        assert sorted(pages) == list(range(layout.first_page, layout.num_pages))
        assert allocator.available_size() == 0

    def test_a_dry_pool_returns_none_and_changes_nothing(self, allocator):
        """Exhaustion is None, and repeats."""
        assert self.draw(allocator, self.total(allocator)) is not None
        for _ in range(2):
            with unchanged(allocator):
                assert self.draw(allocator, 1) is None

    def test_a_draw_over_capacity_takes_nothing(self, allocator):
        """One page too many leaves content and order of the free list; H5."""
        taken = self.draw(allocator, 3)
        allocator.free(taken[: self.tokens(allocator, 2)])
        with unchanged(allocator):
            assert self.draw(allocator, self.total(allocator)) is None
            assert self.draw(allocator, 10**12) is None

    def test_slots_are_int64_on_the_device(self, allocator, device):
        """Slots are int64, page-contiguous and where the caller asked for them."""
        slots = self.draw(allocator, 3)
        assert str(slots.dtype).endswith("int64")
        assert (device is None) == isinstance(slots, np.ndarray)
        if device is not None:
            assert str(slots.device) == device
        assert ints(slots) == slots_of(allocator, pages_of(allocator, slots))

    def test_a_fresh_pool_draws_the_lowest_pages_in_order(self, allocator):
        """A fresh pool gives ascending pages from the first page on."""
        first = allocator.layout.first_page
        assert pages_of(allocator, self.draw(allocator, 5)) == list(range(first, first + 5))

    def test_a_draw_of_nothing_is_empty(self, allocator):
        """Zero tokens give an empty int64 result, also from a dry pool."""
        with unchanged(allocator):
            empty = self.draw(allocator, 0)
        assert (ints(empty), str(empty.dtype).split(".")[-1]) == ([], "int64")
        self.draw(allocator, self.total(allocator))
        assert ints(self.draw(allocator, 0)) == []

    def test_the_host_twin_draws_the_same_pages(self, need_sort, device):
        """A draw in page ids and a draw in slots take the same pages."""
        in_slots, in_pages = (self.make(need_sort=need_sort, device=device) for _ in range(2))
        slots = self.draw(in_slots, 5)
        pages = self.draw_pages(in_pages, 5)
        assert (ints(pages), pages.dtype) == (pages_of(in_slots, slots), np.int64)
        assert in_pages.state_digest() == in_slots.state_digest()

    def test_a_negative_draw_is_an_error(self, allocator):
        """A negative number of pages is refused."""
        with unchanged(allocator), pytest.raises(ValueError, match="-1"):
            self.draw_pages(allocator, -1)

    # Frees

    def test_freeing_everything_restores_everything(self, allocator):
        """Nothing is stranded: all counts are those of a fresh pool."""
        before = allocator.available_size()
        allocator.free(self.draw(allocator, 7))
        assert allocator.available_size() == before
        assert allocator.page_census()[PageState.HELD] == 0

    def test_freed_pages_come_back_before_fresh_ones(self, lifo):
        """The pages of the last free are drawn next, lowest first."""
        slots = self.draw(lifo, 6)
        back = slots[self.tokens(lifo, 2) : self.tokens(lifo, 4)]
        lifo.free(back)
        assert ints(self.draw(lifo, 2, like=back)) == ints(back)

    def test_the_last_free_call_comes_back_first(self, lifo):
        """Two pages of one class freed in two calls come back in reverse order of the calls."""
        step = lifo.layout.num_classes
        slots = self.draw(lifo, step + 1)
        size = lifo.page_size
        low, high = slots[:size], slots[step * size :]
        lifo.free(high)
        lifo.free(low)
        again = [pages_of(lifo, self.draw(lifo, 1, like=low))[0] for _ in range(2)]
        assert again == [*pages_of(lifo, low), *pages_of(lifo, high)]
        lifo.free(low)
        lifo.free(high)
        again = [pages_of(lifo, self.draw(lifo, 1, like=low))[0] for _ in range(2)]
        assert again == [*pages_of(lifo, high), *pages_of(lifo, low)]

    def test_the_order_inside_one_free_call_does_not_matter(self, allocator):
        """Shuffled slots with repeats release the same pages in the same order; I3."""
        twin = self.make(need_sort=allocator.need_sort, device=allocator.device)
        slots = self.draw(allocator, 8)
        self.draw(twin, 8)
        rng = np.random.default_rng(5)
        shuffled = rng.permutation(np.concatenate([np.asarray(slots)] * 2))
        allocator.free(slots)
        twin.free(twin.io.from_host(shuffled))
        assert snapshot(twin) == snapshot(allocator)

    def test_one_slot_frees_its_whole_page(self, allocator):
        """A free of part of a page releases the page."""
        slots = self.draw(allocator, 3)
        allocator.free(slots[self.tokens(allocator, 2) - 1 : self.tokens(allocator, 2)])
        held = pages_of(allocator, slots)
        assert ints(allocator.pages_in(PageState.HELD)) == [held[0], held[2]]

    def test_repeats_inside_one_free_count_once(self, allocator):
        """free([p, p, q]) releases p and q once each; H9."""
        slots = self.draw(allocator, 2)
        p, q = slots[:1], slots[-1:]
        allocator.free(allocator.io.from_host(np.array([*ints(p), *ints(p), *ints(q)])))
        assert allocator.page_census()[PageState.HELD] == 0

    def test_an_empty_free_does_nothing(self, allocator, device):
        """Empty input of any kind is fine."""
        self.draw(allocator, 2)
        with unchanged(allocator):
            allocator.free(allocator.io.from_host(np.empty(0, dtype=np.int64)))
            allocator.free([])
            allocator.free(np.empty(0))
            allocator.free_segment(np.empty(0, dtype=np.int64), start_pos=0)
            allocator.free_segments([])
            allocator.free_pages(np.empty(0, dtype=np.int64))
            if device is not None:
                import torch

                allocator.free(torch.empty(0))

    def test_int32_slots_free_like_int64(self, allocator):
        """Narrow slots are widened."""
        slots = self.draw(allocator, 2)
        allocator.free(np.asarray(slots).astype(np.int32))
        assert allocator.page_census()[PageState.HELD] == 0

    def test_a_double_free_is_an_error_that_names_the_page(self, allocator):
        """A page freed twice raises, naming it, and changes nothing; H1, H2, PR10."""
        slots = self.draw(allocator, 4)
        page = pages_of(allocator, slots)[1]
        part = slots[self.tokens(allocator, 1) : self.tokens(allocator, 2)]
        allocator.free(part)
        for again in (part, part[:1], slots):
            with unchanged(allocator), pytest.raises(ValueError, match=rf"page {page}\b"):
                allocator.free(again)
        with unchanged(allocator), pytest.raises(ValueError, match=rf"page {page}\b"):
            allocator.free_pages(np.array([page]))

    def test_a_fresh_page_cannot_be_freed(self, allocator):
        """A page that no draw returned is refused."""
        page = allocator.layout.num_pages - 1
        with unchanged(allocator), pytest.raises(ValueError, match=rf"page {page}\b"):
            allocator.free(slots_of(allocator, [page]))

    def test_reserved_pages_are_refused(self, allocator):
        """The padding target never enters the free list, alone or beside good slots; H4."""
        good = ints(self.draw(allocator, 1))
        for page in range(allocator.layout.first_page):
            for slots in (slots_of(allocator, [page]), good + slots_of(allocator, [page])):
                with unchanged(allocator), pytest.raises(ValueError, match=rf"page {page}\b"):
                    allocator.free(slots)

    @pytest.mark.parametrize("distance", [0, 1, 10**9, 2**40])
    def test_out_of_range_pages_are_refused(self, allocator, distance):
        """Slots behind the pool raise, naming the page; H4."""
        good = ints(self.draw(allocator, 1))
        page = allocator.layout.num_pages + distance
        with unchanged(allocator), pytest.raises(ValueError, match=rf"page {page}\b"):
            allocator.free([*good, page * allocator.page_size])

    def test_negative_slots_are_refused(self, allocator):
        """A padding marker of -1 is not a slot."""
        good = ints(self.draw(allocator, 1))
        with unchanged(allocator), pytest.raises(ValueError, match=r"page -1\b"):
            allocator.free([*good, -1])

    def test_slots_that_are_not_integers_are_refused(self, allocator, device):
        """Floats and bools are not slots."""
        slots = self.draw(allocator, 1)
        wrong = [np.asarray(slots).astype(float), np.ones(3, dtype=bool), [1.5]]
        if device is not None:
            import torch

            wrong += [slots.double(), torch.ones(3, dtype=torch.bool)]
        for values in wrong:
            with unchanged(allocator), pytest.raises(ValueError, match="pass integers"):
                allocator.free(values)

    def test_two_dimensional_slots_are_refused(self, allocator):
        """Slots are one-dimensional."""
        slots = np.asarray(self.draw(allocator, 2))
        with unchanged(allocator), pytest.raises(ValueError, match="one dimension"):
            allocator.free(slots.reshape(2, -1))

    def test_free_pages_refuses_repeats(self, allocator):
        """The host twin takes distinct pages."""
        first, second = pages_of(allocator, self.draw(allocator, 2))
        with unchanged(allocator), pytest.raises(ValueError, match=rf"page {first} twice"):
            allocator.free_pages(np.array([first, second, first]))

    def test_free_pages_equals_free(self, allocator):
        """The host twin and the slot call release alike."""
        twin = self.make(need_sort=allocator.need_sort, device=allocator.device)
        slots = self.draw(allocator, 5)
        pages = pages_of(twin, self.draw(twin, 5))
        allocator.free(slots)
        twin.free_pages(np.array(pages[::-1]))
        assert snapshot(twin) == snapshot(allocator)

    # need_sort

    def test_need_sort_stages_frees_and_counts_them(self, sorting):
        """A staged page is available, but not on the free list."""
        slots = self.draw(sorting, 4)
        before = sorting.available_size()
        sorting.free(slots)
        assert sorting.page_census()[PageState.STAGED] == 4
        assert sorting.deferred_available_size() == self.tokens(sorting, 4)
        assert sorting.immediate_available_size() == self.tokens(sorting, self.total(sorting) - 4)
        assert sorting.available_size() >= before

    def test_need_sort_draws_fresh_pages_while_they_last(self, sorting):
        """Staged pages wait while the free list can serve."""
        slots = self.draw(sorting, 4)
        sorting.free(slots)
        fresh = self.draw(sorting, 4)
        assert set(pages_of(sorting, fresh)).isdisjoint(pages_of(sorting, slots))
        assert sorting.page_census()[PageState.STAGED] == 4

    def test_need_sort_merges_ascending_when_the_free_list_is_short(self, sorting):
        """A draw that the free list alone can't serve gets ascending pages after a merge."""
        total = self.total(sorting)
        slots = self.draw(sorting, total)
        size = sorting.page_size
        for page in reversed(range(total)):
            sorting.free(slots[page * size : (page + 1) * size])
        assert ints(self.draw(sorting, total)) == ints(slots)
        assert sorting.page_census()[PageState.STAGED] == 0

    def test_a_short_draw_merges_nothing(self, sorting):
        """None is decided on free + staged before any merge."""
        total = self.total(sorting)
        slots = self.draw(sorting, total)
        sorting.free(slots[: self.tokens(sorting, 2)])
        with unchanged(sorting):
            assert self.draw(sorting, total) is None

    def test_merge_and_sort_free_forces_the_merge(self, allocator):
        """Afterwards nothing is deferred and every class is ascending (need_sort), or as before."""
        slots = self.draw(allocator, 6)
        allocator.free(slots[self.tokens(allocator, 3) :])
        allocator.free(slots[: self.tokens(allocator, 3)])
        model = self.model_of(allocator)
        pages = model.draw([model.class_of(page) for page in pages_of(allocator, slots)])
        model.free_pages(pages[3:])
        model.free_pages(pages[:3])
        model.merge()
        allocator.merge_and_sort_free()
        assert allocator.deferred_available_size() == 0
        assert snapshot(allocator)["free"] == model.free
        with unchanged(allocator):
            allocator.merge_and_sort_free()

    def test_many_small_frees_merge_into_one_ascending_run(self, device):
        """Every page freed alone in any order; then one draw gets them all ascending; I2."""
        sorting = self.make(need_sort=True, device=device)
        total, size = self.total(sorting), sorting.page_size
        slots = self.draw(sorting, total)
        for i in np.random.default_rng(0).permutation(total):
            sorting.free(slots[i * size : i * size + 1])
        assert sorting.page_census()[PageState.STAGED] == total
        assert ints(self.draw(sorting, total)) == ints(slots)

    # Groups

    def test_a_group_holds_frees_back_until_its_end(self, allocator):
        """Nothing is visible before the end, all of it after; C32."""
        slots = self.draw(allocator, 4)
        twin = self.make(need_sort=allocator.need_sort, device=allocator.device)
        self.draw(twin, 4)
        twin.free(slots)
        before = allocator.available_size()
        allocator.free_group_begin()
        allocator.free(slots[: self.tokens(allocator, 2)])
        allocator.free(slots[self.tokens(allocator, 2) :])
        assert allocator.available_size() == before
        assert allocator.page_census()[PageState.PENDING] == 4
        allocator.free_group_end()
        assert snapshot(allocator) == snapshot(twin)

    def test_a_group_remembers_values_not_buffers(self, allocator):
        """The caller may overwrite its slots before the group ends; C33, I1."""
        slots = self.draw(allocator, 3)
        keep = self.tokens(allocator, 1)
        mine = slots[keep : 2 * keep]
        pages = pages_of(allocator, slots)
        allocator.free_group_begin()
        allocator.free(mine)
        mine[:] = 0
        own = np.array([pages[2]])
        allocator.free_pages(own)
        own[:] = pages[0]
        allocator.free_group_end()
        assert ints(allocator.pages_in(PageState.HELD)) == [pages[0]]

    def test_a_group_without_frees_is_fine(self, allocator):
        """An empty group changes nothing."""
        self.draw(allocator, 1)
        with unchanged(allocator):
            allocator.free_group_begin()
            allocator.free_group_end()

    def test_a_pending_page_cannot_be_freed_again_or_drawn(self, allocator):
        """A second free raises at the call, so that the end of the group can't fail."""
        slots = self.draw(allocator, self.total(allocator))
        allocator.free_group_begin()
        allocator.free(slots[:1])
        with unchanged(allocator), pytest.raises(ValueError, match="pending"):
            allocator.free(slots[:1])
        with unchanged(allocator):
            assert self.draw(allocator, 1, like=slots[: allocator.page_size]) is None
        allocator.free_group_end()
        assert ints(self.draw(allocator, 1, like=slots[: allocator.page_size])) == ints(
            slots[: allocator.page_size]
        )

    def test_groups_do_not_nest(self, allocator):
        """A begin inside a group and an end outside one are errors."""
        with unchanged(allocator), pytest.raises(RuntimeError, match="no free group is open"):
            allocator.free_group_end()
        allocator.free_group_begin()
        with unchanged(allocator), pytest.raises(RuntimeError, match="already open"):
            allocator.free_group_begin()
        allocator.free_group_end()

    def test_an_exception_inside_a_group_still_releases(self, allocator):
        """The context manager ends the group whatever happens; I1."""
        slots = self.draw(allocator, 2)

        def work():
            with allocator.free_group():
                allocator.free(slots)
                raise KeyError

        with pytest.raises(KeyError):
            work()
        assert allocator.page_census()[PageState.HELD] == 0
        assert allocator.page_census()[PageState.PENDING] == 0

    def test_clear_inside_a_group_leaves_no_late_free(self, allocator):
        """After a clear the group is empty and its end adds nothing; I1."""
        fresh = snapshot(allocator)
        slots = self.draw(allocator, 3)
        with allocator.free_group():
            allocator.free(slots)
            allocator.clear()
        assert snapshot(allocator) == fresh

    # Segments

    def test_segments_equal_free_of_all_of_it(self, allocator):
        """A row freed as one segment, or split on any page boundary, equals free; C34, C35."""
        row = ints(self.draw(allocator, 6))
        size = allocator.page_size
        states = []
        for cuts in ([], [size], [2 * size, 5 * size], [k * size for k in range(1, 6)]):
            twin = self.make(need_sort=allocator.need_sort, device=allocator.device)
            self.draw(twin, 6)
            bounds = [0, *cuts, len(row)]
            runs = [(row[a:b], a) for a, b in pairwise(bounds)]
            twin.free_segments((twin.io.from_host(np.array(run)), start) for run, start in runs)
            states.append(snapshot(twin))
        one = self.make(need_sort=allocator.need_sort, device=allocator.device)
        one.free_segment(self.draw(one, 6), start_pos=0)
        allocator.free(row)
        assert states == [snapshot(allocator)] * 4
        assert snapshot(one) == snapshot(allocator)

    def test_segments_with_a_gap_keep_the_pages_between(self, allocator):
        """Two disjoint runs of one row release their pages only."""
        row = self.draw(allocator, 6)
        size = allocator.page_size
        allocator.free_segments([(row[: 2 * size], 0), (row[4 * size :], 4 * size)])
        assert ints(allocator.pages_in(PageState.HELD)) == pages_of(allocator, row)[2:4]

    def test_a_segment_may_start_and_end_inside_a_page(self, allocator):
        """Every page that the run touches is released, whatever the offsets."""
        size = allocator.page_size
        for start in range(size, 2 * size):
            for stop in range(start + 1, 4 * size + 1):
                twin = self.make(need_sort=allocator.need_sort, device=allocator.device)
                row = self.draw(twin, 4)
                twin.free_segment(row[start:stop], start_pos=start)
                kept = pages_of(twin, row)
                del kept[start // size : -(-stop // size)]
                assert ints(twin.pages_in(PageState.HELD)) == kept

    def test_one_bad_segment_releases_none(self, allocator):
        """free_segments checks all its runs before it releases one."""
        row = self.draw(allocator, 4)
        size = allocator.page_size
        allocator.free(row[3 * size :])
        for bad in ((row[3 * size :], 3 * size), (row[2 * size : 3 * size], -1)):
            with unchanged(allocator), pytest.raises(ValueError, match=r"page|start_pos"):
                allocator.free_segments([(row[: 2 * size], 0), bad])

    def test_a_start_that_does_not_fit_the_slots_is_an_error(self, allocator):
        """A wrong start_pos would lose pages silently; it raises instead."""
        row = self.draw(allocator, 4)
        starts = {1, allocator.page_size - 1, allocator.page_size + 1}
        for start in starts if allocator.page_size > 1 else ():
            with unchanged(allocator), pytest.raises(ValueError, match=f"start_pos={start}"):
                allocator.free_segment(row, start_pos=start)

    def test_segments_work_inside_a_group(self, allocator):
        """Segments freed in a group are released at its end; AC2."""
        fresh = snapshot(allocator)["available"]
        row = self.draw(allocator, 4)
        with allocator.free_group():
            allocator.free_segment(row, start_pos=0)
            assert allocator.page_census()[PageState.PENDING] == 4
        assert allocator.available_size() == fresh

    # The cache's pages

    def test_a_cached_page_can_only_be_released_by_the_cache(self, allocator):
        """free refuses a cached page; release_cached gives it back."""
        slots = self.draw(allocator, 3)
        pages = np.array(pages_of(allocator, slots))
        allocator.adopt_pages(pages[:2])
        with unchanged(allocator), pytest.raises(ValueError, match=rf"page {pages[0]}\b.*cached"):
            allocator.free(slots)
        with unchanged(allocator), pytest.raises(ValueError, match=rf"page {pages[2]}\b.*held"):
            allocator.release_cached(pages)
        allocator.release_cached(pages[:2])
        assert ints(allocator.pages_in(PageState.HELD)) == [pages[2]]

    def test_two_nodes_cannot_own_one_page(self, allocator):
        """A page is adopted once, and only from a request."""
        pages = np.array(pages_of(allocator, self.draw(allocator, 2)))
        allocator.adopt_pages(pages[:1])
        for wrong in (pages, pages[[1, 1]], [allocator.layout.num_pages - 1], [0], [-5], [10**9]):
            with unchanged(allocator), pytest.raises(ValueError, match="page"):
                allocator.adopt_pages(np.array(wrong))
            with unchanged(allocator), pytest.raises(ValueError, match="page"):
                allocator.check_held(np.array(wrong))
        with unchanged(allocator):
            allocator.check_held(pages[1:])

    def test_released_pages_queue_like_freed_ones(self, allocator):
        """release_cached follows the same order, staging and groups as free."""
        twin = self.make(need_sort=allocator.need_sort, device=allocator.device)
        for pool in (allocator, twin):
            pages = np.array(pages_of(pool, self.draw(pool, 5)))
            if pool is allocator:
                pool.adopt_pages(pages)
            release = pool.release_cached if pool is allocator else pool.free_pages
            release(pages[3:])
            pool.free_group_begin()
            release(pages[:2])
            pool.free_group_end()
            release(pages[2:3])
        assert snapshot(allocator) == snapshot(twin)

    def test_pages_of_all_states_sum_to_the_capacity(self, allocator):
        """A page is in exactly one place."""
        slots = self.draw(allocator, 8)
        size = allocator.page_size
        allocator.adopt_pages(np.array(pages_of(allocator, slots)[:2]))
        allocator.free(slots[2 * size : 5 * size])
        allocator.free_group_begin()
        allocator.free(slots[5 * size : 6 * size])
        census = allocator.page_census()
        returned = PageState.STAGED if allocator.need_sort else PageState.FREE
        expected = dict.fromkeys(census, 0)
        expected |= {PageState.FREE: self.total(allocator) - 8, PageState.HELD: 2}
        expected |= {PageState.CACHED: 2, PageState.PENDING: 1}
        expected[returned] += 3
        assert census == expected
        assert sum(census.values()) == self.total(allocator)

    # Trials

    def test_a_trial_is_undone_exactly(self, allocator):
        """Draws, frees and merges since a backup leave no trace."""
        slots = self.draw(allocator, 5)
        size = allocator.page_size
        allocator.free(slots[: 2 * size])
        before = snapshot(allocator)
        mark = allocator.backup_state()
        allocator.free(slots[3 * size :])
        self.draw(allocator, self.total(allocator) - 3)
        allocator.merge_and_sort_free()
        allocator.restore_state(mark)
        assert snapshot(allocator) == before
        allocator.check_invariants()
        allocator.free(slots[2 * size :])

    def test_backups_nest_last_in_first_out(self, allocator):
        """An inner trial ends before its outer one; passing it over uses it up."""
        states, marks = [], []
        for _ in range(3):
            states.append(snapshot(allocator))
            marks.append(allocator.backup_state())
            self.draw(allocator, 2)
        allocator.restore_state(marks[2])
        assert snapshot(allocator) == states[2]
        allocator.restore_state(marks[0])
        assert snapshot(allocator) == states[0]
        for mark in marks:
            with unchanged(allocator), pytest.raises(RuntimeError, match="backup"):
                allocator.restore_state(mark)

    def test_a_backup_that_cannot_be_exact_is_an_error(self, allocator):
        """Adopt, release, clear and an open group stand between a backup and its restore."""
        slots = self.draw(allocator, 4)
        pages = np.array(pages_of(allocator, slots))
        allocator.adopt_pages(pages[:1])
        for step in (
            lambda: allocator.adopt_pages(pages[1:2]),
            lambda: allocator.release_cached(pages[:1]),
            lambda: allocator.clear(),
        ):
            mark = allocator.backup_state()
            step()
            with unchanged(allocator), pytest.raises(RuntimeError, match="new backup"):
                allocator.restore_state(mark)

    def test_a_backup_survives_calls_that_move_no_page_to_the_cache(self, allocator):
        """Adopting or releasing nothing, and calls that raise, don't use a backup up."""
        slots = self.draw(allocator, 2)
        pages = np.array(pages_of(allocator, slots))
        before = snapshot(allocator)
        mark = allocator.backup_state()
        allocator.adopt_pages(pages[:0])
        allocator.release_cached(pages[:0])
        with pytest.raises(ValueError, match="held"):
            allocator.release_cached(pages)
        self.draw(allocator, 2)
        allocator.restore_state(mark)
        assert snapshot(allocator) == before

    def test_a_restore_inside_an_open_group_is_an_error(self, allocator):
        """The group ends first; then the backup is good again."""
        slots = self.draw(allocator, 2)
        before = snapshot(allocator)
        mark = allocator.backup_state()
        allocator.free_group_begin()
        allocator.free(slots)
        with unchanged(allocator), pytest.raises(RuntimeError, match="free group is open"):
            allocator.restore_state(mark)
        allocator.free_group_end()
        allocator.restore_state(mark)
        assert snapshot(allocator) == before

    def test_a_backup_taken_inside_a_group_does_not_outlive_it(self, allocator):
        """Pages that were pending at the mark are free after the group; none turn held again."""
        slots = self.draw(allocator, 2)
        allocator.free_group_begin()
        allocator.free(slots)
        mark = allocator.backup_state()
        allocator.free_group_end()
        with unchanged(allocator), pytest.raises(RuntimeError, match="inside a free group"):
            allocator.restore_state(mark)
        assert allocator.page_census()[PageState.HELD] == 0

    def test_a_backup_of_another_allocator_is_refused(self, allocator):
        """Marks of two allocators don't mix, even of equal pools."""
        twin = self.make(need_sort=allocator.need_sort, device=allocator.device)
        mark = twin.backup_state()
        allocator.backup_state()
        with unchanged(allocator), pytest.raises(RuntimeError, match="another allocator"):
            allocator.restore_state(mark)

    # Reports

    def test_clear_gives_a_fresh_allocator(self, allocator):
        """After a clear the state and the next draws are those of a new pool."""
        fresh = self.make(need_sort=allocator.need_sort, device=allocator.device)
        slots = self.draw(allocator, 9)
        allocator.adopt_pages(np.array(pages_of(allocator, slots)[:2]))
        allocator.free(slots[self.tokens(allocator, 5) :])
        allocator.clear()
        assert snapshot(allocator) == snapshot(fresh)
        assert ints(self.draw(allocator, 4)) == ints(self.draw(fresh, 4))

    def test_the_state_string_says_free_and_staged_apart(self, allocator):
        """One line: total, immediate with free pages, deferred with staged pages; C185."""
        slots = self.draw(allocator, 5)
        allocator.free(slots[: self.tokens(allocator, 2)])
        total = self.total(allocator) - 3
        staged = 2 if allocator.need_sort else 0
        size = allocator.page_size
        assert allocator.allocator_state_str() == (
            f"total={total * size} "
            f"immediate={(total - staged) * size} [free_pages={total - staged}] "
            f"deferred={staged * size} [release_pages={staged}]"
        )

    def test_the_census_lists_every_available_page(self, allocator, device):
        """get_all_free_pages is int64 on the device: free in draw order, then staged, by class."""
        slots = self.draw(allocator, 5)
        allocator.free(slots[: self.tokens(allocator, 2)])
        census = allocator.get_all_free_pages()
        seen = snapshot(allocator)
        expected = [f + s for f, s in zip(seen["free"], seen["staged"], strict=True)]
        assert ints(census) == list(chain.from_iterable(expected))
        assert str(census.dtype).endswith("int64")
        assert (device is None) == isinstance(census, np.ndarray)

    def test_the_census_is_a_copy(self, allocator):
        """Writing to what was returned does not reach the pool."""
        with unchanged(allocator):
            allocator.get_all_free_pages()[:] = 0
            allocator.free_list.states()[:] = 0

    def test_get_kvcache_returns_what_was_given(self, device):
        """The pool object passes through untouched."""
        pool = object()
        assert self.make(device=device, kvcache=pool).get_kvcache() is pool

    def test_debug_never_changes_a_result(self, need_sort, device):
        """The same calls give the same slots and state with and without debug."""
        results = []
        for debug in (False, True):
            pool = self.make(need_sort=need_sort, device=device, debug=debug)
            slots = self.draw(pool, 6)
            size = pool.page_size
            pool.free_segment(slots[size : 3 * size], start_pos=size)
            pool.free(slots[5 * size :])
            results.append((ints(slots), ints(self.draw(pool, 3)), snapshot(pool)))
        assert results[0] == results[1]

    def test_equal_calls_give_equal_digests_and_different_states_differ(self, allocator):
        """The digest is the state: free order, staging, states and an open group enter it."""
        digests = [allocator.state_digest()]
        size = allocator.page_size
        slots = self.draw(allocator, 3 * allocator.layout.num_classes)
        step = allocator.layout.num_classes * size
        digests.append(allocator.state_digest())
        allocator.free(slots[:size])
        allocator.free(slots[step : step + size])
        digests.append(allocator.state_digest())
        self_again = self.make(need_sort=allocator.need_sort, device=allocator.device)
        self.draw(self_again, 3 * allocator.layout.num_classes)
        self_again.free(slots[step : step + size])
        self_again.free(slots[:size])
        digests.append(self_again.state_digest())
        allocator.free_group_begin()
        digests.append(allocator.state_digest())
        assert len(set(digests)) == len(digests)

    # Interrupted commits

    @pytest.mark.parametrize("fault", [Interrupting, OutOfMemory])
    @pytest.mark.parametrize(
        "commit", ["draw", "free", "adopt", "release", "pend", "group end", "merge", "restore"]
    )
    def test_an_interrupted_commit_makes_every_later_call_raise(self, device, fault, commit):
        """A half-written state is never used again: later calls raise RuntimeError."""
        pool = self.make(need_sort=True, device=device)
        slots = self.draw(pool, 4)
        pages = np.array(pages_of(pool, slots))
        pool.adopt_pages(pages[:1])
        pool.free(slots[3 * pool.page_size :])
        mark = pool.backup_state()
        if commit in ("pend", "group end"):
            pool.free_group_begin()
        if commit == "group end":
            pool.free_pages(pages[1:2])
        pool.free_list._state = pool.free_list._state.view(fault)
        steps = {
            "draw": lambda: self.draw(pool, 1),
            "free": lambda: pool.free_pages(pages[1:2]),
            "adopt": lambda: pool.adopt_pages(pages[1:2]),
            "release": lambda: pool.release_cached(pages[:1]),
            "pend": lambda: pool.free_pages(pages[1:2]),
            "group end": pool.free_group_end,
            "merge": pool.merge_and_sort_free,
            "restore": lambda: pool.restore_state(mark),
        }
        with pytest.raises((KeyboardInterrupt, MemoryError)):
            steps[commit]()
        pool.free_list._state = pool.free_list._state.view(np.ndarray)
        assert_unusable(pool, self)

    # Replicas

    def test_the_hash_seed_does_not_enter_the_state(self):
        """Processes with other hash seeds reach the same digests."""
        script = (
            "from tests.contract.allocator_contract import run_random_calls as run\n"
            f"from {type(self).__module__} import {type(self).__name__} as Contract\n"
            "print([run(Contract(), need_sort, 7) for need_sort in (False, True)])"
        )
        outputs = {
            subprocess.run(
                [sys.executable, "-c", script],
                env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for seed in ("0", "1", "4294967295")
        }
        assert outputs == {f"{[run_random_calls(self, sort, 7) for sort in (False, True)]}\n"}


def run_random_calls(contract, need_sort, seed, steps=60):
    """Run a fixed random series of calls and return the digest after each tenth."""
    rng = np.random.default_rng(seed)
    pool = contract.make(need_sort=need_sort)
    held, digests = [], []
    for step in range(steps):
        if held and rng.random() < 0.45:
            pool.free_pages(np.array(held.pop(int(rng.integers(len(held))))))
        else:
            pages = contract.draw_pages(pool, int(rng.integers(1, 5)))
            if pages is not None:
                held.append(pages.tolist())
        if step % 10 == 9:
            digests.append(pool.state_digest())
    return digests


def assert_unusable(pool, contract):
    """Assert that every call of an interrupted allocator raises RuntimeError and says why."""
    calls = [
        pool.available_size,
        pool.immediate_available_size,
        pool.deferred_available_size,
        pool.allocator_state_str,
        pool.get_all_free_pages,
        lambda: contract.draw(pool, 1),
        lambda: contract.draw(pool, 10**6),
        lambda: contract.draw_pages(pool, 1),
        lambda: pool.free([]),
        lambda: pool.free([pool.page_size]),
        lambda: pool.free_pages(np.array([1])),
        lambda: pool.free_segment([pool.page_size], start_pos=0),
        lambda: pool.free_segments([]),
        lambda: pool.adopt_pages(np.array([1])),
        lambda: pool.check_held(np.array([1])),
        lambda: pool.release_cached(np.array([1])),
        pool.free_group_begin,
        pool.free_group_end,
        pool.merge_and_sort_free,
        pool.backup_state,
        lambda: pool.restore_state(None),
        pool.clear,
        pool.state_digest,
        pool.check_invariants,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="interrupted"):
            call()
