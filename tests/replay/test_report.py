"""Reports say what was measured, and how."""

import json
from dataclasses import replace

from replay.hits import MEANINGS, UNITS, HitCount
from replay.report import to_json, to_table
from replay.result import Definition, Result
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


TABLE = """\
made: made (plain), blocks of 4 tokens, partial tail has an id (ceil), ids global, no timestamps

capacity (tokens)   requests   input tokens   hit tokens   hit rate   evicted pages   peak pages   replay (s)   requests/s
──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
          512,000     12,031    144,793,823    6,575,459   0.045413         274,653        1,000         2.00        6,016

hit D2: cached leading tokens / all input tokens; the partial tail counts its own length; page 512; cold start, no warm-up; file order, one request at a time; lru; outputs not cached"""  # noqa: E501


def test_the_table_is_this_text():
    assert to_table(make_report()) == TABLE


def test_a_trace_with_a_clock_shows_its_span():
    report = replace(make_report(), span_ms=3_536_000)

    assert to_table(report).splitlines()[0].endswith(", 3,536.0 s from first to last request")


def test_the_heading_names_the_unit_of_other_hits():
    assert "hits (pages)" in to_table(make_report("D1"))


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
