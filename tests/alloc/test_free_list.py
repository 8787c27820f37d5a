"""The classed free list itself: draws of any mix of classes, checks, found corruption."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import ClassedFreeList, PageLayout, PageState
from tests.alloc.alloc_builders import ints
from tests.models.naive_allocator import NaiveAllocator

LAYOUTS = {
    "single": PageLayout.single(4, 12),
    "interleave": PageLayout.interleave(4, 3, 4),
    "owner lanes": PageLayout.owner_lanes(4, 3, 4),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


def make(layout, need_sort=False):
    return ClassedFreeList(layout, need_sort=need_sort)


@pytest.mark.parametrize("kind", LAYOUTS)
@given(data=st.data(), need_sort=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_draw_of_any_classes_equals_one_page_at_a_time(kind, data, need_sort):
    """Any order and any repeats of classes: the naive lists predict every page and every list."""
    layout = LAYOUTS[kind]
    free_list = make(layout, need_sort)
    model = NaiveAllocator(
        layout.num_classes, layout.first_page, layout.pages_per_class, 4, need_sort
    )
    classes = st.lists(st.integers(0, layout.num_classes - 1), max_size=8)
    for _ in range(data.draw(st.integers(1, 6))):
        wanted = data.draw(classes)
        before = free_list.state_digest()
        required = np.bincount(np.array(wanted, dtype=np.int64), minlength=layout.num_classes)
        possible = free_list.can_draw(required)
        drawn = free_list.draw(np.array(wanted, dtype=np.int64))
        expected = model.draw(wanted)
        assert possible == (expected is not None)
        if expected is None:
            assert (drawn, free_list.state_digest()) == (None, before)
        else:
            assert ints(drawn) == expected
            assert ints(layout.class_of(drawn)) == wanted
        if model.held:
            back = data.draw(st.lists(st.sampled_from(sorted(model.held)), unique=True))
            free_list.free(np.array(back, dtype=np.int64))
            model.free_pages(back)
        assert ints(free_list.counts()) == model.counts()
        for c in range(layout.num_classes):
            assert ints(free_list.free_pages_of(c)) == model.free[c]
            assert ints(free_list.staged_pages_of(c)) == model.staged[c]
        assert free_list.violations() == []


def test_all_in_says_whether_pages_are_in_a_state(layout):
    """Ids out of range are in no state; no pages are in every state."""
    free_list = make(layout)
    pages = free_list.draw(np.zeros(2, dtype=np.int64))
    assert free_list.all_in(pages, PageState.HELD)
    assert not free_list.all_in(pages, PageState.FREE)
    assert not free_list.all_in(np.array([*ints(pages), layout.num_pages]), PageState.HELD)
    assert not free_list.all_in(np.array([-1]), PageState.RESERVED)
    assert free_list.all_in(np.array([0]), PageState.RESERVED)
    assert free_list.all_in(np.empty(0, dtype=np.int64), PageState.CACHED)


def test_the_numbers_say_where_pages_are(layout):
    """num_free, num_staged and num_pending count pages; group_is_open says so."""
    free_list = make(layout, need_sort=True)
    pages = free_list.draw(np.zeros(3, dtype=np.int64))
    free_list.free(pages[:1])
    assert (free_list.num_free, free_list.num_staged) == (9, 1)
    assert (free_list.num_pending, free_list.group_is_open) == (0, False)
    free_list.group_begin()
    free_list.free(pages[1:])
    assert (free_list.num_pending, free_list.group_is_open) == (2, True)
    free_list.group_end()
    assert (free_list.num_staged, free_list.num_pending) == (3, 0)


def test_the_message_says_what_the_page_is(layout):
    """A refused page is named with its state and what is allowed."""
    free_list = make(layout)
    pages = free_list.draw(np.zeros(2, dtype=np.int64))
    free_list.adopt(pages[:1])
    with pytest.raises(
        ValueError, match=rf"cannot free page {pages[0]}: it is cached, and only held pages can be"
    ):
        free_list.free(pages)
    with pytest.raises(ValueError, match=r"cannot free page 0: it is reserved"):
        free_list.free(np.array([0]))
    with pytest.raises(
        ValueError, match=rf"valid pages are \[{layout.first_page}, {layout.num_pages}\)"
    ):
        free_list.free(np.array([layout.num_pages]))


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (lambda fl: fl._state.__setitem__(0, PageState.FREE), "reserved"),
        (lambda fl: fl._state.__setitem__(5, PageState.HELD), "free pages differ"),
        (lambda fl: fl._free.__setitem__((0, 0), fl._free[1, 0]), "class 0 hold another class"),
        (lambda fl: fl._free_tops.__setitem__(0, 3), "free pages differ"),
        (lambda fl: fl._state.__setitem__(5, PageState.STAGED), "staged pages differ"),
        (lambda fl: fl._state.__setitem__(5, PageState.PENDING), "pending pages differ"),
    ],
)
def test_a_corrupted_list_is_found_and_described(corrupt, words):
    """violations says each broken rule in words."""
    free_list = make(LAYOUTS["interleave"], need_sort=True)
    assert free_list.violations() == []
    corrupt(free_list)
    assert any(words in sentence for sentence in free_list.violations())


def test_a_backup_cannot_be_written(layout):
    """What restore goes back to is read-only."""
    free_list = make(layout, need_sort=True)
    free_list.free(free_list.draw(np.zeros(2, dtype=np.int64)))
    mark = free_list.backup()
    for pages in (*mark.free, *mark.staged):
        with pytest.raises(ValueError, match="read-only"):
            pages[:] = 0


@pytest.mark.parametrize("mark", [None, 0, "mark", ((), ())], ids=repr)
def test_only_a_backup_can_be_restored(layout, mark):
    """Anything else is a ValueError with the value."""
    free_list = make(layout)
    with pytest.raises(ValueError, match="is not a backup"):
        free_list.restore(mark)


def test_need_sort_enters_the_digest_as_a_bool(layout):
    """1 and True are the same pool."""
    assert make(layout, 1).state_digest() == make(layout, np.True_).state_digest()


def test_digests_tell_pools_apart(layout):
    """Layout and need_sort enter the digest."""
    digests = {make(kind, sort).state_digest() for kind in LAYOUTS.values() for sort in (0, 1)}
    assert len(digests) == 6
