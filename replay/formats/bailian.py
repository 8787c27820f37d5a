"""Bailian JSONL: one turn of a chat a line, one global id per block of 16 tokens."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from replay.formats.base import Facts, Id, Length, TailRule, Time
from replay.trace import Request

DEFAULT_BLOCK_SIZE = 16


class BailianLine(msgspec.Struct, frozen=True, gc=False):
    """A line; fields that are not named here are ignored."""

    chat_id: int
    timestamp: Time
    input_length: Length
    hash_ids: list[Id]
    output_length: Length = 0


class BailianFormat:
    """Reads lines of `chat_id`, `timestamp` (s), `input_length`, `output_length`, `hash_ids`.

    Args:
        first: The first line, decoded.
        block_size: Tokens behind one id; None for 16.
    """

    name = "Bailian"
    shape = '{"chat_id": n, "timestamp": s, "input_length": n, "hash_ids": [id, ...]}'

    def __init__(self, first: object, block_size: int | None) -> None:
        self._rule = TailRule(block_size or DEFAULT_BLOCK_SIZE)
        self._decoder = msgspec.json.Decoder(BailianLine)

    @staticmethod
    def matches(first: object) -> bool:
        """Say whether a decoded first line looks like this format."""
        return isinstance(first, dict) and "hash_ids" in first and "chat_id" in first

    def facts(self) -> Facts:
        """Return what was detected so far."""
        return Facts(self._rule.block_size, self._rule.tail, "global", "s")

    def parse(self, line: bytes, line_no: int) -> Iterable[Request]:
        """Turn one line into its request."""
        row = self._decoder.decode(line)
        self._rule.check(len(row.hash_ids), row.input_length, ("hash_ids", "input_length"))
        milliseconds = row.timestamp * 1000
        return (Request(row.input_length, row.hash_ids, row.output_length, milliseconds),)
