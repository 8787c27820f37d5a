"""Other engines' prefix caches behind the benchmark's operations, when they are importable.

Only their public classes are called. ``--peer PATH`` names the folder that ``import sglang`` is
found in, for example an unpacked wheel with its dependencies installed.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import Any

import torch


class SglangCache:
    """SGLang's ``UnifiedRadixCache`` with full attention, its Python or its Rust core.

    Written against release 0.5.23.

    Args:
        backend: ``python`` or ``rust``.
        pool_tokens: size of the pool.
        page_size: tokens of a page.
    """

    def __init__(self, backend: str, pool_tokens: int, page_size: int) -> None:
        from sglang.srt.mem_cache import base_prefix_cache as api
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.name = {"python": "sglang py", "rust": "sglang rs"}[backend]
        self.page_size = page_size
        self.pool: Any = PagedTokenToKVPoolAllocator(
            pool_tokens // page_size * page_size, page_size, torch.float16, "cpu", None, False
        )
        self.cache: Any = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.pool,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=backend,
            )
        )
        self._api: Any = api
        self._radix_key: Any = RadixKey
        self._key: Any = None
        self._match: Any = None
        self._receipt: Any = None
        self._params: Any = None
        self._slots = self._new = torch.empty(0, dtype=torch.int64)

    def key(self, tokens: array[int]) -> None:
        """Wrap the prompt."""
        self._key = self._radix_key(tokens)

    def match(self) -> int:
        """Match."""
        params = self._api.MatchPrefixParams(key=self._key)
        match = self._match = self.cache.match_prefix(params)
        return int(match.device_prefix_len)

    def lock(self) -> None:
        """Lock what was matched."""
        self._receipt = self.cache.inc_lock_ref(self._match.last_device_node)

    def indices(self) -> int:
        """Put together the slots of the match; returns their number."""
        self._slots = self.cache.path_device_indices(self._match.last_device_node)
        return len(self._slots)

    def room(self, tokens: int) -> bool:
        """Say whether the pool has this many free slots."""
        return tokens <= int(self.pool.available_size())

    def evict(self, tokens: int) -> None:
        """Evict."""
        self.cache.evict(self._api.EvictParams(num_tokens=tokens))

    def alloc(self, tokens: int) -> None:
        """Take slots."""
        self._new = self.pool.alloc(tokens)

    def prepare_insert(self) -> None:
        """Join the matched and the new slots."""
        value = torch.cat([self._slots, self._new])
        self._params = self._api.InsertParams(
            key=self._radix_key(self._key.token_ids[: len(value)]),
            value=value,
            prev_prefix_len=int(self._match.device_prefix_len),
        )

    def insert(self) -> None:
        """Insert slots."""
        self.cache.insert(self._params)

    def unlock(self) -> None:
        """Give the lock back."""
        self.cache.dec_lock_ref(self._match.last_device_node, self._receipt.to_dec_params())


def find(path: Path) -> list[str]:
    """Make a peer importable and return the backends that there are.

    Raises:
        ValueError: there is no such package in ``path``, or it can't be imported.
    """
    sys.path.insert(0, str(path))
    try:
        import sglang.srt.mem_cache.unified_radix_cache  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--peer {path}: {error}") from None
    return ["python", "rust"]
