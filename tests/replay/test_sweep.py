"""One pass serves all capacities, and all ways to page a trace agree."""

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.capacity import parse_capacities
from replay.errors import ReplayError
from replay.hits import MEANINGS
from replay.schedule import Schedule
from replay.sweep import SweepConfig, sweep
from replay.synthetic import ChatSpec, Range, generate
from replay.trace import Request
from tests.replay.replay_builders import (
    lru_hits,
    make_block_reader,
    make_token_reader,
    rate_of,
    seen_hits,
)


@st.composite
def block_traces(draw):
    """Draw (ids, input_length) of a ceil trace with blocks of 4 tokens."""
    lengths = draw(st.lists(st.integers(0, 24), min_size=1, max_size=10))
    ids = st.integers(0, 1)
    return [([draw(ids) for _ in range(-(-n // 4))], n) for n in lengths]


def run(reader, capacity="unbounded", **options):
    return sweep(reader, SweepConfig(parse_capacities(capacity), **options))


def counters(report):
    """Return the results without the clock's part."""
    return [replace(result, replay_ns=0) for result in report.results]


@pytest.mark.parametrize("definition", MEANINGS)
@settings(max_examples=25, deadline=None)
@given(prompts=block_traces())
def test_unbounded_equals_the_set_oracle_by_every_definition(definition, prompts):
    (result,) = run(make_block_reader(prompts), definition=definition).results
    cached = seen_hits([ids for ids, _ in prompts])
    rows = [(k, len(ids), n) for k, (ids, n) in zip(cached, prompts, strict=True)]

    assert result.hit.rate == pytest.approx(float(rate_of(definition, rows, 4)), abs=2e-9)
    assert result.evicted_pages == 0


@pytest.mark.parametrize("definition", MEANINGS)
@settings(max_examples=25, deadline=None)
@given(prompts=block_traces(), capacity=st.integers(1, 8))
def test_lru_equals_the_block_oracle_by_every_definition(definition, prompts, capacity):
    (result,) = run(make_block_reader(prompts), f"{capacity}p", definition=definition).results
    cached = lru_hits([ids for ids, _ in prompts], capacity)
    rows = [(k, len(ids), n) for k, (ids, n) in zip(cached, prompts, strict=True)]

    assert result.hit.rate == pytest.approx(float(rate_of(definition, rows, 4)), abs=2e-9)


@pytest.mark.parametrize("page_size", [1, 2, 4])
@settings(max_examples=15, deadline=None)
@given(prompts=block_traces())
def test_an_expanded_replay_equals_the_fast_path(page_size, prompts):
    reader = make_block_reader(prompts)
    fast = run(reader, "8,16,32,unbounded", page_size=page_size)
    expanded = run(reader, "8,16,32,unbounded", page_size=page_size, expand=True)

    assert counters(fast) == counters(expanded)


def test_a_sweep_equals_its_capacities_one_by_one():
    prompts = generate(ChatSpec(systems=2, system_tokens=Range(20, 40)), seed=1, requests=150)
    reader = make_token_reader([p.tolist() for p in prompts])
    texts = ["160", "1600", "16k"]
    alone = [counters(run(reader, text))[0] for text in texts]

    assert counters(run(reader, ",".join(texts))) == alone


def test_the_limit_ends_the_replay_and_the_working_set():
    reader = make_block_reader([([i, i], 8) for i in range(10)])
    report = run(reader, limit=3)

    assert report.results[0].requests == 3
    assert report.results[0].capacity_pages == 6


def test_capacities_come_back_rounded_and_in_order():
    reader = make_block_reader([([1], 4)])

    assert [r.capacity_tokens for r in run(reader, "11,4,6p").results] == [8, 4, 24]


def test_unbounded_needs_a_trace_that_can_be_read_twice():
    reader = replace(make_block_reader([([1], 4)]), rewindable=False)

    with pytest.raises(ReplayError, match="cannot be read twice"):
        run(reader)


def test_an_impossible_capacity_stops_before_anything_is_read():
    reader = make_block_reader([([1], 4)])

    with pytest.raises(ReplayError, match="--capacity 3: less than one page of 4 tokens"):
        run(reader, "100,3,unbounded")


def test_pools_that_are_too_large_together_are_refused():
    reader = make_block_reader([([1], 4)])

    with pytest.raises(ReplayError, match="200000000 pages in 2 pools"):
        run(reader, "120000000p,80000000p")


def test_progress_ends_at_the_limit():
    shares = []
    reader = make_block_reader([([i], 4) for i in range(200)])
    sweep(reader, SweepConfig(parse_capacities("40"), limit=100), shares.append)

    assert shares == [0.64, 1.0]


@settings(max_examples=15, deadline=None)
@given(prompts=block_traces())
def test_one_replicated_rank_equals_the_plain_sweep(prompts):
    reader = make_block_reader(prompts)
    plain = run(reader, "8,16,unbounded")
    replicated = run(reader, "8,16,unbounded", schedules=(Schedule(1),))

    assert [replace(r, sharding=None) for r in counters(replicated)] == counters(plain)


@pytest.mark.parametrize("rotation", ["chain", "seam"])
@settings(max_examples=15, deadline=None)
@given(prompts=block_traces())
def test_an_expanded_sharded_replay_equals_the_fast_path(rotation, prompts):
    reader, schedules = make_block_reader(prompts), (Schedule(2, 1, rotation), Schedule(3, 2))
    fast = run(reader, "4,12,24", schedules=schedules)
    expanded = run(reader, "4,12,24", schedules=schedules, expand=True)

    assert counters(fast) == counters(expanded)


def test_capacities_come_first_and_schedules_within_each():
    reader = make_block_reader([([1, 2], 8)])
    schedules = (Schedule(1), Schedule(2, 3))
    results = run(reader, "4,8", schedules=schedules).results

    assert [(r.capacity_pages, r.sharding.schedule) for r in results] == [
        (pages, schedule) for pages in (1, 2) for schedule in schedules
    ]


def test_requests_still_in_flight_are_inserted_at_the_end():
    shared = list(range(1, 7))
    reader = make_block_reader([([*shared, 100 + i], 28) for i in range(6)])
    schedule = Schedule(4, 8, "chain", use_leases=False)
    (result,) = run(reader, "unbounded", schedules=(schedule,)).results

    assert result.sharding.declined_inserts >= 3  # an insert that never comes can't be declined


def test_ranks_count_when_pools_are_too_large_together():
    reader = make_block_reader([([1], 4)])

    with pytest.raises(ReplayError, match="180000000 pages in 2 pools"):
        run(reader, "20000000p", schedules=(Schedule(1), Schedule(8)))


def test_a_generated_trace_shows_its_seed_in_its_hits():
    def rate(seed):
        prompts = islice(generate(ChatSpec(), seed=seed, requests=50), 50)
        return run(make_token_reader([p.tolist() for p in prompts])).results[0].hit

    assert rate(1) == rate(1)
    assert rate(1) != rate(2)


def test_the_span_runs_from_the_first_request_to_the_last():
    reader = make_block_reader([])
    reader.items = [Request(4, [i], timestamp_ms=1000.0 + i) for i in range(100)]

    assert run(reader).span_ms == 99


def test_sessions_with_clocks_of_their_own_have_no_span():
    reader = make_block_reader([])
    reader.info = replace(reader.info, scope="local")
    reader.items = [Request(4, [i], timestamp_ms=1000.0 + i) for i in range(3)]

    assert run(reader).span_ms == 0
