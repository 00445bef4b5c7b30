"""RadixCache: finished and running prompts' pages, found again by their tokens.

The idea is RadixAttention (Zheng et al., SGLang, 2023); here edges are runs of whole pages.
"""

import heapq
from collections.abc import Iterable, Iterator

import numpy as np

from minisgl.cache.pages import Int32


class Node:
    """A run of pages and the tokens in them; its prefix is the path from the root.

    `locks` counts the running requests whose path ends here or below. A locked node keeps its end:
    a split leaves the object with the lower part, so a request may hold on to its node.
    """

    __slots__ = ("children", "locks", "pages", "parent", "queued", "tokens", "used")

    def __init__(self, parent: "Node | None", tokens: Int32, pages: Int32, locks: int, used: int) -> None:
        self.parent = parent
        self.tokens = tokens  # [len(pages) * page_size]
        self.pages = pages
        self.children: dict[bytes, Node] = {}  # by the tokens of a child's first page
        self.locks = locks
        self.used = used  # logical time of the last use
        self.queued = False  # has an entry in the eviction heap


class RadixCache:
    """Owns the pages in its tree. Lengths are in pages except where tokens are named."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        empty = np.empty(0, dtype=np.int32)
        self.root = Node(None, empty, empty, locks=1, used=0)
        self.cached = 0  # pages in the tree
        self.evictable = 0  # of these, in unlocked nodes
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap of (used, serial, leaf); entries may be out of date
        self._serial = 0

    def match_length(self, tokens: Int32) -> int:
        """How many leading tokens the tree holds, in whole pages; changes nothing."""
        node, inside, pages = self._walk(self.root, tokens)
        del node, inside
        return pages * self.page_size

    def match(self, tokens: Int32) -> tuple[Node, Int32]:
        """The deepest node of the longest cached prefix, in whole pages, and the prefix's pages.

        The pages stay the tree's, and may be evicted unless the caller locks the node.
        """
        node, inside, count = self._walk(self.root, tokens)
        if 0 < inside < len(node.pages):
            node = self._split(node, inside)
        self._touch(node)
        runs = [n.pages for n in self._path(node)]
        pages = np.concatenate(runs[::-1]) if runs else np.empty(0, dtype=np.int32)
        assert len(pages) == count
        return node, pages

    def insert(self, node: Node, tokens: Int32, pages: Int32) -> tuple[Node, int]:
        """Add a run of full pages below `node`; returns the run's deepest node and how many of its pages were there.

        Of `pages`, the leading ones that the tree already had (as its own copies) stay the caller's;
        the rest now belong to the tree.
        """
        assert len(tokens) == len(pages) * self.page_size
        node, inside, known = self._walk(node, tokens)
        if 0 < inside < len(node.pages):
            node = self._split(node, inside)
        if known < len(pages):
            tail = tokens[known * self.page_size :].copy()
            leaf = Node(node, tail, pages[known:].copy(), locks=0, used=self._clock)
            node.children[self._key(tail)] = leaf
            self.cached += len(leaf.pages)
            self.evictable += len(leaf.pages)
            node = leaf
        self._touch(node)
        self._queue(node)
        return node, known

    def lock(self, node: Node) -> None:
        """Keep the pages on the path to `node` from being evicted; locks are counted."""
        for n in self._path(node):
            if n.locks == 0:
                self.evictable -= len(n.pages)
            n.locks += 1

    def unlock(self, node: Node) -> None:
        """Take one lock back."""
        self._touch(node)
        for n in self._path(node):
            n.locks -= 1
            assert n.locks >= 0, "unlocked more often than locked"
            if n.locks == 0:
                self.evictable += len(n.pages)
                self._queue(n)

    def evict(self, count: int) -> Int32:
        """Take up to `count` pages out of the tree, from the ends of the least recently used leaves."""
        taken: list[Int32] = []
        while count > 0 and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.locks or node.children:
                continue  # queued again when that changes
            if used != node.used:
                self._queue(node)
                continue
            pages = node.pages[max(0, len(node.pages) - count) :]
            taken.append(pages)
            count -= len(pages)
            self._trim(node, len(pages))
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int32)

    def check(self, holders: Iterable[Node]) -> Int32:
        """Prove the tree sound, given every lock that is held; returns all its pages."""
        held: dict[Node, int] = {self.root: 1}
        for holder in holders:
            for n in self._path(holder):
                held[n] = held.get(n, 0) + 1
        pages: list[Int32] = []
        evictable = 0
        queued = {node for _, _, node in self._leaves}
        assert len(queued) == len(self._leaves), "a leaf is queued twice"
        for node in self._nodes():
            assert node.locks == held.pop(node, 0), "a node's lock count differs from its holders"
            assert node.queued == (node in queued)
            assert len(node.tokens) == len(node.pages) * self.page_size
            assert (len(node.pages) > 0) == (node is not self.root)
            for key, child in node.children.items():
                assert child.parent is node and key == self._key(child.tokens)
            if node.locks == 0:
                evictable += len(node.pages)
                assert node.children or node.queued, "an unlocked leaf is not queued for eviction"
            pages.append(node.pages)
        assert not held, "a lock is held on a node outside the tree"
        every = np.concatenate(pages)
        assert len(np.unique(every)) == len(every), "the tree holds a page twice"
        assert self.cached == len(every), "the count of cached pages has drifted"
        assert self.evictable == evictable, "the count of evictable pages has drifted"
        return every

    def _walk(self, node: Node, tokens: Int32) -> tuple[Node, int, int]:
        """Follow `tokens` down from the end of `node`: the node reached, pages matched in it, and in all."""
        size = self.page_size
        end = len(tokens) // size * size
        at, inside = 0, len(node.pages)
        while at < end:
            child = node.children.get(self._key(tokens[at:]))
            if child is None:
                break
            run = min(len(child.tokens), end - at)
            differs = child.tokens[:run] != tokens[at : at + run]
            same = int(differs.argmax()) // size if differs.any() else run // size
            node, inside = child, same
            at += same * size
            if same < len(child.pages):
                break
        return node, inside, at // size

    def _split(self, node: Node, count: int) -> Node:
        """Put a new node with the first `count` pages above `node`, which keeps the rest; returns the new one."""
        parent, cut = node.parent, count * self.page_size
        assert parent is not None
        upper = Node(parent, node.tokens[:cut], node.pages[:count], node.locks, node.used)
        parent.children[self._key(upper.tokens)] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[cut:], node.pages[count:]
        upper.children[self._key(node.tokens)] = node
        return upper

    def _trim(self, leaf: Node, count: int) -> None:
        """Drop the last `count` pages of an unlocked leaf."""
        self.cached -= count
        self.evictable -= count
        parent = leaf.parent
        assert parent is not None
        if count == len(leaf.pages):
            del parent.children[self._key(leaf.tokens)]
            self._queue(parent)
        else:
            leaf.pages = leaf.pages[:-count]
            leaf.tokens = leaf.tokens[: -count * self.page_size]
            self._queue(leaf)

    def _queue(self, node: Node) -> None:
        """Offer a node for eviction, if it is an unlocked leaf and not on offer yet."""
        if not (node.locks or node.children or node.queued):
            self._serial += 1
            node.queued = True
            heapq.heappush(self._leaves, (node.used, self._serial, node))

    def _touch(self, node: Node) -> None:
        self._clock += 1
        for n in self._path(node):
            n.used = self._clock

    def _path(self, node: Node) -> Iterator[Node]:
        """The nodes from `node` up, the root left out."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            yield at
            at = at.parent

    def _nodes(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _key(self, tokens: Int32) -> bytes:
        return tokens[: self.page_size].tobytes()


class NoCache:
    """Stands in for a RadixCache where nothing is to be kept (`--cache none`)."""

    cached = 0
    evictable = 0

    def __init__(self) -> None:
        empty = np.empty(0, dtype=np.int32)
        self.root = Node(None, empty, empty, locks=1, used=0)

    def match_length(self, tokens: Int32) -> int:
        return 0

    def match(self, tokens: Int32) -> tuple[Node, Int32]:
        return self.root, self.root.pages

    def insert(self, node: Node, tokens: Int32, pages: Int32) -> tuple[Node, int]:
        return node, len(pages)

    def lock(self, node: Node) -> None:
        pass

    def unlock(self, node: Node) -> None:
        pass

    def evict(self, count: int) -> Int32:
        return self.root.pages

    def check(self, holders: Iterable[Node]) -> Int32:
        return self.root.pages
