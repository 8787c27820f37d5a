"""The obvious allocator: lists and sets, one page at a time. It predicts the exact order of pages.

A page belongs to class ``(page - first_page) % num_classes``. ``free[c]`` is class c in draw order;
``staged[c]`` are its releases under need_sort, in order of release.
"""

from copy import deepcopy
from dataclasses import dataclass, field


@dataclass
class NaiveAllocator:
    num_classes: int
    first_page: int
    pages_per_class: int
    page_size: int
    need_sort: bool
    held: set[int] = field(default_factory=set)
    cached: set[int] = field(default_factory=set)
    pending: list[int] | None = None

    def __post_init__(self):
        self.clear()

    def clear(self):
        last = self.first_page + self.num_classes * self.pages_per_class
        self.free = [
            [page for page in range(self.first_page, last) if self.class_of(page) == c]
            for c in range(self.num_classes)
        ]
        self.staged = [[] for _ in range(self.num_classes)]
        self.held, self.cached = set(), set()
        self.pending = None if self.pending is None else []

    def class_of(self, page):
        return (page - self.first_page) % self.num_classes

    def counts(self):
        return [len(f) + len(s) for f, s in zip(self.free, self.staged, strict=True)]

    def draw(self, classes):
        for c in set(classes):
            if classes.count(c) > self.counts()[c]:
                return None
        for c in set(classes):
            if classes.count(c) > len(self.free[c]):
                self.free[c], self.staged[c] = sorted(self.free[c] + self.staged[c]), []
        pages = [self.free[c].pop(0) for c in classes]
        self.held |= set(pages)
        return pages

    def any_classes(self, num_pages):
        """Return the classes of a stock draw over several: the fullest gives each page."""
        fills = [len(free) for free in self.free]
        if num_pages > sum(fills):
            fills = self.counts()
        classes = []
        for _ in range(num_pages):
            classes.append(fills.index(max(fills)))
            fills[classes[-1]] -= 1
        return classes

    def draw_owned(self, classes):
        """Draw without a merge: a short class gives its staged pages in order of release."""
        for c in set(classes):
            if classes.count(c) > self.counts()[c]:
                return None
        pages = [self.free[c].pop(0) if self.free[c] else self.staged[c].pop(0) for c in classes]
        self.held |= set(pages)
        return pages

    def free_pages(self, pages):
        self.move_out(self.held, pages)

    def adopt(self, pages):
        assert set(pages) <= self.held
        self.held -= set(pages)
        self.cached |= set(pages)

    def release_cached(self, pages):
        self.move_out(self.cached, pages)

    def move_out(self, place, pages):
        assert set(pages) <= place
        place -= set(pages)
        if self.pending is not None:
            self.pending += pages
        else:
            self.push(pages)

    def push(self, pages):
        for page in sorted(pages, reverse=not self.need_sort):
            if self.need_sort:
                self.staged[self.class_of(page)].append(page)
            else:
                self.free[self.class_of(page)].insert(0, page)

    def group_end(self):
        pages, self.pending = self.pending, None
        self.push(pages)

    def merge(self):
        for c in range(self.num_classes):
            if self.staged[c]:
                self.free[c], self.staged[c] = sorted(self.free[c] + self.staged[c]), []

    def backup(self):
        return deepcopy((self.free, self.staged))

    def restore(self, state):
        last = self.first_page + self.num_classes * self.pages_per_class
        self.free, self.staged = deepcopy(state)
        away = {page for lists in (*self.free, *self.staged) for page in lists} | self.cached
        self.held = set(range(self.first_page, last)) - away

    def new_page_classes(self, requests):
        """Return bases and the classes of all new pages; a request is (prefix, seq, base)."""
        fills, bases, classes = self.counts(), [], []
        for prefix, seq, base in requests:
            first, last = -(-prefix // self.page_size), -(-seq // self.page_size)
            if base is None:
                base = (fills.index(max(fills)) - first) % self.num_classes
            bases.append(base)
            for position in range(first, last):
                c = (base + position) % self.num_classes
                fills[c] -= 1
                classes.append(c)
        return bases, classes


def naive_extend(requests, pages, page_size):
    """Return the slots of (prefix, seq, last_loc) requests, one token at a time."""
    pages, slots = iter(pages), []
    for prefix, seq, last in requests:
        for position in range(prefix, seq):
            last = next(pages) * page_size if position % page_size == 0 else last + 1
            slots.append(last)
    return slots
