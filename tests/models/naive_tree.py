"""An obvious model of the cached pages: one dictionary entry a page, no nodes, no order kept.

An entry's key is the page's whole path ``(namespace, page 0, ..., page k)``, so a prefix test is
tuple slicing. Every page carries the fields of the run it came in with; ``run`` plays the part of
the NodeId. Victims are found by sorting all candidates anew for every single page.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Path: TypeAlias = tuple[Hashable, ...]


@dataclass
class Page:
    """What is known of one cached page."""

    page: int
    run: int
    last_access: int
    hits: int
    created: int
    priority: int
    base: int | None


NAIVE_POLICIES: dict[str, Callable[[Page], Any]] = {
    "lru": lambda p: p.last_access,
    "lfu": lambda p: (p.hits, p.last_access),
    "fifo": lambda p: p.created,
    "mru": lambda p: -p.last_access,
    "filo": lambda p: -p.created,
    "priority": lambda p: (p.priority, p.last_access),
    "slru": lambda p: (1 if p.hits >= 2 else 0, p.last_access),
}


class NaiveTree:
    """The tree's behaviour, page by page."""

    def __init__(self, policy: str = "lru") -> None:
        self.policy = NAIVE_POLICIES[policy]
        self.cached: dict[Path, Page] = {}
        self.locks: list[Path] = []
        self.tick = 0
        self.next_run = 1

    @staticmethod
    def path(units: Sequence[Hashable], page_size: int, namespace: Hashable = None) -> Path:
        """Return the path of the whole pages of a key."""
        whole = len(units) // page_size
        return (
            namespace,
            *(tuple(units[i * page_size : (i + 1) * page_size]) for i in range(whole)),
        )

    def matched(self, path: Path) -> int:
        """Return how many leading pages of a path are cached."""
        count = 0
        while count + 2 <= len(path) and path[: count + 2] in self.cached:
            count += 1
        return count

    def pages(self, path: Path) -> list[int]:
        """Return the page ids of the cached part of a path."""
        return [self.cached[path[: i + 2]].page for i in range(self.matched(path))]

    def base(self, path: Path) -> int | None:
        """Return the base of the deepest cached page of a path."""
        count = self.matched(path)
        return self.cached[path[: count + 1]].base if count else None

    def match(self, path: Path, hits: int = 1) -> list[int]:
        self._use(path[: self.matched(path) + 1], hits, 0)
        return self.pages(path)

    def declines(self, path: Path, base: int | None) -> bool:
        return bool(base is not None and self.matched(path) and self.base(path) != base)

    def insert(
        self, path: Path, pages: Sequence[int], priority: int = 0, base: int | None = None
    ) -> tuple[int, list[int]]:
        """Add a path; returns (pages that were there, the caller's pages that are superfluous)."""
        count = self.matched(path)
        known = self.pages(path)
        self._use(path[: count + 1], 0, priority)
        if count < len(path) - 1:
            run = self._new_run()
            for i in range(count, len(path) - 1):
                self.cached[path[: i + 2]] = Page(
                    pages[i], run, self.tick, 0, self.tick, priority, base
                )
        return count, [mine for mine, ours in zip(pages, known, strict=False) if mine != ours]

    def lock(self, path: Path) -> None:
        """Lock a path that is cached in full."""
        assert self.matched(path) == len(path) - 1
        self.locks.append(path)

    def unlock(self, path: Path) -> None:
        self.locks.remove(path)

    def locked(self, path: Path) -> bool:
        return any(lock[: len(path)] == path for lock in self.locks)

    def victims(self, count: int) -> list[int]:
        """Drop up to ``count`` pages, each the least valuable of all unlocked leaves."""
        gone: list[int] = []
        while len(gone) < count:
            parents = {path[:-1] for path in self.cached}
            candidates = [
                path for path in self.cached if path not in parents and not self.locked(path)
            ]
            if not candidates:
                break
            worst = sorted(candidates, key=self._order)[0]
            gone.append(self.cached.pop(worst).page)
        return gone

    def sizes(self) -> tuple[int, int]:
        """Return (evictable, protected) pages."""
        protected = sum(1 for path in self.cached if self.locked(path))
        return len(self.cached) - protected, protected

    def reset(self) -> list[int]:
        gone = [page.page for page in self.cached.values()]
        self.cached.clear()
        self.locks.clear()
        self._new_run()
        return gone

    def _order(self, path: Path) -> tuple[Any, int]:
        page = self.cached[path]
        return self.policy(page), page.run

    def _new_run(self) -> int:
        run = self.next_run
        self.next_run += 1
        return run

    def _use(self, path: Path, hits: int, priority: int) -> None:
        """Stamp a cached path; a run that goes on past its end is cut in two there."""
        self.tick += 1
        if len(path) > 1:
            run = self.cached[path].run
            if any(
                len(p) == len(path) + 1 and p[:-1] == path and self.cached[p].run == run
                for p in self.cached
            ):
                upper = self._new_run()
                for i in range(2, len(path) + 1):
                    if self.cached[path[:i]].run == run:
                        self.cached[path[:i]].run = upper
        for i in range(2, len(path) + 1):
            page = self.cached[path[:i]]
            page.last_access = self.tick
            page.hits += hits
            page.priority = max(page.priority, priority)
