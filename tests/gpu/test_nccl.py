"""The sharded prefill over NCCL: one rank on one GPU, and two ranks where there are two GPUs."""

import pytest
import torch

from tests.distributed.gloo_cases import run_nccl_cases
from tests.distributed.gloo_ranks import run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_nccl_ranks_read_what_was_written(world_size, tmp_path):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    reports = run_ranks(
        world_size, run_nccl_cases, tmp_path / "store", deadline_s=180, backend="nccl"
    )
    for rank, report in reports.items():
        wrong = {name: text for name, text in report.items() if text != "ok"}
        assert not wrong, "\n".join(f"rank {rank}, {name}: {text}" for name, text in wrong.items())
        assert len(report) == 5
