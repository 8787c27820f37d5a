"""The kernels compile for a GPU, also where there is none: wide accesses, few compilations."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Absent:
    # Answers what compiling asks about the device.
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0


driver.set_active(Absent())
from scratch.kernels import launch


def capture(kernel, launcher, *args):
    # Call a launcher with the kernel replaced by its own compilation.
    made = []
    original = getattr(launch, kernel)

    class Compile:
        def __getitem__(self, grid):
            return lambda *given: made.append(original.warmup(*given, grid=(1,)))

    setattr(launch, kernel, Compile())
    launcher(*args)
    setattr(launch, kernel, original)
    return made[0].asm["ptx"]


ptx = {}
for count in (1000, 17, 4096):
    for dtype in (torch.int32, torch.int64):
        loc, table = torch.zeros(count, dtype=dtype), torch.zeros(count, dtype=torch.int32)
        ptx["translate"] = capture(
            "_translate_kernel", launch.translate_locs, loc, table, 64)
for name, widths in (("mla", (576,)), ("mha", (1024, 1024))):
    parts = [torch.zeros(640, width, dtype=torch.int16) for width in widths]
    for count in (1, 8, 17):
        out = torch.zeros(count * 64, sum(widths), dtype=torch.int16)
        pages = torch.zeros(count, dtype=torch.int64)
        ptx["pack " + name] = capture("_pack_kernel", launch.pack_pages, out, parts, pages, 64)
for name, widths in (("mla", (512, 64)), ("mha", (1024, 1024))):
    for given, stored in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ):
        bits = {1: torch.uint8, 2: torch.int16}[stored.itemsize]
        for count in (8192, 17):
            values = [torch.zeros(count, width, dtype=given) for width in widths]
            pool = torch.zeros(640, sum(widths), dtype=bits)
            targets = list(pool.split(widths, dim=1))
            rows = torch.zeros(count, dtype=torch.int64)
            scratch = torch.zeros(640, sum(widths), dtype=bits)
            ptx[f"store {name} {given} {stored}"] = capture(
                "_store_kernel", launch.store_rows, values, stored, targets, rows, scratch, rows)
count = {
    name: sum(len(cache[0]) for cache in getattr(launch, name).device_caches.values())
    for name in ("_translate_kernel", "_pack_kernel", "_store_kernel")
}
print(json.dumps({"ptx": ptx, "count": count}))
"""


@pytest.fixture(scope="module")
def compiled():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": "."},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_batches_of_any_size_share_a_compilation(compiled):
    """One for each dtype of slots, shape of pool and conversion."""
    assert compiled["count"] == {"_translate_kernel": 2, "_pack_kernel": 2, "_store_kernel": 6}


def test_rows_are_moved_in_16_byte_accesses(compiled):
    """Both ways, for whole pages and for rows that are stored as they are."""
    for name, ptx in compiled["ptx"].items():
        if name.startswith("pack") or name.endswith("bfloat16 torch.bfloat16"):
            loads = "ld.global.v2.b64" in ptx or "ld.global.v4.b32" in ptx
            stores = "st.global.v2.b64" in ptx or "st.global.v4.b32" in ptx
            assert loads, name
            assert stores, name
