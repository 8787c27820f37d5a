"""Owner metadata: what it accepts, and how it splits."""

import numpy as np
import pytest

from tiers import OwnerMetadata

OWNERS = [0, 1, 1, 0, 2]


def ints(values, dtype=np.int64):
    return np.array(values, dtype=dtype)


@pytest.mark.parametrize(
    ("rank", "positions"),
    [(0, [0, 1, 2, 9, 10, 11]), (1, [3, 4, 5, 6, 7, 8]), (2, [12, 13, 14]), (3, [])],
)
def test_each_rank_owns_the_positions_of_its_pages(rank, positions):
    owners = OwnerMetadata.of(OWNERS, rank, 3)
    assert owners.owned_positions.tolist() == positions
    assert owners.page_owners.tolist() == OWNERS
    assert owners.page_owners.dtype == np.int8
    assert (owners.num_tokens, owners.num_owned_pages) == (15, len(positions) // 3)
    assert owners.classes().dtype == np.int64


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("cut", range(6))
def test_a_split_at_a_page_cuts_all_three(rank, cut):
    head, tail = OwnerMetadata.of(OWNERS, rank, 3).split(cut * 3)
    for part, owners in ((head, OWNERS[:cut]), (tail, OWNERS[cut:])):
        whole = OwnerMetadata.of(owners, rank, 3)
        assert part.page_owners.tolist() == owners
        assert part.owned_positions.tolist() == whole.owned_positions.tolist()
        assert part.page_size == 3


@pytest.mark.parametrize("at", [-3, 1, 4, 16, 18])
def test_a_split_elsewhere_is_refused(at):
    with pytest.raises(ValueError, match="page boundary"):
        OwnerMetadata.of(OWNERS, 0, 3).split(at)


@pytest.mark.parametrize(
    ("positions", "owners", "page_size", "message"),
    [
        (ints([0, 1]), ints([0, 1], np.int8), 0, "page_size=0"),
        (ints([0, 1]), ints([0, 1]), 2, "page_owners are int64"),
        (ints([[0, 1]]), ints([0, 1], np.int8), 2, "owned_positions are"),
        (ints([0, 1], np.int32), ints([0, 1], np.int8), 2, "owned_positions are int32"),
        (ints([0, 1]), ints([0, -1], np.int8), 2, "at least 0"),
        (ints([0, 4]), ints([0, 1], np.int8), 2, "leave the write"),
        (ints([-1, 0]), ints([0, 1], np.int8), 2, "leave the write"),
        (ints([0]), ints([0, 1], np.int8), 2, "whole pages"),
        (ints([1, 0]), ints([0, 1], np.int8), 2, "whole pages"),
        (ints([0, 1, 2, 3]), ints([0, 1], np.int8), 2, "not the positions"),
        (ints([0, 1]), ints([0, 0], np.int8), 2, "all of its pages"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(positions, owners, page_size, message):
    with pytest.raises(ValueError, match=message):
        OwnerMetadata(positions, owners, page_size)


def test_it_keeps_read_only_copies():
    owners = ints([0, 1], np.int8)
    positions = ints([0, 1])
    kept = OwnerMetadata(positions, owners, 2)
    owners[:] = positions[:] = 7
    assert (kept.page_owners.tolist(), kept.owned_positions.tolist()) == ([0, 1], [0, 1])
    with pytest.raises(ValueError, match="read-only"):
        kept.page_owners[0] = 3
    with pytest.raises(AttributeError):
        kept.page_size = 4


@pytest.mark.parametrize(("owners", "rank"), [([128], 0), ([-1], 0), ([0], -1)])
def test_owners_that_an_int8_cannot_hold_are_refused(owners, rank):
    with pytest.raises(ValueError, match="128"):
        OwnerMetadata.of(owners, rank, 2)
