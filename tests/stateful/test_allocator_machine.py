"""Any series of calls, misuse among them, keeps every allocator equal to the naive one."""

from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from alloc import PageState
from tests.alloc.alloc_builders import (
    as_slots,
    decode,
    extend,
    ints,
    make_interleave,
    make_lanes,
    make_paged,
    make_token,
    slots_of,
    snapshot,
)
from tests.models.naive_allocator import NaiveAllocator, naive_extend

PAGES = 12
KINDS = {
    "token": (make_token, (PAGES,), 1),
    "paged of 1": (make_paged, (PAGES, 1), 1),
    "paged of 4": (make_paged, (PAGES, 4), 1),
    "interleave of 2": (make_interleave, (PAGES // 2, 4, 2), 2),
    "interleave of 4": (make_interleave, (PAGES // 4, 2, 4), 4),
    "lanes of 1": (make_lanes, (PAGES, 2, 1), 1),
    "lanes of 2": (make_lanes, (PAGES // 2, 4, 2), 2),
    "lanes of 3": (make_lanes, (PAGES // 3, 1, 3), 3),
}

DEVICES = [None, "cpu"] if find_spec("torch") else [None]
PICKS = st.lists(st.integers(0, 63), min_size=1, max_size=6)


def picked(pages, picks):
    """Return some of the pages, distinct, in the order of the picks."""
    ordered = sorted(pages)
    return list(dict.fromkeys(ordered[i % len(ordered)] for i in picks))


class AllocatorMachine(RuleBasedStateMachine):
    """One allocator, one naive allocator, the same calls."""

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        device=st.sampled_from(DEVICES),
        need_sort=st.booleans(),
        debug=st.booleans(),
    )
    def build(self, kind, device, need_sort, debug):
        make, arguments, self.num_classes = KINDS[kind]
        self.kind = kind.split()[0]
        self.real = make(*arguments, device=device, need_sort=need_sort, debug=debug)
        layout = self.real.layout
        self.page_size = layout.page_size
        self.model = NaiveAllocator(
            layout.num_classes,
            layout.first_page,
            layout.pages_per_class,
            layout.page_size,
            need_sort,
        )
        self.marks = []  # (mark of the real one, backup of the model, taken inside a group)

    def held(self):
        return sorted(self.model.held)

    # Draws

    @rule(count=st.integers(0, PAGES + 2), start=st.integers(0, 3), in_slots=st.booleans())
    def draw(self, count, start, in_slots):
        classes = [(start + i) % self.num_classes for i in range(count)]
        size = count * self.page_size
        if self.kind == "interleave":
            start %= self.num_classes
            call = self.real.alloc_cyclic if in_slots else self.real.alloc_cyclic_pages
            out = call(start, size if in_slots else count)
        else:
            out = self.real.alloc(size) if in_slots else self.real.alloc_pages(count)
        pages = self.model.draw(self.stock(classes))
        if pages is None:
            assert out is None
        else:
            assert ints(out) == (slots_of(self.real, pages) if in_slots else pages)

    def stock(self, classes):
        """Return the classes of a draw; owner lanes choose them themselves."""
        if self.kind != "lanes":
            return classes
        if len(classes) > sum(self.model.counts()):
            return classes + [0] * PAGES  # more than there is, so that the model refuses
        return self.model.any_classes(len(classes))

    @precondition(lambda self: self.kind == "lanes")
    @rule(owners=st.lists(st.integers(0, 3), max_size=8), way=st.sampled_from(["slots", "pages"]))
    def draw_with_owners(self, owners, way):
        owners = [owner % self.num_classes for owner in owners]
        required = [owners.count(lane) for lane in range(self.num_classes)]
        available = self.model.counts()
        short = [max(0, r - a) for r, a in zip(required, available, strict=True)]
        assert self.real.compute_owner_lane_stats(owners) == (required, available, short)
        if way == "slots":
            out = self.real.alloc_pages_with_owners(owners)
        else:
            out = self.real.alloc_owner_pages(owners)
        pages = self.model.draw_owned(owners)
        assert (pages is None) == any(short)
        if pages is None:
            assert out is None
        else:
            assert ints(out) == (slots_of(self.real, pages) if way == "slots" else pages)

    @precondition(lambda self: self.kind == "lanes")
    @rule(
        pick=st.integers(0, 63),
        prefix=st.integers(0, 11),
        grown=st.integers(0, 20),
        owners=st.lists(st.integers(0, 3), min_size=25, max_size=25),
    )
    def extend_with_owners(self, pick, prefix, grown, owners):
        prefix, last = (prefix, -1) if self.model.held else (0, -1)
        if prefix:
            page = self.held()[pick % len(self.model.held)]
            last = page * self.page_size + (prefix - 1) % self.page_size
        new = -(-(prefix + grown) // self.page_size) - -(-prefix // self.page_size)
        owners = [owner % self.num_classes for owner in owners[:new]]
        seq = prefix + grown
        arguments = ([prefix], [prefix], [seq], [seq], as_slots(self.real, [last]), grown)
        out = self.real.alloc_extend_compute_owner(*arguments, owners)
        pages = self.model.draw_owned(owners)
        if pages is None:
            assert out is None
        else:
            assert ints(out) == naive_extend([(prefix, seq, last)], pages, self.page_size)

    @rule(
        requests=st.lists(
            st.tuples(
                st.integers(0, 63),
                st.integers(0, 3),
                st.integers(0, 3),
                st.integers(0, 11),
                st.booleans(),
                st.one_of(st.none(), st.integers(0, 3)),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def extend(self, requests):
        """Extend new chains, held pages and seams."""
        batch, bases, continues = [], [], []
        for pick, pages, offset, grown, seam, base in requests:
            prefix, last = 0, -1
            if self.model.held and pages:
                page = self.held()[pick % len(self.model.held)]
                prefix = pages * self.page_size
                last = page * self.page_size + self.page_size - 1
                if self.kind != "interleave" and offset % self.page_size:
                    prefix += offset % self.page_size
                    last = page * self.page_size + offset % self.page_size - 1
            batch.append((prefix, prefix + grown, last))
            if base is not None:
                base %= self.num_classes
            if prefix and not seam:
                owner = self.model.class_of(last // self.page_size)
                base = (owner - prefix // self.page_size + 1) % self.num_classes
            bases.append(base)
            continues.append(not seam)
        wanted = [(p, s, base) for (p, s, _), base in zip(batch, bases, strict=True)]
        if self.kind == "token":
            self.refused(NotImplementedError, lambda: extend(self.real, batch))
            return
        resolved, classes = self.model.new_page_classes(wanted)
        given_bases = list(bases)
        out = extend(self.real, batch, bases, continues)
        pages = self.model.draw(self.stock(classes))
        if pages is None:
            assert (out, bases) == (None, given_bases)
        else:
            assert ints(out) == naive_extend(batch, pages, self.page_size)
            assert bases == (resolved if self.kind == "interleave" else given_bases)

    @precondition(lambda self: self.model.held)
    @rule(picks=PICKS, offset=st.integers(0, 3))
    def decode(self, picks, offset):
        offset %= self.page_size
        requests = []
        for page in picked(self.model.held, picks):
            requests.append((self.page_size + offset + 1, page * self.page_size + offset - 1))
            if offset == 0:
                requests[-1] = (self.page_size + 1, (page + 1) * self.page_size - 1)
        if self.kind not in ("paged", "lanes"):
            self.refused(NotImplementedError, lambda: decode(self.real, requests))
            return
        out = decode(self.real, requests)
        pages = self.model.draw(self.stock([0] * len(requests) if offset == 0 else []))
        if pages is None:
            assert out is None
        else:
            batch = [(seq - 1, seq, last) for seq, last in requests]
            assert ints(out) == naive_extend(batch, pages, self.page_size)

    # Releases

    @precondition(lambda self: self.model.held)
    @rule(picks=PICKS, way=st.sampled_from(["slots", "part", "pages", "segment", "segments"]))
    def free(self, picks, way):
        pages = picked(self.model.held, picks)
        slots = np.array(slots_of(self.real, pages))
        if way == "slots":
            self.real.free(np.concatenate([slots[::-1], slots[:1]]))
        elif way == "part":
            self.real.free(slots[:: self.page_size])
        elif way == "pages":
            self.real.free_pages(np.array(pages))
        elif way == "segment":
            self.real.free_segment(slots, start_pos=8 * self.page_size)
        else:
            cut = len(pages) // 2 * self.page_size
            self.real.free_segments([(slots[:cut], 0), (slots[cut:], cut)])
        self.model.free_pages(pages)

    @precondition(lambda self: self.model.held)
    @rule(picks=PICKS)
    def adopt(self, picks):
        pages = picked(self.model.held, picks)
        self.real.check_held(np.array(pages))
        self.real.adopt_pages(np.array(pages))
        self.model.adopt(pages)
        self.drop_marks()

    @precondition(lambda self: self.model.cached)
    @rule(picks=PICKS)
    def release(self, picks):
        pages = picked(self.model.cached, picks)
        self.real.release_cached(np.array(pages))
        self.model.release_cached(pages)
        self.drop_marks()

    @precondition(lambda self: self.model.pending is None)
    @rule()
    def begin_group(self):
        self.real.free_group_begin()
        self.model.pending = []

    @precondition(lambda self: self.model.pending is not None)
    @rule()
    def end_group(self):
        self.real.free_group_end()
        self.model.group_end()
        self.marks = [
            (mark, None if inside else state, False) for mark, state, inside in self.marks
        ]

    @rule()
    def merge(self):
        self.real.merge_and_sort_free()
        self.model.merge()

    # Trials and reset

    @rule()
    def backup(self):
        inside = self.model.pending is not None
        self.marks.append((self.real.backup_state(), self.model.backup(), inside))

    @precondition(lambda self: self.marks)
    @rule(pick=st.integers(0, 63))
    def restore(self, pick):
        pick %= len(self.marks)
        mark, state, _ = self.marks[pick]
        if state is None or self.model.pending is not None:
            self.refused(RuntimeError, lambda: self.real.restore_state(mark))
            return
        self.real.restore_state(mark)
        self.model.restore(state)
        self.marks[pick:] = [(mark, None, False) for mark, _, _ in self.marks[pick:]]

    @rule(really=st.integers(0, 7))
    def clear(self, really):
        if really == 0:
            self.real.clear()
            self.model.clear()
            self.drop_marks()

    def drop_marks(self):
        self.marks = [(mark, None, False) for mark, _, _ in self.marks]

    # Misuse

    def refused(self, error, call):
        before = snapshot(self.real)
        with pytest.raises(error):
            call()
        assert snapshot(self.real) == before

    @rule(picks=PICKS, bad=st.integers(-2, 2 * PAGES), good=st.booleans())
    def free_what_is_not_held(self, picks, bad, good):
        """Free, staged, pending, cached, reserved and foreign pages are refused by every call."""
        if bad in self.model.held:
            return
        pages = picked(self.model.held, picks) if good and self.model.held else []
        slots = slots_of(self.real, [*pages, bad])
        size = self.page_size
        self.refused(ValueError, lambda: self.real.free(slots))
        self.refused(ValueError, lambda: self.real.free_pages(np.array([bad, *pages])))
        self.refused(ValueError, lambda: self.real.free_segment(slots, start_pos=0))
        runs = [(slots[: -size or None], 0), (slots[-size:], len(slots) - size)]
        self.refused(ValueError, lambda: self.real.free_segments(runs))
        self.refused(ValueError, lambda: self.real.adopt_pages(np.array([*pages, bad])))
        self.refused(ValueError, lambda: self.real.check_held(np.array([*pages, bad])))

    @rule(bad=st.integers(-2, 2 * PAGES))
    def release_what_is_not_cached(self, bad):
        if bad not in self.model.cached:
            pages = np.array([*sorted(self.model.cached)[:1], bad])
            self.refused(ValueError, lambda: self.real.release_cached(pages))

    @precondition(lambda self: self.model.held)
    @rule(picks=PICKS)
    def name_a_page_twice(self, picks):
        pages = picked(self.model.held, picks)
        twice = np.array([*pages, pages[0]])
        self.refused(ValueError, lambda: self.real.free_pages(twice))
        self.refused(ValueError, lambda: self.real.adopt_pages(twice))

    @rule()
    def use_a_group_wrongly(self):
        call = self.real.free_group_begin
        if self.model.pending is None:
            call = self.real.free_group_end
        self.refused(RuntimeError, call)

    @rule(size=st.integers(-5, -1))
    def draw_a_negative_size(self, size):
        error = NotImplementedError if self.kind == "interleave" else ValueError
        self.refused(error, lambda: self.real.alloc(size))
        self.refused(error, lambda: self.real.alloc_pages(size))

    # What must hold after every step

    @invariant()
    def equals_the_model(self):
        self.real.check_invariants()
        seen = snapshot(self.real)
        assert seen["free"] == self.model.free
        assert seen["staged"] == self.model.staged
        assert ints(self.real.pages_in(PageState.HELD)) == self.held()
        assert ints(self.real.pages_in(PageState.CACHED)) == sorted(self.model.cached)
        pending = sorted(self.model.pending or [])
        assert ints(self.real.pages_in(PageState.PENDING)) == pending
        counts = self.model.counts()
        floor = min(counts) * self.num_classes if self.kind == "interleave" else sum(counts)
        assert seen["available"] == floor * self.page_size
        for mine, theirs in [
            (self.model.free, self.real.immediate_available_size()),
            (self.model.staged, self.real.deferred_available_size()),
        ]:
            assert sum(map(len, mine)) * self.page_size == theirs


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestAllocatorMachine = AllocatorMachine.TestCase


class LaneMachine(AllocatorMachine):
    """Owner lanes alone: draws by lane and stock draws over free and staged pages."""

    @initialize(
        kind=st.sampled_from(["lanes of 2", "lanes of 3"]),
        device=st.just(None),
        need_sort=st.sampled_from([True, True, False]),
        debug=st.booleans(),
    )
    def build(self, kind, device, need_sort, debug):
        super().build(kind=kind, device=device, need_sort=need_sort, debug=debug)


LaneMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLaneMachine = LaneMachine.TestCase
