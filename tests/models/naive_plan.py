"""The obvious plan: dictionaries and sets, one page and one slot at a time."""

from dataclasses import dataclass
from itertools import pairwise


class CannotPlan(Exception):
    """The batch breaks a rule; the text names it."""


@dataclass
class NaivePlan:
    page_size: int
    block_pages: int
    places: dict[int, int]
    send_pages: list[int] | None
    trash_page: int
    prefix_order: list[int]

    def row(self, loc):
        page, offset = divmod(loc, self.page_size)
        return self.places.get(page, self.trash_page) * self.page_size + offset

    @property
    def send_rows(self):
        if self.send_pages is None:
            return None
        ps = self.page_size
        return [page * ps + offset for page in self.send_pages for offset in range(ps)]


def owner_of(page, spec, first_page):
    return (page - first_page) % spec.shard_size


def local_page(page, spec, first_page):
    return 0 if page < first_page else (page - first_page) // spec.shard_size + 1


def check_chunk(chunk, prefix):
    if len(set(chunk)) < len(chunk):
        raise CannotPlan("twice")
    if set(chunk) & prefix:
        raise CannotPlan("another's chunk")


def naive_plan(spec, tables, prefix_lens, seq_lens, *, first_page=None, exact=False):
    """Plan a batch of page tables (one list of page ids a request), or raise ``CannotPlan``."""
    n, ps = spec.shard_size, spec.page_size
    first = n if first_page is None else first_page
    prefix, chunk, block = set(), [], 0
    for table, prefix_len, seq_len in zip(tables, prefix_lens, seq_lens, strict=True):
        if prefix_len % ps:
            raise CannotPlan("aligned")
        count = prefix_len // ps
        own = table[:count]
        owners = [owner_of(page, spec, first) for page in own]
        if not exact and any((a + 1) % n != b for a, b in pairwise(owners)):
            raise CannotPlan("cyclic")
        prefix |= set(own)
        block += -(-count // n)
        chunk += table[count : -(-seq_len // ps)]
    check_chunk(chunk, prefix)
    by_rank = [sorted(p for p in prefix if owner_of(p, spec, first) == rank) for rank in range(n)]
    if exact:
        block = max(len(pages) for pages in by_rank)
    if max(len(pages) for pages in by_rank) > block:
        raise CannotPlan("block_pages")
    if n * block * ps > spec.max_prefix_tokens:
        raise CannotPlan("max_prefix_tokens")
    if len(chunk) * ps > spec.chunk_tokens:
        raise CannotPlan("chunk_tokens")
    places = {}
    for rank, pages in enumerate(by_rank):
        for k, page in enumerate(pages):
            places[page] = rank * block + k
    for j, page in enumerate(chunk):
        places[page] = spec.max_prefix_tokens // ps + j
    mine = [local_page(page, spec, first) for page in by_rank[spec.shard_rank]]
    return NaivePlan(
        page_size=ps,
        block_pages=block,
        places=places,
        send_pages=mine + [0] * (block - len(mine)) if block else None,
        trash_page=(spec.max_prefix_tokens + spec.chunk_tokens) // ps,
        prefix_order=[page for pages in by_rank for page in pages],
    )
