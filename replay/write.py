"""Writing prompts as trace lines: token ids, or Mooncake block ids."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray


@contextmanager
def compressing(file: BinaryIO, path: str) -> Iterator[BinaryIO]:
    """Open a stream into a file that compresses as the suffix of its path says.

    Equal content gives equal bytes: no name and no time goes into the file.

    Args:
        file: Where the bytes go; the caller closes it.
        path: A final `.gz`, `.zst` or `.xz` compresses, anything else doesn't.
    """
    if path.endswith(".gz"):
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as stream:
            yield stream  # type: ignore[misc]
    elif path.endswith(".zst"):
        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as stream:
            yield stream
    elif path.endswith(".xz"):
        with lzma.open(file, "wb") as stream:
            yield stream  # type: ignore[misc]
    else:
        yield file


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
