"""Runs jobs on every rank of a group: alone, in threads of this process, or in processes.

Threads share one device and meet in an ``InProcessGroup``. Processes meet in a
``torch.distributed`` group through a file that all of them see: over Gloo on CPUs, over NCCL with
a GPU each.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from examples.tiny_engine.engine import Engine, EngineConfig, RunResult
from examples.tiny_engine.model import Model, ModelConfig
from examples.tiny_engine.workload import Chat
from scratch import GatherGroup, InProcessGroup, ShardGroup, SoloGroup

Meeting: TypeAlias = Literal["processes", "threads"]


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank does."""

    model: ModelConfig
    engine: EngineConfig
    chats: Sequence[Chat]

    def run(self, group: GatherGroup) -> RunResult:
        """Do one rank's part."""
        model = Model(self.model, self.engine.device)
        return Engine(self.engine, model, group).run(self.chats)


def run_ranks(jobs: Sequence[Job], ranks: int, meeting: Meeting) -> list[list[RunResult]]:
    """Run jobs one after the other on all ranks; return each job's results by rank.

    Processes are started once for all jobs: that takes longer than a small job.

    Args:
        jobs: what to do, all on one kind of device.
        ranks: size of the group; one rank is this thread.
        meeting: what the ranks are.

    Raises:
        ValueError: processes on GPUs, and fewer GPUs than ranks.
    """
    if ranks == 1:
        return [[job.run(SoloGroup())] for job in jobs]
    if meeting == "threads":
        return [_run_threads(job, ranks) for job in jobs]
    if jobs[0].engine.device == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(
            f"{ranks} processes need a GPU each, {torch.cuda.device_count()} here; use threads"
        )
    by_rank = _run_processes(jobs, ranks)
    return [list(results) for results in zip(*by_rank, strict=True)]


def _run_threads(job: Job, ranks: int) -> list[RunResult]:
    def run(group: InProcessGroup) -> RunResult:
        try:
            return job.run(group)
        except BaseException:
            group.leave()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, InProcessGroup.create(ranks)))


def _run_processes(jobs: Sequence[Job], ranks: int) -> list[list[RunResult]]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_process, (ranks, jobs, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        return [pickle.loads(_result_file(folder, rank).read_bytes()) for rank in range(ranks)]


def _run_process(rank: int, ranks: int, jobs: Sequence[Job], folder: str) -> None:
    """Be one rank: meet the others, do the jobs, leave the results in the folder."""
    torch.set_num_threads(1)
    on_gpus = jobs[0].engine.device == "cuda"
    if on_gpus:
        torch.cuda.set_device(rank)  # what "cuda" means from here on
    store = Path(folder, "store").as_uri()
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    results = [job.run(ShardGroup.dedicated()) for job in jobs]
    _result_file(folder, rank).write_bytes(pickle.dumps(results))
    dist.destroy_process_group()  # after an error it could wait for ranks that are gone


def _result_file(folder: str, rank: int) -> Path:
    return Path(folder, f"rank{rank}.pickle")
