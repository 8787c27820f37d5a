"""A small transformer in plain torch: RMSNorm, RoPE, SwiGLU, and attention as GQA or as MLA.

Weights are random and seeded. Pools keep KV in float32, and all arithmetic is in float64: a matrix
product of another shape may round its last bit otherwise, so how a prompt was cut into chunks may
change a logit by 1e-14 or so, or by 1e-7 where that bit tips the rounding of a stored value. Both
are far below the gap between two logits. Attention reads a chunk's own KV back from the pool too,
so that a token's KV is rounded alike whoever reads it, and when.

The model knows no slots and no pages: ``BatchKv`` writes the new tokens' KV and reads a request's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch

COMPUTE_DTYPE = torch.float64

Variant: TypeAlias = Literal["gqa", "mla"]

Parts: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""What is kept of n tokens in one layer. GQA: keys and values, each [n, kv_heads, head_dim].
MLA: the latent [n, latent_dim] and the rope part [n, rope_dim], shared by all heads."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a model and the seed of its weights."""

    variant: Variant = "gqa"
    seed: int = 0
    vocab: int = 256
    width: int = 64
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    latent_dim: int = 24
    rope_dim: int = 8
    mlp_width: int = 128


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """New tokens of several requests, one request after the other.

    Attributes:
        ids: int64[n] token ids.
        positions: int64[n] their places in their own sequences.
        lengths: how many are each request's; at least 1.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(
        cls, tokens: Sequence[Sequence[int]], starts: Sequence[int], device: str
    ) -> ForwardBatch:
        """Return a batch: of request i ``tokens[i]``, which follow ``starts[i]`` known tokens."""
        ids = [token for ids in tokens for token in ids]
        positions = [
            position
            for ids, start in zip(tokens, starts, strict=True)
            for position in range(start, start + len(ids))
        ]
        return cls(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            [len(ids) for ids in tokens],
        )


class BatchKv(Protocol):
    """The KV of one batch, as attention sees it."""

    def write(self, layer: Attention, parts: Parts) -> None:
        """Keep the parts of the batch's new tokens."""

    def read(self, layer: Attention, request: int) -> Parts:
        """Return the parts of all tokens of the batch's i-th request so far, by position."""


class Weights:
    """A seeded source of matrices, the same on every device."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        """Return a matrix that keeps the size of what it is applied to, times ``gain``."""
        values = torch.randn(rows, columns, generator=self._generator)
        return values.to(self._device, COMPUTE_DTYPE) * (gain / math.sqrt(rows))


class Attention:
    """What both variants share: keep the new KV, then let every request attend to its own."""

    def __init__(self, layer_id: int, config: ModelConfig, out: torch.Tensor) -> None:
        self.layer_id = layer_id
        self.config = config
        self.w_out = out

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Parts]:
        """Return the queries of tokens [n, ...], and the parts that are kept of them."""
        raise NotImplementedError

    def attend(self, queries: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Return [n, heads, head_dim]: the last n of a request's tokens look at all up to them."""
        raise NotImplementedError

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, kv: BatchKv) -> torch.Tensor:
        """Return the layer's output: [n, width]."""
        queries, new_parts = self.project(x, batch.positions)
        kv.write(self, new_parts)
        mixed: list[torch.Tensor] = []
        for i, own in enumerate(torch.split(queries, batch.lengths)):
            first, second = kv.read(self, i)
            mixed.append(self.attend(own, (first.to(COMPUTE_DTYPE), second.to(COMPUTE_DTYPE))))
        out: torch.Tensor = torch.cat(mixed).flatten(1) @ self.w_out
        return out


class GroupedQueryAttention(Attention):
    """Query heads in groups that share a key head and a value head."""

    def __init__(self, layer_id: int, config: ModelConfig, weights: Weights) -> None:
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        self.w_query = weights.matrix(config.width, heads * size, gain=2.0)
        self.w_key = weights.matrix(config.width, kv_heads * size)
        self.w_value = weights.matrix(config.width, kv_heads * size)
        super().__init__(layer_id, config, weights.matrix(heads * size, config.width))

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Parts]:
        """Return rotated queries, and rotated keys with values."""
        size = self.config.head_dim
        queries, keys, values = (
            (x @ w).view(len(x), -1, size) for w in (self.w_query, self.w_key, self.w_value)
        )
        return rotate(queries, positions), (rotate(keys, positions), values)

    def attend(self, queries: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Attend with every group of query heads to its key and value head."""
        keys, values = parts
        grouped = queries.view(len(queries), self.config.num_kv_heads, -1, self.config.head_dim)
        scores = torch.einsum("nhgd,shd->hgns", grouped, keys) / self.config.head_dim**0.5
        return torch.einsum("hgns,shd->nhgd", causal_softmax(scores), values).flatten(1, 2)


class LatentAttention(Attention):
    """MLA: one latent per token stands for the keys and values of all heads.

    The latent is never expanded: queries are brought into its space, and so are the outputs out.
    """

    def __init__(self, layer_id: int, config: ModelConfig, weights: Weights) -> None:
        heads, size, latent = config.num_heads, config.head_dim, config.latent_dim
        self.w_query = weights.matrix(config.width, heads * (size + config.rope_dim), gain=2.0)
        self.w_down = weights.matrix(config.width, latent + config.rope_dim)
        self.w_key = weights.matrix(latent, heads * size).view(latent, heads, size)
        self.w_value = weights.matrix(latent, heads * size).view(latent, heads, size)
        super().__init__(layer_id, config, weights.matrix(heads * size, config.width))

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Parts]:
        """Return queries [n, heads, latent + rope], and the latent with the rope part."""
        config = self.config
        queries = (x @ self.w_query).view(len(x), config.num_heads, -1)
        plain, rope = torch.split(queries, [config.head_dim, config.rope_dim], dim=-1)
        in_latent = torch.einsum("nhd,lhd->nhl", plain, self.w_key)
        down = x @ self.w_down
        latent, key_rope = torch.split(down, [config.latent_dim, config.rope_dim], dim=-1)
        shared = rotate(key_rope[:, None], positions)[:, 0]
        return torch.cat([in_latent, rotate(rope, positions)], -1), (rms_norm(latent), shared)

    def attend(self, queries: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Attend to latent and rope part together; the values are the latent."""
        latent = parts[0]
        size = self.config.head_dim + self.config.rope_dim
        scores = torch.einsum("nhk,sk->hns", queries, torch.cat(parts, dim=-1)) / size**0.5
        mixed = torch.einsum("hns,sl->nhl", causal_softmax(scores), latent)
        return torch.einsum("nhl,lhd->nhd", mixed, self.w_value)


class GatedMlp:
    """SwiGLU."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.w_gate = weights.matrix(config.width, config.mlp_width)
        self.w_up = weights.matrix(config.width, config.mlp_width)
        self.w_down = weights.matrix(config.mlp_width, config.width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, width]."""
        return (torch.nn.functional.silu(x @ self.w_gate) * (x @ self.w_up)) @ self.w_down


class Model:
    """Embedding, layers of attention and MLP, and logits."""

    def __init__(self, config: ModelConfig, device: str = "cpu") -> None:
        self.config = config
        self.device = device
        weights = Weights(config.seed, device)
        kind = GroupedQueryAttention if config.variant == "gqa" else LatentAttention
        self.embedding = weights.matrix(config.vocab, config.width, gain=config.vocab**0.5)
        self.layers = [
            (kind(layer_id, config, weights), GatedMlp(config, weights))
            for layer_id in range(config.num_layers)
        ]
        self.w_logits = weights.matrix(config.width, config.vocab)

    def forward(self, batch: ForwardBatch, kv: BatchKv) -> torch.Tensor:
        """Return the logits after each request's last new token: [requests, vocab]."""
        x = self.embedding[batch.ids]
        for attention, mlp in self.layers:
            x = x + attention(rms_norm(x), batch, kv)
            x = x + mlp(rms_norm(x))
        last = torch.tensor(batch.lengths, device=self.device).cumsum(0) - 1
        return rms_norm(x[last]) @ self.w_logits


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """Return vectors of mean square 1."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return vectors [n, heads, d], turned pair by pair by their positions (RoPE)."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=COMPUTE_DTYPE) / half
    angles = positions[:, None, None] * 10_000.0**-steps
    left, right = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def causal_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Return weights of scores [..., n, s]; the n queries are the last n of the s tokens."""
    num_queries, num_keys = scores.shape[-2:]
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device)
    return scores.masked_fill(~seen.tril(num_keys - num_queries), float("-inf")).softmax(-1)
