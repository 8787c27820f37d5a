"""One extend batch over sharded KV pages: plan, translate, gather a layer ahead, and the pools.

Each rank of a group keeps every N-th page. For an extend batch it plans where the prefix pages go
in a scratch, gathers them layer by layer while the layer before is computed, stages the chunk
beside them, and reads ``[prefix | chunk]`` through translated slots.

>>> import torch
>>> from alloc import PageShardSpec
>>> spec = PageShardSpec(0, 1, 16, max_prefix_tokens=64, chunk_tokens=32)
>>> pool = PageInterleaveMLATokenToKVPool(
...     128, 16, torch.float32, 4, 2, layer_num=2, device="cpu",
...     shard_spec=spec, shard_group=SoloGroup())
>>> slots = torch.arange(16, 48).view(1, -1)                 # pages 1 and 2 of one request
>>> with_prefix = pool.begin_shard_extend(slots, [0], [16], [32])
>>> with_prefix.block_pages, pool.translate_loc_to_scratch(slots[0, 15:18]).tolist()
(1, [15, 64, 65])
>>> pool.end_shard_extend()
"""

from scratch.budget import ScratchBudget, padded_block_pages
from scratch.extend import ShardExtend
from scratch.gather import PrefixGather
from scratch.group import (
    GatherGroup,
    PendingGather,
    ShardGroup,
    SoloGroup,
    get_kv_shard_group,
)
from scratch.in_process import InProcessGroup
from scratch.layout import ScratchLayout
from scratch.page_source import PageSource
from scratch.plan import ShardExtendPlan, ShardExtendPlanner
from scratch.pools import MHATokenToKVPool, MLATokenToKVPool
from scratch.sharded_pools import (
    PageInterleaveMHATokenToKVPool,
    PageInterleaveMLATokenToKVPool,
)
from scratch.translate import SlotTranslator
from scratch.write_plan import LayoutPlacement, Placement, WritePlanCache

__all__ = [
    # plan
    "ShardExtendPlanner",
    "ShardExtendPlan",
    "PageSource",
    "ScratchLayout",
    # translation and writes
    "SlotTranslator",
    "WritePlanCache",
    "Placement",
    "LayoutPlacement",
    # admission
    "ScratchBudget",
    "padded_block_pages",
    # groups
    "GatherGroup",
    "PendingGather",
    "ShardGroup",
    "SoloGroup",
    "InProcessGroup",
    "get_kv_shard_group",
    # gather
    "PrefixGather",
    "ShardExtend",
    # pools
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "PageInterleaveMHATokenToKVPool",
    "PageInterleaveMLATokenToKVPool",
]
