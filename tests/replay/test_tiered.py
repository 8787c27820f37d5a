"""Replays with tiers below the pool: hits by tier, and what they sum to."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from replay.capacity import parse_capacities
from replay.cli import main
from replay.errors import ReplayError
from replay.sweep import SweepConfig, sweep
from replay.tiered import TieredDriver, TierOptions, TierPages
from tests.replay.replay_builders import make_block_reader, make_token_reader


def chats(seed=0, requests=120):
    """Growing prompts of a few users, as token ids."""
    rng = np.random.default_rng(seed)
    users = [[int(rng.integers(4))] * 4 for _ in range(6)]
    prompts = []
    for _ in range(requests):
        user = users[int(rng.integers(len(users)))]
        user += rng.integers(0, 3, size=int(rng.integers(1, 9))).tolist()
        del user[48:]
        prompts.append(list(user))
    return prompts


def run(capacity, host=None, disk=None, *, reader=None, **settings):
    tiers = TierOptions.read(host, disk)
    config = SweepConfig(parse_capacities(capacity), tiers=tiers, **{"page_size": 4, **settings})
    return sweep(reader or make_token_reader(chats()), config).results


@pytest.mark.parametrize("definition", ["D1", "D2", "D3", "D4", "D5"])
def test_device_hits_and_all_hits_are_between_those_of_pools_of_these_sizes(definition):
    (tiered,) = run("10p", "20p", "30p", definition=definition)
    (unbounded,) = run("unbounded", definition=definition)
    parts = tiered.tiering
    assert tiered.hit.hits == parts.device_hits + parts.host_hits + parts.disk_hits
    assert parts.host_hits > 0
    assert parts.disk_hits > 0
    assert tiered.hit.hits <= unbounded.hit.hits
    assert tiered.hit.total == unbounded.hit.total


def test_tiers_that_hold_everything_hit_as_an_unbounded_pool_does():
    (unbounded,) = run("unbounded")
    for host, disk in (("unbounded", None), ("24p", "unbounded"), ("40p", "unbounded")):
        (tiered,) = run("12p", host, disk)
        assert tiered.hit == unbounded.hit
        assert tiered.tiering.dropped_pages == 0 or disk


def test_a_pool_that_evicts_nothing_uses_no_tier():
    (tiered,) = run("unbounded", "10p", "10p")
    (plain,) = run("unbounded")
    assert tiered.hit == plain.hit
    assert tiered.tiering.device_hits == plain.hit.hits
    assert tiered.tiering.stored_pages == tiered.evicted_pages == 0
    assert tiered.peak_pages == plain.peak_pages


def test_small_tiers_add_up_exactly_by_hand():
    """A, B and C take turns on a device for one of them; the tiers below hold the others."""
    prompts = [([1, 2], 8), ([3, 4], 8), ([5, 6], 8), ([1, 2], 8), ([3, 4], 8)]
    reader = make_block_reader(prompts)
    (result,) = run("2p", "6p", reader=reader, page_size=None)
    assert result.hit.hits == 16
    parts = result.tiering
    assert (parts.device_hits, parts.host_hits, parts.disk_hits) == (0, 16, 0)
    assert (parts.stored_pages, parts.loaded_pages, parts.dropped_pages) == (6, 4, 0)
    assert (parts.host_evicted_pages, parts.fetched_pages) == (0, 0)
    (result,) = run("2p", "2p", "4p", reader=make_block_reader(prompts), page_size=None)
    assert (result.tiering.host_hits, result.tiering.disk_hits) == (0, 16)


def test_every_tier_is_sound_at_every_step():
    from replay.driver import Prompt, RunConfig
    from replay.sweep import plan_units

    reader = make_token_reader(chats(1))
    units = plan_units(reader.info, page_size=4, expand=False)
    driver = TieredDriver(RunConfig(10, units.page_size, units.tree_page_size), TierPages(12, 20))
    for request in reader:
        driver.feed([Prompt(units.key(request), units.pages(request), request.input_length)])
        driver.check_invariants()
    driver.drain()
    assert driver.result().peak_pages <= 10


def test_json_and_table_show_a_column_for_each_tier():
    arguments = ["replay", "example", "--limit", "200", "--page-size", "16", "--capacity", "5k,20k"]
    arguments += ["--host-capacity", "20k", "--disk-capacity", "1000p"]
    table = CliRunner().invoke(main, arguments, catch_exceptions=False).output
    for words in ("device", "host", "disk", "don't add up", "16,000"):
        assert words in table
    assert max(len(line) for line in table.splitlines()) <= 100
    document = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
    for row in document["results"]:
        tiers = row["tiers"]
        assert tiers["device_hits"] + tiers["host_hits"] + tiers["disk_hits"] == row["hits"]
        assert (tiers["host_pages"], tiers["disk_pages"]) == (1250, 1000)
        assert all(isinstance(value, int) for value in tiers.values())


@pytest.mark.parametrize(
    ("host", "disk", "message"),
    [
        (None, "1M", "--disk-capacity: the disk holds"),
        ("1M,2M", None, "--host-capacity 1M,2M: give one capacity"),
        ("much", None, "--host-capacity 'much'"),
        ("1M", "0", "--disk-capacity '0'"),
    ],
)
def test_mistakes_are_told_in_one_line(host, disk, message):
    with pytest.raises(ReplayError, match=message) as caught:
        TierOptions.read(host, disk)
    assert "\n" not in str(caught.value)


def test_a_tier_of_less_than_a_page_is_refused():
    with pytest.raises(ReplayError, match="--host-capacity 3: less than one page"):
        run("10p", "3")
    with pytest.raises(ReplayError, match="--disk-capacity 3: less than one page"):
        run("10p", "10p", "3")
