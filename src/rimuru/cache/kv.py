"""Blocks of KV cache: which request reads which pages, what is shared, what is kept for later.

Room: the cache. Rule: integers and bytes only, no torch; every answer is all or nothing.

A *block* is `block_tokens` tokens of a sequence and owns one page per layer group. A block is

    reserved   taken ahead for a running request's growth; counts as free and is taken back first
    used       read by at least one request
    cached     full, published under its key, read by nobody; evicted when room is needed

A block of its own is known by its first group's page. Blocks that were never published need no record:
they have one user, the slot in whose row they stand.

Longer than 500 lines because growth, sharing, eviction and moves edit the same rows and counts; the
order of eviction is in `idle`, the keys are in `prefix`, the choice of moves is the pool's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

from rimuru.pool import Allocator, CorruptPoolError, Shortage
from rimuru.pool.compact import plan_moves

from .idle import Block, IdleBlocks


class RowWriter(Protocol):
    """What the cache needs of the device's block tables (`rimuru.pool.tables.KVTables`)."""

    def stage_row(self, group: int, slot: int, block: int, pages: Sequence[int]) -> None: ...


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
        self._each = {cls: len(groups) for cls, groups in self._groups_of.items()}
        # rows[slot][group]: pages, those reserved ahead at the end.
        self._rows = [[array("i") for _ in group_classes] for _ in range(slots)]
        self._committed = [0] * slots  # leading blocks that need no publishing any more
        self._only = next(iter(self._each.items())) if len(self._each) == 1 else None
        self._cls = group_classes[0]
        per = allocator.geometry.classes[self._cls].per_parent
        self._per = per if len(group_classes) == 1 else 0
        self._ahead = reserve_blocks
        self._active = 0  # slots that hold anything
        self._room = [0] * slots  # blocks in a slot's row, those reserved ahead included
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
        return self.allocator.obtainable_together(self._each) + self.reserved_blocks()

    def reserved_blocks(self) -> int:
        """Blocks taken ahead for the growth of running requests."""
        return sum(self._room) - sum(self.held)

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

    def spare_pages(self, cls: int) -> list[int]:
        """Pages of a class reserved ahead or with a cached prefix nobody reads: what others may have."""
        groups = self._groups_of.get(cls, [])
        out = [block.pages[group] for run in self._idle.runs() for block in run for group in groups]
        for held, row in zip(self.held, self._rows, strict=True):
            for group in groups:
                out += row[group][held:]
        return out

    def row(self, slot: int, group: int = 0) -> list[int]:
        """The pages a slot uses, in order (a copy)."""
        return self._rows[slot][group][: self.held[slot]].tolist()

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
        for group, pages in enumerate(row):
            pages.fromlist([block.pages[group] for block in blocks])
        self.held[slot] = self._room[slot] = self._committed[slot] = hit_blocks
        if blocks:
            self._shared[slot] = blocks
            self._active += 1
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
        need, ahead = blocks_total - have, self._ahead
        if blocks_total + ahead > self.max_blocks:
            ahead = self.max_blocks - blocks_total
        per = self._per
        if per and need <= per <= need + ahead:  # growth as a rule: a parent is all it takes
            row = self._rows[slot][0]
            if self.prefix_caching:
                pages = self.allocator.take_whole(self._cls, 1, None, row[-1] if have else None)
            else:
                pages = self.allocator.take_whole(self._cls, 1, slot)
            if pages is not None:
                row += pages
                self._taken += per
                self._room[slot] = have + per
                self.held[slot] = blocks_total
                if not have:
                    self._active += 1
                if self._tables is not None:
                    self._tables.stage_row(0, slot, have, pages)
                return 0
        got = self._take_parents(slot, need, ahead) or self._take(slot, need, ahead)
        if not got:
            missing = self._make_room(need, slot, evict)
            if missing:
                return missing
            # From now on reserve nothing, until a request ends: it would be taken back at once.
            self._ahead = 0
            got = need
        if not have:
            self._active += 1
        self._room[slot] = have + got
        self.held[slot] = blocks_total
        if self._tables is not None:
            self._write(slot, have)
        return 0

    def grow_many(self, slots: Sequence[int], totals: Sequence[int], evict: bool = True) -> int:
        """`grow` for many slots in order, up to the first that falls short; how many have enough now."""
        held, room = self.held, self._room
        done = 0
        for slot, total in zip(slots, totals, strict=True):
            if total <= room[slot]:
                if total > held[slot]:
                    held[slot] = total
            elif self.grow(slot, total, evict):
                return done
            done += 1
        return done

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
        by_key, shared, blank = self._by_key, self._shared[slot], self._blank
        pages = zip(*(pages[start:upto_blocks] for pages in self._rows[slot]), strict=True)
        at = start
        for key, block_pages in zip(keys[start:upto_blocks], pages, strict=True):
            if key in by_key:
                self._private[slot].append(at)
            else:
                block = blank.pop() if blank else Block()
                block.key, block.pages, block.users = key, block_pages, 1
                by_key[key] = block
                shared.append(block)
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
        if not self.prefix_caching:
            self._free_all(slot)
        else:
            gone: list[tuple[int, ...]] = []
            run: list[Block] = []
            stamp = self._idle.next_stamp()
            for block in self._shared[slot]:
                block.users -= 1
                if not block.users:
                    if block.key is None:
                        gone.append(block.pages)
                        self._blank.append(block)
                    else:
                        block.stamp = stamp
                        run.append(block)
            if run:
                self._idle.add(stamp, run)
            own = [*self._private[slot], *range(self._committed[slot], self._room[slot])]
            gone += [tuple(pages[i] for pages in row) for i in own]
            self._give(None, gone)
            self._shared[slot], self._private[slot] = [], []
        for group in row:
            del group[:]
        self.held[slot] = self._room[slot] = self._committed[slot] = 0
        self._active -= 1
        self._ahead = self.reserve_blocks

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

        Only parents that hold nothing but idle blocks are candidates. The price of one is what has
        to be computed again: its blocks and, as a prefix is found from its head, the blocks behind
        them. Cheapest first, then least recently used. This looks at every idle block.
        """
        allocator = self.allocator
        runs = list(self._idle.runs())
        places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for r, run in enumerate(runs):
            for at, block in enumerate(run):
                for cls, groups in self._groups_of.items():
                    for group in groups:
                        parent = allocator.parent_of(cls, block.pages[group])
                        places.setdefault((cls, parent), []).append((r, at))
        offers = []
        for (cls, parent), found in places.items():
            if parent >= 0 and allocator.load(cls, parent) == len(found):
                heads: dict[int, int] = {}
                for r, at in found:
                    heads[r] = min(at, heads.get(r, at))
                offers.append((sum(len(runs[r]) - at for r, at in heads.items()), max(heads), heads))
        offers.sort(key=lambda offer: offer[:2])

        def cut() -> int:
            return sum(map(allocator.parents, self._each))

        before = cut()
        for _, _, heads in offers:
            if before - cut() >= parents:
                break
            victims = [block for r, at in heads.items() for block in runs[r][at:]]
            for block in victims:
                self._idle.take(block)
            for r, at in heads.items():
                del runs[r][at:]
            self._forget(victims)
        return before - cut()

    def compact(
        self,
        most: int = 64,
        pinned: Callable[[int, int], bool] = lambda cls, page: False,
        over_cached: bool = False,
    ) -> list[Move]:
        """Move pages together so that parents come back whole; at most `most` moves a page class.

        Rows, shared blocks, tables and the allocator know the new places when this returns. The
        caller copies the bytes of every move, in stream order after all work that was launched
        before and before the tables are flushed; only then may a source be written or poisoned.
        `pinned(cls, page)`: pages that must stay (being sent elsewhere, guarded by an epoch).
        `over_cached`: pages in use may also take the places of cached blocks nobody reads, which are
        forgotten, one a page at most: then what is cached and what is in use lie in parents of
        their own, and `evict_parents` can free the former.
        """
        moves: list[Move] = []
        for cls, groups in self._groups_of.items():
            parents = self.allocator.open_parents(cls)
            cached = self._cached_pages(groups) if over_cached else {}
            for page in cached:
                parent = self.allocator.parent_of(cls, page)
                if parent not in parents:
                    parents[parent] = self.allocator.pages_of(cls, parent), set()
                parents[parent][0].remove(page)
                parents[parent][1].add(page)
            parents = {p: (used, free) for p, (used, free) in parents.items() if used}
            plan = plan_moves(parents, partial(pinned, cls), most)
            if not plan:
                continue
            victims = list({id(b): b for _, target in plan if (b := cached.get(target))}.values())
            for block in victims:
                self._idle.take(block)
            self._forget(victims)
            self.allocator.move(cls, plan)
            new = dict(plan)
            self._relocate(groups, new)
            moves += [Move(cls, source, target) for source, target in plan]
            if self._freed is not None:
                filled = {(cls, target) for target in new.values()}
                self._freed = [place for place in self._freed if place not in filled]
                self._freed += [(cls, source) for source in new]
        return moves

    def _cached_pages(self, groups: Sequence[int]) -> dict[int, Block]:
        """Pages of some groups that hold a cached block nobody reads."""
        return {block.pages[g]: block for run in self._idle.runs() for block in run for g in groups}

    def _relocate(self, groups: Sequence[int], new: dict[int, int]) -> None:
        """Replace pages of some groups wherever they are written down."""
        for slot, row in enumerate(self._rows):
            for group in groups:
                if not new.keys().isdisjoint(row[group]):
                    row[group] = array("i", [new.get(page, page) for page in row[group]])
                    if self._tables is not None:
                        self._tables.stage_row(group, slot, 0, row[group])
        listed = chain(self._shared, self._idle.runs())
        touched = [b for run in listed for b in run if not new.keys().isdisjoint(b.pages)]
        for block in touched:  # one that two slots share comes twice, which no page minds: targets are free
            block.pages = tuple(
                new.get(page, page) if group in groups else page for group, page in enumerate(block.pages)
            )

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
        short = need + over - self.allocator.obtainable_together(self._each)
        possible = spare + (self._idle.count if evict else 0)
        if short > possible:
            return short - possible
        if spare:
            short -= self.take_back_reserved(but=slot)
        if short > 0:
            victims = self._idle.pop(short)
            if over:
                self._forget(victims)
            else:
                need -= self._adopt(slot, victims)
        if need:
            got = self._take(slot, need, 0)
            assert got == need
        return 0

    def _adopt(self, slot: int, blocks: Sequence[Block]) -> int:
        """Put the pages of idle blocks into a slot's row, as if evicted and taken again."""
        self._unpublish(blocks)
        for group, pages in enumerate(self._rows[slot]):
            pages.fromlist([block.pages[group] for block in blocks])
        if self._freed is not None:
            for cls, groups in self._groups_of.items():
                self._freed += [(cls, block.pages[group]) for block in blocks for group in groups]
        return len(blocks)

    # ---------------------------------------------------------------- pages

    def _take_parents(self, slot: int, need: int, ahead: int) -> int:
        """`_take` where whole parents hold what is needed, and no more than may be reserved; else 0."""
        if self._only is None:
            return 0
        cls, n = self._only
        row = self._rows[slot]
        owner = near = None
        if not self.prefix_caching:
            owner = slot
        elif row[-1]:
            near = row[-1][-1]
        pages, per = need * n, self.allocator.geometry.classes[cls].per_parent
        parents = 1 if pages <= per else -(-pages // per)
        extra = parents * per - pages
        if extra > ahead * n or (n > 1 and extra % n):
            return 0
        whole = self.allocator.take_whole(cls, parents, owner, near)
        if whole is None:
            return 0
        if n == 1:
            row[0] += whole
        else:
            for group in range(n):
                row[group] += whole[group::n]
        got = (pages + extra) // n
        self._taken += got
        return got

    def _take(self, slot: int, need: int, ahead: int) -> int:
        """Append `need` blocks (and up to `ahead` more) to a slot's row; how many were, 0 if short."""
        row = self._rows[slot]
        # With prefix caching the pages may outlive the request, so that they are nobody's.
        owner = None if self.prefix_caching else slot
        if self._only is not None:
            cls, n = self._only
            near = row[-1][-1] if owner is None and row[0] else None
            pages = self.allocator.take(cls, need * n, owner, ahead * n, n, near)
            if isinstance(pages, Shortage):
                return 0
            packed = array("i", pages)
            for group in range(n):
                row[group] += packed[group::n]
            got = len(pages) // n
            self._taken += got
            return got
        near_by = [pages[-1] for pages in row] if owner is None and row[0] else None
        most = self.allocator.obtainable_together(self._each)
        if most < need:
            return 0
        got = min(need + ahead, most)
        taken: dict[int, list[int]] = {}
        for sparing in (False, True):
            for cls, n in self._each.items():
                last = near_by[self._groups_of[cls][-1]] if near_by else None
                pages = self.allocator.take(cls, need * n, owner, (got - need) * n, n, last, sparing)
                if isinstance(pages, Shortage):
                    break
                taken[cls] = pages
                got = min(got, len(pages) // n)
            if len(taken) == len(self._each):
                break
            # One class took parents that another needs: pack them as `obtainable_together` does.
            for cls, pages in taken.items():
                self.allocator.give(cls, pages, owner)
            taken, got = {}, need
        for cls, groups in self._groups_of.items():
            n, pages = len(groups), taken[cls]
            if len(pages) > got * n:
                self.allocator.give(cls, pages[got * n :], owner)
            for i, group in enumerate(groups):
                row[group].extend(pages[i : got * n : n])
        self._taken += got
        return got

    def _forget(self, blocks: Sequence[Block]) -> None:
        """Free blocks that are idle no more and have no users."""
        self._unpublish(blocks)
        self._give(None, [block.pages for block in blocks])

    def _unpublish(self, blocks: Sequence[Block]) -> None:
        by_key = self._by_key
        for block in blocks:
            del by_key[block.key]  # type: ignore[arg-type]  # idle blocks have keys
        self._blank += blocks

    def _cut(self, slot: int, keep: int) -> None:
        """Give back the blocks of a slot's row from `keep` on."""
        if keep == self._room[slot]:
            return
        row = self._rows[slot]
        owner = None if self.prefix_caching else slot
        self._give(owner, list(zip(*(pages[keep:] for pages in row), strict=True)))
        for pages in row:
            del pages[keep:]
        self._room[slot] = keep
        if not keep:
            self._active -= 1

    def _give(self, owner: int | None, blocks: Sequence[tuple[int, ...]]) -> None:
        """Give blocks' pages back to the allocator."""
        if not blocks:
            return
        self._taken -= len(blocks)
        for cls, groups in self._groups_of.items():
            if self._groups == 1:
                pages = [page for (page,) in blocks]
            else:
                pages = [block[group] for block in blocks for group in groups]
            self.allocator.give(cls, pages, owner)
            if self._freed is not None:
                self._freed += [(cls, page) for page in pages]

    def _free_all(self, slot: int) -> None:
        """Give back everything a slot holds when none of it is shared."""
        row = self._rows[slot]
        self._taken -= self._room[slot]
        for cls, groups in self._groups_of.items():
            self.allocator.give_all(cls, slot)
            if self._freed is not None:
                self._freed += [(cls, page) for group in groups for page in row[group]]

    def _write(self, slot: int, start: int) -> None:
        if self._tables is not None:
            for group, pages in enumerate(self._rows[slot]):
                self._tables.stage_row(group, slot, start, pages[start:])

    # ---------------------------------------------------------------- checking

    def check(self) -> None:
        """Recount everything; `CorruptPoolError` where the books contradict themselves."""

        def require(truth: bool, what: str) -> None:
            if not truth:
                raise CorruptPoolError(what)

        users: dict[int, int] = {}
        records: dict[int, Block] = {}
        private = 0
        pages_seen: set[tuple[int, int]] = set()  # (class, page)

        def claim(block: tuple[int, ...]) -> None:
            for cls, groups in self._groups_of.items():
                for group in groups:
                    place = (cls, block[group])
                    require(place not in pages_seen, f"page {place[1]} of {block} stands in two blocks")
                    pages_seen.add(place)

        active = 0
        for slot, row in enumerate(self._rows):
            have, done = self._room[slot], self._committed[slot]
            active += have > 0
            require(all(len(pages) == have for pages in row), f"slot {slot}: rows and room differ")
            require(
                0 <= done <= self.held[slot] <= have <= self.max_blocks,
                f"slot {slot}: {done} published, {self.held[slot]} used, {have} in the row",
            )
            blocks = list(zip(*row, strict=True))
            own = {*self._private[slot], *range(done, have)}
            shared = [pages for i, pages in enumerate(blocks) if i not in own]
            require(
                shared == [block.pages for block in self._shared[slot]],
                f"slot {slot}: the row differs from the shared blocks it should show",
            )
            for block in self._shared[slot]:
                users[id(block)] = users.get(id(block), 0) + 1
                records[id(block)] = block
            for i in own:
                claim(blocks[i])
                private += 1
        require(active == self._active, f"{active} slots are active, {self._active} counted")
        idle = [block for run in self._idle.runs() for block in run]
        require(len(idle) == self._idle.count, f"{len(idle)} blocks are idle, {self._idle.count} counted")
        for block in idle:
            require(id(block) not in records, f"block {block.pages} is idle twice or in use")
            require(block.key is not None, f"block {block.pages} is kept for nobody")
            records[id(block)] = block
        for block in records.values():
            require(block.users == users.get(id(block), 0), f"block {block.pages}: {block.users} users")
            claim(block.pages)
            if block.key is not None:
                require(self._by_key.get(block.key) is block, f"block {block.pages} is not found by key")
        found = sum(block.key is not None for block in records.values())
        require(found == len(self._by_key), "a key names a block that is gone")
        taken = private + len(records)
        require(taken == self._taken, f"{taken} blocks are taken, {self._taken} counted")
        for cls, n in self._each.items():
            require(
                self.allocator.used(cls) >= taken * n, f"class {cls}: blocks need more pages than are out"
            )
