"""Components by kind of layer."""

from alloc import PageLayout
from radix.components.base import ComponentType, TreeComponent
from radix.components.full import FullComponent

__all__ = ["ComponentType", "TreeComponent", "FullComponent", "make_component"]


def make_component(kinds: tuple[ComponentType, ...], layout: PageLayout) -> TreeComponent:
    """Return the component of a cache.

    Raises:
        ValueError: the kinds are not exactly ``(ComponentType.FULL,)``, the only one there is.
    """
    if tuple(kinds) != (ComponentType.FULL,):
        raise ValueError(f"tree_components={kinds!r} must be (ComponentType.FULL,)")
    return FullComponent(layout)
