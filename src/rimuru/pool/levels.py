"""One page class at work, and what an owner holds of it: the books that the allocator keeps.

Room: the pool. Rule: plain state with the arithmetic of one level; who may take or give what is the
allocator's business.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

import numpy as np

from .geometry import Kind

FULL: set[int] = set()  # the free pages of every parent that has none; never changed
ROOT = -1  # the root pages' parent


class Holding:
    """What one owner holds of a class, by parent.

    Parents held whole are only listed in `whole`, and nowhere else in the books, until something
    other than `give_all` concerns the owner (`_settle`): bulk work then costs little a parent.
    """

    __slots__ = ("parts", "tail", "whole")

    def __init__(self) -> None:
        self.whole = array("i")
        self.parts: dict[int, set[int]] = {}
        self.tail = ROOT - 1  # the parent taken from last


class Level:
    """One page class at work."""

    __slots__ = (
        "buckets", "children", "cut", "filled", "free", "held", "index", "kind", "limit", "limited", "name",
        "offsets", "parent", "per", "quick", "simple", "span", "split", "stack", "stride", "used",
    )  # fmt: skip

    def __init__(self, index: int, name: str, kind: Kind | None, stride: int, per: int, parent: Level | None):
        self.index, self.name, self.kind = index, name, kind
        self.stride = stride  # grains from page to page
        self.per = per  # pages in a parent
        self.span = stride * per  # grains of a parent that are used
        self.parent = parent
        self.simple = parent is not None and parent.parent is None  # cut from the root
        self.quick = parent if self.simple else None  # the root, where no limit is in the way
        self.children: list[Level] = []
        self.split: dict[int, set[int]] = {}  # parent -> its free pages; those held whole are not here
        # Where the pages of a parent start, from its own start.
        self.offsets = np.arange(per if parent else 0, dtype=np.int32) * np.int32(stride)
        self.cut = 0  # parents cut for this level, those held whole included
        self.stack = array("i")  # of the root's free pages those that merged last, see `_unstack`
        # Open parents by how many free pages they have, and a bit for each bucket that is not empty.
        self.buckets: list[dict[int, None]] = [{} for _ in range(per)] if parent else []
        self.filled = 0
        self.free = 0  # pages free inside split parents
        self.used = 0  # pages held by owners
        self.held: dict[Hashable, Holding] = {}
        self.limit: int | None = None
        self.limited = False  # by `limit` or its kind's

    def file(self, parent: int, before: int, after: int) -> None:
        """Move a parent from one bucket to another; 0 and `per` are no buckets."""
        if self.parent is None:
            return
        if 0 < before < self.per:
            bucket = self.buckets[before]
            del bucket[parent]
            if not bucket:
                self.filled &= ~(1 << before)
        if 0 < after < self.per:
            self.buckets[after][parent] = None
            self.filled |= 1 << after

    def range_of(self, parent: int) -> range:
        first = 0 if parent == ROOT else parent
        return range(first, first + self.span, self.stride)

    def pages_in(self, parents: Sequence[int]) -> np.ndarray:
        """All pages of several parents, int32 `[parents, pages]`.

        Made by one addition, not read from a list of all pages: that would cost a cache miss a parent.
        """
        return np.array(parents, np.int32)[:, None] + self.offsets
