"""Where a logical page lies, for one class, interleaved pages and owner lanes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import PageLayout
from tests.alloc.alloc_builders import ints

LAYOUTS = {
    "single": PageLayout.single(4, 24),
    "interleave": PageLayout.interleave(4, 3, 8),
    "owner lanes": PageLayout.owner_lanes(4, 3, 8),
}
OWNER = {
    "single": lambda page: 0,
    "interleave": lambda page: page % 3,
    "owner lanes": lambda page: (page - 1) % 3,
}
LOCAL = {
    "single": lambda page: page,
    "interleave": lambda page: page // 3,
    "owner lanes": lambda page: (page - 1) // 3 + 1 if page else 0,
}


@pytest.fixture(params=LAYOUTS)
def kind(request):
    return request.param


@pytest.fixture
def layout(kind):
    return LAYOUTS[kind]


def test_owner_and_local_page_follow_the_rule_of_the_pool(kind, layout):
    """l % N and l // N, or (l - 1) % N and (l - 1) // N + 1; D8, D9."""
    usable = np.arange(layout.first_page, layout.num_pages)
    assert ints(layout.class_of(usable)) == [OWNER[kind](page) for page in ints(usable)]
    every = np.arange(layout.num_pages)
    assert ints(layout.local_page(every)) == [LOCAL[kind](page) for page in ints(every)]


@pytest.mark.parametrize("pages", [2**61, 10**30])
def test_a_pool_whose_slots_leave_int64_is_refused(pages):
    """Slots are int64: the highest page's must be."""
    with pytest.raises(ValueError, match="leave int64"):
        PageLayout.single(4, pages)


def test_reserved_pages_lie_in_the_trash_page(layout):
    """Ids below first_page map to local page 0, and no usable page does; C16."""
    local = layout.local_page(np.arange(layout.num_pages))
    assert ints(np.flatnonzero(local == 0)) == list(range(layout.first_page))


def test_class_and_local_page_are_a_bijection(layout):
    """page_at is the inverse; each class has local pages 1..pages_per_class."""
    pages = np.arange(layout.first_page, layout.num_pages)
    assert ints(layout.page_at(layout.class_of(pages), layout.local_page(pages))) == ints(pages)
    assert layout.capacity_pages == len(pages) == layout.pages_per_class * layout.num_classes
    for c in range(layout.num_classes):
        local = layout.local_page(pages[layout.class_of(pages) == c])
        assert ints(local) == list(range(1, layout.pages_per_class + 1))


def test_rows_of_a_rank_fill_its_tensor_without_a_gap(layout):
    """Local rows of one class are ps..rank_rows-1; row = local page * ps + offset; D8, AC1."""
    size = layout.page_size
    locs = np.arange(layout.first_page * size, layout.num_pages * size)
    for c in range(layout.num_classes):
        rows = layout.local_row(locs[layout.class_of(locs // size) == c])
        assert ints(rows) == list(range(size, layout.rank_rows))


def test_python_integers_work_like_arrays(layout):
    """One page gives plain integers."""
    page = layout.num_pages - 1
    assert type(layout.class_of(page)) is int
    assert layout.page_at(layout.class_of(page), layout.local_page(page)) == page


@given(
    shard_size=st.integers(1, 8),
    base=st.integers(0, 7),
    start=st.integers(0, 40),
    count=st.integers(0, 40),
)
@settings(max_examples=100, deadline=None)
def test_cyclic_counts_equal_counting(shard_size, base, start, count):
    """The closed form is a count of the classes of position-pages start..start+count."""
    layout = PageLayout(4, shard_size, shard_size, 100)
    base %= shard_size
    classes = [(base + position) % shard_size for position in range(start, start + count)]
    assert ints(layout.cyclic_classes(base, start, count)) == classes
    assert [layout.class_at(base, position) for position in range(start, start + count)] == classes
    expected = [classes.count(c) for c in range(shard_size)]
    assert ints(layout.cyclic_counts(base, start, count)) == expected
    pages = layout.page_at(np.array(classes, dtype=np.int64), 5)
    assert ints(layout.count_classes(pages)) == expected
    assert ints(layout.tally(layout.class_of(pages))) == expected
    assert layout.is_cyclic(pages)
    for position, page in enumerate(ints(pages), start):
        assert layout.base_of(page, position) == base


def test_a_run_that_skips_a_class_is_not_cyclic():
    """Consecutive pages in other than consecutive classes."""
    layout = PageLayout.interleave(4, 3, 8)
    assert layout.is_cyclic(np.array([4, 8, 3]))
    assert not layout.is_cyclic(np.array([4, 6]))
    assert not layout.is_cyclic(np.array([4, 4]))
    assert layout.is_cyclic(np.array([4]))
    assert layout.is_cyclic(np.empty(0, dtype=np.int64))
    assert PageLayout.single(4, 8).is_cyclic(np.array([3, 1, 7]))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((0, 1, 1, 8), "page_size=0"),
        ((4, 0, 1, 8), "num_classes=0"),
        ((4, 4, 2, 8), "first_page=2"),
        ((4, 4, 0, 8), "first_page=0"),
        ((4, 4, 4, 0), "pages_per_class=0"),
    ],
)
def test_a_layout_without_a_page_a_class_or_a_reserved_page_is_refused(fields, words):
    """Each field out of its range is a ValueError with the value."""
    with pytest.raises(ValueError, match=words):
        PageLayout(*fields)


@pytest.mark.parametrize(
    ("slot", "stride", "offset"),
    [(4_000_000, 576, 2_304_000_000), (14_340, 149_760, 2_147_558_400)],
)
def test_row_arithmetic_passes_two_to_the_31(slot, stride, offset):
    """A row times its stride is exact: rows are int64 even for int32-sized slots; O1."""
    layout = PageLayout.single(1, 8_000_000)
    rows = layout.local_row(np.array([slot]))
    assert rows.dtype == np.int64
    assert ints(rows * stride) == [offset]
