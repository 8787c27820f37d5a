"""The kernels compile for a GPU, also where there is none, and once for every batch."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

SCRIPT = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Absent:
    # Answers what compiling asks about the device.
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0


driver.set_active(Absent())
from alloc.kernels import launch


def ints(count, first=0, dtype=torch.int64):
    return torch.zeros(first + count, dtype=dtype)[first:]


for page_size in (1, 64, 256):
    for runs, first, tokens, step in ((1, 0, 16, 0), (3, 1, 1024, 2), (512, 3, 10**6, 256)):
        batch = (runs, tokens, step, page_size, 1024)
        pages, last = ints(runs, first), ints(runs, first)
        plan, out = ints(3 * runs), ints(64)
        launch._extend_slots_kernel.warmup(out, plan, last, pages, *batch, grid=(1,))
        table = ints(64, dtype=torch.int32)
        launch._write_rows_kernel.warmup(table, plan, pages, *batch, grid=(1,))
        launch._decode_slots_kernel.warmup(out, pages, last, runs, 128, grid=(1,))
for name in ("extend_slots", "write_rows", "decode_slots"):
    kernel = getattr(launch, f"_{name}_kernel")
    print(name, *(len(cache[0]) for cache in kernel.device_caches.values()))
"""


def test_one_compilation_for_each_page_size_serves_every_batch():
    """Number of requests, tokens and the alignment of a range compile nothing anew."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": "."},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "extend_slots 3\nwrite_rows 3\ndecode_slots 1\n"
