"""The benchmarks run, print a table that fits a terminal, and write their figures as JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

COMMANDS = {
    "alloc_classed": (["--pools", "1e4,2e4", "--repeats", "20"], 8),
    "stranding": (["--requests", "60", "--ranks", "2"], 6),
    "aimed_eviction": (["--requests", "60"], 12),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_prints_a_table_and_writes_json(tmp_path, name):
    options, rows = COMMANDS[name]
    path = tmp_path / "figures.json"
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, *options, "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert len(json.loads(path.read_text())["results"]) == rows
