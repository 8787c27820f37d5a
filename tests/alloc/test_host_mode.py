"""Without a device there is no torch: not imported, not needed, and missed with a clear error."""

import subprocess
import sys

import numpy as np
import pytest

from tests.alloc.alloc_builders import extend, ints, make_interleave, make_paged, make_token

HOST_ONLY = """
import sys
import numpy as np
{block}
import alloc
from tests.alloc.alloc_builders import decode, extend
from tests.alloc.alloc_builders import make_interleave, make_lanes, make_paged, make_token
token, paged, sharded = make_token(), make_paged(), make_interleave()
token.free(token.alloc(4))
row = extend(paged, [(0, 7, -1)])
decode(paged, [(8, int(row[-1]))])
paged.free_segment(row, start_pos=0)
sharded.free(extend(sharded, [(0, 40, -1)], [None]))
lanes = make_lanes()
lanes.free(lanes.alloc_pages_with_owners([3, 1]))
rows = alloc.ReqToTokenPool(2, 8, None, page_size=4)
rows.write(rows.alloc(1)[0], 0, pages=np.array([1, 2]))
spec = alloc.PageShardSpec(0, 4, 16, 64, 16)
alloc.PageInterleavePlacement(spec).filter_local(np.arange(64), 1)
assert all(type(slots) is np.ndarray for slots in (row, token.get_all_free_pages()))
"""

BLOCK = "sys.modules['torch'] = None"


def run(script):
    return subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60
    )


def test_host_mode_never_imports_torch():
    """Importing alloc and every host call leave torch unloaded; D10."""
    done = run(HOST_ONLY.format(block="") + "print('torch' in sys.modules)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_host_mode_works_where_torch_is_missing():
    """Everything but a device works without torch; D10."""
    done = run(HOST_ONLY.format(block=BLOCK))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "make",
    [
        "alloc.TokenToKVPoolAllocator(8, None, 'cpu', None)",
        "alloc.PagedTokenToKVPoolAllocator(8, 4, None, 'cpu', None)",
        "alloc.PageInterleavePoolAllocator(8, 4, 2, None, 'cpu', None)",
        "alloc.CPSharedPagedTokenToKVPoolAllocator(8, 4, 4, None, 'cpu', None, False, 2, 0)",
        "alloc.ReqToTokenPool(2, 8, 'cpu')",
    ],
)
def test_a_device_without_torch_is_a_clear_error(make):
    """RuntimeError with the device, what to install and what to pass instead; D10."""
    done = run(f"import sys; {BLOCK}; import alloc; {make}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == (
        "RuntimeError: device='cpu' needs torch, which is not installed: "
        "install rotaradix[torch], or pass device=None for host mode"
    )


def test_a_cpu_device_needs_no_triton():
    """Tensors on the CPU take the torch twins; triton is imported for CUDA tensors alone."""
    pytest.importorskip("torch")
    script = """
import sys
sys.modules["triton"] = None
import alloc, numpy as np
pool = alloc.PagedTokenToKVPoolAllocator(64, 4, None, "cpu", None)
row = pool.alloc_extend([0], [0], [7], [7], [-1], 7)
pool.alloc_decode([8], [8], row[-1:])
rows = alloc.ReqToTokenPool(2, 8, "cpu", page_size=4)
rows.write_pages(rows.alloc(1), [0], [np.array([1, 2])])
"""
    done = run(script)
    assert (done.returncode, done.stderr) == (0, "")


def test_host_slots_are_int64_arrays_everywhere():
    """With device=None every slot call gives NumPy int64; D10."""
    token, paged, sharded = make_token(), make_paged(), make_interleave()
    results = [
        token.alloc(3),
        paged.alloc(8),
        extend(paged, [(0, 5, -1)]),
        extend(sharded, [(0, 40, -1)], [0]),
        sharded.alloc_cyclic(1, 16),
        *sharded.class_free_pages,
        paged.get_all_free_pages(),
    ]
    assert [(type(slots), slots.dtype) for slots in results] == [(np.ndarray, np.int64)] * 10


def test_a_device_changes_no_slot_and_no_state():
    """The same calls with device None and "cpu" give the same slots and digests; D10, D12."""
    torch = pytest.importorskip("torch")
    for make in (make_paged, make_interleave):
        found = []
        for device in (None, "cpu", torch.device("cpu")):
            pool = make(device=device)
            out = extend(pool, [(0, 40, -1), (0, 3, -1)], [None, None])
            pool.free(out[:20])
            found.append((ints(out), pool.state_digest()))
        assert found == [found[0]] * 3
