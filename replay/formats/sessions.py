"""Agent sessions: one session a line, its requests in order, sub-agents nested.

Ids cover whole blocks only (floor) and usually mean something within their session alone. The
session's line number then goes into the upper half of every id, so that equal ids of two sessions
never meet in a tree. Sessions are read one after the other, a sub-agent's requests at the place
where it stands: the file has no clock that spans sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec

from replay.errors import ReplayError
from replay.formats.base import Facts, Length, TailRule, Time
from replay.trace import Request

LOCAL_ID_BITS = 32

LocalId = Annotated[int, msgspec.Meta(ge=0, lt=1 << LOCAL_ID_BITS)]
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Entry(msgspec.Struct, frozen=True):
    """A request (`in`, `hash_ids`), or a sub-agent (`requests`)."""

    t: Time = 0.0
    input_length: Length | None = msgspec.field(name="in", default=None)
    output_length: Length = msgspec.field(name="out", default=0)
    hash_ids: list[LocalId] | None = None
    requests: list[Entry] | None = None


class SessionLine(msgspec.Struct, frozen=True):
    """A line; fields that are not named here are ignored."""

    block_size: BlockSize
    hash_id_scope: Literal["local", "global"]
    requests: list[Entry]


class SessionsFormat:
    """Reads lines of `block_size`, `hash_id_scope` and `requests` with `t` (s), `in`, `hash_ids`.

    Args:
        first: The first line, decoded; its block size and scope hold for the whole file.
        block_size: Must be None or what the file says.

    Raises:
        ReplayError: If a block size is given that contradicts the file.
    """

    name = "agent sessions"
    shape = (
        '{"block_size": n, "hash_id_scope": "local", '
        '"requests": [{"t": s, "in": n, "out": n, "hash_ids": [id, ...]}, ...]}'
    )

    def __init__(self, first: object, block_size: int | None) -> None:
        head = msgspec.convert(first, SessionLine)
        if block_size is not None and block_size != head.block_size:
            raise ReplayError(
                f"--block-size {block_size}: the trace says block_size={head.block_size}; "
                "leave the option out"
            )
        self._rule = TailRule(head.block_size, "floor")
        self._scope = head.hash_id_scope
        self._decoder = msgspec.json.Decoder(SessionLine)

    @staticmethod
    def matches(first: object) -> bool:
        """Say whether a decoded first line looks like this format."""
        return isinstance(first, dict) and "requests" in first

    def facts(self) -> Facts:
        """Return what was detected."""
        return Facts(self._rule.block_size, self._rule.tail, self._scope, "s")

    def parse(self, line: bytes, line_no: int) -> Iterable[Request]:
        """Turn one session into its requests, sub-agents unfolded in place."""
        row = self._decoder.decode(line)
        if (row.block_size, row.hash_id_scope) != (self._rule.block_size, self._scope):
            raise ReplayError(
                f"block_size={row.block_size}, hash_id_scope={row.hash_id_scope}; the first line "
                f"says {self._rule.block_size}, {self._scope}, and a file has one of each"
            )
        prefix = line_no << LOCAL_ID_BITS if row.hash_id_scope == "local" else 0
        return self._unfold(row.requests, prefix)

    def _unfold(self, entries: list[Entry], prefix: int) -> Iterator[Request]:
        pending = [(entry, 0.0, f"requests[{i}]") for i, entry in enumerate(entries)][::-1]
        while pending:
            entry, start, place = pending.pop()
            begin = start + entry.t
            if entry.requests is not None:
                pending += [
                    (child, begin, f"{place}.requests[{i}]")
                    for i, child in enumerate(entry.requests)
                ][::-1]
                continue
            yield self._request(entry, begin, place, prefix)

    def _request(self, entry: Entry, begin: float, place: str, prefix: int) -> Request:
        if entry.input_length is None or entry.hash_ids is None:
            raise ReplayError(
                f"{place} lacks 'in' or 'hash_ids'; an entry is a request with both, or a "
                "sub-agent with 'requests'"
            )
        names = (f"hash_ids in {place}", "in")
        self._rule.check(len(entry.hash_ids), entry.input_length, names)
        ids = [prefix | local for local in entry.hash_ids] if prefix else entry.hash_ids
        return Request(entry.input_length, ids, entry.output_length, begin * 1000)
