"""Writing prompts as trace lines: token ids, or Mooncake block ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray


def token_lines(prompts: Iterable[NDArray[np.int64]]) -> Iterator[bytes]:
    """Yield one JSON list of token ids a prompt, with its line break."""
    encode = msgspec.json.Encoder().encode
    for prompt in prompts:
        yield encode(prompt.tolist()) + b"\n"


def mooncake_lines(prompts: Iterable[NDArray[np.int64]], block_size: int) -> Iterator[bytes]:
    """Yield one Mooncake line a prompt, with its line break; requests are a second apart.

    A block's id stands for its tokens and all before them: the first prompt that holds a chain of
    blocks numbers them. Remembers one number per distinct block.

    Args:
        prompts: int64[prompt length] each.
        block_size: Tokens behind one id; the partial tail has an id too.
    """
    encode = msgspec.json.Encoder().encode
    numbers: dict[tuple[int, bytes], int] = {}
    for index, prompt in enumerate(prompts):
        parent = -1
        ids = []
        for start in range(0, len(prompt), block_size):
            link = (parent, prompt[start : start + block_size].tobytes())
            parent = numbers.setdefault(link, len(numbers))
            ids.append(parent)
        line = {
            "timestamp": index * 1000,
            "input_length": len(prompt),
            "output_length": 0,
            "hash_ids": ids,
        }
        yield encode(line) + b"\n"
