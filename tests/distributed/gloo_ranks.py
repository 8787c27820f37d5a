"""Real ranks: processes that meet in a group over a file, with a deadline for all of them."""

import multiprocessing
import os
import time
import traceback
from datetime import timedelta

GONE = "gone"
"""What a rank that ended without a report reports."""


def run_ranks(world_size, target, store, *, deadline_s=60.0, backend="gloo"):
    """Run ``target(rank, report)`` on every rank; return each rank's reports.

    Every rank has the default process group when ``target`` starts. ``report(name, text)`` sends
    a line home. Ranks that are not done by the deadline are killed.

    Args:
        world_size: number of processes.
        target: a module-level function.
        store: path of the file in which the ranks meet; it must not exist.
        deadline_s: seconds for everything, start-up included.
        backend: of the default group; with "nccl" rank r has GPU r.

    Returns:
        dict rank -> dict name -> text; ``GONE`` is a name of ranks that were killed or died.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world_size):
        home, away = context.Pipe(duplex=False)
        process = context.Process(
            target=_serve, args=(rank, world_size, str(store), away, target, backend), daemon=True
        )
        process.start()
        away.close()
        pipes.append(home)
        processes.append(process)
    end = time.monotonic() + deadline_s
    reports = {}
    for rank, (home, process) in enumerate(zip(pipes, processes, strict=True)):
        reports[rank] = _collect(home, end)
        process.join(max(0.1, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return reports


def _collect(home, end):
    """Receive until the rank says that it is done, dies, or time is up."""
    reports = {}
    while True:
        try:
            if not home.poll(max(0.0, end - time.monotonic())):
                reports[GONE] = "did not finish before the deadline"
                return reports
            name, text = home.recv()
        except EOFError:
            reports[GONE] = "died"
            return reports
        if name is None:
            return reports
        reports[name] = text


def _serve(rank, world_size, store, away, target, backend):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is the host's, not one group's
        torch.cuda.set_device(rank)

    def report(name, text):
        away.send((name, text))

    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60 if backend == "nccl" else 20),
        )
        target(rank, report)
    except BaseException:
        report("uncaught", traceback.format_exc())
    report(None, "")
    # A group with a dead rank can't be torn down in order.
    os._exit(0)
