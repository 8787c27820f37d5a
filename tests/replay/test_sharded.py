"""A sharded replay: hits of the right pool, balance, declines, and a sound state at the end."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloc import build_in_seq_page_compute_owners
from radix import MatchPrefixParams, RadixKey
from replay.cli import POLICIES
from replay.driver import Driver, Prompt, RunConfig
from replay.hits import MEANINGS
from replay.layouts import OwnerLanes
from replay.schedule import INTERLEAVE, LAYOUTS, OWNER_LANE, Schedule
from replay.sharded import FIRST_ROW_PAGES, ShardedDriver
from replay.synthetic import ChatSpec, Range, generate
from tests.replay.replay_builders import seen_hits

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=14)
SCHEDULES = st.builds(
    Schedule,
    ranks=st.sampled_from([1, 2, 3, 4]),
    in_flight=st.integers(1, 4),
    rotation=st.sampled_from(["chain", "seam"]),
    use_leases=st.booleans(),
    aimed_eviction=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
)
LANES = Schedule(4, layout=OWNER_LANE)


def make_prompt(pages, page_size=1):
    units = [unit for page in pages for unit in [page, *range(1, page_size)]]
    return Prompt(RadixKey(units), len(pages), len(pages) * page_size)


def make_driver(capacity, schedule, page_size=1, policy="lru", definition="D2"):
    return ShardedDriver(RunConfig(capacity, page_size, page_size, policy, definition), schedule)


def chats(turn_pages=(1, 3), requests=600, page_size=4, concurrent=24, seed=5):
    """Make chats under one hot system prompt of 40 pages, as prompts of whole pages."""
    low, high = (pages * page_size for pages in turn_pages)
    spec = ChatSpec(
        systems=1,
        system_tokens=Range(40 * page_size, 40 * page_size),
        turn_tokens=Range(low, high),
        answer_tokens=Range(0, 0),
        turns=Range(1, 6),
        concurrent=concurrent,
    )
    return [
        Prompt(RadixKey(tokens), len(tokens) // page_size, len(tokens))
        for tokens in generate(spec, seed=seed, requests=requests)
    ]


def run(prompts, capacity, schedule, page_size=4):
    """Replay, check the state, and return the result without the clock's part."""
    driver = make_driver(capacity, schedule, page_size)
    driver.feed(prompts)
    driver.check_invariants()
    driver.drain()
    driver.check_invariants()
    return replace(driver.result(), replay_ns=0)


@settings(max_examples=40, deadline=None)
@given(
    prompts=PROMPTS,
    capacity=st.integers(1, 9),
    page_size=st.sampled_from([1, 4]),
    policy=st.sampled_from(POLICIES),
    definition=st.sampled_from(sorted(MEANINGS)),
)
def test_one_rank_and_one_request_at_a_time_equal_the_plain_driver(
    prompts, capacity, page_size, policy, definition
):
    plain = Driver(RunConfig(capacity, page_size, page_size, policy, definition))
    sharded = make_driver(capacity, Schedule(1), page_size, policy, definition)
    for driver in (plain, sharded):
        driver.feed([make_prompt(prompt, page_size) for prompt in prompts])
        driver.drain()
        driver.check_invariants()

    assert sharded.result().hit == plain.result().hit
    assert sharded.result().evicted_pages == plain.result().evicted_pages
    assert sharded.result().peak_pages == plain.result().peak_pages


@settings(max_examples=60, deadline=None)
@given(prompts=PROMPTS, capacity=st.integers(1, 9), schedule=SCHEDULES)
def test_any_schedule_leaves_a_sound_state_after_every_request(prompts, capacity, schedule):
    driver = make_driver(capacity, schedule)
    for prompt in prompts:
        driver.feed([make_prompt(prompt)])
        driver.check_invariants()
    driver.drain()
    driver.check_invariants()
    result = driver.result()

    assert result.requests == len(prompts)
    assert result.hit.hits <= sum(seen_hits(prompts))
    assert result.peak_pages <= capacity * schedule.ranks


@settings(max_examples=30, deadline=None)
@given(
    prompts=PROMPTS,
    ranks=st.sampled_from([2, 4]),
    rotation=st.sampled_from(["chain", "seam"]),
    layout=st.sampled_from(LAYOUTS),
)
def test_without_pressure_one_request_at_a_time_hits_all_that_was_seen(
    prompts, ranks, rotation, layout
):
    driver = make_driver(200, Schedule(ranks, rotation=rotation, layout=layout))
    driver.feed([make_prompt(prompt) for prompt in prompts])
    driver.drain()
    result = driver.result()

    assert result.hit.hits == sum(seen_hits(prompts))
    assert (result.evicted_pages, result.sharding.declined_inserts) == (0, 0)


@settings(max_examples=30, deadline=None)
@given(prompts=PROMPTS, capacity=st.integers(1, 9), schedule=SCHEDULES)
def test_a_batch_is_its_prompts_one_by_one(prompts, capacity, schedule):
    whole, single = (make_driver(capacity, schedule) for _ in range(2))
    whole.feed([make_prompt(prompt) for prompt in prompts])
    for prompt in prompts:
        single.feed([make_prompt(prompt)])

    assert replace(whole.result(), replay_ns=0) == replace(single.result(), replay_ns=0)


@pytest.mark.parametrize("in_flight", [1, 8])
@pytest.mark.parametrize("rotation", ["chain", "seam"])
def test_two_runs_are_equal(rotation, in_flight):
    first, second = (run(chats(), 60, Schedule(4, in_flight, rotation)) for _ in range(2))

    assert first == second


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_ranks_hit_more_than_copies(layout):
    prompts = chats(requests=1500)
    copies, shared = (run(prompts, 80, Schedule(ranks, layout=layout)) for ranks in (1, 4))

    assert shared.hit.rate > copies.hit.rate + 0.03


@pytest.mark.parametrize("in_flight", [1, 8, 32])
def test_a_seam_never_declines(in_flight):
    sharding = run(chats(), 80, Schedule(4, in_flight, "seam")).sharding

    assert (sharding.declined_inserts, sharding.declined_tokens) == (0, 0)


def burst(copies=6, pages=7):
    """Make requests that arrive together and share an uncached prefix of all but a page."""
    shared = list(range(1, pages))
    return [make_prompt([*shared, 100 + i]) for i in range(copies)]


def test_requests_in_flight_that_meet_decline_without_leases_and_not_with_them():
    def declined(use_leases):
        schedule = Schedule(4, in_flight=6, rotation="chain", use_leases=use_leases)
        driver = make_driver(100, schedule)
        driver.feed(burst())
        driver.drain()
        driver.check_invariants()
        sharding = driver.result().sharding
        return sharding.declined_inserts, sharding.declined_tokens

    assert declined(use_leases=True) == (0, 0)
    inserts, tokens = declined(use_leases=False)
    assert inserts >= 3
    assert tokens == inserts  # the shared pages are cached once; each loses its last page


def test_requests_in_flight_see_nothing_of_each_other():
    driver = make_driver(100, Schedule(2, in_flight=2))
    driver.feed([make_prompt([1, 2]), make_prompt([1, 2]), make_prompt([1, 2])])

    assert driver.result().hit.hits == 2


def test_a_request_waits_for_the_oldest_where_it_does_not_fit_beside_it():
    driver = make_driver(4, Schedule(2, in_flight=2))
    driver.feed([make_prompt(range(6)), make_prompt(range(10, 16))])
    driver.drain()
    driver.check_invariants()
    result = driver.result()

    assert result.sharding.waits == 1
    assert (result.evicted_pages, result.peak_pages) == (4, 8)


@pytest.mark.parametrize("rotation", ["chain", "seam"])
def test_a_prompt_longer_than_the_group_keeps_its_leading_pages(rotation):
    driver = make_driver(3, Schedule(2, rotation=rotation))
    driver.feed([make_prompt(range(9)), make_prompt(range(9))])
    driver.drain()
    driver.check_invariants()

    assert driver.result().hit.hits == 6


def test_a_prompt_that_the_lanes_cannot_hold_keeps_its_leading_pages():
    """The cached page leaves lane 0 two pages; the five of 0 0 1 1 0 are one too many for it."""
    driver = make_driver(3, Schedule(2, layout=OWNER_LANE))
    driver.feed([make_prompt([0]), make_prompt(range(6)), make_prompt(range(6))])
    driver.drain()
    driver.check_invariants()
    result = driver.result()

    assert (result.hit.hits, result.peak_pages, result.sharding.cut_requests) == (1 + 5, 5, 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(1, 50))
def test_as_many_pages_fit_as_the_fullest_lane_allows(room, pages):
    ranks, lanes = len(room), OwnerLanes(len(room))

    def fits(count):
        owners = build_in_seq_page_compute_owners(0, count, 1, ranks)
        return (np.bincount(owners, minlength=ranks) <= room).all()

    need = SimpleNamespace(pages_by_class=np.array([pages]))
    assert lanes.num_fitting(np.array(room), need, 0) == max(
        n for n in range(pages + 1) if all(fits(count) for count in range(n + 1))
    )


def test_every_page_lies_on_the_rank_that_computes_it():
    """The tail of a cached prompt is split zigzag anew, whatever the prompt's own lanes."""
    driver = make_driver(40, Schedule(2, layout=OWNER_LANE), page_size=4)
    driver.feed([make_prompt(range(8), 4), make_prompt([*range(5), 90, 91, 92, 93], 4)])
    driver.drain()
    driver.check_invariants()
    layout = driver.cache.allocator.layout

    def owners(pages):
        key = make_prompt(pages, 4).key
        return layout.class_of(driver.cache.match_prefix(MatchPrefixParams(key)).pages).tolist()

    assert owners(range(8)) == [0, 0, 1, 1, 1, 1, 0, 0]
    assert owners([*range(5), 90, 91, 92, 93]) == [0, 0, 1, 1, 1, 0, 1, 1, 0]


@pytest.mark.parametrize("aimed", [True, False])
def test_owner_lanes_make_room_and_never_decline(aimed):
    result = run(chats(), 80, replace(LANES, in_flight=8, aimed_eviction=aimed))

    assert result.sharding.evictions > 0
    assert (result.sharding.declined_inserts, result.sharding.declined_tokens) == (0, 0)


def test_one_page_turns_pile_up_on_the_rank_that_computes_the_first_page():
    """A prefill of one page is always computed by rank 0: its lane is short, the others idle."""
    prompts = chats(turn_pages=(1, 1), requests=1500)
    lanes, seam = (
        run(prompts, 120, replace(LANES, layout=layout)) for layout in (OWNER_LANE, INTERLEAVE)
    )

    assert lanes.sharding.mean_stranded_pages > 10 * seam.sharding.mean_stranded_pages
    assert lanes.hit.rate < seam.hit.rate


@pytest.mark.parametrize("in_flight", [1, 3])
def test_rows_grow_with_the_longest_request(in_flight):
    long = FIRST_ROW_PAGES + 10
    driver = make_driver(long, Schedule(2, in_flight))
    driver.feed([make_prompt([1]), make_prompt(range(long)), make_prompt(range(3 * long))])
    driver.drain()
    driver.check_invariants()
    driver.feed([make_prompt(range(long))])

    assert driver.result().hit.hits >= long


@pytest.mark.parametrize("ranks", [4, 8])
def test_one_hot_prompt_strands_pages_of_a_chain_and_hardly_any_with_seams(ranks):
    capacity = 480 // ranks
    prompts = chats(turn_pages=(1, 1), requests=1500)
    chain, seam = (run(prompts, capacity, Schedule(ranks, 1, r)) for r in ("chain", "seam"))
    pool = capacity * ranks

    assert chain.sharding.mean_stranded_pages > 0.05 * pool
    assert seam.sharding.mean_stranded_pages < 0.02 * pool
    assert seam.sharding.mean_skew_pages < chain.sharding.mean_skew_pages
    assert seam.hit.rate > chain.hit.rate


def test_aimed_eviction_takes_less_and_hits_no_less_under_one_hot_prompt():
    prompts = chats(turn_pages=(1, 1), requests=1200, concurrent=200)
    aimed, blind = (
        run(prompts, 100, Schedule(8, 1, "chain", aimed_eviction=aimed)) for aimed in (True, False)
    )

    assert aimed.evicted_pages < blind.evicted_pages
    assert aimed.hit.rate >= blind.hit.rate


def test_the_gather_of_a_chain_rounds_its_prefix_up_to_the_ranks():
    driver = make_driver(40, Schedule(4, rotation="chain"))
    driver.feed([make_prompt(range(6)), make_prompt(range(6)), make_prompt(range(4))])
    sharding = driver.result().sharding

    assert (sharding.prefix_pages, sharding.block_pages) == (6 + 4, 2 + 1)
    assert sharding.gather_overhead == 12 / 10
