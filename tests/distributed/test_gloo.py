"""Real groups of ranks: bit-exact, no half state, no hang; B60, B69, C130-C142.

One spawned group runs all cases of its size, since starting a rank costs more than they do.
"""

import pytest

from tests.distributed.gather_cases import all_ok, check_reports, run_gather_cases
from tests.distributed.gloo_cases import gloo_cases, run_gloo_cases
from tests.distributed.gloo_ranks import GONE, run_ranks


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_case_holds_on_every_rank(world_size, tmp_path):
    reports = run_ranks(world_size, run_gloo_cases, tmp_path / "store", deadline_s=120)
    expected = {
        rank: {name: "ok" for name, _ in gloo_cases(rank, world_size)} for rank in range(world_size)
    }
    for rank in range(world_size - 1):
        expected[rank]["a_dead_rank_is_an_error"] = "ok"
    expected[world_size - 1] |= {"a_dead_rank_is_an_error": "died as told", GONE: "died"}
    check_reports(reports, expected)


def test_one_rank_alone_runs_the_same_cases(tmp_path):
    reports = run_ranks(1, run_gather_cases, tmp_path / "store")
    check_reports(reports, all_ok(1))


def _sleep(rank, report):
    import time

    if rank:
        time.sleep(60)


def test_ranks_that_hang_are_killed_at_the_deadline(tmp_path):
    """The harness itself never waits longer than told."""
    reports = run_ranks(2, _sleep, tmp_path / "store", deadline_s=8)
    assert "deadline" in reports[1][GONE]
