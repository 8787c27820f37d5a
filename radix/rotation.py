"""Rotation bases of nodes: which inserts a chain accepts, and what a new node is stamped with.

Position-page P of a run with base b lies on rank ``(b + P) % N``. Two policies:

- ``chain``: one base along every root path; an insert under another base is declined.
- ``seam``: a tail that branches off below a cached prefix may take a fresh base; a node's base then
  says where its own pages lie, and nothing declines.
"""

from __future__ import annotations

from typing import Protocol

from alloc import PageIds, PageLayout
from radix.walk import InsertPlan


class RotationPolicy(Protocol):
    """What tree and scheduler ask about bases."""

    @property
    def name(self) -> str:
        """The policy's name, as the user chose it."""

    def declines(self, chain_base: int | None, base: int | None) -> bool:
        """Say whether a node of base ``chain_base`` refuses what was placed with ``base``."""


class ChainRotation:
    """One base along every root path, then optionally only None."""

    name = "chain"

    def declines(self, chain_base: int | None, base: int | None) -> bool:
        """Refuse another base; None is never refused."""
        return base is not None and chain_base != base


class SeamRotation:
    """Runs of any bases along a path."""

    name = "seam"

    def declines(self, chain_base: int | None, base: int | None) -> bool:
        """Never refuse."""
        return False


def rotation_policy(name: str) -> RotationPolicy:
    """Return a policy by name. Raises ValueError that lists the names."""
    policies: dict[str, RotationPolicy] = {"chain": ChainRotation(), "seam": SeamRotation()}
    if name not in policies:
        raise ValueError(f"rotation={name!r} is unknown; choose one of {', '.join(policies)}")
    return policies[name]


def check_base(layout: PageLayout, pages: PageIds, start: int, base: int) -> None:
    """Raise ValueError unless ``pages`` at position-page ``start`` lie where ``base`` puts them."""
    if not 0 <= base < layout.num_classes:
        raise ValueError(f"rotation_base={base} must be in [0, {layout.num_classes})")
    wrong = layout.class_of(pages) != layout.cyclic_classes(base, start, len(pages))
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(
            f"page {int(pages[i])} at position-page {start + i} lies on rank "
            f"{layout.class_of(int(pages[i]))}, but rotation_base={base} puts it on rank "
            f"{layout.class_at(base, start + i)}"
        )


def derived_base(layout: PageLayout, pages: PageIds, start: int) -> int | None:
    """Return the base that cyclic pages at position-page ``start`` have; None if they are not."""
    if not len(pages) or not layout.is_cyclic(pages):
        return None
    return layout.base_of(int(pages[0]), start)


def stamp(
    plan: InsertPlan, layout: PageLayout, policy: RotationPolicy, *, derive: bool = True
) -> None:
    """Check an insert's new pages against its base, or derive the base from them.

    A derived base that the chain would refuse is left out: the node is stamped None. In a pool of
    one class a base is an opaque label: nothing is checked.

    Args:
        plan: the insert, not declined.
        layout: says each page's class.
        policy: says what a chain refuses.
        derive: False leaves an insert without a base as it is: its pages lie on any class.

    Raises:
        ValueError: a new page does not lie where the given base puts it.
    """
    start = plan.walk.num_pages
    if plan.rotation_base is not None:
        if layout.num_classes > 1:
            check_base(layout, plan.new_pages(), start, plan.rotation_base)
    elif derive:
        base = derived_base(layout, plan.new_pages(), start)
        deepest = plan.walk.deepest()
        if deepest is None or not policy.declines(deepest.rotation_base, base):
            plan.rotation_base = base
