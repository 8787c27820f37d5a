"""The real tree and allocator give the hits of an obvious block-level cache."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from radix import RadixKey
from replay.cli import POLICIES
from replay.driver import Driver, Prompt, RunConfig
from tests.replay.replay_builders import lru_hits, seen_hits

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=14)


def make_prompt(pages, page_size=1):
    units = [unit for page in pages for unit in [page, *range(1, page_size)]]
    return Prompt(RadixKey(units), len(pages), len(pages) * page_size)


def make_driver(capacity, page_size=1, policy="lru"):
    return Driver(RunConfig(capacity, page_size, page_size, policy))


def hits_of(driver, prompts, page_size=1):
    """Feed one prompt at a time and return the cached pages of each."""
    hits, before = [], 0
    for prompt in prompts:
        driver.feed([make_prompt(prompt, page_size)])
        driver.check_invariants()
        now = driver.result().hit.hits // page_size
        hits.append(now - before)
        before = now
    return hits


@settings(max_examples=60, deadline=None)
@given(prompts=PROMPTS, capacity=st.integers(1, 9), page_size=st.sampled_from([1, 4]))
def test_lru_equals_a_block_level_lru(prompts, capacity, page_size):
    driver = make_driver(capacity, page_size)

    assert hits_of(driver, prompts, page_size) == lru_hits(prompts, capacity)


@settings(max_examples=20, deadline=None)
@given(prompts=PROMPTS, policy=st.sampled_from(POLICIES))
def test_without_pressure_every_policy_equals_the_set_of_seen_paths(prompts, policy):
    driver = make_driver(200, policy=policy)

    assert hits_of(driver, prompts) == seen_hits(prompts)
    assert driver.result().evicted_pages == 0


@settings(max_examples=20, deadline=None)
@given(prompts=PROMPTS, capacity=st.integers(1, 9), policy=st.sampled_from(POLICIES))
def test_no_policy_beats_the_seen_paths_or_outgrows_the_pool(prompts, capacity, policy):
    driver = make_driver(capacity, policy=policy)
    hits = hits_of(driver, prompts)
    result = driver.result()

    assert all(hit <= best for hit, best in zip(hits, seen_hits(prompts), strict=True))
    assert result.peak_pages <= capacity


@settings(max_examples=20, deadline=None)
@given(prompts=PROMPTS)
def test_lru_is_a_stack_algorithm(prompts):
    by_capacity = [hits_of(make_driver(capacity), prompts) for capacity in (1, 2, 4, 8)]

    for smaller, larger in pairwise(by_capacity):
        assert all(a <= b for a, b in zip(smaller, larger, strict=True))


def test_a_prompt_longer_than_the_pool_keeps_its_leading_pages():
    driver = make_driver(3)

    assert hits_of(driver, [[0, 1, 2, 0, 1], [0, 1, 2, 0, 1], [0, 1, 2]]) == [0, 3, 3]


def test_evicted_and_peak_pages_add_up():
    driver = make_driver(4)
    hits_of(driver, [[0, 1, 2], [1, 1, 1]])
    result = driver.result()

    assert (result.evicted_pages, result.peak_pages, result.requests) == (2, 4, 2)


def test_an_empty_prompt_is_a_request_without_hits():
    driver = make_driver(4)

    assert hits_of(driver, [[], [1], []]) == [0, 0, 0]
    assert driver.result().requests == 3


def test_the_hottest_page_survives_under_lfu():
    driver = make_driver(2, policy="lfu")

    assert hits_of(driver, [[0], [0], [1], [2], [0]]) == [0, 1, 0, 0, 1]


def test_the_oldest_page_goes_first_under_fifo():
    driver = make_driver(2, policy="fifo")

    assert hits_of(driver, [[0], [1], [0], [2], [0]]) == [0, 0, 1, 0, 0]
