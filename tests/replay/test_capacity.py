"""Laws of the capacity grammar."""

import pytest

from replay.capacity import MAX_CAPACITIES, MAX_PAGES, parse_capacities
from replay.errors import ReplayError


def amounts(text: str) -> list[int | None]:
    return [capacity.amount for capacity in parse_capacities(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", [1]),
        ("500k", [500_000]),
        ("5M", [5_000_000]),
        ("1.5M", [1_500_000]),
        ("2G", [2_000_000_000]),
        ("512Ki", [524_288]),
        ("2Mi, 3Gi", [2 << 20, 3 << 30]),
        ("1k,2k,1k", [1000, 2000]),
        ("1M:5M:2M", [1_000_000, 3_000_000, 5_000_000]),
        ("1M:4M:2M", [1_000_000, 3_000_000]),
        ("1k:10k:x3", [1000, 3000, 9000]),
        ("100:200:x1.5", [100, 150]),
        ("5:5:1", [5]),
        ("unbounded,1k", [None, 1000]),
    ],
)
def test_an_amount_list_or_range_means_these_numbers(text, expected):
    assert expected == amounts(text)


def test_a_final_p_counts_pages():
    (capacity,) = parse_capacities("3p")

    assert capacity.pages(512, 0) == 3


def test_tokens_round_down_to_whole_pages():
    (capacity,) = parse_capacities("1535")

    assert capacity.pages(512, 0) == 2


def test_unbounded_is_the_working_set_and_at_least_a_page():
    (capacity,) = parse_capacities("unbounded")

    assert (capacity.pages(512, 7), capacity.pages(512, 0)) == (7, 1)


@pytest.mark.parametrize(
    "text",
    ["", "0", "0k", "-5", "5m", "k", "1e6", "5 M", "0.4", "1,,2", "1:2", "1:2:3:4", "5:1:1",
     "1:5:0", "1:5:x1", "1:5:x", "1p:5:1", "1p:5p:1", "1:unbounded:1", "nan", "inf", "\uff11"],
)  # fmt: skip
def test_garbage_is_one_line_that_repeats_it(text):
    with pytest.raises(ReplayError) as caught:
        parse_capacities(text)

    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--capacity ")


def test_too_many_capacities_are_refused_without_listing_them():
    with pytest.raises(ReplayError, match=f"more than {MAX_CAPACITIES} capacities"):
        parse_capacities("1:1000000000:1")


def test_less_than_a_page_is_refused_with_the_least_amount():
    (capacity,) = parse_capacities("511")

    with pytest.raises(ReplayError, match="less than one page of 512 tokens; give at least 512"):
        capacity.pages(512, 0)


def test_more_pages_than_can_be_replayed_are_refused():
    (capacity,) = parse_capacities("1000G")

    with pytest.raises(ReplayError, match=f"at most {MAX_PAGES} pages"):
        capacity.pages(1, 0)
