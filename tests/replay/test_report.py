"""Reports say what was measured, and how."""

import json
from dataclasses import replace

from replay.hits import MEANINGS, UNITS, HitCount
from replay.report import to_json, to_table
from replay.result import Definition, Result, Sharding
from replay.schedule import OWNER_LANE, Schedule
from replay.sweep import Report
from tests.replay.replay_builders import BLOCK_INFO


def make_report(hit="D2"):
    result = Result(
        capacity_pages=1000,
        page_size=512,
        requests=12031,
        input_tokens=144793823,
        hit=HitCount(6575459, 144793823),
        evicted_pages=274653,
        peak_pages=1000,
        replay_ns=2_000_000_000,
    )
    definition = Definition(hit, MEANINGS[hit], UNITS[hit], 512, "lru")
    return Report(BLOCK_INFO, definition, (result,))


def flat(text):
    """Return a text without its line breaks."""
    return " ".join(text.split())


TABLE = """\
made: made (plain), blocks of 4 tokens, partial tail has an id (ceil), ids
global, no timestamps, 12,031 requests of 144,793,823 tokens

capacity        hit            evicted   peak  replay  requests
(tokens)     tokens  hit rate    pages  pages     (s)     per s
───────────────────────────────────────────────────────────────
 512,000  6,575,459  0.045413  274,653  1,000    2.00     6,016

hit D2: cached leading tokens / all input tokens; the partial tail counts its
own length; page 512; cold start, no warm-up; file order, one request at a time;
lru; outputs not cached"""


def test_the_table_is_this_text():
    assert to_table(make_report()) == TABLE


def test_a_trace_with_a_clock_shows_its_span():
    report = replace(make_report(), span_ms=3_536_000)

    assert ", 3,536.0 s from first to last request, " in flat(to_table(report))


def test_one_request_is_said_so():
    report = make_report()
    report = replace(report, results=(replace(report.results[0], requests=1, input_tokens=3),))

    assert ", 1 request of 3 tokens " in flat(to_table(report))


def test_the_heading_names_the_unit_of_other_hits():
    assert "(pages)" in to_table(make_report("D1")).splitlines()[4]


def test_json_holds_integers_and_the_definition():
    document = json.loads(to_json(make_report()))
    (row,) = document["results"]

    assert row.pop("hit_rate") == 6575459 / 144793823
    assert all(type(value) is int for value in row.values())
    assert row == {
        "capacity_tokens": 512000,
        "capacity_pages": 1000,
        "page_size": 512,
        "requests": 12031,
        "input_tokens": 144793823,
        "hits": 6575459,
        "total": 144793823,
        "evicted_pages": 274653,
        "peak_pages": 1000,
        "replay_microseconds": 2_000_000,
        "requests_per_second": 6015,
    }
    assert document["definition"] == {
        "hit": "D2",
        "meaning": MEANINGS["D2"],
        "unit": "tokens",
        "page_size": 512,
        "policy": "lru",
        "warm_up": "none",
        "order": "file",
    }
    assert document["trace"]["tail"] == "ceil"


def test_a_run_that_took_no_time_has_no_speed():
    (result,) = make_report().results
    idle = Result(1, 1, 0, 0, HitCount(0, 0), 0, 0, 0)

    assert (result.requests_per_second, idle.requests_per_second) == (6015.5, 0.0)


def make_sharded_report(*schedules):
    """Make a report with one result for each schedule."""
    plain = make_report()
    results = tuple(
        replace(
            plain.results[0],
            sharding=Sharding(
                schedule=schedule,
                placements=12031,
                skew_pages=25223366,
                max_skew_pages=2633,
                evictions=6147,
                free_pages=70700000,
                stranded_pages=70632517,
                max_stranded_pages=12076,
                declined_inserts=31,
                declined_tokens=419212,
                prefix_pages=103893,
                block_pages=21698,
                waits=1,
                cut_requests=2,
            ),
        )
        for schedule in schedules
    )
    definition = replace(plain.definition, schedules=schedules)
    return replace(plain, definition=definition, results=results)


SHARDED_TABLES = """\
capacity                      in        hit            evicted  replay
(tokens)  pool  rotation  flight     tokens  hit rate    pages     (s)
──────────────────────────────────────────────────────────────────────
 512,000    1x         -       8  6,575,459  0.045413  274,653    2.00
 512,000    8x     chain       8  6,575,459  0.045413  274,653    2.00

capacity                      in     skew  stranded  declined  declined
(tokens)  pool  rotation  flight    pages     pages   inserts    tokens  gather
───────────────────────────────────────────────────────────────────────────────
 512,000    8x     chain       8  2,096.5  11,490.6        31   419,212    1.67
"""


def test_a_sharded_report_shows_hits_and_balance_of_each_pool():
    text = to_table(make_sharded_report(Schedule(1, 8), Schedule(8, 8, "chain")))

    assert SHARDED_TABLES in text
    assert "capacity: of one rank. 1x: every rank holds a copy" in text
    assert "; file order, 8 requests in flight; lru" in flat(text)


def test_no_line_is_wider_than_80_columns():
    text = to_table(make_sharded_report(Schedule(1, 8), Schedule(8, 8, "chain")))

    assert max(map(len, [*text.splitlines(), *to_table(make_report()).splitlines()])) <= 80


def test_the_replicated_pool_alone_has_no_balance():
    assert "stranded\n" not in to_table(make_sharded_report(Schedule(1)))


def test_what_was_turned_off_is_said():
    schedule = Schedule(8, 1, "chain", use_leases=False, aimed_eviction=False)

    assert "\nWithout leases. Blind eviction.\n" in to_table(make_sharded_report(schedule))


def test_a_pool_that_never_evicts_has_no_stranding_to_tell():
    report = make_sharded_report(Schedule(8))
    sharding = replace(report.results[0].sharding, evictions=0, stranded_pages=0)
    report = replace(report, results=(replace(report.results[0], sharding=sharding),))

    assert "2,096.5         -  " in to_table(report)


def test_json_of_a_sharded_run_holds_its_schedule_and_integers():
    document = json.loads(to_json(make_sharded_report(Schedule(1, 8), Schedule(8, 8, "chain"))))
    copies, shared = (row["sharding"] for row in document["results"])

    assert (copies["ranks"], copies["rotation"], copies["use_leases"]) == (1, None, None)
    assert copies["layout"] is None
    assert shared == {
        "ranks": 8,
        "in_flight": 8,
        "rotation": "chain",
        "use_leases": True,
        "aimed_eviction": True,
        "layout": "interleave",
        "placements": 12031,
        "skew_pages": 25223366,
        "max_skew_pages": 2633,
        "evictions": 6147,
        "free_pages": 70700000,
        "stranded_pages": 70632517,
        "max_stranded_pages": 12076,
        "declined_inserts": 31,
        "declined_tokens": 419212,
        "prefix_pages": 103893,
        "block_pages": 21698,
        "waits": 1,
        "cut_requests": 2,
    }


def test_owner_lanes_stand_beside_rotations_in_one_column():
    text = to_table(make_sharded_report(Schedule(8), Schedule(8, layout=OWNER_LANE)))

    assert "(tokens)  pool      layout  flight" in text
    assert " 512,000    8x  owner-lane       1 " in text
    assert "owner-lane puts a page on the rank that computes it" in flat(text)


def test_json_of_owner_lanes_has_no_rotation():
    document = json.loads(to_json(make_sharded_report(Schedule(8, layout=OWNER_LANE))))
    lanes = document["results"][0]["sharding"]

    assert (lanes["layout"], lanes["rotation"], lanes["use_leases"]) == ("owner-lane", None, None)


def test_a_plain_run_has_no_sharding_in_json():
    (row,) = json.loads(to_json(make_report()))["results"]

    assert "sharding" not in row
