"""Real 2- and 4-rank groups: bit-exact, no half state, no hang; B60, B69, C130-C142.

One spawned group runs all cases of its size, since starting a rank costs more than they do.
"""

import pytest

from tests.distributed.gloo_cases import cases, run_cases
from tests.distributed.gloo_ranks import GONE, run_ranks


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_case_holds_on_every_rank(world_size, tmp_path):
    reports = run_ranks(world_size, run_cases, tmp_path / "store")
    names = [name for name, _ in cases(0, world_size)]
    for rank, report in reports.items():
        last = rank == world_size - 1
        wrong = {name: text for name, text in report.items() if text != "ok"}
        if last:
            assert wrong.pop("a_dead_rank_is_an_error") == "died as told"
            assert wrong.pop(GONE) == "died"
        assert not wrong, "\n".join(f"rank {rank}, {name}: {text}" for name, text in wrong.items())
        assert set(names) <= set(report)


def _sleep(rank, report):
    import time

    if rank:
        time.sleep(60)


def test_ranks_that_hang_are_killed_at_the_deadline(tmp_path):
    """The harness itself never waits longer than told."""
    reports = run_ranks(2, _sleep, tmp_path / "store", deadline_s=8)
    assert "deadline" in reports[1][GONE]
