"""Builders for scratch tests: specs, page tables with cyclic owners, pools and layers."""

from types import SimpleNamespace

import numpy as np
import torch

from alloc import PageShardSpec, ReqToTokenPool

LAYERS = 4


def make_spec(rank=0, size=4, ps=16, groups=64, chunk_pages=32):
    return PageShardSpec(rank, size, ps, groups * size * ps, chunk_pages * ps)


def group_pages(size, groups, start=0, count=None):
    """Pages of a chain whose owners are cyclic from ``start``; its i-th group is ``groups[i]``."""
    total = len(groups) * size - start if count is None else count
    return [groups[(start + i) // size] * size + (start + i) % size for i in range(total)]


def page_table(tables, width=None):
    """Page lists as a NumPy int32 table, rows padded with zeros."""
    width = width or max(map(len, tables), default=1) or 1
    out = np.zeros((len(tables), width), dtype=np.int32)
    for row, pages in enumerate(tables):
        out[row, : len(pages)] = pages
    return out


def slot_table(tables, ps, width=None):
    """The same tables as an int32 tensor of slots."""
    pages = page_table(tables, width)
    slots = pages[:, :, None] * ps + np.arange(ps)
    slots[pages == 0] = 0
    return torch.from_numpy(slots.reshape(len(tables), pages.shape[1] * ps).astype(np.int32))


def row_pool(tables, ps, device=None):
    """The same tables in a ReqToTokenPool; row i is request i."""
    longest = max(map(len, tables), default=1) or 1
    pool = ReqToTokenPool(max(1, len(tables)), longest * ps, device, page_size=ps)
    rows = pool.alloc(len(tables))
    for row, pages in zip(rows, tables, strict=True):
        if pages:
            pool.write(row, 0, pages=np.array(pages))
    return pool


def slots_of(pages, ps, start=0, stop=None):
    """Slots of positions ``[start, stop)`` of a chain: int64 tensor."""
    ids = torch.tensor(list(pages), dtype=torch.int64)
    flat = (ids[:, None] * ps + torch.arange(ps)).view(-1)
    return flat[start:stop]


def layer(layer_id):
    return SimpleNamespace(layer_id=layer_id)
