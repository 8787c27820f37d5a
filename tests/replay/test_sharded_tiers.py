"""Sharded replays with tiers below the ranks: hits by tier, and a sound state all along."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from radix import RadixKey
from replay.cli import main
from replay.driver import Prompt, RunConfig
from replay.schedule import LAYOUTS, OWNER_LANE, Schedule
from replay.sharded import ShardedDriver
from replay.sharded_tiers import TieredShardedDriver
from replay.tiered import TieredDriver, TierPages
from tests.replay.replay_builders import seen_hits

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=14)
TIERS = st.builds(TierPages, st.integers(1, 12), st.integers(0, 12))
SCHEDULES = st.builds(
    Schedule,
    ranks=st.sampled_from([1, 2, 3]),
    in_flight=st.integers(1, 3),
    rotation=st.sampled_from(["chain", "seam"]),
    aimed_eviction=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
)
PLACINGS = [Schedule(2, rotation="chain"), Schedule(2), Schedule(2, layout=OWNER_LANE)]


def make_prompt(ids):
    return Prompt(RadixKey(list(ids)), len(ids), len(ids))


def fed(driver, prompts):
    """Feed prompts one by one, check after each, and return the result."""
    for ids in prompts:
        driver.feed([make_prompt(ids)])
        driver.check_invariants()
    driver.drain()
    driver.check_invariants()
    return driver.result()


@settings(max_examples=60, deadline=None)
@given(prompts=PROMPTS, capacity=st.integers(1, 9), schedule=SCHEDULES, tiers=TIERS)
def test_hits_of_the_tiers_add_up_under_any_schedule(prompts, capacity, schedule, tiers):
    result = fed(TieredShardedDriver(RunConfig(capacity, 1, 1), schedule, tiers), prompts)
    parts = result.tiering
    hits = [parts.device_hits, parts.host_hits, parts.disk_hits]

    assert sum(hits) == result.hit.hits <= sum(seen_hits(prompts))
    assert min(hits) >= 0
    assert parts.disk_hits == 0 or tiers.disk
    assert result.peak_pages <= capacity * schedule.ranks


@settings(max_examples=60, deadline=None)
@given(prompts=PROMPTS, capacity=st.integers(1, 9), tiers=TIERS)
def test_one_rank_and_one_request_at_a_time_equal_the_tiers_of_a_plain_pool(
    prompts, capacity, tiers
):
    config = RunConfig(capacity, 1, 1)
    plain = fed(TieredDriver(config, tiers), prompts)
    sharded = fed(TieredShardedDriver(config, Schedule(1), tiers), prompts)

    assert (sharded.hit, sharded.tiering) == (plain.hit, plain.tiering)


@pytest.mark.parametrize("schedule", PLACINGS)
def test_what_leaves_the_ranks_comes_back_to_them(schedule):
    """A, B and C take turns on ranks with room for one; host and disk hold the others."""
    prompts = [range(8), range(10, 18), range(20, 28), range(8), range(10, 18)]
    config = RunConfig(4, 1, 1)
    host = fed(TieredShardedDriver(config, schedule, TierPages(12)), prompts).tiering
    disk = fed(TieredShardedDriver(config, schedule, TierPages(4, 12)), prompts).tiering

    assert fed(ShardedDriver(config, schedule), prompts).hit.hits == 0
    assert (host.device_hits, host.host_hits, host.disk_hits) == (0, 16, 0)
    assert (host.stored_pages, host.loaded_pages, host.dropped_pages) == (24, 16, 0)
    assert (disk.device_hits, disk.host_hits, disk.disk_hits) == (0, 0, 16)


def test_the_command_takes_shards_and_tiers_together():
    arguments = ["replay", "example", "--limit", "200", "--capacity", "2k", "--shards", "2"]
    arguments += ["--layout", "interleave,owner-lane", "--host-capacity", "8k"]
    table = CliRunner().invoke(main, arguments, catch_exceptions=False).output
    document = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)

    for words in ("device", "host", "disk", "each rank keeps its own", "stranded"):
        assert words in table
    assert max(len(line) for line in table.splitlines()) <= 100
    for row in document["results"]:
        tiers = row["tiers"]
        assert tiers["device_hits"] + tiers["host_hits"] + tiers["disk_hits"] == row["hits"]
        assert tiers["host_hits"] > 0
        assert tiers["host_pages"] == 500
