"""The gather's benchmark runs over Gloo on any number of ranks, and says what it needs for NCCL."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import gather
from scratch import SoloGroup

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--prefix-tokens=60", "--page=4", "--layers=3", "--compute=0.5,2", "--repeats=2"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_prints_tables_and_writes_json(tmp_path, ranks):
    path = tmp_path / "figures.json"
    options = [*TINY, "--backend", "gloo", "--ranks", str(ranks), "--json", str(path)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gather", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert f"{ranks} ranks over gloo" in result.stdout
    rows = json.loads(path.read_text())["results"]
    assert [row["measure"] for row in rows] == ["bandwidth", "hidden", "hidden"] * 2
    for row in rows:
        if row["measure"] == "bandwidth":
            assert row["gathered_bytes"] >= 60 * 2 * 576
            assert row["gather_of_bare"] > 0
            assert row["with_packing_gbytes_s"] > 0
        else:
            assert row["hidden"] <= 1
            assert row["both_ms"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_it_runs_over_nccl(ranks, capsys):
    """One rank sends nothing, but takes the same way."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    setup = gather.make_setup("nccl", ranks, 4096, page=64, layers=4, compute=(2.0,), repeats=3)
    rows = gather.run(setup)
    gather.report(setup, rows)
    assert len(rows) == 4
    assert f"{ranks} ranks over nccl" in capsys.readouterr().out


def test_prefixes_are_rounded_up_to_a_page_on_every_rank():
    sizes = {"page": 4, "layers": 2, "compute": (1.0,), "repeats": 1}
    assert gather.make_setup("gloo", 3, 50, **sizes).prefix_tokens == 60
    assert gather.make_setup("gloo", 3, 60, **sizes).prefix_tokens == 60


@pytest.mark.parametrize(
    ("gpus", "ranks", "backend"), [(0, 2, "gloo"), (1, 2, "gloo"), (2, 2, "nccl"), (8, 4, "nccl")]
)
def test_nccl_is_the_default_where_every_rank_can_have_a_gpu(gpus, ranks, backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    sizes = {"page": 64, "layers": 2, "compute": (1.0,), "repeats": 1}
    assert gather.make_setup(None, ranks, None, **sizes).backend == backend


def test_too_few_gpus_are_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ran = CliRunner().invoke(gather.main, ["--backend", "nccl", "--ranks", "4"])
    assert ran.exit_code == 1
    assert "needs a GPU a rank: 4 ranks, 1 GPUs here" in ran.output


@pytest.mark.parametrize("times", ["0", "a", "1,-2", ""])
def test_times_that_make_no_sense_are_refused(times):
    ran = CliRunner().invoke(gather.main, ["--compute", times])
    assert ran.exit_code == 2
    assert "times above 0" in ran.output


def test_a_wrong_result_is_noticed():
    sizes = {"page": 4, "layers": 2, "compute": (1.0,), "repeats": 1}
    setup = gather.make_setup("gloo", 1, 20, **sizes)
    group = gather.TimedGroup(SoloGroup(), gather.Clock(torch.device("cpu")))
    for kind in gather.KINDS:
        world = gather.World(setup, kind, group)
        world.check()
        world.pool.layer_rows()[1][0][int(world.plan.prefix_pages[2]) * 4 + 3] += 1
        with pytest.raises(RuntimeError, match="wrong result: layer 1 on rank 0"):
            world.check()
