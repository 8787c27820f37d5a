"""The radix tree: one walk, splits, locks and eviction order. Knows no allocator and no device.

The core decides and returns data; ``unified_cache`` applies it. One walk serves match and insert:

    walk    key -> Walk(last, parts, partial)  read-only
    match   walk + split + touch -> MatchHandle and the path's payloads
    insert  walk -> InsertPlan                 read-only; may decline
            commit_insert(plan)                can't fail
    evict   pages wanted -> page ids to free   trimmed page by page from the tail

Time is a tick per operation. A use stamps every node of its path; a use that ends inside an edge
splits the edge there, so that the rest keeps its stamp. A parent that becomes a leaf keeps its own.
No recursion anywhere: a path may be 100,000 nodes deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import ClassVar, NoReturn

import numpy as np

from alloc import PageIds, PageLayout
from alloc.spaces import as_count
from radix.aiming import WINDOW, aim, attainable
from radix.components import TreeComponent
from radix.detached import DroppedRun, dropped_run
from radix.eviction import Frontier, policy_named
from radix.key import PLAIN, RadixKey, unit_bytes_of
from radix.locks import LockTable
from radix.node import NO_CHILDREN, PAGE_BYTES, TREE_SHIFT, NodeId, TreeNode
from radix.params import LockReceipt, MatchHandle
from radix.rotation import ChainRotation, RotationPolicy
from radix.walk import InsertPlan, Walk, handle_holds, starts_with_parts, walk_key, walk_on

_tree_numbers = count(1)


class UnifiedTreeCore:
    """Nodes, walks, splits, locks and the eviction order of one cache.

    Args:
        page_size: units of a page.
        component: what nodes hold.
        eviction_policy: name of the policy.
        rotation: which bases a chain accepts; default ``chain``.

    Attributes:
        supports_rotation_base: a sharded cache refuses a core class where this is False.
    """

    supports_rotation_base: ClassVar[bool] = True

    def __init__(
        self,
        page_size: int,
        component: TreeComponent,
        eviction_policy: str = "lru",
        rotation: RotationPolicy | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size={page_size} must be at least 1")
        self.page_size = page_size
        self.component = component
        self.eviction_policy = eviction_policy
        self.rotation = rotation or ChainRotation()
        self._locks = LockTable(component)
        self._frontier = Frontier(policy_named(eviction_policy))
        self._tree_number = next(_tree_numbers)
        self._next_node = 0
        self._tick = 0
        self._committing = False
        self._nodes: dict[int, TreeNode] = {}
        self._root = self._new_root()

    # Handles

    def root_node_handle(self) -> NodeId:
        """Return the root's id."""
        return self._root.id

    def node_by_id(self, node_id: NodeId) -> TreeNode:
        """Return the node of a handle.

        Raises:
            KeyError: the node is gone (evicted, or from before a reset), or belongs to another
                tree.
        """
        node = self._nodes.get(node_id) if isinstance(node_id, int) else None
        if node is None:
            self._refuse_handle(node_id)
        return node

    def path_pages(self, node_id: NodeId) -> PageIds:
        """Return the page ids from the root to the end of a node: int64[end]. Cost: O(path)."""
        parts: list[bytes] = []
        node: TreeNode | None = self.node_by_id(node_id)
        while node is not None:
            parts.append(node.live_pages())
            node = node.parent
        return np.frombuffer(b"".join(reversed(parts)), dtype=np.int64)

    def num_nodes(self) -> int:
        """Return the number of nodes, the root left out."""
        return len(self._nodes) - 1

    def nodes(self) -> Iterator[TreeNode]:
        """Yield every node but the root, parents first, children in order of attachment."""
        stack = [self._root]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(reversed(list(node.children.values())))

    # Walk

    def walk(self, key: RadixKey, handle: MatchHandle | None = None) -> Walk:
        """Follow a key as far as it goes, from a match's end where its handle still holds."""
        if handle is not None:
            node = self._nodes.get(handle.node_id)
            if node is not None and handle_holds(node, handle, key, self.page_size):
                return walk_on(node, handle, key, self.page_size)
        return walk_key(self._root, key, self.page_size)

    # Match

    def peek(self, key: RadixKey) -> MatchHandle:
        """Return what ``match`` would find, and change nothing.

        The handle's node is the deepest that the key reaches; inside an edge it ends before that
        node does, and an insert from it walks again.
        """
        walk = self.walk(key)
        deepest = walk.deepest() or self._root
        return MatchHandle(deepest.id, walk.num_pages, key, walk.parts)

    def match(
        self, key: RadixKey, *, count_hit: bool = True, lock: bool = False
    ) -> tuple[MatchHandle, LockReceipt | None]:
        """Find the longest cached prefix in whole pages, and use it.

        Splits the edge in which the match ends, stamps the path, and counts a hit on each of its
        nodes. With ``lock`` the path is locked in the same operation.

        Returns:
            The handle, and the receipt when locked.
        """
        self._check_usable()
        walk = walk_key(self._root, key, self.page_size)
        self._committing = True
        last = walk.last if walk.partial is None else self._settle(walk)
        left_frontier = self._leave_frontier(last)
        self._touch(last, 1 if count_hit else 0)
        receipt = self._locks.lock(last) if lock else None
        if left_frontier and not last.pins:
            self._frontier.add(last)
        self._committing = False
        return MatchHandle(last.id, walk.num_pages, key, walk.parts), receipt

    # Insert

    def plan_insert(
        self,
        key: RadixKey,
        pages: bytes,
        *,
        rotation_base: int | None = None,
        priority: int = 0,
        handle: MatchHandle | None = None,
    ) -> InsertPlan:
        """Say what an insert would do; changes nothing.

        Args:
            key: the tokens; only whole pages count.
            pages: page ids of at least those whole pages, int64 as bytes.
            rotation_base: base of the caller's pages; the rotation policy may decline it for the
                deepest node that the key reaches, the root excepted.
            priority: see ``InsertParams``.
            handle: see ``InsertParams``.

        Raises:
            ValueError: fewer page ids than whole pages, or a priority or base that is no integer.
        """
        self._check_usable()
        priority = as_count(priority, "priority")
        if rotation_base is not None:
            rotation_base = as_count(rotation_base, "rotation_base")
        num_pages = len(key) // self.page_size
        if len(pages) < num_pages * PAGE_BYTES:
            raise ValueError(
                f"the value has {len(pages) // PAGE_BYTES} pages for the {num_pages} whole pages "
                f"of the key; pass a value as long as the key"
            )
        pages = pages[: num_pages * PAGE_BYTES]
        walk = self.walk(key, handle)
        deepest = walk.deepest()
        declined = deepest is not None and self.rotation.declines(
            deepest.rotation_base, rotation_base
        )
        duplicates = _NO_PAGES
        if not declined and not starts_with_parts(pages, walk.parts):
            known = b"".join(walk.parts)
            given = np.frombuffer(pages, dtype=np.int64, count=walk.num_pages)
            duplicates = given[given != np.frombuffer(known, dtype=np.int64)]
            pages = known + pages[len(known) :]
        return InsertPlan(
            walk, key, num_pages, pages, duplicates, declined, rotation_base, priority
        )

    def commit_insert(self, plan: InsertPlan) -> NodeId:
        """Carry out a plan made just before; returns the node where the key ends."""
        self._check_usable()
        self._committing = True
        walk = plan.walk
        last = self._settle(walk)
        left_frontier = self._leave_frontier(last)
        self._touch(last, 0, plan.priority)
        if plan.num_pages > walk.num_pages:
            last = self._attach(last, plan)
        elif left_frontier:
            self._frontier.add(last)
        self._committing = False
        return last.id

    def _attach(self, parent: TreeNode, plan: InsertPlan) -> TreeNode:
        page = self.page_size * plan.key.unit_bytes
        parent.compact(parent.num_pages * self._page_bytes(parent))
        matched, stop = plan.walk.num_pages, plan.num_pages
        namespace = plan.key.namespace if parent is self._root else parent.namespace
        leaf = TreeNode(
            self._new_id(),
            parent,
            namespace,
            plan.key.data[matched * page : stop * page],
            plan.pages[matched * PAGE_BYTES :],
            stop,
        )
        leaf.last_access = leaf.created = self._tick
        leaf.priority = plan.priority
        leaf.rotation_base = plan.rotation_base
        self._nodes[leaf.id] = leaf
        parent.add_child(leaf, page)
        self.component.adopt(leaf)
        self._frontier.add(leaf)
        return leaf

    # Locks

    def inc_lock_ref(self, node_id: NodeId) -> LockReceipt:
        """Lock a node and all above it against eviction.

        Returns:
            The receipt to unlock with. Locking the root holds nothing and is fine.

        Raises:
            KeyError: a stale or foreign handle; nothing changed.

        Cost: O(nodes that were not locked before), amortised.
        """
        self._check_usable()
        node = self.node_by_id(node_id)
        self._committing = True
        self._leave_frontier(node)
        receipt = self._locks.lock(node)
        self._committing = False
        return receipt

    def dec_lock_ref(self, receipt: LockReceipt) -> None:
        """Release one lock.

        Raises:
            ValueError: the receipt was used already, is from before a reset, or is another
                tree's; nothing changed.
        """
        self._check_usable()
        node = self._locks.node_of(receipt)
        self._committing = True
        self._locks.unlock(receipt, node)
        if not node.pins and not node.children and node.parent is not None:
            self._frontier.add(node)
        self._committing = False

    def check_receipt(self, receipt: LockReceipt) -> TreeNode:
        """Return the node that a receipt locks; raises the ValueError of ``dec_lock_ref``."""
        return self._locks.node_of(receipt)

    # Eviction

    def evict(self, num_pages: int, runs: list[DroppedRun] | None = None) -> PageIds:
        """Drop up to ``num_pages`` unlocked pages in policy order; returns their ids.

        The first leaf loses pages from its tail; a parent becomes a candidate when its last
        child goes. What goes is appended to ``runs`` where given. Cost: O(log leaves) for each
        node that goes, O(pages) to copy ids; O(path) for each run.
        """
        self._check_usable()
        dropped: list[bytes] = []
        self._committing = True
        while num_pages > 0:
            node_id = self._frontier.first()
            if node_id is None:
                break
            node = self._nodes[node_id]
            taken = min(num_pages, node.num_pages)
            if runs is not None:
                runs.append(dropped_run(node, taken, self.page_size))
            dropped.append(self._trim(node, taken))
            num_pages -= taken
        self._committing = False
        return np.frombuffer(b"".join(dropped), dtype=np.int64)

    def evict_classes(
        self,
        deficits: Sequence[int],
        layout: PageLayout,
        window: int = WINDOW,
        runs: list[DroppedRun] | None = None,
    ) -> PageIds:
        """Drop unlocked pages until each class has given its deficit; returns the page ids.

        Prefers, among the first ``window`` leaves in policy order, those that end in a page of a
        short class (``radix.aiming``). A class without evictable pages is given up at once,
        instead of draining the tree for it. ``runs`` is as in ``evict``.

        Cost: O(window) for each leaf that is trimmed.
        """
        self._check_usable()
        wanted = np.array(deficits, dtype=np.int64)
        dropped: list[bytes] = []
        self._committing = True
        while attainable(wanted, self.component.evictable_by_class()):
            leaves = (self._nodes[node_id] for node_id in self._frontier.window(window))
            node, num_pages = aim(layout, leaves, wanted)
            if runs is not None:
                runs.append(dropped_run(node, num_pages, self.page_size))
            dropped.append(self._trim(node, num_pages))
            wanted -= layout.count_classes(np.frombuffer(dropped[-1], dtype=np.int64))
        self._committing = False
        return np.frombuffer(b"".join(dropped), dtype=np.int64)

    def _trim(self, node: TreeNode, num_pages: int) -> bytes:
        """Drop the tail of a candidate, or all of it."""
        gone = num_pages == node.num_pages
        if gone:
            self._frontier.discard(node)
        dropped = self.component.trim(node, num_pages)
        node.num_pages -= num_pages
        node.end -= num_pages
        if gone:
            self._remove(node)
            return dropped
        live = node.num_pages * self._page_bytes(node)
        if 2 * live <= len(node.key):
            node.key = node.key[:live]
        return dropped

    def _remove(self, node: TreeNode) -> None:
        parent = node.parent
        assert parent is not None, "the root is never a candidate"
        parent.remove_child(node, self._page_bytes(node))
        del self._nodes[node.id]
        node.parent = None
        if not parent.children and not parent.pins and parent is not self._root:
            self._frontier.add(parent)

    # Reset

    def reset(self) -> PageIds:
        """Drop every node and receipt; returns the page ids that the nodes held.

        NodeIds go on counting, so handles and receipts from before are stale. Cost: O(nodes).
        """
        self._check_usable()
        pages = b"".join(node.live_pages() for node in self._nodes.values())
        self._committing = True
        # Unlink by hand: a deep chain of references would be freed recursively.
        for node in self._nodes.values():
            node.parent = None
            node.children = NO_CHILDREN
        self._nodes.clear()
        self._locks.clear()
        self._frontier.clear()
        self.component.reset()
        self._root = self._new_root()
        self._committing = False
        return np.frombuffer(pages, dtype=np.int64)

    # Checks

    def clock(self) -> tuple[int, int]:
        """Return the tick of the last operation and the number of nodes ever made."""
        return self._tick, self._next_node

    def frontier_ids(self) -> list[NodeId]:
        """Return the eviction candidates in order. Cost: O(leaves)."""
        return list(self._frontier)

    def receipts(self) -> list[LockReceipt]:
        """Return the receipts that are out, oldest first."""
        return self._locks.receipts()

    def root(self) -> TreeNode:
        """Return the root node."""
        return self._root

    def interrupted(self) -> bool:
        """Say whether a commit was interrupted: the tree is unusable."""
        return self._committing

    # Private

    def _new_root(self) -> TreeNode:
        root = TreeNode(self._new_id(), None, PLAIN, b"", b"", 0)
        self._nodes[root.id] = root
        return root

    def _new_id(self) -> NodeId:
        node_id = NodeId(self._tree_number << TREE_SHIFT | self._next_node)
        self._next_node += 1
        return node_id

    def _page_bytes(self, node: TreeNode) -> int:
        return self.page_size * unit_bytes_of(node.namespace)

    def _settle(self, walk: Walk) -> TreeNode:
        """Split the partial node of a walk, if any; return the node where the match ends."""
        if walk.partial is not None:
            return self._split(walk.partial, walk.partial_pages)
        return walk.last

    def _split(self, lower: TreeNode, num_pages: int) -> TreeNode:
        """Put the first ``num_pages`` of a node into a new one above it; return the new one.

        The lower part keeps the id, and with it receipts, handles and its place in the frontier.
        """
        parent = lower.parent
        assert parent is not None, "the root has no run to split"
        page = self._page_bytes(lower)
        cut, live = num_pages * page, lower.num_pages * page
        upper = TreeNode(
            self._new_id(),
            parent,
            lower.namespace,
            lower.key[:cut],
            lower.pages[: num_pages * PAGE_BYTES],
            lower.start + num_pages,
        )
        self.component.split(upper, lower, num_pages)
        lower.key = lower.key[cut:live]
        lower.num_pages -= num_pages
        upper.pins = 1 if lower.pins else 0
        upper.copy_marks(lower)
        self._nodes[upper.id] = upper
        parent.add_child(upper, page)
        lower.parent = upper
        upper.add_child(lower, page)
        return upper

    def _leave_frontier(self, node: TreeNode) -> bool:
        """Take a node out of the frontier if it is a candidate; say whether it was."""
        if node.children or node.pins or node.parent is None:
            return False
        self._frontier.discard(node)
        return True

    def _touch(self, node: TreeNode, hits: int, priority: int = 0) -> None:
        """Stamp a path from its end up with this operation's tick."""
        self._tick += 1
        tick = self._tick
        used: TreeNode | None = node
        while used is not None:
            used.last_access = tick
            used.hits += hits
            if used.priority < priority:
                used.priority = priority
            used = used.parent

    def _check_usable(self) -> None:
        if self._committing:
            raise RuntimeError(
                "the tree was interrupted inside a commit, or is used by two threads; "
                "its state is unknown: build a new cache"
            )

    def _refuse_handle(self, node_id: NodeId) -> NoReturn:
        if not isinstance(node_id, int) or node_id >> TREE_SHIFT != self._tree_number:
            raise KeyError(f"node {node_id!r} is a handle from another tree, or none")
        raise KeyError(
            f"node {node_id} is stale: it was evicted, or is from before a reset; match again"
        )


_NO_PAGES: PageIds = np.empty(0, dtype=np.int64)
