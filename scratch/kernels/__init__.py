"""The operations that touch every token: pack, store, translate. Plain torch, on any device.

Each operation is one function on tensors, with no planner or pool behind it, and writes into
buffers that the caller owns.
"""

from scratch.kernels.pack import pack_pages
from scratch.kernels.store import BITS, store_rows
from scratch.kernels.translate import expand_pages, translate_locs

__all__ = ["BITS", "expand_pages", "pack_pages", "store_rows", "translate_locs"]
