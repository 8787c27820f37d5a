"""Token JSONL: one prompt a line, as a list of token ids or an object that holds one."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from replay.errors import ReplayError
from replay.formats.base import Facts, Id
from replay.trace import Request


class TokensLine(msgspec.Struct, frozen=True):
    """A line that is an object; fields that are not named here are ignored."""

    token_ids: list[Id] | None = None
    tokens: list[Id] | None = None


class TokensFormat:
    """Reads `[token, ...]`, `{"token_ids": [...]}` or `{"tokens": [...]}`.

    Args:
        first: The first line, decoded.
        block_size: Must be None: a token trace has no blocks.

    Raises:
        ReplayError: If a block size is given.
    """

    name = "token ids"
    shape = '[id, ...], or {"token_ids": [id, ...]}, or {"tokens": [id, ...]}'

    def __init__(self, first: object, block_size: int | None) -> None:
        if block_size is not None:
            raise ReplayError(
                f"--block-size {block_size}: a trace of token ids has no blocks; use --page-size"
            )
        self._decoder = msgspec.json.Decoder(list[Id] | TokensLine)

    @staticmethod
    def matches(first: object) -> bool:
        """Say whether a decoded first line looks like this format."""
        if isinstance(first, dict):
            return "token_ids" in first or "tokens" in first
        return isinstance(first, list)

    def facts(self) -> Facts:
        """Return what was detected."""
        return Facts(1, "none", "global", "none")

    def parse(self, line: bytes, line_no: int) -> Iterable[Request]:
        """Turn one line into its request."""
        row = self._decoder.decode(line)
        ids = row if isinstance(row, list) else _tokens_of(row)
        return (Request(len(ids), ids),)


def _tokens_of(row: TokensLine) -> list[int]:
    if row.token_ids is not None and row.tokens is not None:
        raise ReplayError("both token_ids and tokens are given; a line holds one list of tokens")
    ids = row.token_ids if row.token_ids is not None else row.tokens
    if ids is None:
        raise ReplayError(f"neither token_ids nor tokens is given; a line is {TokensFormat.shape}")
    return ids
