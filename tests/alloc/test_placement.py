"""Which rank owns a slot, and in which row it keeps it."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import PageInterleavePlacement, PageShardSpec
from tests.alloc.alloc_builders import ints


def make_spec(shard_rank=0, shard_size=4, page_size=16, groups=64, chunk_pages=32):
    return PageShardSpec(
        shard_rank=shard_rank,
        shard_size=shard_size,
        page_size=page_size,
        max_prefix_tokens=groups * shard_size * page_size,
        chunk_tokens=chunk_pages * page_size,
    )


def make_placement(shard_size=4, page_size=16, shard_rank=0):
    return PageInterleavePlacement(make_spec(shard_rank, shard_size, page_size))


SHAPES = [(1, 1), (1, 16), (2, 1), (3, 5), (4, 16), (8, 64)]


@pytest.fixture(params=["numpy", "torch"])
def arange(request):
    if request.param == "numpy":
        return np.arange
    return pytest.importorskip("torch").arange


# The spec


def test_a_spec_is_frozen():
    """An immutable value object: equal by value, hashable; B1, C2."""
    spec = make_spec()
    with pytest.raises(FrozenInstanceError):
        spec.page_size = 32
    assert spec == make_spec()
    assert len({spec, make_spec(), make_spec(1)}) == 2


def test_derived_sizes_follow_from_the_fields():
    """logical_page_size == N * ps; scratch_rows == prefix + chunk + ps; B1, C2."""
    spec = make_spec(shard_size=4, page_size=16, groups=64, chunk_pages=32)
    assert spec.logical_page_size == 64
    assert spec.scratch_rows == 64 * 64 + 32 * 16 + 16
    assert spec.layout(8).num_pages == 4 * 9


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((0, 0, 16, 0, 0), "shard_size=0"),
        ((0, -4, 16, 0, 0), "shard_size=-4"),
        ((4, 4, 16, 64, 16), r"shard_rank=4 must be in \[0, 4\)"),
        ((-1, 4, 16, 64, 16), "shard_rank=-1"),
        ((0, 4, 0, 64, 16), "page_size=0"),
        ((0, 4, -16, 64, 16), "page_size=-16"),
        ((0, 4, 16, 65, 16), "max_prefix_tokens=65 must be a multiple .* 64"),
        ((0, 4, 16, 16, 16), "max_prefix_tokens=16"),
        ((0, 4, 16, -64, 16), "max_prefix_tokens=-64"),
        ((0, 4, 16, 64, 17), "chunk_tokens=17 must be a multiple of page_size=16"),
        ((0, 4, 16, 64, -16), "chunk_tokens=-16"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(fields, words):
    """Each field out of its range is a ValueError with value and rule; B1."""
    with pytest.raises(ValueError, match=words):
        PageShardSpec(*fields)


def test_one_rank_is_a_valid_group():
    """shard_size 1 is the identity placement."""
    placement = make_placement(1, 16)
    locs = np.arange(100)
    assert ints(placement.owner_of(locs)) == [0] * 100
    assert ints(placement.local_index(locs)) == list(range(100))


# The mapping


@pytest.mark.parametrize(("shard_size", "page_size"), SHAPES)
def test_group_owner_and_offset_rebuild_every_slot(arange, shard_size, page_size):
    """A bijection, also for a last group that is not whole: 37 groups + 5 tokens; B2, C3, C4."""
    placement = make_placement(shard_size, page_size)
    size = shard_size * page_size
    locs = arange(37 * size + 5)
    owner, row = placement.owner_of(locs), placement.local_index(locs)
    assert ints(locs // size * size + owner * page_size + locs % page_size) == ints(locs)
    assert ints(row) == ints(locs // size * page_size + locs % page_size)
    assert ints(placement.loc_of(owner, row)) == ints(locs)
    assert len(set(zip(ints(owner), ints(row), strict=True))) == len(locs)


def test_the_formulas_give_the_worked_values():
    """N=4, ps=16: owners and rows of a few slots, by hand; B2, C5."""
    placement = make_placement(4, 16)
    locs = np.array([0, 15, 16, 63, 64, 80, 127, 1000])
    assert ints(placement.owner_of(locs)) == [0, 0, 1, 3, 0, 1, 3, 2]
    assert ints(placement.local_index(locs)) == [0, 15, 0, 15, 16, 16, 31, 248]


@pytest.mark.parametrize(("shard_size", "page_size"), SHAPES)
def test_shares_of_whole_groups_partition_the_slots(arange, shard_size, page_size):
    """Disjoint, equal in size, complete, the same rows on every rank; B3, C6, C7."""
    placement = make_placement(shard_size, page_size)
    locs = arange(7 * shard_size * page_size)
    masks = [placement.local_mask(locs, rank) for rank in range(shard_size)]
    assert ints(sum(mask * 1 for mask in masks)) == [1] * len(locs)
    rows = [ints(placement.filter_local(locs, rank)) for rank in range(shard_size)]
    assert rows == [list(range(7 * page_size))] * shard_size


@pytest.mark.parametrize(("shard_size", "page_size"), SHAPES)
def test_a_rank_owns_one_page_of_every_group(shard_size, page_size):
    """Rank r's slots are positions [r * ps, (r + 1) * ps) of every group; B4, C8."""
    placement = make_placement(shard_size, page_size)
    size = shard_size * page_size
    locs = np.arange(5 * size)
    for rank in range(shard_size):
        expected = [
            rank * page_size <= loc % size < (rank + 1) * page_size for loc in range(len(locs))
        ]
        mask = placement.local_mask(locs, rank)
        assert (ints(mask), mask.dtype) == (expected, np.bool_)


def test_filtering_keeps_the_order():
    """Shuffled slots give rows in their order; B3, C6."""
    placement = make_placement(2, 2)
    assert ints(placement.filter_local(np.array([9, 0, 6, 4, 5, 0]), 0)) == [5, 0, 2, 3, 0]
    assert ints(placement.filter_local([7, 2, 3, 2], 1)) == [3, 0, 1, 0]


def test_the_rank_of_the_spec_does_not_enter():
    """Stateless: the rank is always an argument, and any shard_rank gives the same; C9."""
    locs = np.arange(300)
    rows = [ints(make_placement(4, 16, rank).filter_local(locs, 2)) for rank in range(4)]
    assert rows == [rows[0]] * 4


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_out_of_range_is_an_error(rank):
    """The rank lies in [0, N)."""
    for method in ("local_mask", "filter_local"):
        with pytest.raises(ValueError, match=f"rank={rank}"):
            getattr(make_placement(), method)(np.arange(4), rank)


@pytest.mark.parametrize("rank", [0.5, 1.0, "1", None, True])
def test_a_rank_is_an_integer(rank):
    """No float is cut to a rank."""
    with pytest.raises(ValueError, match=r"rank=.* must be an integer"):
        make_placement().local_mask(np.arange(4), rank)


@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
@pytest.mark.parametrize("values", [[1.5], [1.0, float("nan")], [True, False]], ids=repr)
def test_slots_that_are_not_integers_are_refused(kind, values):
    """owner_of([1.5]) is an error and not the owner of slot 1."""
    locs = values if kind == "list" else np.array(values)
    if kind == "torch":
        locs = pytest.importorskip("torch").tensor(values)
    placement = make_placement()
    for call in (
        placement.owner_of,
        placement.local_index,
        lambda rows: placement.loc_of(np.arange(len(rows)), rows),
        lambda owners: placement.loc_of(owners, np.arange(len(owners))),
    ):
        with pytest.raises(ValueError, match="pass integers"):
            call(locs)


def test_any_length_of_slots_is_accepted(arange):
    """Empty slots and the reserved range map too; C10."""
    placement = make_placement(4, 16)
    assert ints(placement.owner_of(arange(0))) == []
    assert ints(placement.filter_local(arange(0), 1)) == []
    assert ints(placement.local_index(arange(64))) == list(range(16)) * 4


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_int32_slots_are_widened(kind):
    """int32 and int64 give the same int64 results; B5, O1."""
    module = np if kind == "numpy" else pytest.importorskip("torch")
    placement = make_placement(4, 16)
    narrow = (
        module.arange(2**31 - 40, 2**31 - 1).astype("int32")
        if kind == "numpy"
        else (module.arange(2**31 - 40, 2**31 - 1, dtype=module.int32))
    )
    for function in (placement.owner_of, placement.local_index):
        wide = function(narrow)
        assert str(wide.dtype).endswith("int64")
        assert ints(wide) == ints(function(np.asarray(narrow).astype(np.int64)))
    owner = placement.owner_of(narrow)
    back = placement.loc_of(owner, placement.local_index(narrow))
    assert ints(back) == ints(narrow)
    rows = module.asarray([2**31 - 1], dtype=module.int32)
    assert ints(placement.loc_of(rows * 0, rows)) == [(2**31 - 1) // 16 * 64 + 15]


@given(loc=st.integers(0, 2**60), shard_size=st.integers(1, 16), page_size=st.integers(1, 256))
@settings(max_examples=100, deadline=None)
def test_no_slot_overflows(loc, shard_size, page_size):
    """Far beyond 2**31 the arithmetic is that of Python integers; B5."""
    placement = make_placement(shard_size, page_size)
    group, inside = divmod(loc, shard_size * page_size)
    owner, offset = divmod(inside, page_size)
    locs = np.array([loc])
    assert ints(placement.owner_of(locs)) == [owner]
    assert ints(placement.local_index(locs)) == [group * page_size + offset]
    assert ints(placement.loc_of([owner], [group * page_size + offset])) == [loc]
