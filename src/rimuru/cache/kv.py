"""Blocks of KV cache: which request reads which pages, what is shared, what is kept for later.

Room: the cache. Rule: integers and bytes only, no torch; every answer is all or nothing.

A *block* is `block_tokens` tokens of a sequence and owns one page per layer group. A block is

    reserved   taken ahead for a running request's growth; counts as free and is taken back first
    used       read by at least one request
    cached     full, published under its key, read by nobody; evicted when room is needed

A block of its own is known by its first group's page. Blocks that were never published need no record:
they have one user, the slot in whose row they stand.

Longer than 500 lines because growth, sharing, eviction and moves edit the same rows and counts; the
order of eviction is in `idle`, the keys are in `prefix`, the choice of moves is the pool's, the recount
of everything is in `audit`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from typing import Protocol

import numpy as np

from rimuru.pool import Allocator, Shortage
from rimuru.pool.compact import plan_moves

from .audit import audit
from .idle import Block, IdleBlocks
from .ranking import cheapest_parents, pages_of


class RowWriter(Protocol):
    """What the cache needs of the device's block tables (`rimuru.pool.tables.KVTables`)."""

    def stage_blocks(self, slot: int, block: int, pages: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state. `free` could be taken now without evicting; it includes `reserved`."""

    used: int
    cached: int
    reserved: int
    free: int


@dataclass(frozen=True, slots=True)
class Move:
    """A page of class `cls` whose bytes go from grain `source` to grain `target`."""

    cls: int
    source: int
    target: int


class KVCache:
    """Block tables of `slots` concurrent requests over `allocator`'s pages.

    group_classes: the page class of each layer group's page. max_blocks: the length of a row.
    `held[slot]` (blocks a slot uses) may be read by anyone, so that a scheduler need not call
    `grow` for a slot that has enough.
    """

    def __init__(
        self,
        allocator: Allocator,
        group_classes: Sequence[int],
        block_tokens: int,
        slots: int,
        max_blocks: int,
        tables: RowWriter | None = None,
        prefix_caching: bool = True,
        reserve_blocks: int = 32,
        track_freed: bool = False,
    ):
        if not group_classes or slots < 1 or max_blocks < 1 or block_tokens < 1:
            raise ValueError("a KV cache needs a layer group, a slot, a block and a token in it")
        self.allocator = allocator
        self.block_tokens = block_tokens
        self.max_blocks = max_blocks
        self.prefix_caching = prefix_caching
        self.reserve_blocks = reserve_blocks
        self.held = [0] * slots
        self._groups = len(group_classes)
        self._tables = tables
        # Groups whose pages are of one class are served by one take: class -> its groups.
        self._groups_of: dict[int, list[int]] = {}
        for group, cls in enumerate(group_classes):
            self._groups_of.setdefault(cls, []).append(group)
        self._classes = tuple(group_classes)
        self._per = allocator.geometry.classes[group_classes[0]].per_parent
        self._each = {cls: len(groups) for cls, groups in self._groups_of.items()}
        self._only = group_classes[0] if len(self._each) == 1 else None
        # A slot's pages, block after block, each group's in turn; those reserved ahead at the end. Where all
        # groups' pages are of one class, pages too few for another block may follow: the rest of a parent.
        self._rows = [array("i") for _ in range(slots)]
        self._room = [0] * slots  # whole blocks in a slot's row
        self._blocks = self._loose = 0  # of all rows: whole blocks, and pages beyond them
        self._committed = [0] * slots  # leading blocks that need no publishing any more
        self._ahead = reserve_blocks
        self._taken = 0  # blocks whose pages are out of the allocator
        self._by_key: dict[bytes, Block] = {}
        # Of a slot's committed blocks: those found by key, in order, and the places of the others.
        self._shared: list[list[Block]] = [[] for _ in range(slots)]
        self._private: list[list[int]] = [[] for _ in range(slots)]
        self._idle = IdleBlocks()
        self._blank: list[Block] = []  # records to use again
        self._freed: list[tuple[int, int]] | None = [] if track_freed else None

    # ---------------------------------------------------------------- asking

    def free_blocks(self) -> int:
        """Blocks that can be taken now without evicting anything, reserved ones included."""
        return self._obtainable() + self.reserved_blocks()

    def reserved_blocks(self) -> int:
        """Blocks taken ahead for the growth of running requests."""
        return self._blocks - sum(self.held)

    def _obtainable(self) -> int:
        """Blocks that the allocator could give, with what rows hold beyond whole blocks."""
        if self._only is None or self._groups == 1:
            return self.allocator.obtainable_together(self._each)
        return (self.allocator.obtainable(self._only) + self._loose) // self._groups

    def evictable_blocks(self) -> int:
        """Blocks that hold a cached prefix nobody reads."""
        return self._idle.count

    def cached_blocks(self) -> int:
        """Blocks that can be found by key, in use or not."""
        return len(self._by_key)

    def counts(self) -> BlockCounts:
        """Blocks by state, for gauges."""
        idle, reserved = self._idle.count, self.reserved_blocks()
        return BlockCounts(self._taken - idle - reserved, idle, reserved, self.free_blocks())

    def spare_pages(self, cls: int) -> np.ndarray:
        """Pages of a class reserved ahead or with a cached prefix nobody reads: what others may have."""
        groups, n = self._groups_of.get(cls, []), self._groups
        rows = [np.array(row[held * n :]) for held, row in zip(self.held, self._rows, strict=True)]
        if self._only is None:
            rows = [row.reshape(-1, n)[:, groups].ravel() for row in rows]
        idle = pages_of([block for run in self._idle.runs() for block in run], n)
        return np.concatenate([idle[:, groups].ravel(), *rows])

    def row(self, slot: int, group: int = 0) -> list[int]:
        """The pages a slot uses, in order (a copy)."""
        return self._rows[slot][group :: self._groups][: self.held[slot]].tolist()

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading keys name a cached block."""
        by_key = self._by_key
        for i, key in enumerate(keys):
            if key not in by_key:
                return i
        return len(keys)

    # ---------------------------------------------------------------- a request's life

    def admit(self, slot: int, keys: Sequence[bytes], hit_blocks: int) -> None:
        """Start a request in an empty slot on the first `hit_blocks` cached blocks of its keys.

        Raises ValueError if the slot is taken, KeyError if one of the blocks is not cached (any
        more); nothing changes then.
        """
        row = self._rows[slot]
        if self._room[slot]:
            raise ValueError(f"slot {slot} is taken by a request with {self.held[slot]} blocks")
        if hit_blocks > self.max_blocks:
            raise ValueError(f"{hit_blocks} blocks do not fit a row of {self.max_blocks}")
        blocks = [self._by_key[key] for key in keys[:hit_blocks]]
        for block in blocks:
            if block.users == 0:
                self._idle.take(block)
            block.users += 1
        row.frombytes(b"".join([block.pages for block in blocks]))
        self.held[slot] = self._room[slot] = self._committed[slot] = hit_blocks
        self._blocks += hit_blocks
        if blocks:
            self._shared[slot] = blocks
            self._write(slot, 0)

    def grow(self, slot: int, blocks_total: int, evict: bool = True) -> int:
        """Make a slot use `blocks_total` blocks; 0, or how many blocks are missing (nothing changed).

        Room comes from free pages, then from what is reserved for others, then, with `evict`, from
        cached prefixes nobody reads. Raises ValueError past the length of a row.
        """
        have = self._room[slot]
        if blocks_total <= have:
            if blocks_total > self.held[slot]:
                self.held[slot] = blocks_total
            return 0
        if blocks_total > self.max_blocks:
            raise ValueError(f"{blocks_total} blocks do not fit a row of {self.max_blocks}")
        need, ahead = blocks_total - have, min(self._ahead, self.max_blocks - blocks_total)
        if not self._take_parents(slot, need, ahead) and not self._take(slot, need, ahead):
            missing = self._make_room(need, slot, evict)
            if missing:
                return missing
            # From now on reserve nothing, until a request ends: it would be taken back at once.
            self._ahead = 0
        self.held[slot] = blocks_total
        self._write(slot, have)
        return 0

    def grow_many(self, slots: Sequence[int], totals: Sequence[int], evict: bool = True) -> list[int]:
        """`grow` for many distinct slots; those that fell short and have what they had.

        Slots that need one more parent each get them in one go.
        """
        held, room = self.held, self._room
        growing, wanted = [], []
        for slot, total in zip(slots, totals, strict=True):
            if total > room[slot]:
                growing.append(slot)
                wanted.append(total)
            elif total > held[slot]:
                held[slot] = total
        if len(growing) > 1 and self._take_parent_each(growing, wanted):
            for slot, total in zip(growing, wanted, strict=True):
                held[slot] = total
            return []
        return [slot for slot, total in zip(growing, wanted, strict=True) if self.grow(slot, total, evict)]

    def commit(self, slot: int, keys: Sequence[bytes], upto_blocks: int) -> None:
        """Publish a slot's first `upto_blocks` blocks under their keys, for others to share.

        Call it when the step that fills the blocks has been launched. Where a key is published
        already, that block stays the shared one and this slot keeps its own, unpublished.
        Raises ValueError for blocks the slot does not use or keys that are missing.
        """
        start = self._committed[slot]
        if upto_blocks <= start or not self.prefix_caching:
            return
        if upto_blocks > self.held[slot] or upto_blocks > len(keys):
            raise ValueError(
                f"slot {slot} uses {self.held[slot]} blocks and has {len(keys)} keys; "
                f"it cannot publish {upto_blocks}"
            )
        known, shared, blank = self._by_key.setdefault, self._shared[slot], self._blank
        width = 4 * self._groups
        raw = self._rows[slot][start * self._groups : upto_blocks * self._groups].tobytes()
        parts = [raw[at : at + width] for at in range(0, len(raw), width)]
        at = start
        for key, pages in zip(keys[start:upto_blocks], parts, strict=True):
            block = blank.pop() if blank else Block()
            if known(key, block) is block:
                block.key, block.pages, block.users = key, pages, 1
                shared.append(block)
            else:
                blank.append(block)
                self._private[slot].append(at)
            at += 1
        self._committed[slot] = upto_blocks

    def shrink(self, slot: int, blocks_total: int) -> None:
        """Give back a slot's blocks from `blocks_total` on, reserved ones included.

        Raises ValueError where that would take back a published block.
        """
        if blocks_total < self._committed[slot]:
            raise ValueError(
                f"slot {slot} cannot shrink to {blocks_total} blocks: {self._committed[slot]} are published"
            )
        self.held[slot] = min(self.held[slot], blocks_total)
        self._cut(slot, self.held[slot])

    def release(self, slot: int) -> None:
        """End a slot's request. Published blocks without other users stay cached until evicted."""
        if not self._room[slot]:
            return
        row = self._rows[slot]
        if self.prefix_caching:
            self._let_go(slot)
        else:
            self._taken -= self._room[slot]
            for cls in self._each:
                self.allocator.give_all(cls, slot)
            self._note_freed(row)
        self._resize(slot, -len(row))
        del row[:]
        self.held[slot] = self._room[slot] = self._committed[slot] = 0
        self._ahead = self.reserve_blocks

    def _let_go(self, slot: int) -> None:
        """Blocks that others may find become idle where nobody else reads them; the others are free."""
        row, n, done = self._rows[slot], self._groups, self._committed[slot]
        gone = array("i")
        run: list[Block] = []
        stamp = self._idle.next_stamp()
        for block in self._shared[slot]:
            block.users -= 1
            if not block.users:
                if block.key is None:
                    gone.frombytes(block.pages)
                    self._blank.append(block)
                    self._taken -= 1
                else:
                    block.stamp = stamp
                    run.append(block)
        if run:
            self._idle.add(stamp, run)
        for at in self._private[slot]:
            gone += row[at * n : at * n + n]
        gone += row[done * n :]
        self._taken -= len(self._private[slot]) + self._room[slot] - done
        self._give(None, gone)
        self._shared[slot], self._private[slot] = [], []

    # ---------------------------------------------------------------- making room

    def evict(self, blocks: int) -> int:
        """Forget up to `blocks` cached blocks, least recently used first, tails before heads.

        Their pages are free afterwards. Returns how many were evicted.
        """
        victims = self._idle.pop(blocks)
        self._forget(victims)
        return len(victims)

    def evict_parents(self, parents: int) -> int:
        """Forget cached blocks until `parents` parents have come back whole; how many did.

        Only parents that hold nothing but idle blocks are candidates, in the order of
        `ranking.cheapest_parents`. This looks at every idle block.
        """
        classes = self.allocator.geometry.classes
        if not any(self._idle.count * n >= classes[cls].per_parent for cls, n in self._each.items()):
            return 0
        runs = list(self._idle.runs())
        before = sum(map(self.allocator.parents, self._each))
        for heads in cheapest_parents(runs, self.allocator, self._groups_of):
            if before - sum(map(self.allocator.parents, self._each)) >= parents:
                break
            victims: list[Block] = []
            for run, length in heads:
                victims += runs[run][length:]
                del runs[run][length:]
            for block in victims:
                self._idle.take(block)
            self._forget(victims)
        return before - sum(map(self.allocator.parents, self._each))

    def compact(
        self,
        most: int = 256 << 20,
        pinned: Callable[[int, int], bool] = lambda cls, page: False,
        over_cached: bool = False,
        parents: int | None = None,
    ) -> list[Move]:
        """Move pages together so that parents come back whole; at most `most` bytes of a page class.

        With `parents`, no more than it takes for so many of a class to come back. Rows, shared blocks,
        tables and the allocator know the new places when this returns. The caller copies the bytes of
        every move, in stream order after all work that was launched before and before the tables are
        flushed; only then may a source be written or poisoned.
        `pinned(cls, page)`: pages that must stay (being sent elsewhere, guarded by an epoch).
        `over_cached`: pages in use may also take the places of cached blocks nobody reads, which are
        forgotten, one a page at most: then what is cached and what is in use lie in parents of
        their own, and `evict_parents` can free the former.
        """
        moves: list[Move] = []
        for cls, groups in self._groups_of.items():
            page_class = self.allocator.geometry.classes[cls]
            idle = self._idle.count * len(groups) if over_cached else 0
            if parents is not None and self.allocator.free_inside(cls) + idle < page_class.per_parent:
                continue  # no parent's pages would fit into the others
            homes = self.allocator.open_parents(cls)
            cached = self._offer_cached(cls, groups, homes) if idle else {}
            plan = plan_moves(homes, partial(pinned, cls), most // page_class.page_bytes, parents)
            if not plan:
                continue
            victims = list({id(b): b for _, target in plan if (b := cached.get(target))}.values())
            for block in victims:
                self._idle.take(block)
            self._forget(victims)
            self.allocator.move(cls, plan)
            new = dict(plan)
            self._relocate(new, cached_too=not idle)
            moves += [Move(cls, source, target) for source, target in plan]
            if self._freed is not None:
                filled = {(cls, target) for target in new.values()}
                self._freed = [place for place in self._freed if place not in filled]
                self._freed += [(cls, source) for source in new]
        return moves

    def _offer_cached(
        self, cls: int, groups: Sequence[int], homes: dict[int, tuple[set[int], set[int]]]
    ) -> dict[int, Block]:
        """Count pages of cached blocks nobody reads as free in `homes`, parents -> pages (used, free).

        Returns the blocks by such pages; those that share their parent with no page in use are none.
        """
        allocator = self.allocator
        in_use = np.zeros(allocator.roots, bool)
        in_use[allocator.roots_of(np.array(array("i", chain.from_iterable(self._rows))))] = True
        for home in [home for home in homes if not in_use[allocator.roots_of(home)]]:
            del homes[home]
        blocks = [block for run in self._idle.runs() for block in run]
        pages = pages_of(blocks, self._groups)[:, groups]
        near = np.flatnonzero(in_use[allocator.roots_of(pages)].any(axis=1))
        blocks, pages = [blocks[i] for i in near.tolist()], pages[near]
        found, where, count = np.unique(
            allocator.parents_of(cls, pages), return_inverse=True, return_counts=True
        )
        loads = np.array([allocator.load(cls, home) for home in found.tolist()], np.int64)
        for home in found[count == loads].tolist():
            homes.pop(home, None)
        # Where no page in use shares the root, blocks that are not near may share the parent: it is as it is.
        mixed = (count < loads)[where].reshape(pages.shape) & in_use[allocator.roots_of(pages)]
        cached: dict[int, Block] = {}
        for i, page in zip(np.nonzero(mixed)[0].tolist(), pages[mixed].tolist(), strict=True):
            home = allocator.parent_of(cls, page)
            if home not in homes:
                homes[home] = allocator.pages_of(cls, home), set()
            homes[home][0].remove(page)
            homes[home][1].add(page)
            cached[page] = blocks[i]
        return cached

    def _relocate(self, new: dict[int, int], cached_too: bool) -> None:
        """Replace pages wherever they are written down, with `cached_too` in blocks nobody reads as well.

        A page that is taken starts where no other does, so that it is known without its class.
        """
        roots = self.allocator.roots_of
        left = np.zeros(self.allocator.roots, bool)
        left[roots(np.array(list(new)))] = True
        changed: list[Block] = []
        for slot, row in enumerate(self._rows):
            if not row or not left[roots(np.frombuffer(row, np.int32))].any():
                continue
            self._rows[slot] = array("i", [new.get(page, page) for page in row])
            self._write(slot, 0)
            changed += self._shared[slot]
        if cached_too:
            idle = [block for run in self._idle.runs() for block in run]
            hit = left[roots(pages_of(idle, self._groups))].any(axis=1)
            changed += [idle[i] for i in np.flatnonzero(hit).tolist()]
        for block in changed:  # one that two slots share comes twice, which no page minds: targets are free
            block.pages = array("i", [new.get(page, page) for page in array("i", block.pages)]).tobytes()

    def reset_prefix(self) -> None:
        """Forget every cached prefix; blocks in use stay but cannot be found any more."""
        self.evict(self._idle.count)
        for block in self._by_key.values():
            block.key = None
        self._by_key.clear()

    def take_back_reserved(self, but: int | None = None) -> int:
        """Free the blocks reserved ahead for growth, except slot `but`'s; how many that were."""
        before = self._taken
        for slot, held in enumerate(self.held):
            if slot != but:
                self._cut(slot, held)
        return before - self._taken

    def freed(self) -> list[tuple[int, int]]:
        """(class, page) freed since the last call; needs `track_freed`. A page may be taken again."""
        out, self._freed = self._freed or [], [] if self._freed is not None else None
        return out

    def _make_room(self, need: int, slot: int, evict: bool) -> int:
        """Give a slot `need` more blocks at others' cost; 0, or the blocks missing if it cannot be."""
        spare = self.reserved_blocks() - (self._room[slot] - self.held[slot])
        over = max(-(-self.allocator.excess(cls) // n) for cls, n in self._each.items())
        short = need + over - self._obtainable()
        possible = spare + (self._idle.count if evict else 0)
        if short > possible:
            return short - possible
        if spare or self._loose:
            short -= self.take_back_reserved(but=slot)
        if short > 0:
            victims = self._idle.pop(short)
            if over:
                self._forget(victims)
            else:
                need -= self._adopt(slot, victims)
        if need:
            took = self._take(slot, need, 0)
            assert took
        return 0

    def _adopt(self, slot: int, blocks: Sequence[Block]) -> int:
        """Put the pages of idle blocks into a slot's row, as if evicted and taken again."""
        self._unpublish(blocks)
        pages = b"".join([block.pages for block in blocks])
        self._append(slot, pages)
        self._taken -= len(blocks)  # they were out and stay so
        self._note_freed(array("i", pages))
        return len(blocks)

    # ---------------------------------------------------------------- pages

    def _append(self, slot: int, pages: bytes) -> None:
        """Pages (int32) taken from the allocator go to the end of a slot's row."""
        self._taken += self._resize(slot, len(pages) // 4)
        self._rows[slot].frombytes(pages)

    def _resize(self, slot: int, pages: int) -> int:
        """Count a slot's row as `pages` longer than it is; by how many blocks that is more."""
        now, n = len(self._rows[slot]), self._groups
        have = (now + pages) // n
        more = have - self._room[slot]
        self._room[slot] = have
        self._blocks += more
        self._loose += pages - more * n
        return more

    def _lacking(self, slot: int, blocks: int) -> int:
        """Pages that a slot's row needs for `blocks` blocks more."""
        return (self._room[slot] + blocks) * self._groups - len(self._rows[slot])

    def _take_parents(self, slot: int, need: int, ahead: int) -> bool:
        """`_take` where whole parents hold what is needed, and no more than may be reserved."""
        cls, row = self._only, self._rows[slot]
        if cls is None:
            return False
        pages = self._lacking(slot, need)
        parents = -(-pages // self._per)
        if parents * self._per - pages >= (ahead + 1) * self._groups:
            return False
        if self.prefix_caching:
            whole = self.allocator.take_whole(cls, parents, None, row[-1] if row else None)
        else:
            whole = self.allocator.take_whole(cls, parents, slot)
        if whole is None:
            return False
        self._append(slot, whole)
        return True

    def _take_parent_each(self, slots: Sequence[int], totals: Sequence[int]) -> bool:
        """`_take_parents` for many slots (to `totals` blocks) that need one each; for all of them or none."""
        cls, per, rows, n = self._only, self._per, self._rows, self._groups
        if cls is None:
            return False
        pages = [len(rows[slot]) for slot in slots]
        lacking = [total * n - had for total, had in zip(totals, pages, strict=True)]
        if max(lacking) > per or min(lacking) <= per - (self._ahead + 1) * n:
            return False
        if max(pages) + per >= (self.max_blocks + 1) * n:
            return False
        nears = [rows[slot][-1] for slot in slots if rows[slot]] if self.prefix_caching else None
        whole = self.allocator.take_whole_each(cls, slots, nears)
        if whole is None:
            return False
        at, width = 0, 4 * per
        for slot in slots:
            self._append(slot, whole[at : at + width])
            at += width
        if self._tables is not None:
            for slot, had in zip(slots, pages, strict=True):
                self._write(slot, had // n)
        return True

    def _take(self, slot: int, need: int, ahead: int) -> bool:
        """Append `need` blocks (and up to `ahead` more) to a slot's row, or nothing where they are short."""
        row, n = self._rows[slot], self._groups
        # With prefix caching the pages may outlive the request, so that they are nobody's.
        owner = None if self.prefix_caching else slot
        if self._only is not None:
            near = row[-1] if owner is None and row else None
            pages = self.allocator.take(self._only, self._lacking(slot, need), owner, ahead * n, n, near)
            if isinstance(pages, Shortage):
                return False
            self._append(slot, array("i", pages).tobytes())
            return True
        last = row[-n:] if owner is None else None
        most = self.allocator.obtainable_together(self._each)
        if most < need:
            return False
        got = min(need + ahead, most)
        taken: dict[int, list[int]] = {}
        for sparing in (False, True):
            for cls, groups in self._groups_of.items():
                k, near = len(groups), last[groups[-1]] if last else None
                pages = self.allocator.take(cls, need * k, owner, (got - need) * k, k, near, sparing)
                if isinstance(pages, Shortage):
                    break
                taken[cls] = pages
                got = min(got, len(pages) // k)
            if len(taken) == len(self._each):
                break
            # One class took parents that another needs: pack them as `obtainable_together` does.
            for cls, pages in taken.items():
                self.allocator.give(cls, pages, owner)
            taken, got = {}, need
        blocks = array("i", bytes(4 * n * got))
        for cls, groups in self._groups_of.items():
            k, pages = len(groups), taken[cls]
            if len(pages) > got * k:
                self.allocator.give(cls, pages[got * k :], owner)
            for i, group in enumerate(groups):
                blocks[group::n] = array("i", pages[i : got * k : k])
        self._append(slot, blocks.tobytes())
        return True

    def _forget(self, blocks: Sequence[Block]) -> None:
        """Free blocks that are idle no more and have no users."""
        self._unpublish(blocks)
        self._taken -= len(blocks)
        self._give(None, array("i", b"".join([block.pages for block in blocks])))

    def _unpublish(self, blocks: Sequence[Block]) -> None:
        by_key = self._by_key
        for block in blocks:
            del by_key[block.key]  # type: ignore[arg-type]  # idle blocks have keys
        self._blank += blocks

    def _cut(self, slot: int, keep: int) -> None:
        """Give back the pages of a slot's row behind `keep` blocks."""
        row, stop = self._rows[slot], keep * self._groups
        if stop == len(row):
            return
        self._taken += self._resize(slot, stop - len(row))
        self._give(None if self.prefix_caching else slot, row[stop:])
        del row[stop:]

    def _give(self, owner: int | None, pages: array[int]) -> None:
        """Give pages, of blocks one after the other, back to the allocator."""
        if not pages:
            return
        if self._only is not None:
            self.allocator.give(self._only, pages, owner)
        else:
            for cls, groups in self._groups_of.items():
                mine = chain.from_iterable(pages[group :: self._groups] for group in groups)
                self.allocator.give(cls, mine, owner)
        self._note_freed(pages)

    def _note_freed(self, pages: array[int]) -> None:
        if self._freed is not None:
            self._freed += zip(cycle(self._classes), pages)

    def _write(self, slot: int, start: int) -> None:
        """Hand a slot's blocks from `start` on to the tables."""
        if self._tables is not None:
            n = self._groups
            self._tables.stage_blocks(slot, start, self._rows[slot][start * n : self._room[slot] * n])

    # ---------------------------------------------------------------- checking

    def check(self) -> None:
        """Recount everything; `CorruptPoolError` where the books contradict themselves."""
        audit(self)
