"""`--shards` and its companions: lists of schedules, and clear refusals."""

import pytest

from replay.errors import ReplayError
from replay.schedule import OWNER_LANE, Schedule, ShardOptions


def brief(**options):
    """Return (ranks, in_flight, rotation) of the schedules; rotation None for one rank."""
    return [
        (s.ranks, s.in_flight, s.rotation if s.ranks > 1 else None)
        for s in ShardOptions(**options).schedules()
    ]


def test_without_shards_there_is_no_schedule():
    assert ShardOptions().schedules() == ()


def test_the_replicated_pool_comes_first_and_seams_are_the_default():
    assert brief(shards="8") == [(1, 1, None), (8, 1, "seam")]


def test_naming_the_replicated_pool_adds_nothing():
    assert brief(shards="1,8, 8") == brief(shards="8")


def test_lists_are_crossed_and_the_replicated_pool_has_no_rotation():
    assert brief(shards="4,8", in_flight="1,3", rotation="chain,seam") == [
        (1, 1, None),
        (1, 3, None),
        (4, 1, "chain"),
        (4, 3, "chain"),
        (4, 1, "seam"),
        (4, 3, "seam"),
        (8, 1, "chain"),
        (8, 3, "chain"),
        (8, 1, "seam"),
        (8, 3, "seam"),
    ]


def test_owner_lanes_come_once_beside_every_rotation_of_interleaved_pages():
    both = ShardOptions("4", layout="interleave,owner-lane", rotation="chain,seam").schedules()
    alone = ShardOptions("4", in_flight="1,2", layout="owner-lane").schedules()

    assert [(s.ranks, s.layout, s.rotation) for s in both[1:3]] == [
        (4, "interleave", "chain"),
        (4, "interleave", "seam"),
    ]
    assert both[3:] == (Schedule(4, layout=OWNER_LANE),)
    assert alone[2:] == (Schedule(4, 1, layout=OWNER_LANE), Schedule(4, 2, layout=OWNER_LANE))
    assert [s.owner_lanes for s in alone] == [False, False, True, True]


@pytest.mark.parametrize("given", [{"rotation": "chain"}, {"no_leases": True}])
def test_what_only_rotation_bases_have_is_refused_with_owner_lanes_alone(given):
    with pytest.raises(ReplayError, match="owner lanes have no rotation bases") as caught:
        ShardOptions("4", layout="owner-lane", **given).schedules()
    assert "\n" not in str(caught.value)


def test_an_unknown_layout_is_named():
    with pytest.raises(
        ReplayError, match="'up' is no layout; give interleave, owner-lane or inter"
    ):
        ShardOptions("8", layout="up").schedules()


def test_switches_act_on_sharded_pools():
    options = ShardOptions("2", rotation="chain", no_leases=True, blind_eviction=True)

    assert options.schedules() == (Schedule(1), Schedule(2, 1, "chain", False, False))


@pytest.mark.parametrize("option", ["shards", "in_flight"])
@pytest.mark.parametrize("text", ["", "0", "-1", "1025", "2.5", "x", "1,,2", "9" * 5000, "\uff18"])
def test_a_number_out_of_place_is_named_with_its_range(option, text):
    with pytest.raises(ReplayError, match="is no whole number from 1 to 1024; give one"):
        ShardOptions(**{"shards": "8", option: text}).schedules()


def test_an_unknown_rotation_is_named():
    with pytest.raises(ReplayError, match="'up' is no rotation; give chain, seam or chain,seam"):
        ShardOptions("8", rotation="chain,up").schedules()


@pytest.mark.parametrize(
    ("name", "value"),
    [("in_flight", "8"), ("rotation", "seam"), ("no_leases", True), ("blind_eviction", True)],
)
def test_an_option_without_shards_is_refused(name, value):
    option = "--" + name.replace("_", "-")
    with pytest.raises(ReplayError, match=f"{option}: needs a sharded pool; add --shards"):
        ShardOptions(**{name: value}).schedules()


def test_leases_cannot_be_turned_off_where_there_are_none():
    with pytest.raises(ReplayError, match="only the chain rotation has leases"):
        ShardOptions("8", no_leases=True).schedules()
