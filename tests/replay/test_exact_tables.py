"""The public traces give the exact numbers that come with them."""

import pytest

from replay.capacity import parse_capacities
from replay.formats import open_trace
from replay.schedule import Schedule
from replay.sweep import SweepConfig, sweep
from tests.replay.replay_builders import TRACES, TRACES_MISSING

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=TRACES_MISSING)

CONVERSATION = "conversation_trace.jsonl"
SYNTHETIC = "synthetic_trace.jsonl"

UNBOUNDED = {
    (CONVERSATION, "D1"): (105_710, 288_500),
    (CONVERSATION, "D2"): (54_098_411, 144_793_823),
    (CONVERSATION, "D3"): (54_063_104, 144_793_823),
    (CONVERSATION, "D5"): (27_038_068, 67_915_607),
    (SYNTHETIC, "D1"): (77_953, 121_877),
    (SYNTHETIC, "D2"): (39_852_661, 61_194_628),
    (SYNTHETIC, "D3"): (39_802_880, 61_194_628),
    (SYNTHETIC, "D5"): (31_535_563, 36_552_394),
}
MEANS = {CONVERSATION: 0.384258, SYNTHETIC: 0.423235}
UNIQUE_BLOCKS = {CONVERSATION: 182_790, SYNTHETIC: 43_924}
LRU_D2 = {
    CONVERSATION: {
        1_000: 6_575_459,
        5_000: 16_505_817,
        10_000: 31_238_981,
        20_000: 42_493_406,
        50_000: 52_347_371,
    },
    SYNTHETIC: {
        1_000: 5_245_479,
        5_000: 17_411_123,
        10_000: 26_421_660,
        20_000: 35_629_847,
        50_000: 39_852_661,
    },
}
LRU_D5 = {
    CONVERSATION: {
        2_818: 4_362_064,
        5_637: 8_928_755,
        11_275: 15_849_049,
        22_550: 21_501_492,
        45_100: 25_426_292,
    },
    SYNTHETIC: {2_818: 10_096_926, 5_637: 16_187_558, 11_275: 23_093_187, 22_550: 29_142_879},
}
LRU = {"D2": LRU_D2, "D5": LRU_D5}


def run(name, capacity, **options):
    reader = open_trace(str(TRACES / name))
    return sweep(reader, SweepConfig(parse_capacities(capacity), **options)).results


@pytest.mark.parametrize(("name", "definition"), UNBOUNDED)
def test_an_unbounded_cache_gives_the_published_integers(name, definition):
    (result,) = run(name, "unbounded", definition=definition)

    assert (result.hit.hits, result.hit.total) == UNBOUNDED[name, definition]
    assert result.peak_pages == UNIQUE_BLOCKS[name]


@pytest.mark.parametrize("name", MEANS)
def test_an_unbounded_cache_gives_the_published_mean(name):
    (result,) = run(name, "unbounded", definition="D4")

    assert round(result.hit.rate, 6) == MEANS[name]


@pytest.mark.parametrize(
    ("definition", "name", "pages"),
    [
        (definition, name, pages)
        for definition, tables in LRU.items()
        for name, table in tables.items()
        for pages in table
    ],
)
def test_lru_gives_the_published_tokens_at_every_capacity(definition, name, pages):
    (result,) = run(name, f"{pages}p", definition=definition)

    assert result.hit.hits == LRU[definition][name][pages]


def test_a_sweep_of_a_published_trace_equals_its_single_runs():
    table = LRU_D2[SYNTHETIC]
    results = run(SYNTHETIC, ",".join(f"{pages}p" for pages in table))

    assert {r.capacity_pages: r.hit.hits for r in results} == table


@pytest.mark.parametrize("page_size", [512, 64])
def test_an_expanded_replay_of_500_requests_equals_the_fast_path(page_size):
    capacity = "500k,1M,2M"
    expanded = run(CONVERSATION, capacity, limit=500, page_size=page_size, expand=True)
    fast = run(CONVERSATION, capacity, limit=500, page_size=page_size)

    assert [r.hit for r in expanded] == [r.hit for r in fast]
    assert [r.evicted_pages for r in expanded] == [r.evicted_pages for r in fast]
    assert all(r.evicted_pages for r in fast)


def test_a_page_of_64_and_a_page_of_512_hit_the_same_when_nothing_is_evicted():
    (large,) = run(CONVERSATION, "unbounded", limit=500)
    (small,) = run(CONVERSATION, "unbounded", limit=500, page_size=64, expand=True)

    assert large.hit == small.hit


def test_eight_ranks_with_seams_hit_what_one_pool_of_eight_times_the_pages_hits():
    schedules = (Schedule(1), Schedule(8))
    copies, shared = run(SYNTHETIC, "1000p", schedules=schedules)
    (pooled,) = run(SYNTHETIC, "8000p")

    assert copies.hit.hits == LRU_D2[SYNTHETIC][1_000]
    assert shared.hit.rate == pytest.approx(pooled.hit.rate, abs=0.002)
    assert shared.sharding.mean_stranded_pages < 80


def test_leases_keep_a_pipelined_schedule_from_declining():
    schedules = [Schedule(8, 32, "chain", use_leases=leases) for leases in (True, False)]
    with_leases, without = run(CONVERSATION, "10000p", limit=2000, schedules=tuple(schedules))

    assert with_leases.sharding.declined_tokens == 0
    assert without.sharding.declined_tokens > 0


def test_agent_sessions_stream_from_their_archive():
    (result,) = run("agentic_code_sessions.jsonl.xz", "1M", limit=300)

    assert result.requests == 300
    assert 0.5 < result.hit.rate < 1.0
