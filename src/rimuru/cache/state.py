"""Recurrent states: the pages of the running requests, and checkpoints of them for prefix hits.

Room: the cache. Rule: integers and bytes only, no torch; every answer is all or nothing.

A *state set* is one page of each STATE and CONV layer group: what a hybrid model's recurrent layers keep
of one sequence. A running request owns one set, and every step overwrites it. A *checkpoint* is a set that
holds a copy of a state as it was at the end of a full block; it is found under that block's key, never
changes, and is evicted when room is needed.

Eviction is GreedyDual (Cao and Irani, 1997): a checkpoint is worth the clock at its last use plus the
blocks it saves from recomputation, the least worthy one goes, and its worth is the new clock. So a long
prefix outlives a short one that was used as lately, but not for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from rimuru.pool import Allocator, CorruptPoolError, Shortage
from rimuru.pool.compact import plan_moves

OWNER = "states"

# Copies pages of one class: (class, source pages, target pages). Complete for whatever is ordered after it.
Copy = Callable[[int, Sequence[int], Sequence[int]], None]


class CellWriter(Protocol):
    """What the states need of the device's table (`rimuru.pool.tables.Table`)."""

    def stage(self, index: int, value: int) -> None: ...


class Checkpoint:
    """A state at the end of `blocks` blocks, in `pages`, one a layer group."""

    __slots__ = ("blocks", "gain", "holds", "pages", "rank")

    def __init__(self, pages: tuple[int, ...], blocks: int, gain: int):
        self.pages = pages
        self.blocks = blocks
        self.gain = gain  # blocks that need no recomputing because of it
        self.rank = (0, 0)  # worth, and a stamp by which equals go least recently used first
        self.holds = 0  # uses under way; it must not be evicted


class StateCache:
    """State sets of `slots` concurrent requests and checkpoints, over `allocator`'s pages.

    group_classes: the page class of each STATE and CONV layer group. tables: int32 `[groups, slots]` of
    grain indices, by flattened cell. `copy` moves the bytes. With `track_freed`, `freed` tells what was
    given back.
    """

    def __init__(
        self,
        allocator: Allocator,
        group_classes: Sequence[int],
        slots: int,
        tables: CellWriter | None = None,
        copy: Copy = lambda cls, source, target: None,
        track_freed: bool = False,
    ):
        if not group_classes or slots < 1:
            raise ValueError("recurrent states need a layer group and a slot")
        self.allocator = allocator
        self._classes = tuple(group_classes)
        self._each = {cls: self._classes.count(cls) for cls in self._classes}
        self._slots: list[tuple[int, ...] | None] = [None] * slots
        self._tables, self._copy = tables, copy
        self._checkpoints: dict[bytes, Checkpoint] = {}
        self._order: list[tuple[tuple[int, int], bytes]] = []  # heap by rank; entries may be out of date
        self._clock = self._stamp = 0
        self._freed: list[tuple[int, int]] | None = [] if track_freed else None

    # ---------------------------------------------------------------- asking

    @property
    def active(self) -> int:
        """Slots that own a state set."""
        return sum(pages is not None for pages in self._slots)

    @property
    def checkpoints(self) -> int:
        """Checkpoints there are."""
        return len(self._checkpoints)

    def pages(self, slot: int) -> tuple[int, ...] | None:
        """The pages of a slot's set, one a layer group; None where it has none."""
        return self._slots[slot]

    def match(self, keys: Sequence[bytes]) -> int:
        """The most leading blocks at whose end there is a checkpoint."""
        for n in range(len(keys), 0, -1):
            if keys[n - 1] in self._checkpoints:
                return n
        return 0

    def can_save(self) -> bool:
        """Whether there is a set for another checkpoint: free, or that of one it may displace."""
        return self.allocator.obtainable_together(self._each) > 0 or self._least() is not None

    # ---------------------------------------------------------------- a request's life

    def acquire(self, slot: int) -> bool:
        """Give an empty slot a set from free pages; what the pages hold is nobody's. False if there is none.

        Raises ValueError if the slot has one already.
        """
        if self._slots[slot] is not None:
            raise ValueError(f"slot {slot} has a state already")
        pages = self._take()
        if pages is None:
            return False
        self._own(slot, pages)
        return True

    def resume(self, slot: int, key: bytes) -> None:
        """Start a slot from the checkpoint `key`: copied into the slot's own set, which the checkpoint
        survives, or, where the slot has none, by taking over the checkpoint's pages.

        Raises KeyError where there is no such checkpoint; nothing changes then.
        """
        checkpoint, own = self._checkpoints[key], self._slots[slot]
        if own is None:
            del self._checkpoints[key]
            self._own(slot, checkpoint.pages)
            return
        self._move(checkpoint.pages, own)
        self._use(key, checkpoint)

    def save(self, slot: int, keys: Sequence[bytes]) -> bool:
        """Publish the slot's present state, that of the end of the last block of `keys`.

        The pages come from free ones, else from the least worthy checkpoint where this one is worth
        more. False where neither gives any, or the checkpoint exists. Raises ValueError where the slot
        has no state or there is no block.
        """
        own = self._slots[slot]
        if own is None or not keys:
            raise ValueError(f"slot {slot} has no state to save, or no block ends there")
        key = keys[-1]
        if key in self._checkpoints:
            return False
        gain = len(keys) - self.match(keys[:-1])
        pages = self._take()
        if pages is None:
            victim = self._least()
            if victim is None or self._checkpoints[victim].rank[0] > self._clock + gain:
                return False
            pages = self._sacrifice(victim)
        self._move(own, pages)
        checkpoint = self._checkpoints[key] = Checkpoint(pages, len(keys), gain)
        self._use(key, checkpoint)
        return True

    def release(self, slot: int) -> None:
        """Take a slot's set back; checkpoints of it stay."""
        pages = self._slots[slot]
        if pages is not None:
            self._slots[slot] = None
            self._give(pages)

    # ---------------------------------------------------------------- making room

    def hold(self, key: bytes) -> None:
        """Keep a checkpoint from being evicted until `let_go`; holds nest."""
        self._checkpoints[key].holds += 1

    def let_go(self, key: bytes) -> None:
        """Undo one `hold`, if the checkpoint is still there."""
        checkpoint = self._checkpoints.get(key)
        if checkpoint is not None and checkpoint.holds:
            checkpoint.holds -= 1

    def evict(self, n: int) -> int:
        """Forget up to `n` checkpoints, the least worthy first; how many were. Their pages are free."""
        done = 0
        while done < n and (key := self._least()) is not None:
            self._give(self._sacrifice(key))
            done += 1
        return done

    def drop(self, useful: Callable[[bytes], bool]) -> int:
        """Forget the checkpoints whose block is cached no more, by `useful`: no hit can reach them."""
        gone = [k for k, c in self._checkpoints.items() if not c.holds and not useful(k)]
        for key in gone:
            self._give(self._checkpoints.pop(key).pages)
        return len(gone)

    def compact(self, most: int, parents: int | None = None) -> dict[int, int]:
        """Move pages together so that parents come back whole, and copy their bytes; pages moved by class.

        At most `most` bytes a class; with `parents`, no more than it takes for so many of a class to come
        back. The order of the copies is that of `save` and `resume`.
        """
        moved = {}
        for cls in self._each:
            n = most // self.allocator.geometry.classes[cls].page_bytes
            plan = plan_moves(self.allocator.open_parents(cls), lambda page: False, n, parents)
            if not plan:
                continue
            self.allocator.move(cls, plan)
            new = dict(plan)
            self._copy(cls, list(new), list(new.values()))
            for slot, pages in enumerate(self._slots):
                if pages is not None and not new.keys().isdisjoint(pages):
                    self._own(slot, tuple(new.get(page, page) for page in pages))
            for checkpoint in self._checkpoints.values():
                checkpoint.pages = tuple(new.get(page, page) for page in checkpoint.pages)
            if self._freed is not None:
                filled = {(cls, target) for target in new.values()}
                self._freed = [place for place in self._freed if place not in filled]
                self._freed += [(cls, source) for source in new]
            moved[cls] = len(plan)
        return moved

    def freed(self) -> list[tuple[int, int]]:
        """(class, page) freed since the last call; needs `track_freed`. A page may be taken again."""
        out, self._freed = self._freed or [], [] if self._freed is not None else None
        return out

    # ---------------------------------------------------------------- pages

    def _take(self) -> tuple[int, ...] | None:
        """One set of free pages."""
        taken: dict[int, list[int]] = {}
        if self.allocator.obtainable_together(self._each):
            for cls, n in self._each.items():
                pages = self.allocator.take(cls, n, OWNER)
                if isinstance(pages, Shortage):
                    break
                taken[cls] = pages
        if len(taken) < len(self._each):
            for cls, pages in taken.items():
                self.allocator.give(cls, pages, OWNER)
            return None
        return tuple(taken[cls].pop() for cls in self._classes)

    def _own(self, slot: int, pages: tuple[int, ...]) -> None:
        self._slots[slot] = pages
        if self._tables is not None:
            for group, page in enumerate(pages):
                self._tables.stage(group * len(self._slots) + slot, page)

    def _move(self, source: Sequence[int], target: Sequence[int]) -> None:
        for cls in self._each:
            at = [i for i, c in enumerate(self._classes) if c == cls]
            self._copy(cls, [source[i] for i in at], [target[i] for i in at])

    def _use(self, key: bytes, checkpoint: Checkpoint) -> None:
        self._stamp += 1
        checkpoint.rank = (self._clock + checkpoint.gain, self._stamp)
        heappush(self._order, (checkpoint.rank, key))
        if len(self._order) > 2 * len(self._checkpoints) + 64:
            self._order = [(c.rank, k) for k, c in self._checkpoints.items()]
            heapify(self._order)

    def _least(self) -> bytes | None:
        """The checkpoint to forget first; None where all are held."""
        held = []
        key = None
        while self._order:
            rank, found = self._order[0]
            checkpoint = self._checkpoints.get(found)
            if checkpoint is not None and checkpoint.rank == rank and not checkpoint.holds:
                key = found
                break
            entry = heappop(self._order)
            if checkpoint is not None and checkpoint.rank == rank:
                held.append(entry)
        for entry in held:
            heappush(self._order, entry)
        return key

    def _sacrifice(self, key: bytes) -> tuple[int, ...]:
        """Forget the least worthy checkpoint; its pages, which nobody owns now."""
        checkpoint = self._checkpoints.pop(key)
        self._clock = max(self._clock, checkpoint.rank[0])
        return checkpoint.pages

    def _give(self, pages: Sequence[int]) -> None:
        for cls in self._each:
            mine = [page for page, c in zip(pages, self._classes, strict=True) if c == cls]
            self.allocator.give(cls, mine, OWNER)
            if self._freed is not None:
                self._freed += [(cls, page) for page in mine]

    # ---------------------------------------------------------------- checking

    def check(self) -> None:
        """Recount everything; `CorruptPoolError` where the books contradict themselves."""

        def require(truth: bool, what: str) -> None:
            if not truth:
                raise CorruptPoolError(what)

        sets = [pages for pages in self._slots if pages is not None]
        sets += [c.pages for c in self._checkpoints.values()]
        for cls, n in self._each.items():
            pages = [p for s in sets for p, c in zip(s, self._classes, strict=True) if c == cls]
            require(len(set(pages)) == len(pages), f"class {cls}: a page stands in two states")
            held = self.allocator.held_by(cls, OWNER)
            require(held == n * len(sets), f"class {cls}: {len(sets)} states hold {held} pages")
        listed = set(self._order)
        for key, c in self._checkpoints.items():
            require((c.rank, key) in listed, f"the checkpoint of {c.blocks} blocks can never be evicted")
