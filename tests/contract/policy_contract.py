"""What every eviction policy does: its victims are those of a full re-sort at every step.

A subclass names its policy. The reference is ``NaiveTree``, which sorts all unlocked leaves anew
for every single page, and has the policies' keys in its own words.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from tests.builders import World, make_world
from tests.models.naive_tree import NaiveTree


class PolicyContract:
    """Mix into a test class with ``policy`` set."""

    policy: ClassVar[str]

    def make(self, page_size: int = 1, num_pages: int = 64) -> tuple[World, NaiveTree]:
        return make_world(page_size, num_pages, self.policy), NaiveTree(self.policy)

    def insert(self, world: World, model: NaiveTree, letters: list[int], priority: int = 0) -> None:
        tokens = [t for t in letters for _ in range(world.page_size)]
        pages = world.draw(len(letters))
        world.insert(tokens, pages, priority=priority)
        model.insert(model.path(tokens, world.page_size), pages.tolist(), priority)

    def match(self, world: World, model: NaiveTree, letters: list[int]) -> None:
        tokens = [t for t in letters for _ in range(world.page_size)]
        expected = model.match(model.path(tokens, world.page_size))
        assert expected == world.match(tokens).pages.tolist()

    def evict_page(self, world: World) -> list[int]:
        before = set(world.cached_pages())
        world.evict(world.page_size)
        return sorted(before - set(world.cached_pages()))

    def assert_same_victims(self, world: World, model: NaiveTree) -> None:
        """Drain the tree page by page; every page is the reference's next victim."""
        while True:
            expected = model.victims(1)
            assert expected == self.evict_page(world)
            world.check()
            if not expected:
                return

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("page_size", [1, 4])
    def test_victims_are_those_of_a_full_resort(self, page_size: int, seed: int) -> None:
        """Random matches, inserts, locks and evictions; then all of the rest."""
        rng = np.random.default_rng(seed)
        world, model = self.make(page_size)
        locks = []
        for _ in range(120):
            letters = rng.integers(0, 2, rng.integers(1, 7)).tolist()
            tokens = [t for t in letters for _ in range(page_size)]
            path = model.path(tokens, page_size)
            match rng.integers(0, 6):
                case 0 | 1:
                    short = len(letters) - world.free_pages()
                    for _ in range(max(0, short)):
                        assert model.victims(1) == self.evict_page(world)
                    if len(letters) <= world.free_pages():
                        self.insert(world, model, letters, int(rng.integers(0, 3)))
                case 2 | 3:
                    self.match(world, model, letters)
                case 4 if len(locks) < 3:
                    found = model.match(path)
                    receipt = world.cache.inc_lock_ref(world.match(tokens).last_device_node)
                    locks.append((receipt, path[: len(found) + 1]))
                    model.lock(locks[-1][1])
                case 4:
                    receipt, locked = locks.pop(int(rng.integers(0, len(locks))))
                    world.cache.dec_lock_ref(receipt)
                    model.unlock(locked)
                case 5:
                    for _ in range(int(rng.integers(0, 4))):
                        assert model.victims(1) == self.evict_page(world)
        for receipt, locked in locks:
            world.cache.dec_lock_ref(receipt)
            model.unlock(locked)
        self.assert_same_victims(world, model)

    def test_one_big_eviction_is_many_small_ones(self) -> None:
        """The order does not depend on how much is asked for at a time."""
        big, _ = self.make()
        small, _ = self.make()
        for world in (big, small):
            for letters in ([0, 0, 1], [0, 1], [1, 1, 1, 1], [1, 0]):
                world.insert(letters)
            world.match([0, 0])
        big.evict(6)
        for _ in range(6):
            small.evict(1)
        assert small.cached_pages() == big.cached_pages()

    def test_ties_go_by_creation(self) -> None:
        """Entries that the policy can't tell apart go oldest node first."""
        world, model = self.make()
        self.insert(world, model, [0, 0, 0])
        # The split's upper part and its tail share every field that a policy reads but one.
        for letters in ([1], [2], [3]):
            self.insert(world, model, letters)
        for node in world.core.nodes():
            world.core._frontier.discard(node)
            node.last_access = node.created = node.hits = node.priority = 1
            world.core._frontier.add(node)
        for page in model.cached.values():
            page.last_access = page.created = page.hits = page.priority = 1
        ids = world.core.frontier_ids()
        assert sorted(ids) == ids
        self.assert_same_victims(world, model)

    def test_a_split_keeps_the_order(self) -> None:
        """Both halves carry the fields of the whole."""
        world, model = self.make()
        self.insert(world, model, [0, 0, 0, 0], priority=1)
        self.match(world, model, [0, 0, 0, 0])
        self.insert(world, model, [1, 1])
        self.match(world, model, [0, 0])
        self.insert(world, model, [0, 0, 1], priority=2)
        self.assert_same_victims(world, model)
