"""Page groups below the host: which blob holds which pages, and which of them all ranks have.

A group is a fixed number of consecutive pages of a chain, aligned at multiples of it. Its name is a
keyed hash of everything that its bytes depend on: the model, the shape of a payload, the rank, the
namespace, and all tokens from the chain's start to the group's end. So a name that is found is the
right prefix, and nothing else has to be looked up.

    pages   0 .. g-1 | g .. 2g-1 | 2g .. 3g-1 | rest: not kept
    name    h0       | h1        | h2              h(i) = H(h(i-1), tokens of group i)

Each rank keeps the rows that it owns. A group counts only where every rank has it intact, written
under the same owners: ranks compare before pages are drawn and again after bytes were read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from alloc import IntArray, PageIds, PageLayout
from radix import DroppedRun, RadixKey
from tiers.agreement import Agreement, alone
from tiers.blobs import BlobStore
from tiers.metadata import OwnerMetadata

_NAME_BYTES = 24
_MISSING = -1


class HostRows(Protocol):
    """One rank's bytes of host pages; ``HostKVPool`` is it."""

    def describe(self) -> str:
        """Return what the bytes of a page depend on."""

    def read(self, pages: PageIds) -> bytes:
        """Return this rank's bytes of some pages."""

    def write(self, pages: PageIds, payload: bytes, skip_pages: int = 0) -> bool:
        """Write this rank's bytes, if they are as many as needed; see ``HostKVPool.write``."""


class NoRows:
    """The rows of a replay: there are none."""

    __slots__ = ()

    def describe(self) -> str:
        """Return a name for payloads without bytes."""
        return "none"

    def read(self, pages: PageIds) -> bytes:
        """Return no bytes."""
        return b""

    def write(self, pages: PageIds, payload: bytes, skip_pages: int = 0) -> bool:
        """Take a payload without bytes."""
        return not payload


@dataclass(frozen=True, slots=True)
class GroupOffer:
    """Groups that every rank has under the same owners.

    Attributes:
        start: position-page of the first page offered.
        skip_pages: owned pages of the first group before it.
        names: of the groups, in order.
        owners: of the pages from ``start`` to the last group's end.
    """

    start: int
    skip_pages: int
    names: tuple[str, ...]
    owners: OwnerMetadata


class GroupTier:
    """Keeps and finds page groups in a blob store.

    Args:
        blobs: where they go; a rank's own.
        rows: this rank's bytes of host pages.
        layout: of the host pages.
        model_id: names the model and anything else that its KV depends on.
        rank: this rank; 0 unsharded.
        group_pages: pages of a group.
        agree: how ranks agree on what is there.
        secret: up to 64 bytes that key the names, so that nobody can guess the name of a prompt.

    Raises:
        ValueError: group_pages is less than 1, or the secret is too long.
    """

    def __init__(
        self,
        blobs: BlobStore,
        rows: HostRows,
        layout: PageLayout,
        *,
        model_id: str,
        rank: int = 0,
        group_pages: int = 16,
        agree: Agreement = alone,
        secret: bytes = b"",
    ) -> None:
        if group_pages < 1:
            raise ValueError(f"group_pages={group_pages} must be at least 1")
        self.blobs = blobs
        self.group_pages = group_pages
        self._rows = rows
        self._layout = layout
        self._rank = rank
        self._agree = agree
        self._secret = secret
        signature = (model_id, rank, layout.num_classes, layout.page_size, group_pages)
        self._seed = _hash(secret, repr((*signature, rows.describe())).encode())

    # Names

    def names(self, key: RadixKey) -> Iterator[str]:
        """Yield the names of a key's whole groups; none for a namespace that has no stable name.

        The same in every process: namespaces are None, bool, int, float, str, bytes and tuples of
        these. Cost: O(tokens) to hash up to the last name taken.
        """
        try:
            name = _hash(self._secret, self._seed + _stable(key.namespace))
        except TypeError:
            return
        width = self._group_bytes(key)
        for start in range(0, len(key.data) // width * width, width):
            name = _hash(self._secret, name + key.data[start : start + width])
            yield name.hex()

    def _group_bytes(self, key: RadixKey) -> int:
        return self.group_pages * self._layout.page_size * key.unit_bytes

    # Keep

    def keep(self, run: DroppedRun) -> int:
        """Write the whole groups that a run touches, before its host pages are reused.

        Groups reach above the run where it starts inside one; the tail past the last whole group
        is not kept. A blob that was written under other owners is replaced: other ranks may have
        only the new one.

        Returns:
            Blobs written. A blob that can't be written is left out; ranks may differ in that.
        """
        size = self.group_pages
        written = 0
        first = run.start // size
        if first == len(run.pages) // size:
            return 0
        names = list(enumerate(self.names(run.key)))
        # The deepest first: whoever gives up the oldest blob then shortens chains from their end.
        for i, name in reversed(names[first:]):
            pages = run.pages[i * size : (i + 1) * size]
            owners = OwnerMetadata.of(
                self._layout.class_of(pages), self._rank, self._layout.page_size
            )
            header = _encode(name, owners)
            if self.blobs.header(name) == header:
                self.blobs.use(name)
            else:
                written += self.blobs.put(name, header, self._rows.read(pages))
        return written

    # Find

    def offer(self, key: RadixKey, start: int) -> GroupOffer | None:
        """Return the groups that follow page ``start`` without a gap on every rank; or None.

        Collective where the agreement is: all ranks call it with the same key and start.
        """
        size = self.group_pages
        first = start // size
        num_groups = len(key.data) // self._group_bytes(key) - first
        if num_groups < 1:
            return None
        found: list[OwnerMetadata] = []
        names: list[str] = []
        for name in islice(self.names(key), first, None):
            owners = self._owners_in(name)
            if owners is None:
                break
            found.append(owners)
            names.append(name)
        count = self._common(found, num_groups)
        if not count:
            return None
        page_size = self._layout.page_size
        together = OwnerMetadata.of(
            np.concatenate([owners.classes() for owners in found[:count]]), self._rank, page_size
        )
        head, rest = together.split((start - first * size) * page_size)
        return GroupOffer(start, head.num_owned_pages, tuple(names[:count]), rest)

    def load(self, offer: GroupOffer, pages: PageIds) -> int:
        """Read an offer's bytes into host pages that were drawn with its owners.

        Collective as ``offer`` is.

        Args:
            offer: from ``offer``.
            pages: int64[n] pages for the first n of the offer's owners.

        Returns:
            Leading pages whose bytes are there on every rank.
        """
        size, done = self.group_pages, 0
        skip = offer.skip_pages
        first = offer.start // size * size
        for i, name in enumerate(offer.names):
            group_start = max(first + i * size, offer.start)
            group = pages[group_start - offer.start : first + (i + 1) * size - offer.start]
            whole = len(group) == first + (i + 1) * size - group_start
            body = self.blobs.body(name) if whole else None
            if body is None:
                break
            if not self._rows.write(group, body, skip):
                break
            done += len(group)
            skip = 0
        for name in reversed(offer.names):
            self.blobs.use(name)
        return int(self._agree(np.array([done], dtype=np.int64))[0])

    # Private

    def _owners_in(self, name: str) -> OwnerMetadata | None:
        """Return the owners that a blob was written under; None without an intact one."""
        if name not in self.blobs:
            return None
        header = self.blobs.header(name)
        return None if header is None else _decode(name, header, self._layout, self.group_pages)

    def _common(self, found: Sequence[OwnerMetadata], num_names: int) -> int:
        """Return how many leading groups every rank found, with equal owners."""
        digests = np.full(num_names, _MISSING, dtype=np.int64)
        digests[: len(found)] = [_owner_digest(owners) for owners in found]
        lowest = self._agree(np.concatenate([digests, -digests]))
        same = (lowest[:num_names] == -lowest[num_names:]) & (lowest[:num_names] != _MISSING)
        return num_names if same.all() else int(same.argmin())


def _owner_digest(owners: OwnerMetadata) -> int:
    digest = hashlib.blake2b(owners.page_owners.tobytes(), digest_size=7)
    return int.from_bytes(digest.digest(), "little")


def _hash(secret: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_NAME_BYTES, key=secret).digest()


def _stable(value: Hashable) -> bytes:
    """Return bytes that stand for a value in every process. Raises TypeError for others."""
    if isinstance(value, tuple):
        parts = [_stable(part) for part in value]
        return b"(" + b"".join(len(part).to_bytes(8, "little") + part for part in parts) + b")"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return f"{type(value).__name__}:{value!r}".encode("utf-8", "surrogatepass")
    raise TypeError(f"{type(value).__name__} has no stable bytes")


def _encode(name: str, owners: OwnerMetadata) -> bytes:
    positions: IntArray = owners.owned_positions
    return json.dumps(
        {
            "name": name,
            "page_size": owners.page_size,
            "page_owners": owners.page_owners.tolist(),
            "owned_pages": (positions[:: owners.page_size] // owners.page_size).tolist(),
        },
        separators=(",", ":"),
    ).encode()


def _decode(name: str, header: bytes, layout: PageLayout, size: int) -> OwnerMetadata | None:
    """Return the owners of a header; None where it is not one of this name and layout."""
    try:
        fields = json.loads(header)
        owned = np.array(fields["owned_pages"], dtype=np.int64)
        owners = OwnerMetadata(
            (owned[:, None] * layout.page_size + np.arange(layout.page_size)).reshape(-1),
            np.array(fields["page_owners"], dtype=np.int8),
            layout.page_size,
        )
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        return None
    fits = fields["page_size"] == layout.page_size and len(owners.page_owners) == size
    fits = fits and fields["name"] == name and int(owners.page_owners.max()) < layout.num_classes
    return owners if fits else None
