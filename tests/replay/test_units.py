"""Ids become units so that pages and paths keep their meaning."""

import pytest

from replay.errors import ReplayError
from replay.trace import Request
from replay.units import plan_units
from tests.replay.replay_builders import BLOCK_INFO, TOKEN_INFO


@pytest.mark.parametrize(
    ("info", "page_size", "expand", "expected"),
    [
        (TOKEN_INFO, None, False, (16, 16, 1)),
        (TOKEN_INFO, 3, False, (3, 3, 1)),
        (BLOCK_INFO, None, False, (4, 1, 1)),
        (BLOCK_INFO, 2, False, (2, 1, 2)),
        (BLOCK_INFO, None, True, (4, 4, 4)),
        (BLOCK_INFO, 1, True, (1, 1, 4)),
    ],
)
def test_a_trace_and_a_page_size_fix_the_units(info, page_size, expand, expected):
    units = plan_units(info, page_size=page_size, expand=expand)

    assert (units.page_size, units.tree_page_size, units.units_per_id) == expected


@pytest.mark.parametrize("page_size", [3, 8])
@pytest.mark.parametrize("expand", [False, True])
def test_a_block_that_is_no_whole_number_of_pages_is_explained(page_size, expand):
    with pytest.raises(ReplayError) as caught:
        plan_units(BLOCK_INFO, page_size=page_size, expand=expand)

    assert str(caught.value) == (
        f"--page-size {page_size}: an id of this trace stands for 4 tokens, which is no whole "
        f"number of pages of {page_size}; give a divisor of 4"
    )


def test_tokens_are_not_expanded():
    with pytest.raises(ReplayError, match="--expand: the trace holds token ids already"):
        plan_units(TOKEN_INFO, page_size=None, expand=True)


def test_a_page_of_no_tokens_is_refused():
    with pytest.raises(ReplayError, match="--page-size 0"):
        plan_units(TOKEN_INFO, page_size=0, expand=False)


@pytest.mark.parametrize(
    ("page_size", "expand", "length"), [(None, False, 2), (2, False, 4), (None, True, 8)]
)
def test_a_key_has_the_units_of_all_ids(page_size, expand, length):
    units = plan_units(BLOCK_INFO, page_size=page_size, expand=expand)

    assert len(units.key(Request(7, [5, 6]))) == length


@pytest.mark.parametrize(("page_size", "pages"), [(None, 2), (2, 3), (1, 5)])
def test_pages_past_the_prompt_do_not_count(page_size, pages):
    units = plan_units(BLOCK_INFO, page_size=page_size, expand=False)

    assert units.pages(Request(5, [5, 6])) == pages


def test_a_partial_page_of_tokens_does_not_count():
    units = plan_units(TOKEN_INFO, page_size=4, expand=False)

    assert units.pages(Request(7, list(range(7)))) == 1
