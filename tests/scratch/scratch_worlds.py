"""Sharded prefills beside one unsharded tensor that remembers every write.

A ``Conversation`` draws batches as a scheduler would: chains grow by chunks, share prefixes, drop
partial pages and reuse the pages of finished ones. ``prefill`` runs a batch on some ranks' pools
in lockstep and compares every read with the reference. The same seed draws the same on all ranks.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from alloc import PageLayout, PageShardSpec
from scratch import PageInterleaveMHATokenToKVPool, PageInterleaveMLATokenToKVPool
from tests.scratch.scratch_builders import layer, page_table, slots_of

HEADS, HEAD_DIM = 2, 4
LORA, ROPE = 6, 2
WIDTHS = {"mha": (HEADS * HEAD_DIM, HEADS * HEAD_DIM), "mla": (LORA, ROPE)}


@dataclass
class Batch:
    """Page lists, cached tokens and total tokens of each request."""

    tables: list[list[int]] = field(default_factory=list)
    prefix_lens: list[int] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)

    def locs(self, ps, *, chunk_only=False):
        """Slots of all requests in batch order; ``chunk_only`` leaves the prefixes out."""
        starts = self.prefix_lens if chunk_only else [0] * len(self.tables)
        parts = [
            slots_of(table, ps, start, stop)
            for table, start, stop in zip(self.tables, starts, self.seq_lens, strict=True)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


class Conversation:
    """Draws batches over one page space; its chains hold pages whose tokens were all written.

    Args:
        spec: the limits of a batch.
        layout: the pages.
        rng: NumPy generator.
    """

    def __init__(self, spec: PageShardSpec, layout: PageLayout, rng: np.random.Generator):
        self.spec, self.layout, self.rng = spec, layout, rng
        local = range(1, layout.pages_per_class + 1)
        self.free = [
            [int(layout.page_at(c, k)) for k in rng.permutation(local)]
            for c in range(layout.num_classes)
        ]
        self.chains: list[list[int]] = []
        self.users: dict[int, int] = {}

    def batch(self, max_requests=3):
        """Draw a batch within the scratch; whole pages of each request become a chain."""
        out, rng, ps = Batch(), self.rng, self.spec.page_size
        prefix_room = self.spec.max_prefix_tokens // ps // self.spec.shard_size
        chunk_room = self.spec.chunk_tokens // ps
        finished = []
        for _ in range(int(rng.integers(1, max_requests + 1))):
            prefix = self._prefix(prefix_room)
            want = int(rng.integers(0 if prefix else 1, max(2, chunk_room // 2)))
            table = self._extend(prefix, min(want, chunk_room))
            prefix_room -= -(-len(prefix) // self.spec.shard_size)
            chunk_room -= len(table) - len(prefix)
            tail = int(rng.integers(0, ps)) if len(table) > len(prefix) else 0
            out.tables.append(table)
            out.prefix_lens.append(len(prefix) * ps)
            out.seq_lens.append(len(table) * ps - tail)
            finished.append((table, len(table) - (tail > 0)))
        for table, whole in finished:
            for page in table[whole:]:
                self._drop(page)
            if whole:
                self.chains.append(table[:whole])
        while len(self.chains) > 4:
            for page in self.chains.pop(int(rng.integers(len(self.chains)))):
                self._drop(page)
        return out

    def _prefix(self, room):
        """Take a prefix of a chain, or nothing."""
        if not self.chains or self.rng.integers(4) == 0:
            return []
        chain = self.chains[int(self.rng.integers(len(self.chains)))]
        count = min(int(self.rng.integers(1, len(chain) + 1)), room * self.spec.shard_size)
        for page in chain[:count]:
            self.users[page] += 1
        return chain[:count]

    def _extend(self, prefix, count):
        layout, table = self.layout, list(prefix)
        base = layout.base_of(prefix[0], 0) if prefix else int(self.rng.integers(len(self.free)))
        while len(table) < len(prefix) + count and self.free[layout.class_at(base, len(table))]:
            page = self.free[layout.class_at(base, len(table))].pop()
            self.users[page] = 1
            table.append(page)
        return table

    def _drop(self, page):
        self.users[page] -= 1
        if not self.users[page]:
            self.free[self.layout.class_of(page)].append(page)


class Reference:
    """What was written to every slot of every layer: bits, in one tensor a layer."""

    def __init__(self, kind, dtype, layout, layers, seed):
        self.kind, self.dtype = kind, dtype
        self.rng = torch.Generator().manual_seed(seed)
        width = sum(WIDTHS[kind])
        slots = layout.num_pages * layout.page_size
        self.rows = {
            layer_id: torch.zeros((slots, width), dtype=dtype).view(torch.uint8)
            for layer_id in layers
        }

    def draw(self, layer_id, loc, device="cpu"):
        """Remember random rows for ``loc`` and return their parts as a model passes them."""
        width = sum(WIDTHS[self.kind])
        values = torch.randn(len(loc), width, generator=self.rng).to(self.dtype)
        self.rows[layer_id][loc] = values.view(torch.uint8)
        first = WIDTHS[self.kind][0]
        return [values[:, :first].to(device), values[:, first:].to(device)]

    def part(self, layer_id, loc, part):
        """Bits of one part of some slots."""
        rows = self.rows[layer_id][loc].view(self.dtype)
        first = WIDTHS[self.kind][0]
        taken = rows[:, :first] if part == 0 else rows[:, first:]
        return taken.contiguous().view(torch.uint8)


def make_pool(kind, spec, group, *, dtype=torch.bfloat16, size=None, layers=(0, 3), **kwargs):
    """A sharded pool with layers ``[start, end)``; ``size`` is one rank's slots."""
    size = size or 12 * spec.page_size
    shape = (HEADS, HEAD_DIM) if kind == "mha" else (LORA, ROPE)
    make = PageInterleaveMHATokenToKVPool if kind == "mha" else PageInterleaveMLATokenToKVPool
    device = kwargs.pop("device", "cpu")
    return make(
        size,
        spec.page_size,
        dtype,
        *shape,
        layers[1] - layers[0],
        device,
        layers[0],
        layers[1],
        shard_spec=spec,
        shard_group=group,
        **kwargs,
    )


def write(pool, kind, layer_id, loc, parts):
    """Write rows as an attention layer does."""
    setter = pool.set_kv_buffer if kind == "mha" else pool.set_mla_kv_buffer
    setter(layer(layer_id), loc, *parts)


def bits(tensor, rows=slice(None)):
    """Copy the bits of rows of a tensor: uint8[n, bytes]; any dtype."""
    return tensor.view(torch.uint8)[rows].flatten(1).clone()


def read(pool, kind, layer_id, loc):
    """Bits of both parts of some slots, read in every way that the pool offers: [..., n, bytes]."""
    rows = pool.translate_loc_to_scratch(loc)
    if kind == "mha":
        return [
            bits(pool.get_key_buffer(layer_id), rows),
            bits(pool.get_value_buffer(layer_id), rows),
        ]
    whole = pool.get_key_buffer(layer_id)
    nope, rope = pool.get_mla_kv_buffer(layer(layer_id), loc, pool.dtype)
    latent = bits(pool.get_value_buffer(layer_id), rows)
    return [
        torch.stack([bits(nope), bits(whole[..., :LORA], rows), latent]),
        torch.stack([bits(rope), bits(whole[..., LORA:], rows)]),
    ]


def prefill(pools, kind, reference, batch, *, index_dtype=torch.int64, pause=lambda: None):
    """Run a batch on these ranks in lockstep; every rank reads exactly what was written.

    What was read is compared after the batch, so that nothing waits for a device in between;
    ``pause`` is called before every write and read.
    """
    ps, layers, device = pools[0].page_size, pools[0].layers, pools[0].device
    chunk, everything = batch.locs(ps, chunk_only=True), batch.locs(ps)
    chunk_loc, loc = (locs.to(index_dtype).to(device) for locs in (chunk, everything))
    layer_ids = range(layers.start, layers.end)
    drawn = [reference.draw(layer_id, chunk, device) for layer_id in layer_ids]
    source, found = page_table(batch.tables), []
    for pool in pools:
        rows = range(len(batch.tables))
        pool.begin_shard_extend(source, rows, batch.prefix_lens, batch.seq_lens)
    for layer_id, parts in zip(layer_ids, drawn, strict=True):
        for pool in pools:
            pause()
            write(pool, kind, layer_id, chunk_loc, parts)
        for pool in pools:
            pause()
            found.append((pool, layer_id, read(pool, kind, layer_id, loc)))
    for pool in pools:
        pool.end_shard_extend()
    for pool, layer_id, parts in found:
        rank = pool.shard.planner.spec.shard_rank
        assert is_exact(parts, reference, layer_id, everything), f"rank {rank} layer {layer_id}"


def is_exact(found, reference, layer_id, loc):
    """Say whether what ``read`` found is what was written."""
    pairs = ((reference.part(layer_id, loc, part), got.cpu()) for part, got in enumerate(found))
    return all(torch.equal(expected.expand_as(got), got) for expected, got in pairs)


def check_persisted(pools, kind, reference, locs):
    """Each rank's pool holds exactly its own rows of ``locs``."""
    for pool in pools:
        planner = pool.shard.planner
        owners = planner.layout.class_of(locs // pool.page_size)
        own = locs[owners == planner.spec.shard_rank]
        rows = planner.layout.local_row(own)
        for index, layer_id in enumerate(range(pool.layers.start, pool.layers.end)):
            if kind == "mha":
                stored = [pool.k_buffer[index], pool.v_buffer[index]]
            else:
                whole = pool.kv_buffer[index]
                stored = [whole[..., :LORA], whole[..., LORA:]]
            for part, buffer in enumerate(stored):
                assert torch.equal(reference.part(layer_id, own, part), bits(buffer, rows).cpu())
