"""The sharded prefill over NCCL, a GPU a rank: the cases that Gloo runs on CPUs; B69.

Bit-exact for MLA and MHA: plans in a row, fragmented pages, sub-ranges, splits, evictions and
reuse between plans; translation, reads and packing also replayed from CUDA graphs. A group of one
rank runs on one GPU.
"""

import os

import pytest
import torch

from tests.distributed.gather_cases import all_ok, check_reports, run_gather_cases
from tests.distributed.gloo_ranks import run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_case_holds_on_every_rank_over_nccl(world_size, tmp_path):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    reports = run_ranks(
        world_size, run_gather_cases, tmp_path / "store", deadline_s=300, backend="nccl"
    )
    check_reports(reports, all_ok(world_size))


def report_multicast(rank, report):
    report("multicast", os.environ["NCCL_NVLS_ENABLE"])


def test_ranks_leave_nvlink_multicast_off(tmp_path):
    if torch.cuda.device_count() < 1:
        pytest.skip("needs a CUDA device")
    reports = run_ranks(1, report_multicast, tmp_path / "store", backend="nccl")
    assert reports == {0: {"multicast": "0"}}
