"""Replicas in processes of their own, fed the same calls, hold the same state after every step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from radix import POLICIES
from tests.replicas.schedules import SHARDED, STEPS, schedules

ROOT = Path(__file__).parents[2]
REPLICAS = {"plain": "0", "no gc": "1", "gc often": "2", "clock stands still": "4294967295"}
"""What each replica differs in: mode, and hash seed."""


def run_replicas() -> list[dict[str, list[str]]]:
    """Run all replicas at once; each gives the lines of every schedule."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.replicas.schedules", mode],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for mode, seed in REPLICAS.items()
    ]
    found = []
    ended = [process.communicate(timeout=300) for process in running]
    for process, (out, errors) in zip(running, ended, strict=True):
        assert process.returncode == 0, errors
        lines: dict[str, list[str]] = {}
        for line in out.splitlines():
            name, _, rest = line.partition("|")
            lines.setdefault(name, []).append(rest)
        found.append(lines)
    return found


def test_replicas_agree_after_every_step():
    """Digests, victims, bases, free lists and rows; the first step that differs is shown."""
    first, *others = run_replicas()
    assert list(first) == [*POLICIES, *SHARDED]
    for name, lines in first.items():
        assert len(lines) == STEPS
        for mode, other in zip(list(REPLICAS)[1:], others, strict=True):
            for ours, theirs in zip(lines, other[name], strict=True):
                where = f"{name}: replica {mode!r} differs first at step {ours.split()[0]}"
                assert ours == theirs, where


@pytest.mark.parametrize("name", [*POLICIES, *SHARDED])
def test_the_schedules_do_something(name):
    """Most steps change the state, and some evict."""
    lines = list(dict(schedules(seed=1))[name])
    digests = [line.split()[1] for line in lines]
    assert len(set(digests)) > STEPS // 2
    assert sum("victims=[]" not in line for line in lines) > STEPS // 20
