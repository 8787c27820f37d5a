"""Fast orders equal the plain sort, whatever the runs; B57."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alloc import PageLayout
from scratch.owner_major import (
    NotCyclicError,
    key_dtype,
    may_be_cyclic,
    owner_major,
    sorted_keys,
    sorted_keys_of_runs,
)


@st.composite
def cyclic_run_lists(draw):
    n, first = draw(st.integers(1, 5)), draw(st.booleans())
    layout = PageLayout(4, n, n if first else 1, 9)
    runs = []
    for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)):
        base = draw(st.integers(0, n - 1))
        locals_ = draw(st.lists(st.integers(1, 9), min_size=length, max_size=length))
        pages = [layout.page_at((base + i) % n, local) for i, local in enumerate(locals_)]
        runs.append(np.array(pages, dtype=draw(st.just(np.int32))))
    return layout, runs


@given(cyclic_run_lists())
@example((PageLayout(4, 4, 4, 9), [np.array([4, 5, 6, 7, 8, 9, 10, 11], dtype=np.int32)]))
def test_runs_give_the_keys_of_one_sort(case):
    """Repeats included, padding left out."""
    layout, runs = case
    pages = np.concatenate(runs)
    expected = sorted_keys(layout, pages)
    assert expected.tolist() == sorted_keys_of_runs(layout, runs).tolist()
    order = owner_major(layout, expected)
    naive = sorted(set(pages.tolist()), key=lambda p: (layout.class_of(p), layout.local_page(p)))
    assert naive == order.pages.tolist()
    assert [layout.local_page(page) for page in naive] == order.local_pages.tolist()
    counts = layout.count_classes(np.array(naive))
    assert counts.tolist() == order.counts.tolist()


@given(cyclic_run_lists(), st.data())
def test_a_run_that_skips_a_rank_is_named(case, data):
    layout, runs = case
    if layout.num_classes == 1:
        return
    bad = data.draw(st.integers(0, len(runs) - 1))
    step = data.draw(st.integers(2, layout.num_classes))
    extra = (layout.class_of(int(runs[bad][-1])) + step) % layout.num_classes
    runs[bad] = np.append(runs[bad], np.int32(layout.page_at(extra, 3)))
    with pytest.raises(NotCyclicError) as error:
        sorted_keys_of_runs(layout, runs)
    assert error.value.run == bad


@given(cyclic_run_lists())
def test_cyclic_runs_end_where_they_should(case):
    layout, runs = case
    for run in runs:
        assert may_be_cyclic(layout, run)
        if layout.num_classes > 1:
            assert not may_be_cyclic(layout, np.append(run, run[-1:]))


def test_keys_widen_where_they_would_not_fit():
    assert key_dtype(PageLayout.interleave(64, 8, 1 << 20)) is np.int32
    assert key_dtype(PageLayout.interleave(1, 8, (1 << 31) // 8 - 2)) is np.int64


def test_ids_near_2_31_are_exact():
    layout = PageLayout.interleave(1, 8, (1 << 31) // 8 - 2)
    top = layout.num_pages
    pages = np.array([top - 1, 8, top - 8, 9], dtype=np.int64)
    order = owner_major(layout, sorted_keys(layout, pages))
    assert order.pages.tolist() == [8, top - 8, 9, top - 1]
    assert sorted_keys_of_runs(layout, [pages[1:2], pages[3:], pages[:1], pages[2:3]]).tolist() == (
        sorted_keys(layout, pages).tolist()
    )
