"""One rank's engine: the scheduler plans, the model prefills and decodes, step by step.

Prefill goes through the cache and its pool, sharded or not. Decode is rank-local: while the last
chunk of a prompt is computed, attention reads the whole prompt layer by layer, and what it reads is
copied to a plain pool of this rank, where the answer is then generated token by token. A sharded
pool serves prefill only, because a decode step that gathers every prefix for one new token would
move far more than it computes. So the next turn prefills the answer as part of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from alloc import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    PageInterleavePoolAllocator,
    PageShardSpec,
    ReqToTokenPool,
    ceil_div,
)
from examples.tiny_engine.kv import (
    ExtendRows,
    PlainKv,
    ShardedKv,
    SlotKv,
    make_plain_kv,
    make_sharded_kv,
)
from examples.tiny_engine.model import ForwardBatch, Model, ModelConfig
from examples.tiny_engine.scheduler import (
    CountingCache,
    PrefillBatch,
    Request,
    Scheduler,
    Stats,
)
from examples.tiny_engine.workload import Chat
from radix import CacheInitParams, EvictParams
from scratch import GatherGroup, ScratchBudget

TurnId = tuple[int, int]
"""Number of a chat, number of a turn in it."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of an engine; of one rank where several share a pool.

    Attributes:
        use_cache: False shares no prefix.
        rotation: policy of rotation bases on a sharded pool: seam, where a tail that leaves a
            cached prefix starts on the emptiest rank, or chain, one base along every path.
        use_leases: with chain, give requests in flight that share a start the same base; False
            to see what is declined without.
        page_size: tokens of a page.
        pages_per_rank: pages that each rank's prefill pool holds.
        decode_pages: pages of each rank's decode pool; they hold a turn of every chat at once.
        chunk_tokens: new tokens of a prefill batch.
        max_batch: requests of a prefill batch.
        max_prefix_tokens: scratch for gathered prefixes, with padding.
        max_context: tokens of the longest sequence.
        device: cpu, or cuda for the current GPU.
        check: check all invariants after every step.
    """

    use_cache: bool = True
    rotation: str = "seam"
    use_leases: bool = True
    page_size: int = 8
    pages_per_rank: int = 48
    decode_pages: int = 512
    chunk_tokens: int = 64
    max_batch: int = 3
    max_prefix_tokens: int = 768
    max_context: int = 512
    device: str = "cpu"
    check: bool = True


@dataclass(slots=True)
class RunResult:
    """What one rank did.

    Attributes:
        answers: the tokens of every turn's answer.
        logits: float64[answer tokens, vocab] that each of them was chosen from.
        stats: what the scheduler counted.
        digests: state of cache, allocator and rows after each step.
        prefix_pages: distinct prefix pages of all sharded batches.
        gathered_pages: pages that travelled for them, padding included.
    """

    answers: dict[TurnId, list[int]] = field(default_factory=dict)
    logits: dict[TurnId, torch.Tensor] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)
    digests: list[str] = field(default_factory=list)
    prefix_pages: int = 0
    gathered_pages: int = 0


class Engine:
    """Serves chats on one rank; the ranks of a group all serve the same ones.

    Args:
        config: sizes.
        model: weights.
        group: the ranks that share the prefill pool; one rank keeps a plain pool.
    """

    def __init__(self, config: EngineConfig, model: Model, group: GatherGroup) -> None:
        self.config = config
        self.model = model
        self.allocator = _make_allocator(config, group.size)
        self.kv, budget = _make_kv(config, model.config, group)
        self.cache = _make_cache(config, self.allocator)
        self.scheduler = Scheduler(
            self.cache,
            chunk_tokens=config.chunk_tokens,
            max_batch=config.max_batch,
            budget=budget,
        )
        decode_size = config.decode_pages * config.page_size
        self.decode_allocator = PagedTokenToKVPoolAllocator(
            decode_size, config.page_size, None, config.device, None
        )
        self.decode_kv = make_plain_kv(model.config, decode_size, config.page_size, config.device)
        self.result = RunResult(stats=self.scheduler.stats)
        self._chats: Sequence[Chat] = ()
        self._decoding: list[Request] = []
        self._planned: PrefillBatch | None = None
        self._logits: dict[TurnId, list[torch.Tensor]] = {}

    def run(self, chats: Sequence[Chat]) -> RunResult:
        """Serve all turns of all chats; every chat's next turn comes when its last is answered."""
        self._chats = chats
        for number, chat in enumerate(chats):
            self._enqueue(number, 0, chat.system)
        with torch.inference_mode():
            while self._planned or self._decoding or self.scheduler.waiting:
                self.step()
        self._check_nothing_left()
        return self.result

    def step(self) -> None:
        """Compute the planned batch and a token of every answer; meanwhile plan the next batch.

        On CUDA the device is behind the host until the chosen tokens are asked for.
        """
        batch, decoding = self._planned, self._decoding
        prefill_logits = self._prefill(batch) if batch else None
        decode_logits = self._decode(decoding) if decoding else None
        self._planned = self.scheduler.plan()
        if decode_logits is not None:
            self._append_tokens(decoding, decode_logits)
        if batch and prefill_logits is not None:
            done = self.scheduler.complete(batch)
            rows = [i for i, req in enumerate(batch.reqs) if req in done]
            self._append_tokens(done, prefill_logits[rows])
            self._decoding = self._decoding + done
        self._retire_answered()
        if self.config.check:
            self.cache.check_invariants(self.scheduler.live())
            self.result.digests.append(self.cache.state_digest())

    # Forward passes

    def _prefill(self, batch: PrefillBatch) -> torch.Tensor:
        """Compute a batch's chunks; return the logits after each chunk's last token."""
        spans = list(zip(batch.prefix_lens, batch.seq_lens, strict=True))
        tokens = [
            req.origin_input_ids[start:stop]
            for req, (start, stop) in zip(batch.reqs, spans, strict=True)
        ]
        forward = ForwardBatch.of(tokens, batch.prefix_lens, self.config.device)
        table = self.cache.pool()
        rows = [req.kv.req_pool_idx for req in batch.reqs if req.kv.req_pool_idx is not None]
        sequences = [table.req_to_token[r, :n] for r, n in zip(rows, batch.seq_lens, strict=True)]
        copies = [self._copy_target(req) for req in batch.reqs]
        kv = SlotKv(self.kv, batch.new_slots, sequences, self.decode_kv, copies)
        extend = ExtendRows(table, rows, batch.prefix_lens, batch.seq_lens)
        with self.kv.extending(extend) as plan:
            logits = self.model.forward(forward, kv)
        if plan is not None:
            self.result.prefix_pages += plan.num_prefix_pages
            self.result.gathered_pages += plan.block_pages * len(plan.rank_counts)
        return logits

    def _decode(self, reqs: Sequence[Request]) -> torch.Tensor:
        """Compute the last token of every answer so far; return the logits after each."""
        lengths = [req.prompt_len + len(req.answer) for req in reqs]
        forward = ForwardBatch.of(
            [req.answer[-1:] for req in reqs], [n - 1 for n in lengths], self.config.device
        )
        sequences = [req.decode_slots[:n] for req, n in zip(reqs, lengths, strict=True)]
        new_slots = torch.cat([slots[-1:] for slots in sequences])
        return self.model.forward(forward, SlotKv(self.decode_kv, new_slots, sequences))

    def _copy_target(self, req: Request) -> torch.Tensor | None:
        """Return the decode slots of a prompt whose last chunk this is; None for other chunks."""
        slots: torch.Tensor = req.decode_slots[: req.prompt_len]
        return slots if req.fill_len == req.prompt_len else None

    def _append_tokens(self, reqs: Sequence[Request], logits: torch.Tensor) -> None:
        """Give every request its likeliest next token. Waits for the device."""
        for req, row, token in zip(reqs, logits, logits.argmax(-1).tolist(), strict=True):
            req.answer.append(token)
            self._logits.setdefault((req.chat, req.turn), []).append(row)

    # Requests come and go

    def _enqueue(self, chat: int, turn: int, context: Sequence[int]) -> None:
        """Queue a turn that follows ``context``, with room in the decode pool for its end."""
        coming = self._chats[chat].turns[turn]
        prompt = [*context, *coming.message]
        page = self.config.page_size
        pages = ceil_div(len(prompt) + coming.answer_tokens, page)
        req = Request(chat, turn, prompt, coming.answer_tokens)
        req.decode_slots = self.decode_allocator.alloc(pages * page)
        if req.decode_slots is None:
            raise RuntimeError(f"decode_pages={self.config.decode_pages} are too few for all chats")
        self.scheduler.add(req)

    def _retire_answered(self) -> None:
        """Let go of answered requests and queue the turns that follow them."""
        answered = [req for req in self._decoding if len(req.answer) == req.answer_len]
        self._decoding = [req for req in self._decoding if req not in answered]
        for req in answered:
            turn_id = (req.chat, req.turn)
            self.result.answers[turn_id] = req.answer
            self.result.logits[turn_id] = torch.stack(self._logits.pop(turn_id)).cpu()
            self.decode_allocator.free(req.decode_slots)
            if req.turn + 1 < len(self._chats[req.chat].turns):
                said = [*req.origin_input_ids, *req.answer]
                self._enqueue(req.chat, req.turn + 1, said)

    def _check_nothing_left(self) -> None:
        """Raise RuntimeError if a page, a lock, a row or a decode slot is still taken."""
        self.cache.check_invariants([])
        self.cache.evict(EvictParams(self.cache.total_size()))
        free_pages = int(self.allocator.free_list.counts().sum())
        left = {
            "pages": self.allocator.layout.capacity_pages - free_pages,
            "rows": self.cache.pool().size - self.cache.pool().available_size(),
            "decode tokens": self.decode_allocator.size - self.decode_allocator.available_size(),
        }
        if any(left.values()):
            raise RuntimeError(f"the run left behind: {left}")


def _make_allocator(config: EngineConfig, ranks: int) -> BaseTokenToKVPoolAllocator:
    size = config.pages_per_rank * config.page_size
    if ranks == 1:
        return PagedTokenToKVPoolAllocator(size, config.page_size, None, config.device, None)
    return PageInterleavePoolAllocator(size, config.page_size, ranks, None, config.device, None)


def _make_cache(config: EngineConfig, allocator: BaseTokenToKVPoolAllocator) -> CountingCache:
    # Two batches in flight, and preempted or unfinished requests between their chunks.
    rows = ReqToTokenPool(
        8 * config.max_batch,
        config.max_context,
        config.device,
        page_size=config.page_size,
        debug=config.check,
    )
    return CountingCache(
        CacheInitParams(
            disable=not config.use_cache,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=config.page_size,
            rotation=config.rotation,
            use_leases=config.use_leases,
        )
    )


def _make_kv(
    config: EngineConfig, model: ModelConfig, group: GatherGroup
) -> tuple[PlainKv | ShardedKv, ScratchBudget | None]:
    size = config.pages_per_rank * config.page_size
    if group.size == 1:
        return make_plain_kv(model, size, config.page_size, config.device), None
    spec = PageShardSpec(
        group.rank, group.size, config.page_size, config.max_prefix_tokens, config.chunk_tokens
    )
    kv = make_sharded_kv(
        model, size, spec, group, config.device, exact_blocks=config.rotation == "seam"
    )
    return kv, kv.pool.scratch_budget
