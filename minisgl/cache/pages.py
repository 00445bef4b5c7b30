"""PagePool: the free list of KV pages."""

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


class PagePool:
    """Hands out page numbers and takes them back; it knows nothing of what they hold.

    Every page belongs to exactly one of: this free list, the prefix cache, one running request.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # the next page to hand out is the last free one
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self.free = num_pages

    def take(self, count: int) -> Int32:
        """Remove `count` pages from the free list; the caller has checked `free`."""
        assert 0 <= count <= self.free, f"{count} pages asked of {self.free} free"
        self.free -= count
        pages = self._stack[self.free : self.free + count][::-1].copy()  # neighbours in order, while there are some
        self._is_free[pages] = False
        return pages

    def give(self, pages: Int32) -> None:
        """Put pages back on the free list."""
        assert not self._is_free[pages].any(), f"freed twice: {pages[self._is_free[pages]]}"
        self._stack[self.free : self.free + len(pages)] = pages
        self._is_free[pages] = True
        self.free += len(pages)

    def free_pages(self) -> Int32:
        """The pages on the free list, in no order."""
        return self._stack[: self.free].copy()

    def check(self) -> None:
        """Prove that the list and its marks agree and hold no page twice."""
        listed = self.free_pages()
        assert len(np.unique(listed)) == len(listed), "the free list holds a page twice"
        assert np.array_equal(np.sort(listed), np.flatnonzero(self._is_free)), "free list and marks differ"
